"""Commands that compare two models."""

from __future__ import annotations

from typing import Annotated

import typer

from geutil.cli.files import read_batches, read_model
from geutil.cli.options import BatchSize, Json, Signature, Source
from geutil.cli.output import plain, show, working
from geutil.report.differences import GraphDifference, difference

Other = Annotated[str, typer.Argument(help="The other model.", show_default=False)]


def diff(
    path: Source, other: Other, signature: Signature = None, as_json: Json = False
) -> int:
    """Show which ops two models have and have not in common; exit with 1 if any."""
    from pathlib import Path

    ours = read_model(path, signature)
    theirs = read_model(Path(other), signature)
    found: GraphDifference = difference(ours.graph, theirs.graph)
    show(found, as_json=as_json)
    return 0 if found.is_empty else 1


def check(
    path: Source,
    other: Other,
    data: Annotated[
        str | None,
        typer.Option(help="A .npz file, or a directory of them.", show_default=False),
    ] = None,
    batch: BatchSize = 32,
    samples: Annotated[
        int, typer.Option(min=1, help="How many inputs to draw without data.")
    ] = 8,
    rtol: Annotated[float, typer.Option(help="The relative tolerance.")] = 1e-5,
    atol: Annotated[float, typer.Option(help="The absolute tolerance.")] = 1e-6,
    signature: Signature = None,
    as_json: Json = False,
) -> int:
    """Run two models on the same inputs; exit with 1 if what they give differs."""
    from pathlib import Path

    ours = read_model(path, signature)
    theirs = read_model(Path(other), signature)
    inputs = None if data is None else list(read_batches(Path(data), batch))
    with working("running both"):
        found = ours.compare(theirs, inputs, samples, rtol, atol)
    if as_json:
        show({**plain(found), "equal": found.equal}, as_json=True)
    else:
        print(found)
    return 0 if found.equal else 1
