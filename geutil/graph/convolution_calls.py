"""Calls of functions that are one convolution.

Keras 3 has XLA compile a convolution by groups, because its gradient does not run on
processors without: the layer is a call, and its weights are read in the body.
"""

from __future__ import annotations

from typing import Any

from geutil.graph import creation, function_defs, op_types, types
from geutil.graph.flat_body import FlatBody, flat_body
from geutil.graph.function_calls import is_compiled_call
from geutil.graph.image_layouts import NOT_REMOVED
from geutil.graph.types import Operation, Tensor

_CONVOLUTIONS = frozenset(("Conv2D", "Conv3D"))
_BESIDES = frozenset(
    ("Const", "ExpandDims", "Identity", "NoOp", "ReadVariableOp", "Squeeze")
)
_MOST_NODES = 16
"""Nodes beyond which a body is not looked at."""


def is_convolution_call(op: Operation) -> bool:
    """Tell whether an op calls a function that is one convolution of its arguments."""
    return _body_of(op) is not None


def inlined(op: Operation) -> Tensor:
    """Make the ops of such a function beside its call; return its result."""
    body = _body_of(op)
    if body is None:
        return op.outputs[0]
    scope = types.scope_dirname(op.name)
    tensor_by_name: dict[str, Any] = {
        arg.name: t for arg, t in zip(body.args, op.inputs, strict=True)
    }
    for node_def in body.node_defs():
        if node_def.op == "NoOp":
            continue
        inputs = [tensor_by_name[name] for name in node_def.input if name[0] != "^"]
        inside = node_def.name
        node_def.name = types.absolute_unique_name(op.graph, f"{scope}{inside}")
        node_def.device = node_def.device or op.device
        if node_def.op in _CONVOLUTIONS and is_compiled_call(op):
            _go_on_compiling(node_def)
        new = creation.make_op(op.graph, node_def, inputs)
        creation.add_control_edges(new, op.control_inputs)
        tensor_by_name[inside] = new.outputs[0]
    return tensor_by_name[body.results[0].tensor]


def _go_on_compiling(convolution: Any) -> None:
    """Let XLA compile a convolution, and its gradient, which XLA alone may have."""
    # Grappler leaves nodes that it may not remove: without oneDNN the kernel that it
    # fuses a convolution and its BiasAdd into takes no groups.
    convolution.attr["_XlaScope"].s = convolution.name.encode()
    convolution.attr["_XlaSeparateCompiledGradients"].b = False
    for flag in ("_XlaCompile", NOT_REMOVED):
        convolution.attr[flag].b = True


def _body_of(op: Operation) -> FlatBody | None:
    if op.type not in op_types.CALLS or len(op.outputs) != 1:
        return None
    definition = function_defs.definition_in(op.graph, op.get_attr("f").name)
    if definition is None or len(definition.node_def) > _MOST_NODES:
        return None
    kinds = [node.op for node in definition.node_def]
    convolutions = [kind for kind in kinds if kind in _CONVOLUTIONS]
    if len(convolutions) != 1 or not _BESIDES.issuperset({*kinds} - _CONVOLUTIONS):
        return None
    body = flat_body(definition, {})
    names = {arg.name for arg in body.args}
    for node in body.nodes:
        # Nodes may come in any order; what is made here has to come in this one.
        if any(name not in names for name in node.inputs if name[0] != "^"):
            return None
        names.add(node.name)
    return body
