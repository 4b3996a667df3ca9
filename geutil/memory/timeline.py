"""The memory of a step at each moment: predicted or measured, compared, and drawn.

Pictures are drawn with matplotlib's objects and none of its state.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from geutil.errors import (
    ArgumentTypeError,
    MeasurementError,
    MissingExtraError,
    PlotError,
)
from geutil.graph.types import type_name
from geutil.lazy import Shown
from geutil.sizes import size_text

TRACE = "allocation records of a traced Session"
ALLOCATOR = "allocator statistics"
RESIDENT = "resident-set high-water mark"
_SHOWN = 10
"""How many of the buffers at the peak the text names."""
FORMATS = (".png", ".svg", ".pdf")
_COLOURS = ("#33658a", "#e07a1f")
"""Told apart by the colour-blind, too."""
_ROWS = 12
"""How many tensors at a peak are named."""
_LETTERS = 50
"""How much of a name is shown: both ends."""
_POINTS = 4000
"""More ops than these are drawn in groups, by the most that a group held."""


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
    """A buffer, and the moments at which it is held.

    Attributes:
        tensor: the buffer.
        op: the op that made it.
        first: the index of its first moment in the timeline.
        last: the index of its last moment.
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
        bytes: the most bytes held while it runs.
        phase: "forward", "recompute", "backward" or "update", recognized by the scopes
            that TensorFlow and geutil give to gradients; "bookkeeping" for constants,
            shapes and control, which carry no data; "" if unknown.
        time: its approximate duration: in multiply-adds of a convolution if predicted,
            in seconds if measured; 0 if unknown.
    """

    op: str
    bytes: int
    phase: str = ""
    time: float = 0.0


@dataclass(frozen=True)
class Timeline(Shown):
    """The memory of a step, op by op, in the order of execution.

    Attributes:
        moments: the ops in the order in which they run.
        at_peak: the buffers that are held at the peak, largest first.
        variable_bytes: the variables, which are held all the time and are not counted
            in `moments`.
        constant_bytes: the constants, likewise.
        source: the source of the figures, for example "predicted".
        lifetimes: all buffers that are held at some moment, in the order of allocation;
            () if unknown, as for measured steps.
        note: a remark on the figures, for example that they are the sum over several
            devices; "" if there is none.
        resident: the most bytes of memory in use at once: for a process, with the bytes
            that kernels take outside TensorFlow's allocator; for a GPU, the chunks that
            the allocator hands out. None if unknown, as for measured steps.
        extent: for a GPU, the bytes that it must have free for the step and its
            variables, gaps between chunks included; None likewise.
    """

    moments: tuple[Moment, ...]
    at_peak: tuple[LiveTensor, ...]
    variable_bytes: int
    constant_bytes: int
    source: str
    lifetimes: tuple[Lifetime, ...] = field(default=(), repr=False)
    note: str = ""
    resident: int | None = None
    extent: int | None = None

    @property
    def peak(self) -> int:
        """The most bytes that are held at once, without variables and constants."""
        return max((moment.bytes for moment in self.moments), default=0)

    @property
    def peak_index(self) -> int | None:
        """The index of the first op at the peak; None without ops."""
        sizes = [moment.bytes for moment in self.moments]
        return sizes.index(self.peak) if sizes else None

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Plot the memory over the ops, with the largest tensors at the peak.

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
        return plot_timelines([("", self)], path)

    def __str__(self) -> str:
        index = self.peak_index
        where = "" if index is None else f" at '{self.moments[index].op}'"
        headline = (
            f"peak {size_text(self.peak)}{where} ({self.source}; 1 MB = 10^6 bytes), "
            f"besides variables {size_text(self.variable_bytes)} and constants "
            f"{size_text(self.constant_bytes)}"
        )
        lines = [headline, *([f"  {self.note}"] if self.note else [])]
        lines += largest_lines(self.at_peak)
        return "\n".join(lines)


def largest_lines(tensors: Sequence[LiveTensor]) -> list[str]:
    """Return a line for each of the first tensors, and one for the rest."""
    shown, rest = tensors[:_SHOWN], tensors[_SHOWN:]
    width = max((len(tensor.name) for tensor in shown), default=0)
    lines = [
        f"  {size_text(t.bytes):>9}  {t.name:<{width}}  {t.op_type}" for t in shown
    ]
    if rest:
        size = size_text(sum(tensor.bytes for tensor in rest))
        lines.append(f"  {size:>9}  in {len(rest)} smaller ones")
    return lines


@dataclass(frozen=True)
class Environment:
    """The environment of a measurement.

    Attributes:
        tensorflow: its version.
        device: the device whose memory was measured, for example "CPU:0".
        onednn: whether oneDNN was on.
        grappler: whether Grappler was on.
        jit_compile: whether XLA compiled the step.
        inter_op_threads: how many ops could run at once; None is TensorFlow's default.
        intra_op_threads: how many threads could share one op; None is the default.
    """

    tensorflow: str
    device: str
    onednn: bool
    grappler: bool
    jit_compile: bool
    inter_op_threads: int | None
    intra_op_threads: int | None

    def __str__(self) -> str:
        flags = (self.onednn, self.grappler, self.jit_compile)
        onednn, grappler, xla = ("on" if flag else "off" for flag in flags)
        counts = (self.inter_op_threads, self.intra_op_threads)
        inter, intra = ("default" if n is None else str(n) for n in counts)
        return (
            f"TensorFlow {self.tensorflow} on {self.device}, oneDNN {onednn}, Grappler "
            f"{grappler}, XLA {xla}, threads: inter-op {inter}, intra-op {intra}"
        )


@dataclass(frozen=True)
class DeviceMeasurement:
    """The memory that a step needed on one device, above that held before.

    Attributes:
        device: its full name.
        trace_peak: as in `Measurement`, of tensors that the device made and received.
        allocator_peak: that of the device's process; None where it keeps no statistics,
            or where several devices belong to one process.
        resident_peak: the growth of the device's process; None likewise.
        timeline: the memory of the device op by op; None where there are no records.
    """

    device: str
    trace_peak: int | None
    allocator_peak: int | None
    resident_peak: int | None
    timeline: Timeline | None

    @property
    def peak(self) -> int | None:
        """The peak in bytes, from the best available source; None without one."""
        return next((peak for peak, _ in _peaks_of(self) if peak is not None), None)

    def __str__(self) -> str:
        peaks = [(p, name) for p, name in _peaks_of(self) if p is not None]
        parts = [f"{size_text(p)} by {name}" for p, name in peaks]
        return f"{self.device}: {', '.join(parts) or 'nothing'}"


def _peaks_of(row: DeviceMeasurement | Measurement) -> list[tuple[int | None, str]]:
    """Return the peaks of a measurement with their sources, the best source first."""
    return [
        (row.trace_peak, TRACE),
        (row.allocator_peak, ALLOCATOR),
        (row.resident_peak, RESIDENT),
    ]


@dataclass(frozen=True)
class Measurement:
    """The memory that a step needed, above that of the process before it.

    Variables, arguments and feeds are held before, and are not counted.

    Attributes:
        trace_peak: the peak by the allocation records of a traced step: exact, in
            requested bytes. A function is traced in a Session that runs its graph,
            which may order the ops a little differently. None where there are no
            records.
        allocator_peak: the peak by the statistics of TensorFlow's allocator, which
            counts the chunks that it hands out: up to twice the request. On the CPU it
            counts no buffers smaller than 256 KiB. None where it keeps no statistics:
            on the CPU with oneDNN off.
        resident_peak: the growth of the process. Besides the step, it includes the
            memory of Grappler and XLA for compiling it, and unused chunks of the
            allocator. None on systems other than Linux.
        timeline: the memory op by op; None where there are no records.
        seconds: the time of each step, without the first step, which compiles.
        environment: the settings that the figures depend on.
        partly_compiled: whether XLA compiles calls in the step. The records and the
            timeline lack the buffers of these calls; the allocator counts them. So the
            larger of both figures is the peak.
        devices: the devices of the step by name, each by itself. With several tasks,
            the peaks and the timeline above are those of the fullest one; with several
            devices in one process, those of all together.
    """

    trace_peak: int | None
    allocator_peak: int | None
    resident_peak: int | None
    timeline: Timeline | None
    seconds: tuple[float, ...]
    environment: Environment
    partly_compiled: bool = False
    devices: tuple[DeviceMeasurement, ...] = ()

    def peak_of(self, device: str) -> int | None:
        """Return the peak of a device, by its full name; None for an unknown device."""
        return next((row.peak for row in self.devices if row.device == device), None)

    @property
    def steps(self) -> int:
        """The number of timed steps."""
        return len(self.seconds)

    @property
    def peak(self) -> int:
        """The peak in bytes, from the best available source."""
        return self._best[0]

    @property
    def source(self) -> str:
        """The source of `peak`."""
        return self._best[1]

    @property
    def _best(self) -> tuple[int, str]:
        known = ((peak, source) for peak, source in self._peaks() if peak is not None)
        return next(known, (0, "nothing"))

    def _peaks(self) -> list[tuple[int | None, str]]:
        peaks = _peaks_of(self)
        if self.partly_compiled and (self.allocator_peak or 0) > (self.trace_peak or 0):
            peaks[:2] = reversed(peaks[:2])
        return peaks

    def __str__(self) -> str:
        lines = [f"peak {size_text(self.peak)} by {self.source} (1 MB = 10^6 bytes)"]
        lines += [
            f"  {source}: {'none' if peak is None else size_text(peak)}"
            for peak, source in self._peaks()
            if source != self.source
        ]
        times = f"{median(self.seconds):.3g} s" if self.seconds else "none"
        lines += [f"  step time: {times} (median of {self.steps})"]
        lines.append(f"  {self.environment}")
        if len(self.devices) > 1:
            lines += [f"  {row}" for row in self.devices]
        return "\n".join(lines)


@dataclass(frozen=True)
class TimelineComparison(Shown):
    """The memory of a step before and after a change.

    Attributes:
        before: the step as it was.
        after: the step as it is.
    """

    before: Timeline
    after: Timeline

    @property
    def ratio(self) -> float:
        """The peak after, as a fraction of the peak before."""
        if self.before.peak == 0:
            return 1.0 if self.after.peak == 0 else math.inf
        return self.after.peak / self.before.peak

    @property
    def saved(self) -> int:
        """The bytes by which the peak is lower; negative if it is higher."""
        return self.before.peak - self.after.peak

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Plot both over their progress, with the largest tensors at each peak.

        The path, the errors and the cost are those of `Timeline.plot`.

        Example:
            >>> import tempfile
            >>> from geutil.memory import Moment, Timeline, compare
            >>> before = Timeline((Moment("a", 8_000_000),), (), 0, 0, "predicted")
            >>> after = Timeline((Moment("a", 2_000_000),), (), 0, 0, "predicted")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     compare(before, after).plot(f"{folder}/both.svg").name
            'both.svg'
        """
        return plot_timelines([("before", self.before), ("after", self.after)], path)

    def __str__(self) -> str:
        before, after = size_text(self.before.peak), size_text(self.after.peak)
        change = "saves" if self.saved >= 0 else "costs"
        headline = (
            f"peak {before} -> {after}: {self.ratio:.2f} of it, {change} "
            f"{size_text(abs(self.saved))}"
        )
        return f"{headline}\nbefore: {self.before}\nafter: {self.after}"


