"""Pictures of timelines, drawn with matplotlib's objects and none of its state."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from geutil.errors import MissingExtraError, PlotError
from geutil.memory.sizes import megabytes

FORMATS = (".png", ".svg", ".pdf")
_COLOURS = ("#33658a", "#e07a1f")
"""Told apart by the colour-blind, too."""
_ROWS = 12
"""How many tensors at a peak are named."""
_LETTERS = 50
"""How much of a name is shown: both ends."""
_POINTS = 4000
"""More ops than these are drawn in groups, by the most that a group held."""


class HeldBuffer(Protocol):
    """A buffer that is held at the peak, as `LiveTensor` is."""

    @property
    def name(self) -> str:
        """The tensor that it was made for."""

    @property
    def bytes(self) -> int:
        """Its size."""


class Instant(Protocol):
    """An op of a step, as `Moment` is."""

    @property
    def op(self) -> str:
        """Its name."""

    @property
    def bytes(self) -> int:
        """What is held while it runs."""


class Profile(Protocol):
    """What a picture shows of a `Timeline`, which itself asks for its picture."""

    @property
    def moments(self) -> Sequence[Instant]:
        """The ops in the order in which they run."""

    @property
    def at_peak(self) -> Sequence[HeldBuffer]:
        """The buffers that are held at the peak, largest first."""

    @property
    def variable_bytes(self) -> int:
        """The variables."""

    @property
    def constant_bytes(self) -> int:
        """The constants."""

    @property
    def source(self) -> str:
        """Where the figures come from."""

    @property
    def peak(self) -> int:
        """The most bytes that are held at once."""

    @property
    def peak_index(self) -> int | None:
        """The place of the first op at the peak."""


def plot_timelines(
    timelines: Sequence[tuple[str, Profile]], path: str | os.PathLike[str]
) -> Path:
    """Draw labelled timelines over one another, and what is held at each peak.

    Args:
        timelines: one timeline, or two to compare; with its label.
        path: the file to write.

    Returns:
        The path.

    Raises:
        MissingExtraError: matplotlib is not installed.
        PlotError: the suffix names no format.
    """
    path = _checked(path)
    matplotlib = _matplotlib()
    # The letters of an SVG stay letters, which can be searched.
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure = _figure(matplotlib, timelines)
        figure.savefig(path, dpi=150)
    return path


@contextmanager
def drawn_axes(path: str | os.PathLike[str], x: str, y: str) -> Iterator[Any]:
    """Give axes to draw on, and write the picture at the end of the block.

    Args:
        path: the file to write.
        x: what the horizontal axis shows.
        y: what the vertical one shows.

    Raises:
        MissingExtraError: matplotlib is not installed.
        PlotError: the suffix names no format.
    """
    path = _checked(path)
    matplotlib = _matplotlib()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure = matplotlib.figure.Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.spines[["top", "right"]].set_visible(False)
        yield axes
        figure.savefig(path, dpi=150)


def _checked(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise PlotError(f"cannot write '{path}': name a file in {', '.join(FORMATS)}")
    return path


def _matplotlib() -> Any:
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise MissingExtraError(
            "drawing needs matplotlib: pip install geutil[plot]"
        ) from error
    return matplotlib


def _figure(matplotlib: Any, timelines: Sequence[tuple[str, Profile]]) -> Any:
    height = 1.6 + 3.4 * len(timelines)
    figure = matplotlib.figure.Figure(figsize=(12, height), layout="constrained")
    grid = figure.add_gridspec(len(timelines), 2, width_ratios=(3, 2))
    over_time = figure.add_subplot(grid[:, 0])
    _draw_curves(over_time, timelines)
    for row, (label, timeline) in enumerate(timelines):
        _draw_held(figure.add_subplot(grid[row, 1]), label, timeline, _COLOURS[row])
    figure.legend(loc="outside lower left", frameon=False)
    return figure


def _draw_curves(axes: Any, timelines: Sequence[tuple[str, Profile]]) -> None:
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
    axes.set_ylim(0, max(tallest / 1e6, 1e-6) * 1.15)
    axes.margins(x=0.01)
    axes.set_xlabel("ops in order of execution" + (", %" if compared else ""))
    axes.set_ylabel("held, MB (10\N{SUPERSCRIPT SIX} bytes)")
    axes.spines[["top", "right"]].set_visible(False)


def points(timeline: Profile) -> tuple[list[float], list[float]]:
    """Return places and MB, the last one twice so that its step has a width.

    Of many ops several make a point, at the place of their first.
    """
    sizes = [moment.bytes / 1e6 for moment in timeline.moments]
    group = max(1, -(-len(sizes) // _POINTS))
    starts = range(0, len(sizes), group)
    levels = [max(sizes[start : start + group]) for start in starts]
    return [*map(float, starts), float(len(sizes))], [*levels, *(levels[-1:] or [0.0])]


def _mark_peak(axes: Any, timeline: Profile, scale: float, colour: str) -> None:
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
        f"peak {megabytes(timeline.peak)}",
        (middle, height),
        xytext=(-6 if late else 6, 6),
        textcoords="offset points",
        ha="right" if late else "left",
        va="bottom",
        color=colour,
        weight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )


def _draw_held(axes: Any, label: str, timeline: Profile, colour: str) -> None:
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
        axes.text(largest * 1.28, s=megabytes(size), ha="right", **text)
    axes.set_xlim(0, largest * 1.3)
    # As many rows in each picture, so that they have one height.
    axes.set_ylim(_ROWS + 0.6, -0.6)
    axes.set_axis_off()
    index = timeline.peak_index
    where = "" if index is None else f"\nin '{shortened(timeline.moments[index].op)}'"
    title = f"{label}: held at the peak" if label else "Held at the peak"
    besides = (
        f"\nbesides variables {megabytes(timeline.variable_bytes)}, "
        f"constants {megabytes(timeline.constant_bytes)}"
    )
    axes.set_title(title + where + besides, fontsize=9, loc="left", parse_math=False)


def shortened(name: str) -> str:
    """Return a name, or both its ends if it is long.

    Example:
        >>> shortened("a" * 40 + "b" * 40)
        'aaaaaaaaaaaaaaaaaaaaaaaa…bbbbbbbbbbbbbbbbbbbbbbbbb'
    """
    if len(name) <= _LETTERS:
        return name
    front = (_LETTERS - 1) // 2
    return f"{name[:front]}…{name[front + 1 - _LETTERS :]}"
