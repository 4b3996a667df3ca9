"""Pictures of timelines, drawn with matplotlib's objects and none of its state."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


Labelled = Sequence[tuple[str, Any]]
"""Timelines with their labels. Timelines ask for their pictures, so their class is not
imported here."""


def plot_timelines(timelines: Labelled, path: str | os.PathLike[str]) -> Path:
    """Draw one labelled timeline, or two to compare, and what is held at each peak."""
    with _figure(path, (12, 1.6 + 3.4 * len(timelines))) as figure:
        grid = figure.add_gridspec(len(timelines), 2, width_ratios=(3, 2))
        _draw_curves(figure.add_subplot(grid[:, 0]), timelines)
        for row, (label, timeline) in enumerate(timelines):
            _draw_held(figure.add_subplot(grid[row, 1]), label, timeline, _COLOURS[row])
        figure.legend(loc="outside lower left", frameon=False)
    return Path(path)


@contextmanager
def drawn_axes(path: str | os.PathLike[str], x: str, y: str) -> Iterator[Any]:
    """Yield axes to draw on, labelled `x` and `y`; write the picture at the end.

    Raises MissingExtraError without matplotlib, PlotError for a suffix of no format.
    """
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
    axes.set_ylim(0, max(tallest / 1e6, 1e-6) * 1.15)
    axes.margins(x=0.01)
    axes.set_xlabel("ops in order of execution" + (", %" if compared else ""))
    axes.set_ylabel("held, MB (10\N{SUPERSCRIPT SIX} bytes)")
    axes.spines[["top", "right"]].set_visible(False)


def points(timeline: Any) -> tuple[list[float], list[float]]:
    """Return places and MB: the most of each group of ops, the last one twice."""
    sizes = [moment.bytes / 1e6 for moment in timeline.moments]
    group = max(1, -(-len(sizes) // _POINTS))
    starts = range(0, len(sizes), group)
    levels = [max(sizes[start : start + group]) for start in starts]
    return [*map(float, starts), float(len(sizes))], [*levels, *(levels[-1:] or [0.0])]


def _mark_peak(axes: Any, timeline: Any, scale: float, colour: str) -> None:
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


def _draw_held(axes: Any, label: str, timeline: Any, colour: str) -> None:
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
    """Return a name, or both its ends if it is long."""
    if len(name) <= _LETTERS:
        return name
    front = (_LETTERS - 1) // 2
    return f"{name[:front]}…{name[front + 1 - _LETTERS :]}"
