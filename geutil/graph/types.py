"""Ops, tensors and graphs: their types, and when two are the same.

In a FuncGraph `hash(tensor)` raises and `t0 == t1` adds an Equal op to the graph, so
tensors are told apart by `is` and `id` alone. A collection below holds its elements,
which keeps their ids valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, ValuesView
from typing import Any, Generic, TypeAlias, TypeVar

import tensorflow as tf

from geutil.errors import ArgumentTypeError
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
        >>> from geutil.graph.types import IdentityMap
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
        >>> from geutil.graph.types import unique
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


Graph: TypeAlias = tf.Graph
Operation: TypeAlias = tf.Operation
Tensor: TypeAlias = tf.Tensor
Element: TypeAlias = Any
"""An op or a tensor."""


def is_graph(obj: object) -> bool:
    """Tell whether `obj` is a `tf.Graph` (a FuncGraph is one too)."""
    return isinstance(obj, tf.Graph)


def is_op(obj: object) -> bool:
    """Tell whether `obj` is a `tf.Operation`."""
    return isinstance(obj, tf.Operation)


def is_tensor(obj: object) -> bool:
    """Tell whether `obj` is a symbolic tensor: one that an op of a graph yields."""
    return isinstance(obj, tf.Tensor) and getattr(obj, "graph", None) is not None


def is_reference(tensor: Tensor) -> bool:
    """Tell whether `tensor` is a reference to a version 1 variable."""
    return bool(tensor.dtype._is_ref_dtype)


def is_func_graph(graph: Graph) -> bool:
    """Tell whether `graph` is the graph of a `tf.function` body."""
    return bool(graph.building_function)


def type_name(obj: object) -> str:
    """Return the qualified type of `obj`, for messages."""
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


def require_graph(graph: object) -> None:
    """Raise `ArgumentTypeError` unless `graph` is a `tf.Graph`."""
    if not is_graph(graph):
        raise ArgumentTypeError(f"expected a tf.Graph, got {type_name(graph)}")


def require_op(op: object) -> None:
    """Raise `ArgumentTypeError` unless `op` is a `tf.Operation`."""
    if not is_op(op):
        raise ArgumentTypeError(f"expected a tf.Operation, got {type_name(op)}")


def eager_hint(obj: object) -> str:
    """Return what to add to a refusal of `obj` when it is an eager tensor."""
    eager = isinstance(obj, tf.Tensor) and not is_tensor(obj)
    return "; eager tensors belong to no graph" if eager else ""


def require_tensor(tensor: object) -> None:
    """Raise `ArgumentTypeError` unless `tensor` belongs to a graph."""
    if not is_tensor(tensor):
        raise ArgumentTypeError(
            f"expected a tf.Tensor of a graph, got {type_name(tensor)}"
            f"{eager_hint(tensor)}"
        )
