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


def check_frames(op: Operation, tensor: Tensor) -> None:
    """Refuse `tensor` as an input of `op` when they live in different frames.

    Raises:
        RerouteError: naming the two loops.
    """
    if control_flow_context(op) is None and control_flow_context(tensor.op) is None:
        return
    if control_flow_util.IsLoopEnter(op):
        return
    reads, lives = while_context(op), output_while_context(tensor.op)
    if reads is not lives:
        raise RerouteError(
            f"'{op.name}' runs {_where(reads)} but '{tensor.name}' lives "
            f"{_where(lives)}: bring it in through an Enter op or out through an Exit "
            "op of the loop"
        )


def _where(context: Any) -> str:
    return f"in while loop '{context.name}'" if context else "outside every while loop"
