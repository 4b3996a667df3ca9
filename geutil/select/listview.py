"""An immutable list of ops or tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any


class ListView(Sequence[Any]):
    """A read-only view of a list whose elements are compared by identity.

    `x in view` and `view.index(x)` are safe for tensors of a FuncGraph, for which
    `==` would add an op to the graph.

    Args:
        elements: the list that is viewed.
    """

    def __init__(self, elements: list[Any]) -> None:
        self._elements = elements

    def __getitem__(self, index: Any) -> Any:
        return self._elements[index]

    def __len__(self) -> int:
        return len(self._elements)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._elements)

    def __contains__(self, element: object) -> bool:
        return any(e is element for e in self._elements)

    def index(self, element: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the first position of `element` between `start` and `stop`."""
        for position in range(*slice(start, stop).indices(len(self._elements))):
            if self._elements[position] is element:
                return position
        raise ValueError(f"'{getattr(element, 'name', element)}' is not in the list")

    def count(self, element: Any) -> int:
        """Return how many times `element` is there."""
        return sum(e is element for e in self._elements)

    def __add__(self, other: Iterable[Any]) -> list[Any]:
        return [*self._elements, *other]

    def __radd__(self, other: Iterable[Any]) -> list[Any]:
        return [*other, *self._elements]

    def __repr__(self) -> str:
        return repr(self._elements)
