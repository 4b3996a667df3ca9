"""Node definitions for copies: the original's, with what must differ taken care of."""

from __future__ import annotations

from typing import Any

from geutil.graph import colocation, gradient_registry
from geutil.graph.functions import functions_of_node
from geutil.graph.kinds import Operation
from geutil.transform.custom_gradients import copied_gradient
from geutil.transform.state import TransformState

_FRAME = "frame_name"


def copied_node(info: TransformState, op: Operation, name: str) -> Any:
    """Return the definition for a copy of `op` called `name`, without inputs.

    Attributes and device are the original's, except that frames of version 1 loops and
    closures of `tf.custom_gradient` become the copy's own, and colocation is left for
    `finishing`, when the copies exist.
    """
    node_def = op.node_def
    node_def.name = name
    del node_def.input[:]
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
    return node_def


class FunctionNames:
    """Gathers the functions that nodes call, at little cost for ops that call none."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self._can_call: dict[str, bool] = {}

    def note(self, op: Operation, node_def: Any) -> None:
        """Add the functions that `node_def` names."""
        can_call = self._can_call.get(node_def.op)
        if can_call is None:
            can_call = op.op_def is None or any(
                attribute.type in ("func", "list(func)") for attribute in op.op_def.attr
            )
            self._can_call[node_def.op] = can_call
            # An op may bear the name of a function itself.
            self.names[node_def.op] = None
        if can_call:
            self.names.update(dict.fromkeys(functions_of_node(node_def)))