def compare(
    before: Timeline | Measurement, after: Timeline | Measurement
) -> TimelineComparison:
    """Compare the memory of two steps.

    Args:
        before: a timeline, predicted or measured, or a measurement that has one.
        after: likewise.

    Returns:
        Both, with the ratio of their peaks, to print or plot.

    Raises:
        ArgumentTypeError: one is neither a timeline nor a measurement.
        MeasurementError: a measurement has no timeline, as under XLA; compare the
            `peak` of both then.

    Cost: none.

    Example:
        >>> from geutil.memory import Moment, Timeline, compare
        >>> before = Timeline((Moment("a", 8_000_000),), (), 0, 0, "predicted")
        >>> after = Timeline((Moment("a", 2_000_000),), (), 0, 0, "predicted")
        >>> comparison = compare(before, after)
        >>> comparison.ratio, comparison.saved
        (0.25, 6000000)
    """
    return TimelineComparison(_timeline(before, "before"), _timeline(after, "after"))


def _timeline(side: object, name: str) -> Timeline:
    if isinstance(side, Measurement):
        if side.timeline is None:
            raise MeasurementError(
                f"the measurement '{name}' has no timeline: only a step that XLA does "
                "not compile and that is no callable has one; compare the peaks"
            )
        return side.timeline
    if not isinstance(side, Timeline):
        raise ArgumentTypeError(
            f"{name}: expected a Timeline or a Measurement, got {type_name(side)}"
        )
    return side


