"""Node definitions for copies: the original's, with what must differ taken care of."""

from __future__ import annotations

from typing import Any

from geutil.graph import colocation, gradient_registry
from geutil.graph.function_attributes import rename_functions
from geutil.graph.kinds import Operation
from geutil.transform.custom_gradients import copied_gradient
from geutil.transform.state import TransformState

_FRAME = "frame_name"


def adapt_node(info: TransformState, op: Operation, node_def: Any) -> None:
    """Turn the definition of `op` into that of its copy; name and inputs stay.

    Attributes and device are the original's, except that frames of version 1 loops,
    bodies of version 2 loops and closures of `tf.custom_gradient` become the copy's
    own, and colocation is left for `finishing`, when the copies exist.
    """
    attributes = node_def.attr
    if colocation.ATTRIBUTE in attributes:
        info.colocated[op] = list(attributes[colocation.ATTRIBUTE].list.s)
        del attributes[colocation.ATTRIBUTE]
    if _FRAME in attributes:
        frame = attributes[_FRAME].s.decode()
        attributes[_FRAME].s = info.context_names.get(frame, frame).encode()
    if gradient_registry.ATTRIBUTE in attributes:
        gradient = attributes[gradient_registry.ATTRIBUTE].s.decode()
        if gradient_registry.is_closure(gradient):
            copied = copied_gradient(info, op, gradient)
            attributes[gradient_registry.ATTRIBUTE].s = copied.encode()
    if info.function_names:
        rename_functions(node_def, info.function_names)
