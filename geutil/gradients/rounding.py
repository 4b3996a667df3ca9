"""Keeps Grappler from rounding otherwise than in the step with plain gradients.

Grappler joins what has a single reader with that reader: sums of sums (AddOpsRewrite)
and products of products (MinimizeBroadcasts), which it computes in an order of its own,
and, for oneDNN, a Pad with the convolution behind it. In plain gradients the backward
pass reads much of the forward pass, which keeps those ops apart. With recomputation it
reads copies, and an original and its copy may be left with one reader each. And
Grappler joins nothing that another op waits for.

What is left to chance: of products of several constants and tensors Grappler joins the
constants (ConstantPushDown) in an order that depends on the whole graph.
"""

from __future__ import annotations

from collections.abc import Iterable

from geutil.gradients.delays import SCOPE
from geutil.gradients.stand_ins import make_stand_in
from geutil.gradients.step import Step, tensors_of
from geutil.graph.identity import IdentityMap, MutableIdentityMap
from geutil.graph.importing import add_control_edges, set_new_input
from geutil.graph.kinds import Operation, Tensor
from geutil.select.walks import get_backward_walk_ops

JOINED = frozenset(("Add", "AddN", "AddV2", "Mul"))
_SHAPES = frozenset(("OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"))
"""Types of ops that read a shape only: where it is known, Grappler makes constants of
them, and who else reads the tensor is left alone with it."""

Readers = IdentityMap[list[tuple[Operation, int]]]


def readers_of(step: Step) -> Readers:
    """Return who reads the values of each tensor: ops that the step needs, by input.

    Cost: linear in the ops that the step needs, and their inputs.
    """
    readers: MutableIdentityMap[list[tuple[Operation, int]]] = MutableIdentityMap()
    needed = get_backward_walk_ops([*step.ys, *tensors_of(step.gradients)])
    for op in needed:
        if op.type in _SHAPES:
            continue
        for index, t in enumerate(op.inputs):
            if t not in readers:
                readers[t] = []
            readers[t].append((op, index))
    return readers


def keep_apart(
    step: Step,
    before: Readers,
    copies: Iterable[tuple[Operation, Operation, Operation]],
) -> None:
    """Keep Grappler from joining what is left with one reader of several.

    A copy's last reader reads an op in between. Originals get a second reader instead:
    TensorFlow may be differentiating them just now, and their edges must not change.

    Args:
        step: the step, which recomputes by now.
        before: who read what with plain gradients.
        copies: forward ops that run again, each with its copy and an op that runs after
            it in any case.

    Cost: linear in the ops that the step needs, and their inputs.
    """
    after = readers_of(step)
    for op, copy, later in copies:
        for t, copied in zip(op.outputs, copy.outputs, strict=True):
            if len(before.get(t, ())) > 1:
                if len(after.get(t, ())) == 1:
                    add_control_edges(later, [_hand_on(t).op])
                readers = after.get(copied, ())
                if len(readers) == 1:
                    set_new_input(*readers[0], _hand_on(copied))


def _hand_on(tensor: Tensor) -> Tensor:
    return make_stand_in(tensor, SCOPE, "apart")


def without_joined(step: Step, awaited: Iterable[Operation]) -> tuple[Operation, ...]:
    """Return what to wait for instead of backward ops that Grappler may join.

    That is what these read of the backward pass.

    Cost: linear in the backward ops and their inputs.
    """
    backward = frozenset(step.backward)
    waiting = list(awaited)[::-1]
    met = set(waiting)
    found: dict[Operation, None] = {}
    while waiting:
        op = waiting.pop()
        producers = [t.op for t in op.inputs if t.op in backward]
        if not producers or not _is_joined(op):
            found[op] = None
            continue
        fresh = [p for p in reversed(dict.fromkeys(producers)) if p not in met]
        met.update(fresh)
        waiting += fresh
    return tuple(found)


def _is_joined(op: Operation) -> bool:
    return op.type in JOINED and len(op.outputs[0].consumers()) == 1
