"""Arguments and options that several commands have."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer


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
