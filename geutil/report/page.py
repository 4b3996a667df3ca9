"""A page that explains itself.

One HTML file with the viewer in it, which needs no network.
"""

from __future__ import annotations

import functools
import html
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

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


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline'; worker-src blob:; style-src 'unsafe-inline'; \
img-src data: blob:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<script type="application/json" id="payload">{payload}</script>
<script>
{script}
</script>
<!--
This page contains the following packages.

{licences}
-->
</body>
</html>
"""
_STATIC_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
{body}
</body>
</html>
"""
_FRAME_HEIGHT = 620
"""Pixels of a page in a notebook."""


@dataclass(frozen=True)
class Page:
    """A page to look at: a drawing, a comparison, or a timeline.

    It is one file with its scripts in it, and its policy forbids the browser to ask the
    network for anything. A notebook shows it in a frame.

    Attributes:
        title: its title.
        payload: what the scripts draw, as JSON can hold it.
        body: HTML that is shown as it is, without any script; "" lets them draw.
        style: the style sheet of such HTML.
    """

    title: str
    payload: Mapping[str, Any] = field(repr=False)
    body: str = field(default="", repr=False)
    style: str = field(default="", repr=False)

    @property
    def html(self) -> str:
        """The text of the file.

        Raises:
            ReportError: the viewer was not built; installed packages contain it.
        """
        if self.body:
            title = html.escape(self.title)
            return _STATIC_PAGE.format(title=title, style=self.style, body=self.body)
        bundle = read_bundle()
        return _PAGE.format(
            title=html.escape(self.title),
            style=bundle.style,
            payload=_json(self.payload),
            script=bundle.script,
            licences=bundle.licences,
        )

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the page to a file.

        Args:
            path: the file to write.
            overwrite: whether to replace a file that exists.

        Returns:
            The path.

        Raises:
            ReportError: there is such a file, and `overwrite` is not set; or the
                viewer was not built.

        Cost: linear in the size of the page, some 0.6 MB and 0.3 kB an op.
        """
        path = Path(path)
        if path.exists() and not overwrite:
            raise ReportError(f"'{path}' exists; pass overwrite=True to replace it")
        text = self.html
        path.write_text(text, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        """Return a frame for a notebook."""
        text = html.escape(self.html)
        style = f"width:100%;height:{_FRAME_HEIGHT}px;border:1px solid #d9dee5"
        title = html.escape(self.title)
        return f'<iframe title="{title}" style="{style}" srcdoc="{text}"></iframe>'


def _json(payload: Mapping[str, Any]) -> str:
    """Return JSON that cannot end the element that it stands in."""
    text = json.dumps(payload, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c")
