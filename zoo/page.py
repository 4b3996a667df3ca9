"""Writes the page: one row a model, one column a journey."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from zoo import strategies
from zoo.journeys import JOURNEYS
from zoo.models import MODELS
from zoo.results import DIED, ERROR, MISSED, NONE, OK, REFUSED, STATES, Cell
from zoo.running import Row, read_row

_PACKAGES = ("tensorflow", "keras", "keras-hub", "tf-keras")
_NOTE = 400
_TEXT = 48
_MARKS = {OK: "", NONE: "", MISSED: "**", REFUSED: "", ERROR: "**", DIED: "**"}

_TOP = """# The zoo

Real architectures, in their smallest variants and with random weights, go through every client of
geutil next to plain TensorFlow, which runs in a process of its own that never imports geutil. `make
zoo` runs them, each journey with a limit of time, and goes on where it ended; `make zoo
ARGS="--again"` begins again. It writes this page.

| Column | Journey, and its limits |
| --- | --- |
| open | opened as SavedModel (with all its signatures), function, Keras model, `.keras` file and frozen graph, run, saved, loaded by plain TensorFlow: the same bits, without Grappler; the same gradients |
| fold | batch norms folded: every batch norm listed, at most 1e-5 of an output's range apart, saved, loaded and differentiated by plain TensorFlow: gradients within 1e-5 |
| batch size | set to 3, to any, to 5: rows have the same results, or depend on each other, as a run of plain TensorFlow shows |
| strip | the training function stripped: equal to inference, no random op left |
| int8 | folded, quantized, calibrated by default, converted; noise by variance next to TFLite's post-training quantization (PTQ) on the same data: at most 1.1 of it; no op that the report calls quantized is float in the file; no more float ops than PTQ's; the file at most 1.05 of PTQ's |
| memory, speed | gradients of a training step with checkpoints "memory" and "speed": equal to `tf.gradients` (1e-6 of the largest), random numbers too; the figure is the planned peak, as a share of plain gradients'; "by order alone" where nothing is recomputed |
| fit | one step of `fit` with `checkpointed`: the same weights (1e-6) |
| peak | the measured peak of the step with checkpoints "memory", as a share of plain gradients': not above it, and within 10 % of the report |
| bits | gradients under op determinism: the same bits, with both, wherever plain ones repeat their own |
"""  # noqa: E501
_REMARKS = Path(__file__).with_name("remarks.md")
_STRATEGIES = """## Under tf.distribute

MirroredStrategy on two logical CPU devices, 4 images of 64 px (96 px for Inception and
Xception) on each, batch norms and biases at random; `python -m zoo.strategies`. The
numbers are largest differences as a part of the largest value. Batch norms of random
networks magnify rounding: the third column has the change of plain gradients when the
last bits of the input change.
"""
_KEY = """A **bold** cell misses its limit or raises. A number in brackets leads to the
note below.
"""


def page(folder: Path) -> str:
    """Return the page of all rows that there are in a folder."""
    rows = [read_row(folder, name) for name in MODELS]
    rows = [row for row in rows if row.cells or row.failed]
    notes: list[str] = []
    tables = "\n".join(_tables(rows, notes))
    counted = _counted(rows)
    parts = [_TOP, _REMARKS.read_text(encoding="utf-8"), _KEY, counted, tables]
    parts += [_STRATEGIES, *strategies.table(strategies.noted()), ""]
    parts += ["## Notes\n"] if notes else []
    listed = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([*parts, *listed]).rstrip() + "\n"


def _counted(rows: list[Row]) -> str:
    cells = [found for row in rows for found in row.cells.values()]
    counts = {state: sum(c.state == state for c in cells) for state in STATES}
    said = {
        OK: "as they must be",
        NONE: "with nothing to do",
        MISSED: "miss a limit",
        REFUSED: "refused",
        ERROR: "raise another error",
        DIED: "died or took too long",
    }
    parts = ", ".join(f"{counts[state]} {said[state]}" for state in STATES)
    return (
        f"{len(rows)} models, {len(cells)} journeys: {parts}. {_versions()}. "
        f"{_days(rows)}.\n"
    )


def _days(rows: list[Row]) -> str:
    """Say whether all rows are of the same sources, and of when they are."""
    days = sorted(row.day for row in rows if row.day)
    versions = len({state for row in rows for state in row.sources})
    what = "the same sources" if versions == 1 else f"{versions} states of the sources"
    return f"Run from {days[0]} to {days[-1]}, with {what}" if days else "Not run"


def _versions() -> str:
    """Name the packages that the models come from, with their versions."""
    found = []
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def _tables(rows: list[Row], notes: list[str]) -> Iterator[str]:
    family = ""
    for row in rows:
        if MODELS[row.name].family != family:
            family = MODELS[row.name].family
            yield f"\n## {family}\n"
            yield f"| model | {' | '.join(JOURNEYS)} |"
            yield f"|{' --- |' * (len(JOURNEYS) + 1)}"
        cells = [_text(row, name, notes) for name in JOURNEYS]
        yield f"| {row.name} | {' | '.join(cells)} |"
    yield ""


def _text(row: Row, journey: str, notes: list[str]) -> str:
    found = row.cells.get(journey)
    if row.failed and journey == next(iter(JOURNEYS)):
        found = Cell(NONE, "not made", row.failed)
    if found is None:
        return ""
    text = _plain(found.text)[:_TEXT]
    mark = _MARKS[found.state]
    text = f"{mark}{text}{mark}"
    if found.note:
        notes.append(f"{row.name}, {journey}: {_plain(found.note)[:_NOTE]}")
        text += f" ({len(notes)})"
    return text


def _plain(text: str) -> str:
    """Return a text that Markdown leaves as it is."""
    for character in "\\`*_{}[]<>|":
        text = text.replace(character, f"\\{character}")
    return text.replace("\n", " ")
