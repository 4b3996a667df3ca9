"""The memory of a step at each moment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from geutil.memory.sizes import megabytes
from geutil.notebook_display import Shown

_SHOWN = 10
"""How many of the buffers at the peak the text names."""


@dataclass(frozen=True)
class LiveTensor:
    """A buffer that is held at some moment.

    Attributes:
        name: the tensor that it was made for, or "OP (temporary)".
        op_type: the type of the op that made it.
        bytes: its size.
    """

    name: str
    op_type: str
    bytes: int

    @property
    def scope(self) -> str:
        """The name scope of the op that made it."""
        return self.name.rpartition("/")[0]


@dataclass(frozen=True)
class Lifetime:
    """A buffer, and the moments in which it is held.

    Attributes:
        tensor: the buffer.
        op: the op that made it.
        first: the place of the first moment among those of the timeline.
        last: the place of the last one.
    """

    tensor: LiveTensor
    op: str
    first: int
    last: int


@dataclass(frozen=True)
class Moment:
    """One op of a step.

    Attributes:
        op: its name.
        bytes: what is held while it runs, at the most.
        phase: "forward", "recompute", "backward" or "update", told by the scopes that
            TensorFlow and geutil give to gradients; "" where it is not known.
    """

    op: str
    bytes: int
    phase: str = ""


@dataclass(frozen=True)
class Timeline(Shown):
    """The memory of a step, op by op, in the order of execution.

    Attributes:
        moments: the ops in the order in which they run.
        at_peak: the buffers that are held at the peak, largest first.
        variable_bytes: the variables, which are held all the time and are not counted
            in `moments`.
        constant_bytes: the constants, likewise.
        source: where the figures come from, for example "predicted".
        lifetimes: all buffers that are held at some moment, by the order in which they
            are made; () where that is not known, as of measured steps.
        note: what else must be known of the figures, for example that they are the sum
            over several devices; "" if nothing.
        resident: the most bytes of memory that the process has in use at once, with
            what kernels take beside TensorFlow's allocator; None where that is not
            known, as of measured steps.
    """

    moments: tuple[Moment, ...]
    at_peak: tuple[LiveTensor, ...]
    variable_bytes: int
    constant_bytes: int
    source: str
    lifetimes: tuple[Lifetime, ...] = field(default=(), repr=False)
    note: str = ""
    resident: int | None = None

    @property
    def peak(self) -> int:
        """The most bytes that are held at once, variables and constants apart."""
        return max((moment.bytes for moment in self.moments), default=0)

    @property
    def peak_index(self) -> int | None:
        """The place of the first op at the peak, None without ops."""
        sizes = [moment.bytes for moment in self.moments]
        return sizes.index(self.peak) if sizes else None

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the memory over the ops, with the largest tensors at the peak.

        Args:
            path: the file to write; its suffix (.png, .svg, .pdf) is the format.

        Returns:
            The path.

        Raises:
            MissingExtraError: matplotlib is not installed.
            PlotError: the suffix is none of the above.

        Cost: linear in the ops.

        Example:
            >>> import tempfile
            >>> from geutil.memory import LiveTensor, Moment, Timeline
            >>> moments = (Moment("a", 4_000_000), Moment("b", 8_000_000))
            >>> held = (LiveTensor("a:0", "MatMul", 4_000_000),) * 2
            >>> timeline = Timeline(moments, held, 0, 0, "predicted")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     timeline.plot(f"{folder}/step.svg").name
            'step.svg'
        """
        from geutil.memory.plotting import plot_timelines

        return plot_timelines([("", self)], path)

    def __str__(self) -> str:
        index = self.peak_index
        where = "" if index is None else f" at '{self.moments[index].op}'"
        headline = (
            f"peak {megabytes(self.peak)}{where} ({self.source}; 1 MB = 10^6 bytes), "
            f"besides variables {megabytes(self.variable_bytes)} and constants "
            f"{megabytes(self.constant_bytes)}"
        )
        lines = [headline, *([f"  {self.note}"] if self.note else [])]
        lines += largest_lines(self.at_peak)
        return "\n".join(lines)


def largest_lines(tensors: Sequence[LiveTensor]) -> list[str]:
    """Return a line for each of the first tensors, and one for the rest.

    Args:
        tensors: the largest first.
    """
    shown, rest = tensors[:_SHOWN], tensors[_SHOWN:]
    width = max((len(tensor.name) for tensor in shown), default=0)
    lines = [
        f"  {megabytes(t.bytes):>9}  {t.name:<{width}}  {t.op_type}" for t in shown
    ]
    if rest:
        size = megabytes(sum(tensor.bytes for tensor in rest))
        lines.append(f"  {size:>9}  in {len(rest)} smaller ones")
    return lines
