"""Ops, tensors and graphs.

Their types, when two are the same, their names, shapes and nested structures.

In a FuncGraph `hash(tensor)` raises and `t0 == t1` adds an Equal op to the graph, so
tensors are distinguished by `is` and `id` alone. A collection below holds its elements,
which keeps their ids valid.

Dicts, named tuples, lists and tuples nest; anything else is a leaf. Tensors and
variables are leaves: iterating over one would add ops to its graph. So are arrays.
"""

from __future__ import annotations

import copy
import math
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
    ValuesView,
)
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.graph._tf import Reference

V = TypeVar("V")


def dereference(key: Any) -> Any:
    """Return the tensor behind `tensor.ref()`, and any other key as it is."""
    return key.deref() if isinstance(key, Reference) else key


class IdentityMap(Mapping[Any, V], Generic[V]):
    """A mapping whose keys are distinguished by identity.

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
    """A set of elements distinguished by identity, in insertion order."""

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
    """Return whether `obj` is a `tf.Graph` (a FuncGraph is one too)."""
    return isinstance(obj, tf.Graph)


def is_op(obj: object) -> bool:
    """Return whether `obj` is a `tf.Operation`."""
    return isinstance(obj, tf.Operation)


def is_tensor(obj: object) -> bool:
    """Return whether `obj` is a symbolic tensor: one that an op of a graph yields."""
    return isinstance(obj, tf.Tensor) and getattr(obj, "graph", None) is not None


def is_stateful(op: Operation) -> bool:
    """Return whether running `op` twice may not be the same as running it once."""
    definition = op.op_def
    return definition is None or bool(definition.is_stateful)


def is_reference(tensor: Tensor) -> bool:
    """Return whether `tensor` is a reference to a version 1 variable."""
    return bool(tensor.dtype._is_ref_dtype)


def is_func_graph(graph: Graph) -> bool:
    """Return whether `graph` is the graph of a `tf.function` body."""
    return bool(graph.building_function)


def type_name(obj: object) -> str:
    """Return the qualified type of `obj`, for messages."""
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


def as_model(value: Any, refusal: str) -> Any:
    """Return `value` if it is a model; rooms below `geutil.model` know no class of it.

    Args:
        value: the candidate.
        refusal: the message, up to the type of the value: "a model is folded, not".

    Raises:
        ArgumentTypeError: it is no model.
    """
    names = {"graph": tf.Graph, "signature": str, "signatures": Mapping}
    if all(isinstance(getattr(value, n, None), cls) for n, cls in names.items()):
        return value
    raise ArgumentTypeError(
        f"{refusal} a {type_name(value)}",
        remedy="open it with geutil.model.open",
    )


def signatures_of(value: Any, refusal: str) -> dict[str, Any]:
    """Return the signatures of a model as models, its own first; see `as_model`."""
    own, others = as_model(value, refusal).signature, value.signatures
    return {own: value, **{name: others[name] for name in others if name != own}}


def require_graph(graph: object) -> None:
    """Raise `ArgumentTypeError` unless `graph` is a `tf.Graph`."""
    if not is_graph(graph):
        raise ArgumentTypeError(f"expected a tf.Graph, got {type_name(graph)}")


def require_op(op: object) -> None:
    """Raise `ArgumentTypeError` unless `op` is a `tf.Operation`."""
    if not is_op(op):
        raise ArgumentTypeError(f"expected a tf.Operation, got {type_name(op)}")


def eager_hint(obj: object) -> str:
    """Return the end of a refusal's message if `obj` is an eager tensor."""
    eager = isinstance(obj, tf.Tensor) and not is_tensor(obj)
    return "; eager tensors belong to no graph" if eager else ""


def require_tensor(tensor: object) -> None:
    """Raise `ArgumentTypeError` unless `tensor` belongs to a graph."""
    if not is_tensor(tensor):
        raise ArgumentTypeError(
            f"expected a tf.Tensor of a graph, got {type_name(tensor)}"
            f"{eager_hint(tensor)}"
        )


