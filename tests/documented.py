"""What the docstrings of public names must hold."""

from __future__ import annotations

import inspect
import re
from typing import Any


def missing_parts(member: Any, *, raises: bool, cost: bool) -> list[str]:
    """Return the parts that a docstring should have and has not."""
    text = inspect.getdoc(member) or ""
    wanted = {"Example": r"^Example:\n    >>> "}
    if raises:
        wanted["Raises"] = r"^Raises:\n    \w"
    if cost:
        wanted["Cost"] = r"^Cost: \w"
    return [part for part, regex in wanted.items() if not re.search(regex, text, re.M)]


def signature(member: Any) -> str:
    """Return a signature with its annotations, as one line."""
    return re.sub(r"\s+", " ", str(inspect.signature(member))).replace("'", "")


def frozen(signatures: str) -> dict[str, str]:
    """Return a table of signatures by name; an indented line continues one."""
    lines = signatures.replace("\n    ", " ").strip().splitlines()
    return {re.match(r"[\w.]+", line)[0]: line for line in lines}
