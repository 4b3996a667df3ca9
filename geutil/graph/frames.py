"""Frames of version 1 while loops: which tensors an op may read.

The executor runs the body of a loop in a frame of its own. A tensor enters a frame
through an Enter op only; read otherwise, the step fails or hangs.
"""

from __future__ import annotations

from typing import Any

from geutil.errors import RerouteError
from geutil.graph._tf import (
    GetContainingWhileContext,
    GetOutputContext,
    IsLoopEnter,
    IsSwitch,
)
from geutil.graph.adjacency import control_flow_context
from geutil.graph.kinds import Operation, Tensor


def while_context(op: Operation) -> Any:
    """Return the innermost while-loop context that `op` runs in, or None."""
    return GetContainingWhileContext(control_flow_context(op))


def output_while_context(op: Operation) -> Any:
    """Return the innermost while-loop context that the outputs of `op` live in."""
    return GetContainingWhileContext(GetOutputContext(op))


def reading_while_context(op: Operation) -> Any:
    """Return the innermost while-loop context that `op` reads its inputs in, or None.

    An Enter op belongs to the loop that it leads into, and reads outside of it.
    """
    context = while_context(op)
    if context is None or not IsLoopEnter(op):
        return context
    # The context need not list the op: it knows one Enter for each tensor outside.
    if op.get_attr("frame_name") == context.name.encode():
        return GetContainingWhileContext(context.outer_context)
    return context


def check_frames(op: Operation, tensor: Tensor) -> None:
    """Refuse `tensor` as an input of `op` when they live in different frames.

    Raises:
        RerouteError: naming the two loops.
    """
    places = _different_frames(op, tensor.op)
    if places is not None:
        raise RerouteError(
            f"'{op.name}' reads {places[0]} but '{tensor.name}' lives {places[1]}: "
            "bring it in through an Enter op or out through an Exit op of the loop"
        )


def check_control_frames(op: Operation, control_input: Operation) -> None:
    """Refuse a control edge from one loop's frame into another.

    Raises:
        RerouteError: naming the two loops.
    """
    places = _different_frames(op, control_input)
    if places is not None:
        raise RerouteError(
            f"'{op.name}' runs {places[0]} but '{control_input.name}' runs "
            f"{places[1]}: a control edge cannot cross a loop's frame; wait for an "
            "op of the same loop, or for the loop's Exit op"
        )


def _different_frames(op: Operation, producer: Operation) -> tuple[str, str] | None:
    """Return where `op` reads and where `producer` yields, or None if it is one."""
    if control_flow_context(op) is None and control_flow_context(producer) is None:
        return None
    reads, lives = reading_while_context(op), output_while_context(producer)
    return None if reads is lives else (where(reads), where(lives))


def where(context: Any) -> str:
    """Say in words where ops of a while-loop context, or of none, run."""
    return f"in while loop '{context.name}'" if context else "outside every while loop"


def branch_name(op: Operation) -> str | None:
    """Return the name of the version 1 conditional in a branch of which `op` runs."""
    context = control_flow_context(op)
    if context is None or not context.IsCondContext() or IsSwitch(op):
        return None
    name: str = context.name
    return name
