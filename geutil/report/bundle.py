"""The viewer's script, its style, and the licences of what it is made of."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.resources import files

from geutil.errors import ReportError


@dataclass(frozen=True)
class Bundle:
    """What `make web` builds from the sources in `web/`.

    Attributes:
        script: the script, which draws a page's payload.
        style: the style sheet.
        licences: the licences of the packages in it.
    """

    script: str
    style: str
    licences: str


@functools.cache
def read_bundle() -> Bundle:
    """Return the viewer.

    Raises:
        ReportError: it was not built, as in a clone.
    """
    folder = files("geutil.report") / "static"
    try:
        script, style, licences = (
            (folder / name).read_text(encoding="utf-8")
            for name in ("viewer.js", "viewer.css", "LICENSES.txt")
        )
    except FileNotFoundError as error:
        raise ReportError(
            "the viewer's script was not built; in a clone of geutil, call `make web`"
        ) from error
    # A comment ends at the first "--", and a script at its closing tag.
    return Bundle(
        script.replace("</script", "<\\/script"), style, licences.replace("--", "- ")
    )
