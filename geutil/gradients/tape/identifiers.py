"""Numbers that stand for tensors, and keep none of them alive."""

from __future__ import annotations

import itertools
import weakref
from typing import Any


class Identifiers:
    """Gives each object a number of its own.

    The number that Python itself gives an object is used again once the object is
    gone, and on a tape it must not be.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __call__(self, tensor: Any) -> int:
        """Return the number of a tensor: always the same one."""
        key = id(tensor)
        known = self._known.get(key)
        if known is not None and known[0]() is tensor:
            return known[1]
        number = next(self._numbers)
        self._known[key] = (weakref.ref(tensor, lambda _: self._forget(key)), number)
        return number

    def _forget(self, key: int) -> None:
        known = self._known.get(key)
        # Another object may have taken the place by now.
        if known is not None and known[0]() is None:
            del self._known[key]


tensor_id = Identifiers()
"""Returns the number of a tensor: of TensorFlow or numpy, in a graph or not."""
