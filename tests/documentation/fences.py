"""The fenced blocks of a page, and which languages they may be in."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

RUN = ("python", "console")
"""Languages whose blocks are run."""

SHOWN = ("text", "toml", "bash")
"""Languages whose blocks are shown: outputs, settings, and what installs something."""

INSTALLS = re.compile(r"(python -m )?pip install |git clone |cd |make( |$)|#|$")
"""A line that a block of bash may hold, since it cannot be run in a test."""

_FENCE = re.compile(r"^\s*(`{3,}|~{3,})(.*)$")


@dataclass(frozen=True)
class Fence:
    """A fenced block.

    Attributes:
        line: the line of its first fence, counted from 1.
        language: the first word behind the fence.
        title: whatever follows it.
        lines: what is in it.
    """

    line: int
    language: str
    title: str
    lines: tuple[str, ...]


def fences(text: str) -> Iterator[Fence]:
    """Yield the fenced blocks of a page."""
    start, mark, info = 0, "", ""
    held: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        match = _FENCE.match(line)
        if match is None or (mark and not match[1].startswith(mark)):
            held.append(line)
        elif mark:
            language, _, title = info.partition(" ")
            yield Fence(start, language, title, tuple(held))
            mark = ""
        else:
            start, mark, info = number, match[1], match[2].strip()
            held = []
    assert not mark, f"the block in line {start} does not end"
