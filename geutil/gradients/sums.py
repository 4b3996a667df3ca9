"""Sums of gradients: added up one after the other, as the gradients come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from geutil.gradients.edges import backward_edges, with_gradients
from geutil.gradients.step import Step
from geutil.graph.adjacency import consumers, control_inputs, control_outputs
from geutil.graph.importing import neutral, set_control_inputs, set_new_input
from geutil.graph.kinds import Operation, Tensor

SCOPE = "summed"
_MOST_AT_ONCE = 9
_BLOCK = 8


def long_sums(step: Step) -> list[Operation]:
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
        and not _has_common_factor(op)
    ]


def _has_common_factor(op: Operation) -> bool:
    if any(t.op.type != "Mul" for t in op.inputs):
        return False
    first, *others = (frozenset(map(id, t.op.inputs)) for t in op.inputs)
    return bool(first.intersection(*others))


def order_of_addition(op: Operation) -> list[int]:
    """Return the places of what a sum adds, in the order in which it is added.

    Grappler sorts by name what `AddN` adds.
    """
    names = [t.name.removesuffix(":0") for t in op.inputs]
    return sorted(range(len(names)), key=names.__getitem__)


def additions(count: int) -> list[tuple[int, int]]:
    """Return in what pairs `AddN` adds: it takes up to nine, then eight at a time.

    Args:
        count: how many tensors are added. They are numbered from 0, and the results of
            the pairs from `count` on.

    Example:
        >>> additions(4)
        [(0, 1), (4, 2), (5, 3)]
        >>> additions(11)[:3]
        [(0, 1), (11, 2), (3, 4)]
        >>> additions(11)[-1]
        (12, 19)
    """
    pairs: list[tuple[int, int]] = []

    def add_up(numbers: range) -> int:
        total = numbers[0]
        for number in numbers[1:]:
            pairs.append((total, number))
            total = count + len(pairs) - 1
        return total

    first = count if count <= _MOST_AT_ONCE else count % _BLOCK or _BLOCK
    first = _MOST_AT_ONCE if first == 1 else first
    total = add_up(range(first))
    for start in range(first, count, _BLOCK):
        block = add_up(range(start, start + _BLOCK))
        pairs.append((total, block))
        total = count + len(pairs) - 1
    return pairs


def add_in_turn(step: Step) -> Step:
    """Replace the sums of more than two gradients by sums of two.

    `AddN` holds all it adds up until the last has come. And where memory is short,
    Grappler has it start from zeros: these are a constant of the gradient's size that
    is never freed again, and the order of the additions is left to chance. Sums of two
    it leaves alone, with something between them that keeps it from joining them. They
    are made such that the result is the same to the last bit.

    Args:
        step: the step; its graph is changed, and the old sums are left without readers.

    Returns:
        The step with the gradients that take the place of old sums.

    Cost: linear in the gradients that are added.
    """
    replaced = {op: _pairwise(op) for op in long_sums(step)}
    for op, total in replaced.items():
        _redirect(op, total)
    return with_gradients(step, (_renewed(g, replaced) for g in step.gradients))


def _pairwise(op: Operation) -> Tensor:
    """Add up in pairs what a sum adds, with something before each that stays."""
    tensors = [op.inputs[place] for place in order_of_addition(op)]
    graph = op.graph
    with neutral(graph), graph.name_scope(f"{SCOPE}/"), graph.device(op.device):
        for first, second in additions(len(tensors)):
            ahead = tensors[first]
            barrier = tf.raw_ops.PlaceholderWithDefault(
                input=ahead, shape=ahead.shape, name="barrier"
            )
            pair = [barrier, tensors[second]]
            tensors.append(tf.raw_ops.AddN(inputs=pair, name="sum"))
    return tensors[-1]


def _redirect(op: Operation, total: Tensor) -> None:
    """Let all that read an old sum or wait for it do so with the new one."""
    (old,) = op.outputs
    for reader in consumers(old):
        for index, t in enumerate(reader.inputs):
            if t is old:
                set_new_input(reader, index, total)
    for reader in control_outputs(op):
        awaited = [total.op if c is op else c for c in control_inputs(reader)]
        set_control_inputs(reader, awaited)


def _renewed(gradient: Any, replaced: Mapping[Operation, Tensor]) -> Any:
    if isinstance(gradient, tf.IndexedSlices) and gradient.values.op in replaced:
        values = replaced[gradient.values.op]
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    if isinstance(gradient, tf.Tensor):
        return replaced.get(gradient.op, gradient)
    return gradient