Labelled = Sequence[tuple[str, Timeline]]
"""Timelines with their labels."""


def plot_timelines(timelines: Labelled, path: str | os.PathLike[str]) -> Path:
    """Draw one labelled timeline, or two to compare, and the tensors at each peak."""
    with _figure(path, (12, 1.6 + 3.4 * len(timelines))) as figure:
        grid = figure.add_gridspec(len(timelines), 2, width_ratios=(3, 2))
        _draw_curves(figure.add_subplot(grid[:, 0]), timelines)
        for row, (label, timeline) in enumerate(timelines):
            _draw_held(figure.add_subplot(grid[row, 1]), label, timeline, _COLOURS[row])
        figure.legend(loc="outside lower left", frameon=False)
    return Path(path)


@contextmanager
def drawn_axes(path: str | os.PathLike[str], x: str, y: str) -> Iterator[Any]:
    """Yield axes to draw on, labelled `x` and `y`; write the picture at the end."""
    with _figure(path, (8, 4.5)) as figure:
        axes = figure.add_subplot()
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.spines[["top", "right"]].set_visible(False)
        yield axes


@contextmanager
def _figure(path: str | os.PathLike[str], size: tuple[float, float]) -> Iterator[Any]:
    """Give a figure, and write it at the end of the block."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise PlotError(f"cannot write '{path}': name a file in {', '.join(FORMATS)}")
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise MissingExtraError(
            "drawing needs matplotlib: pip install geutil[plot]"
        ) from error
    # The letters of an SVG stay letters, which can be searched.
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(path, dpi=150)


def _draw_curves(axes: Any, timelines: Labelled) -> None:
    """Draw memory over ops; of several timelines over their parts in percent."""
    compared = len(timelines) > 1
    for colour, (label, timeline) in zip(_COLOURS, timelines, strict=False):
        places, sizes = points(timeline)
        scale = 100 / max(len(timeline.moments), 1) if compared else 1
        places = [place * scale for place in places]
        name = f"{label} ({timeline.source})" if label else timeline.source
        axes.step(places, sizes, where="post", color=colour, linewidth=1.4, label=name)
        axes.fill_between(places, sizes, step="post", color=colour, alpha=0.15)
        _mark_peak(axes, timeline, scale, colour)
    tallest = max(timeline.peak for _, timeline in timelines)
    # An axis from 0 to 0 would have no height.
    axes.set_ylim(0, max(tallest / 1e6, 1e-6) * 1.15)
    axes.margins(x=0.01)
    axes.set_xlabel("ops in order of execution" + (", %" if compared else ""))
    axes.set_ylabel("held, MB (10\N{SUPERSCRIPT SIX} bytes)")
    axes.spines[["top", "right"]].set_visible(False)


def points(timeline: Timeline) -> tuple[list[float], list[float]]:
    """Return places and MB: the most of each group of ops, the last one twice."""
    sizes = [moment.bytes / 1e6 for moment in timeline.moments]
    group = max(1, -(-len(sizes) // _POINTS))
    starts = range(0, len(sizes), group)
    levels = [max(sizes[start : start + group]) for start in starts]
    return [*map(float, starts), float(len(sizes))], [*levels, *(levels[-1:] or [0.0])]


def _mark_peak(axes: Any, timeline: Timeline, scale: float, colour: str) -> None:
    """Mark the peak of a timeline with a dot and its bytes."""
    index = timeline.peak_index
    if index is None:
        return
    middle = (index + 0.5) * scale
    height = timeline.peak / 1e6
    axes.plot([middle], [height], "o", color=colour, markersize=5)
    # Text on the side of the middle stays within the axes.
    late = index > len(timeline.moments) / 2
    axes.annotate(
        f"peak {size_text(timeline.peak)}",
        (middle, height),
        xytext=(-6 if late else 6, 6),
        textcoords="offset points",
        ha="right" if late else "left",
        va="bottom",
        color=colour,
        weight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )


def _draw_held(axes: Any, label: str, timeline: Timeline, colour: str) -> None:
    """Draw the largest tensors at the peak: a row each, the name over its bar."""
    named, rest = timeline.at_peak[:_ROWS], timeline.at_peak[_ROWS:]
    rows = [(shortened(tensor.name), tensor.bytes) for tensor in named]
    largest = max((size for _, size in rows), default=0) or 1
    axes.barh(range(len(rows)), [s for _, s in rows], 0.85, color=colour, alpha=0.3)
    if rest:
        total = sum(tensor.bytes for tensor in rest)
        rows.append((f"and {len(rest)} smaller ones, together", total))
    for place, (name, size) in enumerate(rows):
        text = {"y": place, "va": "center", "fontsize": 8, "parse_math": False}
        axes.text(largest * 0.01, s=name, **text)
        axes.text(largest * 1.28, s=size_text(size), ha="right", **text)
    axes.set_xlim(0, largest * 1.3)
    # As many rows in each picture, so that they have one height.
    axes.set_ylim(_ROWS + 0.6, -0.6)
    axes.set_axis_off()
    index = timeline.peak_index
    where = "" if index is None else f"\nin '{shortened(timeline.moments[index].op)}'"
    title = f"{label}: held at the peak" if label else "Held at the peak"
    besides = (
        f"\nbesides variables {size_text(timeline.variable_bytes)}, "
        f"constants {size_text(timeline.constant_bytes)}"
    )
    axes.set_title(title + where + besides, fontsize=9, loc="left", parse_math=False)


def shortened(name: str) -> str:
    """Return a name, or both its ends if it is long."""
    if len(name) <= _LETTERS:
        return name
    front = (_LETTERS - 1) // 2
    return f"{name[:front]}…{name[front + 1 - _LETTERS :]}"
