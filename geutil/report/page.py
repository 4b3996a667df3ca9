"""A page that explains itself: one HTML file, which needs no network."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geutil.errors import ReportError
from geutil.report.bundle import read_bundle

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
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
    """

    title: str
    payload: Mapping[str, Any] = field(repr=False)

    @property
    def html(self) -> str:
        """The text of the file.

        Raises:
            ReportError: the viewer was not built; installed packages contain it.
        """
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
