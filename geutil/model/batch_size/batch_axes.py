"""The dimensions that grow with the batch, and graphs as nodes to walk over.

The batch is given a size that nothing else in the graph has, a prime number, and
TensorFlow's own shape inference carries it through the ops: a dimension that is a
multiple of the prime grows with the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tensorflow as tf

from geutil.graph.flat_body import flat_body
from geutil.graph.op_types import NEXT_ITERATIONS
from geutil.graph.walks import data_inputs, node_name, tensor_name


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
    waits = [0] * len(nodes)
    readers: list[list[int]] = [[] for _ in nodes]
    for i, names in enumerate(inputs):
        for name in names:
            producer = index.get(node_name(name))
            if producer is not None and nodes[producer].op not in NEXT_ITERATIONS:
                waits[i] += 1
                readers[producer].append(i)
    ready = [i for i, count in enumerate(waits) if not count]
    for i in ready:
        for reader in readers[i]:
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    return tuple(_entry(nodes[i], inputs[i]) for i in ready)


def _entry(node: Any, inputs: Sequence[str]) -> ScopeNode:
    data = tuple(map(tensor_name, data_inputs(inputs)))
    written = tuple(data_inputs(node.input))
    return ScopeNode(node, data, written)


def constant_value(node: Any) -> Any:
    """Return the value of a Const node."""
    return tf.make_ndarray(node.attr["value"].tensor)


Shape = tuple[int | None, ...] | None
"""A static shape: None for an unknown rank, None for an unknown dimension."""

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
    if axis in alone:
        return axis
    return next(iter([*alone, *merged]), None)
