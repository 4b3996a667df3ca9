"""Commands that compare two models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from geutil.cli.files import Batches, check_source, read_model
from geutil.cli.options import BatchSize, Force, Html, Json, Signature, Source
from geutil.cli.output import counted, plain, show, working
from geutil.cli.pages import check_page, write_page

Other = Annotated[Path, typer.Argument(help="The other model.", show_default=False)]


def diff(
    path: Source,
    other: Other,
    html: Html = None,
    force: Force = False,
    signature: Signature = None,
    as_json: Json = False,
) -> int:
    """Show which ops two models have and have not in common; exit with 1 if any."""
    check_source(other)
    check_page(html, force)
    ours = read_model(path, signature)
    theirs = read_model(other, signature)
    from geutil import report

    found = report.difference(ours, theirs)
    if html is not None:
        labels = (path.name, other.name)
        write_page(html, lambda: report.diff(ours, theirs, labels=labels))
    show(found, as_json=as_json)
    return 0 if found.is_empty else 1


def check(
    path: Source,
    other: Other,
    data: Annotated[
        Path | None,
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
    check_source(other)
    batches = None if data is None else Batches(data, batch)
    ours = read_model(path, signature)
    theirs = read_model(other, signature)
    if batches is None:
        with working("running both"):
            found = ours.compare(theirs, None, samples, rtol, atol)
    else:
        tried = counted(batches, "running both", len(batches))
        found = ours.compare(theirs, tried, rtol=rtol, atol=atol)
    if as_json:
        show({**plain(found), "equal": found.equal}, as_json=True)
    else:
        print(found)
    return 0 if found.equal else 1
