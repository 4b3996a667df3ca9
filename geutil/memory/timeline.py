"""What a step needs at each moment."""

from __future__ import annotations

from dataclasses import dataclass


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
class Moment:
    """One op of a step.

    Attributes:
        op: its name.
        bytes: what is held while it runs, at the most.
    """

    op: str
    bytes: int


@dataclass(frozen=True)
class Timeline:
    """The memory of a step, op by op, in the order of execution.

    Attributes:
        moments: the ops in the order in which they run.
        at_peak: the buffers that are held at the peak, largest first.
        variable_bytes: the variables, which are held all the time and are not counted
            in `moments`.
        constant_bytes: the constants, likewise.
        source: where the figures come from, for example "predicted".
    """

    moments: tuple[Moment, ...]
    at_peak: tuple[LiveTensor, ...]
    variable_bytes: int
    constant_bytes: int
    source: str

    @property
    def peak(self) -> int:
        """The most bytes that are held at once, variables and constants apart."""
        return max((moment.bytes for moment in self.moments), default=0)
