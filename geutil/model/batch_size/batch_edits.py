"""Changes of a graph or function body as values, and the new nodes that they write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from geutil.graph.creation import new_graph
from geutil.graph.op_types import NEXT_ITERATIONS
from geutil.graph.protos import flat_body
from geutil.graph.types import Tensor
from geutil.graph.walks import (
    data_inputs,
    node_name,
    tensor_name,
    topological_order,
    walk_by_identity,
)
from geutil.model.programs import take_name


@dataclass(frozen=True)
class ScopeNode:
    """A node of a scope."""

    node: Any
    # The tensors that it reads, as `node:k`, control inputs left out.
    inputs: tuple[str, ...]
    # The same as the scope writes them: `node`, or `node:output:k` inside a function.
    written: tuple[str, ...]


@dataclass(frozen=True)
class Scope:
    """A graph, or the body of a function."""

    # Its nodes, producers first; loops of version 1 are cut where they go back.
    entries: tuple[ScopeNode, ...]
    args: tuple[str, ...] = ()  # The names of a function's arguments.
    results: tuple[str, ...] = ()  # The results of a function, as `node:k`.

    def readers(self) -> dict[str, list[tuple[ScopeNode, int]]]:
        """Return (entry, index) of each reader of each tensor."""
        readers_of: dict[str, list[tuple[ScopeNode, int]]] = {}
        for entry in self.entries:
            for index, name in enumerate(entry.inputs):
                readers_of.setdefault(name, []).append((entry, index))
        return readers_of


def scope_of_graph(graph_def: Any) -> Scope:
    """Return the scope of the nodes of a `GraphDef`."""
    return Scope(_ordered(graph_def.node, [n.input for n in graph_def.node]))


def scope_of_function(
    function: Any, library: Mapping[str, Any], attributes: Mapping[str, Any]
) -> Scope:
    """Return the scope of a function's body."""
    body = flat_body(function, library, attributes)
    nodes = [n.definition for n in body.nodes]
    return Scope(
        _ordered(nodes, [n.inputs for n in body.nodes]),
        tuple(f"{arg.name}:0" for arg in body.args),
        tuple(tensor_name(result.tensor) for result in body.results),
    )


def _ordered(
    nodes: Sequence[Any], inputs: Sequence[Sequence[str]]
) -> tuple[ScopeNode, ...]:
    """Return entries with producers first, else in the order given."""
    index = {node.name: i for i, node in enumerate(nodes)}

    def producers(i: int) -> list[int]:
        places = (index.get(node_name(name)) for name in inputs[i])
        known = (place for place in places if place is not None)
        return [place for place in known if nodes[place].op not in NEXT_ITERATIONS]

    order = topological_order(range(len(nodes)), producers)
    return tuple(_entry(nodes[i], inputs[i]) for i in order)


def _entry(node: Any, inputs: Sequence[str]) -> ScopeNode:
    data = tuple(map(tensor_name, data_inputs(inputs)))
    written = tuple(data_inputs(node.input))
    return ScopeNode(node, data, written)


def constant_value(node: Any) -> Any:
    """Return the value of a Const node."""
    return tf.make_ndarray(node.attr["value"].tensor)


Shape = tuple[int | None, ...] | None
"""A static shape: None for an unknown rank, None for an unknown dimension."""

# The batch is given a size that nothing else in the graph has, a prime number, and
# TensorFlow's own shape inference carries it through the ops: a dimension that is a
# multiple of the prime grows with the batch.
_PRIMES = (211, 223, 227, 229, 233, 239, 241, 251, 257, 263, 269, 271, 277, 281, 283)
_SMALL = 4096
"""Elements of the largest constant that is searched for the batch size."""


@dataclass(frozen=True)
class SizeSource:
    """Where the size of the batch can be read."""

    tensor: str  # A tensor, as nodes of its graph or function write it.
    # Its axis that grows with the batch; None of a list of one element a row.
    axis: int | None
    factor: int  # How many times the batch the axis is long.
    dtype: int  # The number of the tensor's dtype.


@dataclass(frozen=True)
class Sizes:
    """The old batch size and the one that corresponds to all."""

    old: int  # The size that may be baked in.
    probe: int
    new: int | None  # The new size, None if any.

    def factor(self, dim: int | None) -> int:
        """Return how many times the batch a dimension is long, 0 if it is fixed."""
        return 0 if not dim or dim % self.probe else dim // self.probe

    def before(self, dim: int) -> int:
        """Return a dimension as it was in the old model."""
        factor = self.factor(dim)
        return factor * self.old if factor else dim

    def axis(self, shape: Shape) -> int | None:
        """Return the first axis that grows with the batch, None if there is none."""
        for axis, dim in enumerate(shape or ()):
            if self.factor(dim):
                return axis
        return None


