"""Objects that show themselves in a notebook, without knowing who draws them.

A class of any layer derives from `Shown`. The package's root, which knows all layers,
says with `draw_with` what draws them.
"""

from __future__ import annotations

import importlib

_drawers: list[tuple[str, str]] = []


def draw_with(module: str, function: str) -> None:
    """Let a function make the HTML of whatever derives from `Shown`.

    Args:
        module: the module that has it, which is imported when it is needed.
        function: its name; it takes what to show, and returns HTML.
    """
    _drawers[:] = [(module, function)]


class Shown:
    """Base of what a notebook shows as a drawing or table."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """Return the HTML that a notebook shows; None lets it show the text."""
        for module, function in _drawers:
            drawn: str = getattr(importlib.import_module(module), function)(self)
            return drawn
        return None
