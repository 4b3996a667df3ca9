"""Makes a backward pass run in the order that it was planned in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from geutil.gradients.eligibility import PARAMETERS
from geutil.gradients.stand_ins import make_stand_in
from geutil.graph.adjacency import consumers
from geutil.graph.importing import add_control_edges, set_new_input
from geutil.graph.kinds import Operation, Tensor, is_reference

SCOPE = "ordered"
_SUMS = frozenset(("Add", "AddN", "AddV2", "Sub"))
_PRODUCTS = frozenset(("Div", "Mul", "Neg", "RealDiv", "Square"))
_UNORDERED = _SUMS | frozenset(
    (
        # oneDNN merges it with the filter gradient that reads the same.
        "BiasAddGrad",
        # They hand on what they get, or nothing.
        "ExpandDims",
        "Identity",
        "NoOp",
        "PlaceholderWithDefault",
        "Reshape",
        "Squeeze",
        # They read no values.
        "Rank",
        "Shape",
        "ShapeN",
        "Size",
    )
)


def queues(ops: Iterable[Operation]) -> Iterator[tuple[Operation, str]]:
    """Yield the ops that take turns, each with its queue: the device.

    Not those that Grappler joins with others, into which they would round otherwise if
    they had to wait: sums, and products with constants or beside such. Nor those that
    read from several devices, since towers would wait for each other by them.

    Args:
        ops: ops of a backward pass that run once whenever it is run.

    Cost: linear in the ops and their inputs.
    """
    for op in ops:
        places = {op.device, *(t.op.device for t in op.inputs)} - {""}
        if op.type not in _UNORDERED and len(places) < 2 and not _is_joined(op):
            yield op, op.device


def _is_joined(op: Operation) -> bool:
    """Tell whether an op is a product that Grappler may join with a constant."""
    if op.type not in _PRODUCTS:
        return False
    beside = [op, *(t.op for t in op.inputs)]
    beside += [reader for t in op.outputs for reader in consumers(t)]
    return any(_scales(other) for other in beside)


def _scales(op: Operation) -> bool:
    return op.type in _PRODUCTS and any(t.op.type == "Const" for t in op.inputs)


def wait_for_turn(op: Operation, before: Operation) -> None:
    """Let an op wait for another, by a node on its first input that can have one.

    Kernels bear no control edges (see `ControlDelays`). An op that reads nothing but
    shapes and the like does not wait.

    Cost: constant.
    """
    places = [i for i, t in enumerate(op.inputs) if _has_values(t)]
    given = [i for i in places if op.inputs[i].op.type in PARAMETERS]
    for index in [i for i in places if i not in given][:1] or given[:1]:
        stand_in = make_stand_in(op.inputs[index], SCOPE, "turn")
        add_control_edges(stand_in.op, [before])
        set_new_input(op, index, stand_in)


def _has_values(tensor: Tensor) -> bool:
    """Tell whether a tensor can be handed on, and is no shape that must be known."""
    numbers = tensor.dtype.is_floating or tensor.dtype.is_complex
    return numbers and not is_reference(tensor)
