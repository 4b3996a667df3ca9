"""Gradients by reference variables, let out once nobody reads the variables any more.

An update of such a variable of version 1 is done in its buffer, and whoever reads the
variable reads that buffer: `Identity` copies nothing. TensorFlow runs an update as soon
as its gradient is there, and what the backward pass reads later is the new value. So
`Optimizer.compute_gradients` gates gradients; here each waits for what reads its own
variable in the step. So who fetches one such gradient runs these reads, too. What
another call of `gradients` reads is not waited for, nor an argument that a function
returns as it is. The value of a resource variable that somebody holds is left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import tensorflow as tf

from geutil.gradients import edges
from geutil.gradients.step import PlainStep, tensors_of
from geutil.graph import adjacency, creation, op_types, v1_control_flow
from geutil.graph.types import (
    IdentitySet,
    MutableIdentityMap,
    Operation,
    Tensor,
    unique,
)
from geutil.memory.kernels.cpu import aliases

_CALLING = op_types.LOOPS | op_types.BRANCHINGS | op_types.CALLS


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
    makers = unique(t.op for t in tensors_of(step.gradients))
    results = [op for op in makers if op in awaitable]
    # Several variables may have one gradient.
    reads: MutableIdentityMap[dict[Operation, None]] = MutableIdentityMap()
    for gradient, reference in updated:
        value = _value(gradient)
        readers = list(_readers(reference, needed))
        found = _behind(readers, needed, awaitable)
        if not awaitable.issuperset(readers):
            # In a loop other values of a turn may still be computed when one leaves it.
            found += results
        reads[value] = reads.get(value, {}) | dict.fromkeys(found)
    ends: dict[Operation, list[Operation]] = {}
    let_out: MutableIdentityMap[Tensor] = MutableIdentityMap()
    graph = step.graph
    for value, ops_behind in reads.items():
        if value.op not in awaitable:
            continue
        others = (op for op in ops_behind if op is not value.op)
        awaited = [end for op in others for end in _ends(op, ends)]
        with (
            creation.neutral(graph),
            graph.device(value.op.device),
            graph.control_dependencies(awaited),
        ):
            let_out[value] = tf.identity(value, f"{value.op.name}_read")
    return edges.with_replaced(step, let_out)


def _value(gradient: Any) -> Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _ends(op: Operation, known: dict[Operation, list[Operation]]) -> list[Operation]:
    """Return the ops to wait for in the place of one that may call a function.

    Once TensorFlow has put a function's ops in the place of its call, an op that waits
    for the call waits for the stateful ones alone; so all results are awaited.
    """
    if op.type not in _CALLING:
        return [op]
    if op not in known:
        with creation.surroundings_of(op):
            known[op] = [tf.identity(t, "read").op for t in op.outputs]
    return known[op]


def _readers(reference: Tensor, needed: Collection[Operation]) -> Iterator[Operation]:
    """Yield the ops that read the buffer of a variable, views of it apart."""
    waiting, met = [reference], IdentitySet([reference])
    while waiting:
        tensor = waiting.pop()
        for op in adjacency.consumers(tensor):
            if op not in needed:
                continue
            shown = _shown(op, tensor)
            for t in shown:
                if t not in met:
                    met.add(t)
                    waiting.append(t)
            if not shown or op.type in _CALLING:
                yield op


def _shown(op: Operation, tensor: Tensor) -> list[Tensor]:
    """Return the results of an op that may be the buffer of an input.

    A function may return an argument, and a loop what it does not change.
    """
    if op.type in _CALLING or v1_control_flow.is_loop_structure(op):
        return list(op.outputs)
    return [op.outputs[there] for there, i in aliases(op) if op.inputs[i] is tensor]


def _behind(
    ops: Iterable[Operation],
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