def shape_of(tensor: Any) -> Shape:
    """Return the static shape of a tensor."""
    return None if tensor.shape.rank is None else tuple(tensor.shape.as_list())


def choose_probe(graph_def: Any) -> int:
    """Return a prime number that divides no dimension and no small constant."""
    numbers = set(_numbers(graph_def))
    for prime in _PRIMES:
        if not any(n % prime == 0 for n in numbers):
            return prime
    # Each divides a number of the graph; the proof by running remains.
    return _PRIMES[-1]


def _numbers(graph_def: Any) -> Iterable[int]:
    bodies = [f.node_def for f in graph_def.library.function]
    for nodes in [graph_def.node, *bodies]:
        for node in nodes:
            if node.op == "Const":
                yield from _numbers_of(node.attr["value"].tensor)
            # To ask for what is not there would put it there.
            if "_output_shapes" in node.attr:
                for shape in node.attr["_output_shapes"].list.shape:
                    yield from (d.size for d in shape.dim if d.size > 0)


def _numbers_of(proto: Any) -> Iterable[int]:
    dims = [d.size for d in proto.tensor_shape.dim]
    yield from (d for d in dims if d > 0)
    if tf.as_dtype(proto.dtype).is_integer and prod(dims) <= _SMALL:
        yield from (abs(int(v)) for v in tf.make_ndarray(proto).flat if v)


def batch_axis_after_reshape(
    shape: Sequence[int], axis: int, target: Sequence[int], batch: int
) -> int | None:
    """Return the axis of a reshaped tensor that takes the batch.

    Elements keep their row-major order, so the batch lies where as many elements come
    before it as did in `shape`. Where several axes qualify, one that is the batch alone
    goes first, and among those the one in the old place.

    Example:
        >>> batch_axis_after_reshape([1, 7, 7, 64], 0, [1, 3136], 1)
        0
        >>> batch_axis_after_reshape([4, 49, 64], 0, [196, 64], 4)
        0
        >>> batch_axis_after_reshape([4, 6], 0, [2, 12], 4)  # The batch is split.
    """
    before = prod(shape[:axis])
    merged: list[int] = []
    alone: list[int] = []
    for index, dim in enumerate(target):
        preceding = prod(target[:index])
        if (
            preceding
            and before % preceding == 0
            and (preceding * dim) % (before * batch) == 0
        ):
            pure = preceding == before and dim == batch
            (alone if pure else merged).append(index)
    # Where several axes fit, the batch most likely stays in its place.
    if axis in alone:
        return axis
    return next(iter([*alone, *merged]), None)


@dataclass(frozen=True)
class Grown:
    """A dimension that is some times the batch."""

    factor: int


Dims: TypeAlias = tuple["int | Grown", ...]


@dataclass(frozen=True)
class SetConstant:
    """Input `index` of `node` becomes a constant of its own."""

    node: str
    index: int
    value: np.ndarray[Any, Any]


@dataclass(frozen=True)
class SetElements:
    """Elements of the vector that a Pack op makes for input `index` are replaced."""

    node: str
    index: int
    pack: str
    elements: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SetDims:
    """Input `index` of `node` becomes a vector of dimensions."""

    node: str
    index: int
    dims: Dims
    source: SizeSource
    dtype: int


@dataclass(frozen=True)
class SetSize:
    """Input `index` of `node`, a number of rows, becomes the batch size."""

    node: str
    index: int
    source: SizeSource  # Where the size of the batch is read.
    # The loop of version 1 that the node is in; None outside of them.
    frame: str | None = None


@dataclass(frozen=True)
class Broadcast:
    """Input `index` of `node`, or a result of a function, is repeated for the batch."""

    node: str | None  # The node, or None for a result.
    index: int  # The index of the input or of the result.
    axis: int  # The axis that is repeated; of several equal rows the first is taken.
    rows: int
    dims: Dims
    source: SizeSource  # Where the size of the batch is read.
    dtype: int


@dataclass(frozen=True)
class SetAttribute:
    """An attribute of `node` gets a new value."""

    node: str
    name: str
    value: Any = field(repr=False)


@dataclass(frozen=True)
class BiasToAdd:
    """A BiasAdd becomes an AddV2 that reads `bias` as it was before a Squeeze."""

    node: str
    bias: str


@dataclass(frozen=True)
class CallAnew:
    """A function that `node` calls is replaced by a changed copy."""

    node: str
    # The attribute that names the function; None if it is the op's type.
    attribute: str | None
    position: int  # The place in the attribute, for a list of functions.
    function: str
    plan: BatchPlan


Edit: TypeAlias = (
    SetConstant
    | SetElements
    | SetDims
    | SetSize
    | Broadcast
    | SetAttribute
    | BiasToAdd
    | CallAnew
)


