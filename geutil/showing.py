"""Things that show themselves in a notebook, without knowing who draws them.

A class of any layer derives from `Shown`. The package's root, which knows all layers,
says with `draw_with` how they are drawn.
"""

from __future__ import annotations

from collections.abc import Callable

Drawer = Callable[[object], str]

_drawers: list[Drawer] = []


def draw_with(drawer: Drawer) -> None:
    """Let `drawer` make the HTML of whatever derives from `Shown`."""
    _drawers[:] = [drawer]


class Shown:
    """Base of what a notebook shows as a drawing or table."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """Return the HTML that a notebook shows; None lets it show the text."""
        return _drawers[0](self) if _drawers else None
