"""Which forward ops can be run again."""

from __future__ import annotations

from geutil.graph.determinism import is_determinism_enabled
from geutil.graph.kinds import Operation, is_reference
from geutil.graph.plain_gradients import in_version_1_control_flow, is_stateful
from geutil.graph.xla import is_compiled_by_xla
from geutil.memory.predicting.kernels import HELD, passes_on

PARAMETERS = frozenset(("Const", "ReadVariableOp", "VariableV2", "Variable"))
"""Types of ops that yield variables and constants."""

_GIVEN = PARAMETERS | {
    "Placeholder",
    "PlaceholderWithDefault",
    "VarHandleOp",
    "_Arg",
    "IteratorGetNext",
}
_PRIMITIVE_FLOW = frozenset(
    prefix + name
    for prefix in ("", "Ref")
    for name in ("Enter", "Exit", "Merge", "Switch", "NextIteration")
) | {"LoopCond"}


def why_kept(op: Operation) -> str | None:
    """Return why an op cannot be run again, or None if it can.

    What an op does besides computing its outputs must happen once: reading a variable
    that is assigned meanwhile, drawing random numbers, moving an average, printing,
    taking from a queue. So its outputs are kept.
    """
    if op.type in _GIVEN or not op.inputs:
        return "it is given"
    if is_stateful(op):
        return f"a {op.type} must run only once"
    if any(is_reference(t) for t in op.inputs):
        # TensorFlow does not call the assignments of version 1 stateful.
        return "it reads or changes a variable of version 1"
    if op.type in _PRIMITIVE_FLOW or in_version_1_control_flow(op):
        return "it belongs to a loop or conditional of version 1"
    if source_of(op).type in HELD:
        return "it is given"
    if is_determinism_enabled() and is_left_to_chance(op):
        return "the order in which it adds is left to chance"
    return None


def source_of(op: Operation) -> Operation:
    """Return the op whose first output an op hands on as it is, itself if it does not.

    Reads of version 1 variables are such: an Identity hands out the variable's buffer.

    Cost: linear in the ops in between.
    """
    while passes_on(op.type) and op.type not in _PRIMITIVE_FLOW:
        op = op.inputs[0].op
    return op


def is_parameter(op: Operation) -> bool:
    """Tell whether an op yields a variable or constant, or hands one on."""
    return source_of(op).type in PARAMETERS


def is_left_to_chance(op: Operation) -> bool:
    """Tell whether TensorFlow may add up an op's inputs in one order or another.

    See `geutil.gradients.chance`. XLA has an order of its own, always the same.
    """
    return (
        op.type == "AddN"
        and len(op.inputs) > 2
        and bool(op.outputs[0].dtype.is_floating or op.outputs[0].dtype.is_complex)
        and not is_compiled_by_xla(op.graph)
    )