@dataclass(frozen=True)
class BatchObstacle:
    """A problem that cannot be mended, and its remedy."""

    node: str
    op: str
    reason: str
    remedy: str
    constants: tuple[str, ...] = ()

    def __str__(self) -> str:
        reads = f" with {', '.join(self.constants)}" if self.constants else ""
        return f"'{self.node}' ({self.op}){reads}: {self.reason}; {self.remedy}"


@dataclass
class BatchPlan:
    """The changes of one graph or function body."""

    # The changes, in the order of the ops.
    edits: list[Edit] = field(default_factory=list)
    problems: list[BatchObstacle] = field(default_factory=list)
    # The names of the nodes that depend on the batch; their recorded shapes no longer
    # hold.
    growing: set[str] = field(default_factory=set)

    def all_problems(self) -> list[BatchObstacle]:
        """Return the problems, those of the functions that are called included."""
        plans = walk_by_identity(
            [self], lambda p: [e.plan for e in p.edits if isinstance(e, CallAnew)]
        )
        return list(dict.fromkeys(problem for p in plans for problem in p.problems))


_Tensors: TypeAlias = Sequence[tuple[str, int]]
"""Tensors as the nodes of a graph or function write them, with their dtypes."""


class NodeWriter:
    """Adds nodes to a graph or a function body: those of ops made in a graph apart."""

    def __init__(
        self,
        nodes: Any,
        *,
        function: bool,
        new: int | None,
        used_names: Sequence[str] = (),
    ) -> None:
        self._nodes = nodes
        self._function = function
        self._new = new
        self._names = {node.name for node in nodes} | set(used_names)

    def write(
        self,
        name: str,
        build: Callable[..., Tensor],
        tensors: _Tensors = (),
        after: Sequence[str] = (),
    ) -> str:
        """Add the ops that `build` makes of tensors, and return its result."""
        graph = new_graph()
        with graph.as_default():
            read = [tf.compat.v1.placeholder(tf.as_dtype(d)) for _, d in tensors]
            result = build(*read)
        written = {id(r.op): t for r, (t, _) in zip(read, tensors, strict=True)}
        for op in graph.get_operations():
            if id(op) not in written:
                node = self._nodes.add()
                node.CopyFrom(op.node_def)
                node.name = take_name(self._names, f"{name}/{op.name}")
                node.input[:] = [written[id(t.op)] for t in op.inputs]
                if not op.inputs:
                    # It keeps a constant in the loop of version 1 that it is for.
                    node.input.extend(after)
                output = op.op_def.output_arg[0].name
                written[id(op)] = (
                    f"{node.name}:{output}:0" if self._function else node.name
                )
        return written[id(result.op)]

    def constant(self, name: str, value: Any, dtype: int, after: Sequence[str]) -> str:
        """Add a constant."""
        return self.write(
            name, lambda: tf.constant(value, tf.as_dtype(dtype)), (), after
        )

    def dims(
        self,
        name: str,
        dims: Dims,
        source: SizeSource,
        dtype: int,
        after: Sequence[str],
    ) -> str:
        """Add a vector of dimensions, read at run time if any batch size is allowed."""
        factors = {d.factor for d in dims if isinstance(d, Grown)}
        if self._new is not None or not factors:
            sizes = [
                d.factor * (self._new or 0) if isinstance(d, Grown) else d for d in dims
            ]
            return self.constant(name, sizes, dtype, after)

        def vector(t: Tensor) -> Tensor:
            of = {f: _rows(t, source, f, tf.as_dtype(dtype)) for f in factors}
            parts = [
                of[d.factor]
                if isinstance(d, Grown)
                else tf.constant(d, tf.as_dtype(dtype))
                for d in dims
            ]
            return tf.raw_ops.Pack(values=parts)

        return self.write(name, vector, [(source.tensor, source.dtype)], after)

    def size(self, name: str, source: SizeSource, after: Sequence[str]) -> str:
        """Add the batch size as a scalar, read at run time if any is allowed."""
        if self._new is not None:
            return self.constant(name, self._new, tf.int32.as_datatype_enum, after)
        read = [(source.tensor, source.dtype)]
        return self.write(name, lambda t: _rows(t, source, 1, tf.int32), read, after)


def _rows(t: Tensor, source: SizeSource, factor: int, dtype: tf.DType) -> Tensor:
    """Make a scalar: the batch size of a source, times a factor."""
    if source.axis is None:
        return tf.raw_ops.TensorListLength(input_handle=t)
    size = tf.raw_ops.Shape(input=t, out_type=dtype)[source.axis]
    if source.factor == factor:
        return size
    # The axis of the source is a multiple of the batch size itself.
    return size // source.factor * factor


def first_row(t: Tensor, axis: int, rank: int) -> Tensor:
    """Make the first slice along an axis, which stays."""
    others = sum(1 << i for i in range(rank) if i != axis)
    end = [int(i == axis) for i in range(rank)]
    return tf.strided_slice(t, [0] * rank, end, begin_mask=others, end_mask=others)
