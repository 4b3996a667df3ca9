"""The command that draws a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from geutil.cli.files import read_model
from geutil.cli.options import Force, Signature, Source
from geutil.cli.pages import check_page, write_page


def view(
    path: Source,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The page to write; by default the model's name with .html.",
            show_default=False,
        ),
    ] = None,
    signature: Signature = None,
    force: Force = False,
) -> None:
    """Draw a model as a page to look into: one file that needs no network."""
    page = Path(f"{path.absolute().stem}.html") if output is None else output
    check_page(page, force)
    model = read_model(path, signature)
    from geutil import report

    write_page(page, lambda: report.view(model, title=path.absolute().name))
