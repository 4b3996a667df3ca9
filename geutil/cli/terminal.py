"""The command at the terminal: its arguments and options, and its output.

These are the options that several commands have. Output is text for people, JSON for
scripts; progress goes to stderr.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from geutil.progress import STEP, note
from geutil.sizes import size_text


def optional(help: str, *names: str, **settings: Any) -> Any:
    """Return an option whose default is not shown."""
    return typer.Option(*names, help=help, show_default=False, **settings)


class SchemeName(str, Enum):
    """Schemes of quantization; see `geutil.quantize.to_tflite`."""

    int8 = "int8"
    int8x4 = "int8x4"
    int16x8 = "int16x8"
    dynamic_range = "dynamic_range"
    dynamic_range_int4 = "dynamic_range_int4"
    weight_only_int8 = "weight_only_int8"
    weight_only_int4 = "weight_only_int4"
    float16 = "float16"


class FileOrder(str, Enum):
    """Orders of the ops of a .tflite file; see `geutil.quantize.to_tflite`."""

    converter = "converter"
    least_memory = "least_memory"


class ModelFormat(str, Enum):
    """Formats that models are written in."""

    saved_model = "saved_model"
    graph_def = "graph_def"
    pbtxt = "pbtxt"
    tflite = "tflite"


class Method(str, Enum):
    """How ranges are calibrated."""

    best = "best"
    moving_average = "moving_average"
    min_max = "min_max"
    percentile = "percentile"
    entropy = "entropy"
    mse = "mse"


class Rounding(str, Enum):
    """How weights are rounded; see `geutil.quantize.calibrate`."""

    nearest = "nearest"
    gptq = "gptq"
    adaround = "adaround"


RoundingName = Annotated[
    Rounding | None,
    typer.Option(
        "--rounding",
        help="How weights are rounded: the last two by data. By default gptq where "
        "they have fewer bits than activations.",
        show_default=False,
    ),
]


_OF_ALL = (
    "of a .tflite file: int8, uint8, int16 or float32; NAME=TYPE is for one, and can "
    "be given several times."
)
InputTypes = Annotated[
    list[str] | None, optional(f"The type of the inputs {_OF_ALL}", "--input-type")
]
OutputTypes = Annotated[
    list[str] | None, optional(f"The type of the outputs {_OF_ALL}", "--output-type")
]


def _path(text: str) -> Path:
    """Return a path. An empty one, of a shell variable that is not set, is none."""
    if not text:
        raise typer.BadParameter("the path is empty")
    return Path(text)


Source = Annotated[
    Path,
    typer.Argument(
        help="A SavedModel directory, or a .pb, .pbtxt, .keras or .h5 file; a .tflite "
        "file becomes a graph.",
        parser=_path,
        metavar="PATH",
    ),
]
SourceOrLite = Annotated[
    Path,
    typer.Argument(
        help="A SavedModel directory, or a .pb, .pbtxt, .keras, .h5 or .tflite file.",
        parser=_path,
        metavar="PATH",
    ),
]
LiteSource = Annotated[
    Path, typer.Argument(help="A .tflite file.", parser=_path, metavar="PATH")
]
SourcesOrLite = Annotated[
    list[Path],
    typer.Argument(
        help="A SavedModel directory, or a .pb, .pbtxt, .keras, .h5 or .tflite file; "
        "several in the order in which they were made.",
        parser=_path,
        metavar="PATH...",
    ),
]
Target = Annotated[Path, optional("Where to write the result.", "--output", "-o")]
As = Annotated[
    ModelFormat | None,
    typer.Option(
        "--format", help="What to write; by default what the name of the output says."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]
Html = Annotated[
    Path | None, optional("Write a page to look at, a file that needs no network.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Signature = Annotated[str | None, optional("The signature to work on.", "--signature")]
Inputs = Annotated[
    list[str] | None,
    optional(
        "A tensor or op; name=tensor also names it. Can be given several times.",
        "--input",
    ),
]
Data = Annotated[
    Path,
    optional(
        "A .npz file with an array for each input, a .npy file, or a directory of "
        "such files, one for each batch."
    ),
]
BatchSize = Annotated[
    int, typer.Option("--batch", min=1, help="How many samples to run at once.")
]


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal that something takes its time, and how long it has."""
    note(STEP, what)
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as p:
        p.add_task(f"{what} …", total=None)
        yield


