"""Objects that show themselves in a notebook, without knowing who draws them.

A class of any layer derives from `Shown`. The package's root, which knows all layers,
says with `lazy.provide` what draws them.
"""

from __future__ import annotations

from geutil import lazy

DRAWING = "drawing"
"""The job of the function that takes what to show, and returns HTML."""


class Shown:
    """Base of objects that a notebook shows as a drawing or table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        return str(lazy.provided(DRAWING)(self))
