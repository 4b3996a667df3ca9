"""Identity of ops and tensors.

In a FuncGraph `hash(tensor)` raises and `t0 == t1` adds an Equal op to the graph, so
tensors are told apart by `is` and `id` alone. A collection below holds its elements,
which keeps their ids valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, ValuesView
from typing import Any, Generic, TypeVar

from geutil.graph._tf import Reference

V = TypeVar("V")


def dereference(key: Any) -> Any:
    """Return the tensor behind `tensor.ref()`, and any other key as it is."""
    return key.deref() if isinstance(key, Reference) else key


class IdentityMap(Mapping[Any, V], Generic[V]):
    """A mapping whose keys are told apart by identity.

    Keys may be tensors of a FuncGraph, which cannot be hashed. A look-up takes the
    tensor or its `ref()`. Iteration is in insertion order.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.graph.identity import IdentityMap
        >>> with tf.Graph().as_default():
        ...     x, y = tf.constant(1.0), tf.constant(2.0)
        >>> names = IdentityMap([(x, "x")])
        >>> x in names, y in names, names[x.ref()]
        (True, False, 'x')
    """

    def __init__(self, pairs: Iterable[tuple[Any, V]] = ()) -> None:
        self._entries: dict[int, tuple[Any, V]] = {}
        for key, value in pairs:
            self._set(key, value)

    def _set(self, key: Any, value: V) -> None:
        key = dereference(key)
        self._entries[id(key)] = (key, value)

    def __getitem__(self, key: Any) -> V:
        entry = self._entries.get(id(dereference(key)))
        if entry is None:
            raise KeyError(getattr(key, "name", key))
        return entry[1]

    def __contains__(self, key: object) -> bool:
        return id(dereference(key)) in self._entries

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IdentityMap):
            return NotImplemented
        return self._entries.keys() == other._entries.keys() and all(
            value is other._entries[key][1] for key, (_, value) in self._entries.items()
        )

    __hash__ = None  # type: ignore[assignment]

    def values(self) -> ValuesView[V]:
        """Return the values; `in` compares them by identity."""
        return _Values(self)

    def __repr__(self) -> str:
        pairs = ", ".join(
            f"{getattr(k, 'name', k)}: {getattr(v, 'name', v)}"
            for k, v in self._entries.values()
        )
        return f"{type(self).__name__}({{{pairs}}})"


class _Values(ValuesView[V]):
    """The values of a mapping, compared by identity."""

    def __contains__(self, value: object) -> bool:
        return any(v is value for v in self)


class MutableIdentityMap(IdentityMap[V]):
    """An `IdentityMap` that can be filled."""

    def __setitem__(self, key: Any, value: V) -> None:
        self._set(key, value)

    def update(self, pairs: Iterable[tuple[Any, V]]) -> None:
        """Set many at once; the keys are elements, no references to them."""
        self._entries.update((id(pair[0]), pair) for pair in pairs)


class IdentitySet:
    """A set of elements told apart by identity, in insertion order."""

    def __init__(self, elements: Iterable[Any] = ()) -> None:
        self._elements = {id(e): e for e in map(dereference, elements)}

    def add(self, element: Any) -> None:
        """Add `element`; one that is there already keeps its place."""
        element = dereference(element)
        self._elements.setdefault(id(element), element)

    def __contains__(self, element: object) -> bool:
        return id(dereference(element)) in self._elements

    def __iter__(self) -> Iterator[Any]:
        return iter(self._elements.values())

    def __len__(self) -> int:
        return len(self._elements)


def unique(elements: Iterable[Any]) -> list[Any]:
    """Return `elements` without repetitions, the first of each kept. Linear.

    Example:
        >>> from geutil.graph.identity import unique
        >>> a, b = object(), object()
        >>> unique([a, b, a]) == [a, b]
        True
    """
    return list({id(e): e for e in elements}.values())


def index_by_identity(elements: Iterable[Any]) -> dict[int, int]:
    """Return the first index of each element, keyed by `id`. Linear."""
    index: dict[int, int] = {}
    for position, element in enumerate(elements):
        index.setdefault(id(element), position)
    return index
