"""Sums of gradients: added up one after the other, as the gradients come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import tensorflow as tf

from geutil.gradients.edges import backward_edges
from geutil.gradients.step import Step
from geutil.graph.adjacency import consumers, control_inputs, control_outputs
from geutil.graph.importing import neutral, set_control_inputs, set_new_input
from geutil.graph.kinds import Operation, Tensor

SCOPE = "summed"
_ONE_BY_ONE = 9


def long_sums(step: Step) -> list[Operation]:
    """Return the sums of more than two gradients that run once whenever the step does.

    Cost: that of `backward_edges`, and linear in its ops.
    """
    return [
        op
        for op in backward_edges(step).awaitable
        if op.type == "AddN" and len(op.inputs) > 2 and op.outputs[0].dtype.is_numeric
    ]


def add_in_turn(step: Step) -> Step:
    """Replace the sums of more than two gradients by sums of two, in the same order.

    `AddN` holds all it adds up until the last has come. And where memory is short,
    Grappler has it start from zeros: these are a constant of the gradient's size that
    is never freed again, and the order of the additions is left to chance. Sums of two
    it leaves alone, with something between them that keeps it from joining them.

    Args:
        step: the step; its graph is changed, and the old sums are left without readers.

    Returns:
        The step with the gradients that take the place of old sums.

    Cost: linear in the gradients that are added.
    """
    replaced = {op: _pairwise(op) for op in long_sums(step)}
    for op, total in replaced.items():
        _redirect(op, total)
    return replace(step, gradients=tuple(_renewed(g, replaced) for g in step.gradients))


def _pairwise(op: Operation) -> Tensor:
    total, *rest = _in_turn(op)
    graph = op.graph
    with neutral(graph), graph.name_scope(f"{SCOPE}/"), graph.device(op.device):
        for number, t in enumerate(rest):
            if number:
                total = tf.raw_ops.PlaceholderWithDefault(
                    input=total, shape=total.shape, name="barrier"
                )
            total = tf.raw_ops.AddN(inputs=[total, t], name="sum")
    return total


def _in_turn(op: Operation) -> list[Tensor]:
    """Return what a sum adds, in the order to add it in.

    Grappler sorts by name, and `AddN` adds up to nine tensors one after the other.
    """
    if len(op.inputs) > _ONE_BY_ONE:
        return list(op.inputs)
    return sorted(op.inputs, key=lambda t: t.name.removesuffix(":0"))


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
    if isinstance(gradient, tf.Tensor):
        return replaced.get(gradient.op, gradient)
    return gradient
