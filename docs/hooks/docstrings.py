"""Reads geutil's docstrings: Google's headings, with "Example" and "Cost" among them.

An extension of griffe, which reads the sources for the reference.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Alias, Extension, Module, Object

RAISES = "Raises:"
# Public in the sources, for other modules of geutil, and of no use to anybody else.
HIDDEN = {
    "model.model.Body": "live",
}
# A name of an error, or several, with what they mean.
PAIR = re.compile(r"^[\w.]+(?:, [\w.]+)*: ")


class Docstrings(Extension):
    """Puts docstrings into the form that griffe knows; leaves out what is hidden."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Forget what is hidden, before classes are looked up by other names."""
        for path, names in HIDDEN.items():
            for name in names.split():
                pkg[path].del_member(name)
        # Its jobs are functions of the modules of its room.
        editor = pkg["tflite.file.LiteFile"]
        for name, member in [*editor.members.items()]:
            value = str(member.value) if member.is_attribute else ""
            if value.endswith(f".{name}"):
                job = Alias(name, f"{pkg.path}.tflite.{value}", lineno=member.lineno)
                editor.set_member(name, job)

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of whatever was read.

        Packages are introduced by their pages, so their docstrings are left out.
        """
        if obj.is_module:
            obj.docstring = None
        elif obj.docstring is not None:
            obj.docstring.value = rewritten(obj.docstring.value)


def rewritten(text: str) -> str:
    """Return a docstring as griffe's parser for Google's style takes it."""
    lines = []
    section: list[str] | None = None
    for line in text.splitlines():
        if section is not None and (not line or line.startswith("    ")):
            section.append(line)
            continue
        if section is not None:
            lines += _raises(section)
            section = None
        if line == RAISES:
            section = []
        else:
            lines.append(_heading(line))
    return "\n".join(lines + (_raises(section) if section is not None else []))


def _heading(line: str) -> str:
    if line == "Example:":
        return "Examples:"
    for word in ("Cost", "Source"):
        if line.startswith(f"{word}: "):
            return f"**{word}:**{line.removeprefix(f'{word}:')}"
    return line


def _raises(section: list[str]) -> list[str]:
    """Return what is raised: pairs of names and meaning, and sentences behind them."""
    entries: list[str] = []
    for line in filter(str.strip, section):
        if entries and line.startswith(" " * 8):
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line.strip())
    pairs = [f"    {entry}" for entry in entries if PAIR.match(entry)]
    prose = " ".join(entry for entry in entries if not PAIR.match(entry))
    listed = [RAISES, *pairs, ""] if pairs else []
    said = [prose if pairs else f"**Raises:** {prose}", ""] if prose else []
    return [*listed, *said]
