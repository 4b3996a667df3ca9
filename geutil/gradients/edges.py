"""The edges of a backward pass, and its sums of gradients as they come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from geutil.gradients.step import Edits, PlainStep
from geutil.graph import adjacency, v1_control_flow
from geutil.graph.types import IdentityMap, Operation, Tensor, unique
from geutil.select.walks import get_backward_walk_ops


@dataclass(frozen=True, eq=False)
class Read:
    """A backward op that reads a forward tensor.

    Attributes:
        op: the backward op.
        index: the position of the input.
        tensor: the forward tensor that plain gradients read there.
    """

    op: Operation
    index: int
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class BackwardEdges:
    """Who reads what in a backward pass, as plain gradients made it.

    Attributes:
        reads: the forward tensors that backward ops read, in their order.
        producers: the backward ops that each backward op reads or waits for.
        readers: the backward ops that read each one.
        tied: pairs of ops of which the second waits for what the first waits for,
            although it comes before it.
        awaitable: the ops that run once whenever the step is run.
        forward: the forward ops behind what backward ops read, each with its place in a
            topological order. After an edit the order of creation is none.
    """

    reads: tuple[Read, ...]
    producers: dict[Operation, tuple[Operation, ...]]
    readers: dict[Operation, list[Operation]]
    tied: tuple[tuple[Operation, Operation], ...]
    awaitable: tuple[Operation, ...]
    forward: dict[Operation, int]


_known: WeakKeyDictionary[PlainStep, BackwardEdges] = WeakKeyDictionary()


def backward_edges(step: PlainStep) -> BackwardEdges:
    """Return the edges of the backward pass of a step.

    Cost: linear in the ops of the step and their inputs at the first call for a step,
    which must come before its graph is changed; none at later ones.
    """
    edges = _known.get(step)
    if edges is None:
        edges = _known[step] = _look_up(step)
    return edges


def _look_up(step: PlainStep) -> BackwardEdges:
    readers: dict[Operation, list[Operation]] = {op: [] for op in step.backward}
    inside = frozenset((*readers, *step.seeds))
    reads = []
    producers = {}
    for op in step.backward:
        producers[op] = tuple(p for p in step.predecessors(op) if p in readers)
        for index, t in enumerate(step.inputs(op)):
            if t.op in readers:
                readers[t.op].append(op)
            elif t.op not in inside:
                reads.append(Read(op, index, t))
    # What an iteration needs, the loop needs.
    tied = [*v1_control_flow.back_edges_among(step.backward), *_merged(step)]
    awaitable = tuple(v1_control_flow.unconditional(step.backward))
    return BackwardEdges(
        tuple(reads),
        producers,
        readers,
        tuple(tied),
        awaitable,
        _forward_places(step, (read.tensor for read in reads)),
    )


def _forward_places(step: PlainStep, read: Iterable[Tensor]) -> dict[Operation, int]:
    ops = get_backward_walk_ops(
        unique(t.op for t in read), within_ops_fn=step.covers, control_inputs=True
    )
    return {op: place for place, op in enumerate(adjacency.topological_sort(ops))}


def changed(step: PlainStep, **fields: Any) -> PlainStep:
    """Return the step with other fields, and with the edges known of it so far."""
    other = replace(step, **fields)
    _known[other] = backward_edges(step)
    return other


def with_replaced(step: PlainStep, replaced: IdentityMap[Tensor]) -> PlainStep:
    """Return the step with the tensors that take the place of others."""
    return changed(step, gradients=tuple(renewed(g, replaced) for g in step.gradients))


def first_results(replaced: Mapping[Operation, Tensor]) -> IdentityMap[Tensor]:
    """Return what takes the place of ops as what takes that of their first result."""
    return IdentityMap((op.outputs[0], t) for op, t in replaced.items())


def renewed(gradient: Any, replaced: IdentityMap[Tensor]) -> Any:
    """Return a gradient, or the one that takes its place."""
    if isinstance(gradient, tf.IndexedSlices) and gradient.values in replaced:
        values = replaced[gradient.values]
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    if isinstance(gradient, tf.Tensor):
        return replaced.get(gradient, gradient)
    return gradient


def _merged(step: PlainStep) -> list[tuple[Operation, Operation]]:
    """Return the filter gradients that oneDNN merges with gradients of a bias.

    A segment that waits for the first of them and is read by the second would close a
    cycle (TensorFlow 2.21: "nodes in a cycle").
    """
    filters: dict[int, list[Operation]] = {}
    for op in step.backward:
        for t in step.inputs(op) if "BackpropFilter" in op.type else ():
            filters.setdefault(id(t), []).append(op)
    return [
        (reader, op)
        for op in step.backward
        if op.type == "BiasAddGrad"
        for reader in filters.get(id(step.inputs(op)[0]), ())
    ]


def long_sums(step: PlainStep) -> list[Operation]:
    """Return the sums of more than two gradients that run once whenever the step does.

    Products that share a factor are left out: Grappler adds up the other factors.

    Cost: that of `backward_edges`, and linear in its ops.
    """
    return [
        op
        for op in backward_edges(step).awaitable
        if op.type == "AddN"
        and len(op.inputs) > 2
        and op.outputs[0].dtype.is_numeric
        and not _has_common_factor(step, op)
    ]


def _has_common_factor(step: PlainStep, op: Operation) -> bool:
    producers = [t.op for t in step.inputs(op)]
    if any(p.type != "Mul" for p in producers):
        return False
    first, *others = (frozenset(map(id, step.inputs(p))) for p in producers)
    return bool(first.intersection(*others))


def order_of_addition(step: PlainStep, op: Operation) -> list[int]:
    """Return the places of what a sum adds, in the order in which it is added.

    Grappler sorts by name what `AddN` adds.
    """
    names = [t.name.removesuffix(":0") for t in step.inputs(op)]
    return sorted(range(len(names)), key=names.__getitem__)


def edits_of(
    reads: Mapping[tuple[Operation, int], Tensor], results: Mapping[Operation, Tensor]
) -> Edits:
    """Return the edits by which ops read other tensors.

    Args:
        reads: what is to be read in the place of single inputs.
        results: what all are to read, or wait for, in the place of the one output of
            an op.

    Cost: linear in the readers.
    """
    inputs: dict[Operation, list[Tensor]] = {}
    controls: dict[Operation, list[Operation]] = {}
    for (op, index), tensor in reads.items():
        inputs.setdefault(op, list(op.inputs))[index] = tensor
    for op, tensor in results.items():
        (old,) = op.outputs
        for reader in adjacency.consumers(old):
            read = inputs.setdefault(reader, list(reader.inputs))
            read[:] = [tensor if t is old else t for t in read]
        for reader in adjacency.control_outputs(op):
            awaited = controls.setdefault(reader, adjacency.control_inputs(reader))
            awaited[:] = [tensor.op if c is op else c for c in awaited]
    return Edits(inputs, controls)
