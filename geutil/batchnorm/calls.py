"""Calls that do nothing but one convolution.

Keras 3 has XLA compile a convolution of groups, because its gradient does not run on
processors without: the layer is a call, and its weights are read in the body.
"""

from __future__ import annotations

from typing import Any

from geutil.graph.bodies import Body, flat_body
from geutil.graph.function_defs import definition_in
from geutil.graph.importing import add_control_edges, make_op
from geutil.graph.kinds import Operation, Tensor
from geutil.graph.names import absolute_unique_name, scope_dirname
from geutil.graph.op_types import CALLS

_CONVOLUTIONS = frozenset(("Conv2D", "Conv3D"))
_BESIDES = frozenset(
    ("Const", "ExpandDims", "Identity", "NoOp", "ReadVariableOp", "Squeeze")
)
_MOST_NODES = 16


def is_convolution_call(op: Operation) -> bool:
    """Tell whether an op calls a function that is one convolution of its arguments.

    Cost: linear in the nodes of the function.
    """
    return _body_of(op) is not None


def inlined(op: Operation) -> Tensor:
    """Make the ops of such a function beside its call; return what it returns."""
    body = _body_of(op)
    if body is None:
        return op.outputs[0]
    scope = scope_dirname(op.name)
    made: dict[str, Any] = {
        arg.name: t for arg, t in zip(body.args, op.inputs, strict=True)
    }
    for node_def in body.node_defs():
        if node_def.op == "NoOp":
            continue
        inputs = [made[name] for name in node_def.input if name[0] != "^"]
        inside = node_def.name
        node_def.name = absolute_unique_name(op.graph, f"{scope}{inside}")
        node_def.device = node_def.device or op.device
        new = make_op(op.graph, node_def, inputs)
        add_control_edges(new, op.control_inputs)
        made[inside] = new.outputs[0]
    return made[body.results[0].tensor]


def _body_of(op: Operation) -> Body | None:
    if op.type not in CALLS or len(op.outputs) != 1:
        return None
    definition = definition_in(op.graph, op.get_attr("f").name)
    if definition is None or len(definition.node_def) > _MOST_NODES:
        return None
    kinds = [node.op for node in definition.node_def]
    convolutions = [kind for kind in kinds if kind in _CONVOLUTIONS]
    if len(convolutions) != 1 or not _BESIDES.issuperset({*kinds} - _CONVOLUTIONS):
        return None
    body = flat_body(definition, {})
    made = {arg.name for arg in body.args}
    for node in body.nodes:
        # Nodes may come in any order; what is made here has to come in this one.
        if any(name not in made for name in node.inputs if name[0] != "^"):
            return None
        made.add(node.name)
    return body
