"""Self-contained pages.

A page is one HTML file that includes the viewer and needs no network.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import os
import sys
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from geutil.errors import ReportError
from geutil.formats import check_free, written_atomically
from geutil.version import __version__


@dataclass(frozen=True)
class Row:
    """The outcome of one candidate.

    Attributes:
        outcome: a word for it, such as "folded".
        good: whether the request was carried out.
        what: the candidate.
        detail: its result, or why there is none.
        names: the ops or scopes that it is about, those of the result first.
    """

    outcome: str
    good: bool
    what: str
    detail: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rows:
    """A report as a table.

    Attributes:
        title: its subject.
        summary: lines that say how much was done.
        rows: the candidates.
    """

    title: str
    summary: tuple[str, ...]
    rows: tuple[Row, ...]

    def data(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)


def payload_of(
    kind: str, title: str, graphs: list[dict[str, Any]], rows: Rows | None
) -> dict[str, Any]:
    """Return the data of a page: `Payload` in web/src/payload.ts."""
    tensorflow = sys.modules.get("tensorflow")
    traced = "" if tensorflow is None else f", TensorFlow {tensorflow.__version__}"
    return {
        "kind": kind,
        "title": title,
        "versions": f"geutil {__version__}{traced}",
        "graphs": graphs,
        **({} if rows is None else {"report": rows.data()}),
    }


@dataclass(frozen=True)
class Bundle:
    """The viewer that `make web` builds from the sources in `web/`.

    Attributes:
        script: the script, which draws a page's payload.
        style: the style sheet.
        loader: the script that brings the two into a frame of a notebook.
        licences: the licences of the packages in it.
    """

    script: str
    style: str
    loader: str
    licences: str

    @functools.cached_property
    def packed(self) -> str:
        """Script and style, as the loader unpacks them."""
        return _packed(json.dumps({"script": self.script, "style": self.style}))

    @property
    def key(self) -> str:
        """A key of the viewer that those of other versions do not have."""
        return hashlib.sha256(self.packed.encode()).hexdigest()[:16]


@functools.cache
def read_bundle() -> Bundle:
    """Return the viewer."""
    folder = files("geutil.report") / "static"
    try:
        script, style, loader, licences = (
            (folder / name).read_text(encoding="utf-8")
            for name in ("viewer.js", "viewer.css", "loader.js", "LICENSES.txt")
        )
    except FileNotFoundError as error:
        raise ReportError(
            "the viewer's script was not built; in a clone of geutil, call `make web`"
        ) from error
    # A comment ends at the first "--", and a script at its closing tag.
    return Bundle(
        script.replace("</script", "<\\/script"),
        style,
        loader.replace("</script", "<\\/script"),
        licences.replace("--", "- "),
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
_FRAME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline'; worker-src blob:; style-src 'unsafe-inline'; \
img-src data: blob:">
<title>{title}</title>
</head>
<body>
<script type="text/plain" id="payload" data-packed data-key="{key}">{payload}</script>
{viewer}
<script>
{loader}
</script>
</body>
</html>
"""
_VIEWER = """<script type="text/plain" id="viewer" data-key="{key}">{packed}</script>
<!--
This page contains the following packages.

{licences}
-->"""
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
    """An HTML page with a drawing, a comparison or a timeline.

    It is one file that includes its scripts, and its policy forbids the browser any
    network request. A notebook shows it in a frame; the first frame of a notebook
    contains the scripts, and the others load them from there.

    Attributes:
        title: its title.
        payload: the data of the drawing, as JSON.
        body: HTML to show instead of a drawing, without scripts; "" draws `payload`.
        style: the style sheet of such HTML.
    """

    title: str
    payload: Mapping[str, Any] = field(repr=False)
    body: str = field(default="", repr=False)
    style: str = field(default="", repr=False)

    @property
    def html(self) -> str:
        """The HTML text of the page.

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
            ReportError: the file exists and `overwrite` is not set; or the viewer was
                not built.

        Cost: linear in the size of the page, about 0.2 MB plus 0.3 kB per op.
        """
        path = Path(path)
        check_free(path, overwrite, ReportError)
        text = self.html
        with written_atomically(path, overwrite=True) as new:
            new.write_text(text, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        """Return a frame for a notebook."""
        text = html.escape(self.html if self.body else self._framed())
        style = f"width:100%;height:{_FRAME_HEIGHT}px;border:1px solid #d9dee5"
        title = html.escape(self.title)
        return f'<iframe title="{title}" style="{style}" srcdoc="{text}"></iframe>'

    def _framed(self) -> str:
        """Return the text of a frame, with the viewer if no frame before has it."""
        bundle = read_bundle()
        viewer = ""
        if _viewer_is_missing():
            viewer = _VIEWER.format(
                key=bundle.key, packed=bundle.packed, licences=bundle.licences
            )
        return _FRAME.format(
            title=html.escape(self.title),
            key=bundle.key,
            payload=_packed(_json(self.payload)),
            viewer=viewer,
            loader=bundle.loader,
        )


_runs: dict[str, int] = {}
"""The cells of the notebook that showed a page, with the number of their last run."""


def _viewer_is_missing() -> bool:
    """Return whether the next frame must have the viewer, and note the cell of it.

    That is so outside of notebooks, in the first cell, and in a cell that runs again:
    its output, which may have held the viewer, is gone.
    """
    cell = _running_cell()
    # Each output of Colab is a page of its own, which sees no other.
    if cell is None or "google.colab" in sys.modules:
        return True
    name, run = cell
    missing = not _runs or _runs.get(name, run) != run
    _runs[name] = run
    return missing


def _running_cell() -> tuple[str, int] | None:
    """Return a key of the cell that runs, and the number of the run."""
    module = sys.modules.get("IPython")
    shell: Any = module.get_ipython() if module else None
    if shell is None or not hasattr(shell, "get_parent"):
        return None
    asked = shell.get_parent()
    # Older notebooks give their cells no names; then the code tells them apart.
    name = asked.get("metadata", {}).get("cellId")
    name = name or asked.get("content", {}).get("code", "")
    return str(name), int(shell.execution_count)


def _packed(text: str) -> str:
    """Return a text deflated and in base 64."""
    return base64.b64encode(zlib.compress(text.encode("utf-8"), 9)).decode("ascii")


def _json(payload: Mapping[str, Any]) -> str:
    """Return JSON that cannot end the element that it stands in."""
    text = json.dumps(payload, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c")
