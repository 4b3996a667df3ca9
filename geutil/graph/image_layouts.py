"""The layout of images on a GPU, held to as the graph has it; grouped convolutions.

Grappler's layout optimizer turns the channels-last ops of a GPU into channels-first
ones, with a transposition wherever the two meet, if a graph trains in float32; so says
`GetSrcAndDstDataFormats` in TensorFlow's generic_layout_optimizer.cc. A step whose
checkpoints were chosen holds these transposed copies besides: a ResNet50 of 64 images
that was planned to hold 1,683 MB takes 2,951 and 1.17 times as long (docs/measured.md,
"On a GPU"). The pass leaves out nodes that Grappler may not remove.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from geutil.graph import creation, function_defs, op_types, state, types
from geutil.graph.flat_body import FlatBody, flat_body
from geutil.graph.function_calls import is_compiled_call
from geutil.graph.placement import kind_of, planned_for
from geutil.graph.types import Graph, Operation, Tensor

NOT_REMOVED = "_grappler_do_not_remove"
"""The attribute of nodes that Grappler keeps as they are."""

_LAST = (b"NHWC", b"NDHWC")
# Layout-sensitive in TensorFlow's generic_layout_optimizer_transposer.cc.
_SENSITIVE = frozenset(
    (
        "AvgPool",
        "AvgPoolGrad",
        "BiasAdd",
        "BiasAddGrad",
        "Conv2D",
        "Conv2DBackpropFilter",
        "Conv2DBackpropInput",
        "Conv3D",
        "Conv3DBackpropFilterV2",
        "Conv3DBackpropInputV2",
        "DepthToSpace",
        "DepthwiseConv2dNative",
        "DepthwiseConv2dNativeBackpropFilter",
        "DepthwiseConv2dNativeBackpropInput",
        "FusedBatchNorm",
        "FusedBatchNormGrad",
        "FusedBatchNormGradV2",
        "FusedBatchNormGradV3",
        "FusedBatchNormV2",
        "FusedBatchNormV3",
        "MaxPool",
        "MaxPool3D",
        "MaxPoolGrad",
        "MaxPoolGradGrad",
        "MaxPoolGradGradV2",
        "MaxPoolGradV2",
        "MaxPoolV2",
        "SpaceToDepth",
    )
)


def hold_when_complete(graph: Graph) -> None:
    """Have the channels-last ops of a graph keep their layout on GPUs."""
    # They lose the fusions with a bias and an activation that Grappler makes otherwise,
    # so nothing is done to ops on other devices, nor where the user has switched the
    # layout optimizer off, or asks for `auto_mixed_precision`, which leaves ops out
    # that keep their layout.
    state.on_completion(graph, hold)


def are_turned(graph: Graph) -> bool:
    """Tell whether Grappler is left to turn the images of a graph for a GPU."""
    options = tf.config.optimizer.get_experimental_options()
    is_left = options.get("auto_mixed_precision") and not _is_switched_off(options)
    return bool(is_left) and any(True for _ in _sensitive(graph))


def _is_switched_off(options: Mapping[str, Any]) -> bool:
    return options.get("layout_optimizer") is False


def _sensitive(graph: Graph) -> Iterator[Operation]:
    """Yield the ops on GPUs whose layout Grappler may change."""
    usual = kind_of(planned_for(graph))
    for op in graph.get_operations():
        if op.type in _SENSITIVE and _device_type(op, usual) == "GPU":
            yield op


def hold(use: state.Use) -> None:
    """Mark the channels-last ops of a graph that is complete."""
    options = tf.config.optimizer.get_experimental_options()
    if _is_switched_off(options) or options.get("auto_mixed_precision"):
        return
    for op in _sensitive(use.graph):
        attributes = op.node_def.attr
        # A Session that has run an op sees no change of it.
        can_change = use.is_function or not state.has_been_run(use.graph, (op,))
        if attributes["data_format"].s in _LAST and can_change:
            op._set_attr(NOT_REMOVED, tf.compat.v1.AttrValue(b=True))


def _device_type(op: Operation, usual: str) -> str:
    device = tf.DeviceSpec.from_string(op.device)
    return str(device.device_type or usual)


# Keras 3 has XLA compile a convolution by groups, because its gradient does not run on
# processors without: the layer is a call, and its weights are read in the body.
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
        # By groups, its gradient runs on a processor only where XLA compiles it.
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