def same_static_shape(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have equal static shapes, unknown parts included."""
    return bool(a._shape == b._shape)


def refine_shapes(ops: Iterable[tuple[Operation, Operation]]) -> None:
    """Make the static shapes of copies as definite as those of their originals."""
    # For copies whose inputs have the same static shapes: facts of the original beyond
    # shape inference (by `set_shape`) hold for the copy too.
    for op, op_ in ops:
        for t, t_ in zip(op.outputs, op_.outputs, strict=True):
            if t._shape != t_._shape:
                # As set_shape does, without a TensorShape in between.
                t_._shape_val = None
                t_._set_shape(*t._shape)


def is_leaf(obj: object) -> bool:
    """Return whether `obj` is no container."""
    return (
        is_op(obj)
        or isinstance(obj, str | bytes | np.ndarray | tf.Tensor | tf.Variable)
        or not isinstance(obj, Iterable)
    )


def as_list(obj: Any) -> list[Any]:
    """Return `obj` as a list: one op or tensor alone becomes a list of one."""
    return [obj] if is_leaf(obj) else list(obj)


def flatten(tree: Any) -> list[Any]:
    """Return the leaves of `tree`, depth first.

    Example:
        >>> from geutil.graph.types import flatten
        >>> flatten({"a": 1, "b": [2, (3,)]})
        [1, 2, 3]
    """
    leaves: list[Any] = []
    stack: list[Iterator[Any]] = [iter([tree])]
    while stack:
        for node in stack[-1]:
            if is_leaf(node):
                leaves.append(node)
                continue
            children = node.values() if isinstance(node, Mapping) else node
            stack.append(iter(children))
            break
        else:
            stack.pop()
    return leaves


def components(obj: Any) -> list[Any]:
    """Return the tensors of indexed slices or of a sparse tensor; else the object."""
    if isinstance(obj, tf.IndexedSlices | tf.SparseTensor):
        return list(tf.nest.flatten(obj, expand_composites=True))
    return [obj]


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return a structure like `tree` whose leaves are `function(leaf)`.

    Dicts keep their class, order and keys; named tuples their class. Other iterables
    (sets, generators, views) become tuples. The depth of the nesting is bounded by
    Python's recursion limit: this nests over containers, never over a graph.

    Example:
        >>> from geutil.graph.types import map_leaves
        >>> map_leaves({"a": 1, "b": [2, (3,)]}, lambda x: 10 * x)
        {'a': 10, 'b': [20, (30,)]}
    """
    if is_leaf(tree):
        return function(tree)
    if isinstance(tree, Mapping):
        mapped = {key: map_leaves(child, function) for key, child in tree.items()}
        if not isinstance(tree, MutableMapping):
            return mapped
        # A copy keeps what the class adds, such as a defaultdict's factory.
        result = copy.copy(tree)
        result.update(mapped)
        return result
    children = [map_leaves(child, function) for child in tree]
    if isinstance(tree, tuple):
        return type(tree)(*children) if hasattr(tree, "_fields") else tuple(children)
    return children if isinstance(tree, list) else tuple(children)


def scope_finalize(scope: str) -> str:
    """Return `scope` with a slash at its end; the empty scope stays empty."""
    return f"{scope}/" if scope and not scope.endswith("/") else scope


def is_in_scope(name: str, scope: str | tuple[str, ...] | None) -> bool:
    """Return whether `name` is a name scope or in it; "" and None hold all."""
    scopes = scope if isinstance(scope, tuple) else (scope or "",)
    return f"{name}/".startswith(tuple(map(scope_finalize, scopes)))


def quoted(names: Iterable[str] | None) -> str:
    """Return names in quotes, for messages."""
    return ", ".join(f"'{name}'" for name in names or ())


def scopes_around(name: str) -> Iterator[str]:
    """Yield a name and the scopes around it, the innermost first, without slashes."""
    while name:
        yield name
        name = name.rpartition("/")[0]


def scope_dirname(name: str) -> str:
    """Return the scope part of `name`, slash included."""
    return name[: name.rfind("/") + 1]


def scope_basename(name: str) -> str:
    """Return the part of `name` after its last slash."""
    return name[name.rfind("/") + 1 :]


def absolute_unique_names(graph: Graph, names: Iterable[str]) -> list[str]:
    """Return each name as `absolute_unique_name` does, in one go."""
    scope, graph._name_stack = graph._name_stack, ""
    try:
        return [graph.unique_name(name) for name in names]
    finally:
        graph._name_stack = scope


def absolute_unique_name(graph: Graph, name: str) -> str:
    """Reserve `name`, or `name_1` and so on, whatever the current name scope is."""
    return absolute_unique_names(graph, [name])[0]


def scopes_in_use(graph: Graph) -> frozenset[str]:
    """Return every name scope that an op is in, with a slash at its end."""
    scopes: set[str] = set()
    for scope in {scope_dirname(op.name) for op in graph.get_operations()}:
        while scope and scope not in scopes:
            scopes.add(scope)
            scope = scope_dirname(scope[:-1])
    return frozenset(scopes)


def unused_name(graph: Graph, name: str) -> str:
    """Return `name`, or `name_1` and so on where it is taken, without reserving it."""
    scope, graph._name_stack = graph._name_stack, ""
    try:
        return str(graph.unique_name(name, mark_as_used=False))
    finally:
        graph._name_stack = scope


def collections_of_elements(graph: Graph) -> IdentityMap[list[str]]:
    """Return, for each op and tensor in a collection, the names of its collections."""
    collections_of: MutableIdentityMap[list[str]] = MutableIdentityMap()
    for name in graph.get_all_collection_keys():
        for element in graph.get_collection_ref(name):
            if is_op(element) or is_tensor(element):
                if element not in collections_of:
                    collections_of[element] = []
                collections_of[element].append(name)
    return collections_of


def known_collection_names() -> frozenset[str]:
    """Return the collection names that TensorFlow itself gives a meaning."""
    # vars() and not getattr(): GraphKeys.VARIABLES logs a deprecation when it is read.
    attributes = vars(tf.compat.v1.GraphKeys).items()
    return frozenset(
        value
        for key, value in attributes
        if not key.startswith("__") and isinstance(value, str)
    )


GivenShapes: TypeAlias = Mapping[Any, Any] | Iterable[tuple[Any, Any]]
"""Shapes of tensors: by tensor, reference or name."""
_STRING_BYTES = 24
"""The bytes of one string in TensorFlow, besides the characters of a long one."""


def dims_of(tensor: Tensor) -> tuple[int | None, ...] | None:
    """Return the static shape of a tensor, or None where the rank is not known."""
    shape = tensor.shape
    return None if shape.rank is None else tuple(shape.as_list())


def dtype_bytes(dtype: Any) -> int:
    """Return the bytes of one element; handles and variants lead elsewhere."""
    base = dtype.base_dtype
    if base.name in ("resource", "variant"):
        return 0
    return _STRING_BYTES if base.name == "string" else int(base.size)


def bytes_of_shape(dtype: Any, dims: Sequence[int | None] | None) -> int | None:
    """Return the bytes of a tensor of a dtype and shape, or None where it is open."""
    each = dtype_bytes(dtype)
    if not each:
        return 0
    if dims is None:
        return None
    static_dims = [dim for dim in dims if dim is not None]
    return each * math.prod(static_dims) if len(static_dims) == len(dims) else None


def pairs_of(shapes: GivenShapes | None) -> Iterable[tuple[Any, Any]]:
    """Return the pairs of shapes that are given as a mapping or as pairs."""
    return shapes.items() if isinstance(shapes, Mapping) else shapes or ()
