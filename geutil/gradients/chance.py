"""Sums that TensorFlow adds up in an order that is left to chance.

`AddN` adds into the buffer of the first input that nothing else holds any more, and
begins with that input. Of three or more terms this decides how the sum is rounded. An
input that another op reads is free if that op happens to have run: so one graph with
one seed yields two results, even where `enable_op_determinism` was called, and more of
the second where the machine is busy. That is TensorFlow's, and plain gradients have it.

What the backward pass reads of such a sum's inputs holds them in any case, and then the
order is fixed. It must not change where the backward pass reads copies instead. So such
a sum is not run a second time, and what held its inputs is made up for.

What is left to chance: sums that Grappler joins with what reads them, and those whose
inputs are read by forward ops alone, some of which run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

from geutil.gradients.delays import SCOPE
from geutil.gradients.eligibility import is_left_to_chance
from geutil.gradients.rounding import JOINED, Readers
from geutil.gradients.stand_ins import make_stand_in
from geutil.gradients.step import Step
from geutil.graph.identity import MutableIdentityMap
from geutil.graph.importing import add_control_edges
from geutil.graph.kinds import Operation, Tensor

_SAME_BUFFER = frozenset(
    (
        "ExpandDims",
        "Identity",
        "PlaceholderWithDefault",
        "Reshape",
        "Squeeze",
        "StopGradient",
    )
)
"""Types of ops that hand on the buffer of what they read."""


def hold_for_sums(
    step: Step, before: Readers, copies: Iterable[tuple[Operation, Operation]]
) -> None:
    """Hold the inputs of sums as long as the backward pass held them.

    Args:
        step: the step, which recomputes by now.
        before: who read what with plain gradients.
        copies: forward ops that run again, each with an op that runs after the forward
            ops in any case.

    Cost: linear in the ops that run again, and in the readers of what they yield.
    """
    backward = frozenset(step.backward)
    added: MutableIdentityMap[Tensor] = MutableIdentityMap()
    held = {
        (id(t), sum_): (t, later)
        for op, later in copies
        for output in op.outputs
        for sum_, t in _summed(output, before)
        if _is_held(output, before, backward) and sum_ not in backward
    }
    for (_, sum_), (t, later) in held.items():
        (total,) = sum_.outputs
        if _is_joined(total, before):
            continue
        if total not in added:
            added[total] = make_stand_in(total, SCOPE, "added")
        holder = make_stand_in(t, SCOPE, "held").op
        add_control_edges(holder, [added[total].op])
        add_control_edges(later, [holder])


def _same_buffer(tensor: Tensor, before: Readers) -> Iterator[Tensor]:
    """Yield the tensor and what hands on its buffer."""
    waiting = [tensor]
    while waiting:
        t = waiting.pop()
        yield t
        waiting += [
            reader.outputs[0]
            for reader, index in before.get(t, ())
            if reader.type in _SAME_BUFFER and index == 0
        ]


def _summed(tensor: Tensor, before: Readers) -> Iterator[tuple[Operation, Tensor]]:
    """Yield the sums left to chance that read a tensor, and which tensor they read."""
    for t in _same_buffer(tensor, before):
        for reader, _ in before.get(t, ()):
            if is_left_to_chance(reader):
                yield reader, t


def _is_held(tensor: Tensor, before: Readers, backward: Set[Operation]) -> bool:
    """Tell whether the backward pass reads a tensor with plain gradients."""
    return any(
        reader in backward
        for t in _same_buffer(tensor, before)
        for reader, _ in before.get(t, ())
    )


def _is_joined(total: Tensor, before: Readers) -> bool:
    """Tell whether Grappler may join a sum with its reader, which a second one stops.

    Then the sum is no op of its own any more.
    """
    readers = before.get(total, ())
    return len(readers) == 1 and readers[0][0].type in JOINED