def show(result: Any, *, as_json: bool) -> None:
    """Print a result as text or JSON."""
    if as_json:
        print(json.dumps(plain(result), indent=2, sort_keys=False))
    else:
        print(result)


def show_written(model: Any, written: Any, *, as_json: bool) -> None:
    """Print a written model, and its place."""
    if not as_json:
        print(f"{model!r} -> {written.path}")
        print(written)
        return
    described = {
        "path": written.path,
        "signature": model.signature,
        "inputs": _described(model.inputs),
        "outputs": _described(model.outputs),
        "ops": model.op_count,
        "written": plain(written),
    }
    show(described, as_json=True)


def _described(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {
            "dtype": t.dtype.name,
            "shape": t.shape.as_list() if t.shape.rank is not None else None,
        }
        for name, t in tensors.items()
    }


class Size(int):
    """A number of bytes, in a table; people see it with a unit."""

    def __str__(self) -> str:
        return size_text(self)


def show_rows(
    titles: Sequence[str], rows: Iterable[Sequence[Any]], *, as_json: bool
) -> None:
    """Print a table; into a pipe, lines of values with tabs between them.

    Without a terminal, sizes are numbers of bytes, and the heads of columns say so.
    """
    listed = [list(row) for row in rows]
    if as_json:
        keys = [title.replace(" ", "_") for title in titles]
        show([dict(zip(keys, row, strict=True)) for row in listed], as_json=True)
        return
    if not sys.stdout.isatty():
        columns = [*zip(*listed, strict=True)] or [()] * len(titles)
        # A pipe gets bare numbers, so that the title has to tell the unit.
        heads = [
            f"{title}, bytes"
            if any(isinstance(cell, Size) for cell in column)
            else title
            for title, column in zip(titles, columns, strict=True)
        ]
        for row in (heads, *listed):
            print("\t".join(map(_field, row)))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, emoji=False, highlight=False)
    cells = [["" if cell is None else str(cell) for cell in row] for row in listed]
    widths = _widths([list(titles), *cells], console.width)
    table = Table(*titles, box=None)
    for row in cells:
        table.add_row(*map(cut_in_middle, row, widths))
    console.print(table)


def _field(value: Any) -> str:
    """Return a value of a table as text that another program reads, on one line."""
    if isinstance(value, Size):
        return str(int(value))
    return "" if value is None else " ".join(str(value).split())


_BESIDE = 2
"""Columns of a terminal that a table's cell has beside it."""


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return how wide columns may be, the widest being the first to give way."""
    titles, *_ = rows
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + _BESIDE * len(widths) > width:
        widest = max(range(len(widths)), key=widths.__getitem__)
        if widths[widest] <= max(len(titles[widest]), _LEAST):
            break
        widths[widest] -= 1
    return widths


# Columns that a cell keeps in a narrow terminal.
_LEAST = 5


def cut_in_middle(text: str, width: int) -> str:
    """Return a text that is not wider: names differ in their ends more than before.

    Example:
        >>> cut_in_middle("block_1/expand/Conv2D", 15)
        'bloc…and/Conv2D'
        >>> cut_in_middle("Conv2D", 15)
        'Conv2D'
    """
    if len(text) <= width:
        return text
    start = (width - 1) // 3
    return f"{text[:start]}…{text[len(text) - (width - 1 - start) :]}"


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: dictionaries, lists, numbers and strings.

    JSON has no NaN and no infinity: they are None.

    Example:
        >>> import numpy as np
        >>> plain({"a": (1, np.float32(0.5)), "b": {3: None}})
        {'a': [1, 0.5], 'b': {'3': None}}
        >>> plain(np.array([1.0, np.nan]))
        [1.0, None]
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or type(value) in (bool, int, float, str):
        return value
    if is_dataclass(value):
        return {
            field.name: plain(getattr(value, field.name))
            for field in fields(value)
            # The rest is there for further questions.
            if field.repr
        }
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # of numpy, which need not be imported to be told
        return plain(value.tolist())
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, Path):
        return str(value)
    name = getattr(value, "name", None)
    if isinstance(name, str):  # before items: a variable has those, too
        return name
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [plain(item) for item in value]
    return str(value)
