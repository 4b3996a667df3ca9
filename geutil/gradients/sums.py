"""Sums of gradients: added up one after the other, as the gradients come."""

from __future__ import annotations

from geutil.gradients.edges import backward_edges, with_replaced
from geutil.gradients.pairs import add_in_pairs
from geutil.gradients.step import Step
from geutil.graph.adjacency import consumers, control_inputs, control_outputs
from geutil.graph.importing import set_control_inputs, set_new_input
from geutil.graph.kinds import Operation, Tensor

SCOPE = "summed"


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


def add_in_turn(step: Step) -> Step:
    """Replace the sums of more than two gradients by sums of two.

    `AddN` holds all it adds up until the last has come; and see `add_in_pairs` for what
    Grappler makes of it. The result is the same to the last bit.

    Args:
        step: the step; its graph is changed, and the old sums are left without readers.

    Returns:
        The step with the gradients that take the place of old sums.

    Cost: linear in the gradients that are added.
    """
    replaced = {op: _pairwise(op) for op in long_sums(step)}
    for op, total in replaced.items():
        _redirect(op, total)
    return with_replaced(step, replaced)


def _pairwise(op: Operation) -> Tensor:
    """Add up in pairs what a sum adds."""
    tensors = [op.inputs[place] for place in order_of_addition(op)]
    return add_in_pairs(tensors, SCOPE, op.device)


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
