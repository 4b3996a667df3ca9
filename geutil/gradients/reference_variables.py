"""Gradients by reference variables, let out once nobody reads the variables any more.

An update of such a variable of version 1 is done in its buffer, and whoever reads the
variable reads that buffer: `Identity` copies nothing. TensorFlow runs an update as soon
as its gradient is there, and what the backward pass reads later is the new value. So
`Optimizer.compute_gradients` gates gradients; here each waits for what reads its own
variable. The value of a resource variable that somebody holds is left as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import tensorflow as tf

from geutil.gradients import edges
from geutil.gradients.step import PlainStep
from geutil.graph import adjacency, creation, op_types, v1_control_flow
from geutil.graph.types import IdentityMap, MutableIdentityMap, Operation, Tensor
from geutil.memory.cpu_kernels import aliases


def let_out_when_read(step: PlainStep) -> PlainStep:
    """Have gradients by reference variables wait for all reads of these in a step.

    Args:
        step: the step, with what runs again in it.

    Returns:
        The step with the gradients to return.

    Cost: none without such variables; linear in the ops of the step and their edges.
    """
    pairs = zip(step.gradients, step.references, strict=True)
    updated = [(g, r) for g, r in pairs if not (g is None or r is None)]
    if not updated:
        return step
    ops = adjacency.topological_sort(step.ops())
    needed = frozenset(ops)
    awaitable = frozenset(v1_control_flow.unconditional(ops, exits=True))
    ends: dict[Operation, list[Operation]] = {}
    let_out = MutableIdentityMap[Tensor]()
    for gradient, reference in updated:
        value = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        if value in let_out or value.op not in awaitable:
            continue
        reads = _behind(_readers(reference, needed), needed, awaitable)
        awaited = [end for op in reads if op is not value.op for end in _ends(op, ends)]
        graph = step.graph
        with (
            creation.neutral(graph),
            graph.device(value.op.device),
            graph.control_dependencies(awaited),
        ):
            let_out[value] = tf.identity(value, f"{value.op.name}_read")
    return edges.with_gradients(step, [_renewed(g, let_out) for g in step.gradients])


def _renewed(gradient: Any, let_out: IdentityMap[Tensor]) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = let_out.get(gradient.values, gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient if gradient is None else let_out.get(gradient, gradient)


def _ends(op: Operation, known: dict[Operation, list[Operation]]) -> list[Operation]:
    """Return the ops to wait for in the place of one that may call a function.

    What waits for a call itself waits for its stateful ops alone once TensorFlow has
    put the function's ops in its place; so it waits for all results.
    """
    if op.type not in op_types.LOOPS | op_types.BRANCHINGS | op_types.CALLS:
        return [op]
    if op not in known:
        with creation.surroundings_of(op):
            known[op] = [tf.identity(t, "read").op for t in op.outputs]
    return known[op]


def _readers(reference: Tensor, needed: Collection[Operation]) -> Iterator[Operation]:
    """Yield the ops that read the buffer of a variable, views of it apart."""
    waiting, met = [reference], set()
    while waiting:
        tensor = waiting.pop()
        for op in adjacency.consumers(tensor):
            if op not in needed or op in met:
                continue
            met.add(op)
            shown = [
                op.outputs[there]
                for there, read in aliases(op)
                if op.inputs[read] is tensor
            ]
            waiting += shown
            if not shown:
                yield op


def _behind(
    ops: Iterator[Operation],
    needed: Collection[Operation],
    awaitable: Collection[Operation],
) -> list[Operation]:
    """Return the first ops behind others that run once and can be awaited."""
    waiting, met = list(ops), set()
    found: dict[Operation, None] = {}
    while waiting:
        op = waiting.pop()
        if op in met:
            continue
        met.add(op)
        if op in awaitable:
            found[op] = None
        else:
            waiting += [r for r in adjacency.successors(op) if r in needed]
    return list(found)
