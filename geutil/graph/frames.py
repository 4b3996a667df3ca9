"""Frames of version 1 while loops: which tensors an op may read.

The executor runs the body of a loop in a frame of its own. A tensor enters a frame
through an Enter op only; read otherwise, the step fails or hangs.
"""

from __future__ import annotations

from typing import Any

from tensorflow.python.ops import control_flow_util

from geutil.errors import RerouteError
from geutil.graph.adjacency import control_flow_context
from geutil.graph.kinds import Operation, Tensor


def while_context(op: Operation) -> Any:
    """Return the innermost while-loop context that `op` runs in, or None."""
    return control_flow_util.GetContainingWhileContext(control_flow_context(op))


def output_while_context(op: Operation) -> Any:
    """Return the innermost while-loop context that the outputs of `op` live in."""
    return control_flow_util.GetContainingWhileContext(
        control_flow_util.GetOutputContext(op)
    )


def reading_while_context(op: Operation) -> Any:
    """Return the innermost while-loop context that `op` reads its inputs in, or None.

    An Enter op belongs to the loop that it leads into, and reads outside of it.
    """
    context = while_context(op)
    if context is not None and control_flow_util.IsLoopEnter(op):
        entrances = (*context.loop_enters, *context._external_values.values())
        if any(t.op is op for t in entrances):
            return control_flow_util.GetContainingWhileContext(context.outer_context)
    return context


def check_frames(op: Operation, tensor: Tensor) -> None:
    """Refuse `tensor` as an input of `op` when they live in different frames.

    Raises:
        RerouteError: naming the two loops.
    """
    producer = tensor.op
    if control_flow_context(op) is None and control_flow_context(producer) is None:
        return
    reads, lives = reading_while_context(op), output_while_context(producer)
    if reads is not lives:
        raise RerouteError(
            f"'{op.name}' reads {_where(reads)} but '{tensor.name}' lives "
            f"{_where(lives)}: bring it in through an Enter op or out through an Exit "
            "op of the loop"
        )


def check_control_frames(op: Operation, control_input: Operation) -> None:
    """Refuse a control edge from one loop's frame into another.

    Raises:
        RerouteError: naming the two loops.
    """
    if control_flow_context(op) is None and control_flow_context(control_input) is None:
        return
    waits, lives = reading_while_context(op), output_while_context(control_input)
    if waits is not lives:
        raise RerouteError(
            f"'{op.name}' runs {_where(waits)} but '{control_input.name}' runs "
            f"{_where(lives)}: a control edge cannot cross the frame of a loop; wait "
            "for an op of the same loop, or for the loop's Exit op"
        )


def _where(context: Any) -> str:
    return f"in while loop '{context.name}'" if context else "outside every while loop"


def branch_name(op: Operation) -> str | None:
    """Return the name of the version 1 conditional in a branch of which `op` runs."""
    context = control_flow_context(op)
    if context is None or not context.IsCondContext() or control_flow_util.IsSwitch(op):
        return None
    name: str = context.name
    return name
