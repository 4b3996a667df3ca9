"""TensorFlow as it runs: XLA, determinism, Grappler, its gradients and tapes.

A Session or function optimizes its graph before it runs it: ops are folded, merged and
removed. The optimized graph can be read off here without running anything, and images
keep the layout that the graph has. Nothing here looks at a kernel; that is `placement`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import tensorflow as tf

from geutil.graph import _tf, creation, function_defs, op_types, state, types
from geutil.graph._tf import (
    AutographStatus,
    Cluster,
    GraphOrParentsInXlaContext,
    IsMklEnabled,
    IsTrainable,
    NamedDevice,
    OptimizeGraph,
)
from geutil.graph.call_graph import FlatBody, flat_body
from geutil.graph.function_calls import is_compiled_call
from geutil.graph.placement import kind_of, planned_for
from geutil.graph.protos import MetaGraphDef
from geutil.graph.types import Graph, Operation, Tensor, is_func_graph, require_graph

F = TypeVar("F", bound=Callable[..., Any])
Backward = Callable[..., Sequence[Any]]


def uses_onednn() -> bool:
    """Tell whether TensorFlow uses oneDNN, and with it the allocator that counts."""
    return bool(IsMklEnabled())


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep the garbage collector from going through TensorFlow's graph."""
    # Plans make many short-lived objects without cycles; each round of the collector
    # takes as long as the graph is large: a third of the time of a plan.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def a_tape_is_open() -> bool:
    """Tell whether a tape of this thread may be recording now."""
    return bool(_tf.could_possibly_record())


def is_watched(tensor: Any) -> bool:
    """Tell whether a tape would record an op that reads `tensor`."""
    return bool(_tf.should_record_backprop([tensor]))


def is_differentiable(tensor: Tensor) -> bool:
    """Tell whether gradients flow through this dtype, or handles of variables."""
    return bool(IsTrainable(tensor))


def without_recording(make: Callable[[], Any]) -> Any:
    """Return the result of `make`, which no tape records."""
    with _tf.stop_recording():
        return make()


def has_tangents(values: Iterable[Any]) -> bool:
    """Tell whether a `tf.autodiff.ForwardAccumulator` follows one of some values."""
    tensors = [getattr(value, "handle", value) for value in values]
    tensors = [t for t in tensors if isinstance(t, tf.Tensor)]
    return bool(tensors) and bool(_tf.pack_tangents(tensors).tangents)


def record_on_tapes(
    name: str, outputs: Sequence[Tensor], inputs: Sequence[Any], backward: Backward
) -> None:
    """Tell all open tapes that an op has made `outputs` of `inputs`."""
    _tf.record_operation(name, list(outputs), list(inputs), backward)


def set_gradient(op: Operation, gradient: Backward) -> None:
    """Make `gradient(op, *output_gradients)` the gradient of an op."""
    op._gradient_function = gradient


def carry_marks(tensor: Tensor, tensor_: Tensor) -> None:
    """Copy handle data and the Keras mask of a tensor to a stand-in."""
    _tf.copy_handle_data(tensor, tensor_)
    mask = getattr(tensor, "_keras_mask", None)
    if mask is not None:
        tensor_._keras_mask = mask


def not_converted(function: F) -> F:
    """Mark a function that autograph calls as it is, but within its own status."""
    # Unlike `tf.autograph.experimental.do_not_convert`, this lets the function decide
    # whether its callees are converted.
    marked: F = _tf.autograph_artifact(function)
    return marked


def converted_as_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as autograph would call it at this place."""
    context = _tf.control_status_ctx()
    if context.status is not AutographStatus.ENABLED:
        return function
    converted: Callable[..., Any] = _tf.tf_convert(function, context)
    return converted


def plain_gradients(
    graph: Graph,
    ys: Sequence[Any],
    xs: Sequence[Any],
    grad_ys: Sequence[Any],
    options: Mapping[str, Any],
) -> list[Any]:
    """Return the result of TensorFlow's own `tf.gradients`, even if it was patched."""
    # `graph`, that of `ys`, must be the default graph.
    arguments = {"colocate_gradients_with_ops": True, **options}
    # The gradient of control flow changes forward ops; no Session may run meanwhile.
    with graph._mutation_lock():
        gradients: list[Any] = _tf.gradients_helper(
            list(ys), list(xs), list(grad_ys), **arguments
        )
    return gradients


def default_gradients(ys: Sequence[Any], grad_ys: Sequence[Any]) -> list[Any]:
    """Return the gradients of `ys` to start with: ones where None is given."""
    seeds: list[Any] = _tf.default_grad_ys(list(grad_ys), list(ys), True)
    return seeds


def collection(graph: Graph, name: str) -> Iterable[Any]:
    """Return the elements of a collection of `graph`."""
    elements: list[Any] = graph.get_collection(name)
    return elements


def variable_tensor(graph: Graph, variable: Any) -> Any:
    """Return the tensor of `graph` that corresponds to a variable, or None."""
    # That is its handle, the FuncGraph's capture of the handle, or, for a version 1
    # variable without a handle, the reference to it.
    handle = variable_handle(variable)
    if getattr(handle, "graph", None) is graph:
        return handle
    captures = getattr(graph, "captures", ())
    return next((inside for outside, inside in captures if outside is handle), None)


def variable_handle(variable: Any) -> Any:
    """Return the handle of a variable, or the reference to one without a handle."""
    handle = getattr(variable, "handle", None)
    return variable._ref() if handle is None else handle


def enclosing_graphs(graph: Graph) -> list[Graph]:
    """Return the graphs that the body of a function was traced in, inner ones first."""
    graphs = []
    outer = getattr(graph, "outer_graph", None)
    while outer is not None:
        graphs.append(outer)
        outer = getattr(outer, "outer_graph", None)
    return graphs


_COLOCATION = "_class"
_KEPT = "_geutil_class"
_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
_GPU = "GPU:"


def optimized(graph_def: Any, fetches: Iterable[str]) -> Any:
    """Return a `GraphDef` as a Session with default options would run it."""
    # Nodes that are on a GPU which this process lacks are optimized for one: a virtual
    # cluster has it.
    names = list(fetches)
    if not names:
        return graph_def
    meta = MetaGraphDef()
    meta.graph_def.CopyFrom(graph_def)
    for node in meta.graph_def.node:
        # A Session places ops before it optimizes; some rewrites are for CPU ops only.
        node.device = node.device or _CPU
        if _COLOCATION in node.attr:
            # Grappler drops colocation when it is run from Python; a Session keeps it,
            # and does not merge ops that differ in it.
            node.attr[_KEPT].CopyFrom(node.attr[_COLOCATION])
    # Where Grappler looks for what it must keep.
    meta.collection_def["train_op"].node_list.value.extend(names)
    absent = sorted(
        {node.device for node in meta.graph_def.node if _GPU in node.device}
    )
    is_absent = absent and not tf.config.get_visible_devices("GPU")
    cluster = _cluster_with(absent) if is_absent else None
    config = tf.compat.v1.ConfigProto()
    # As `tf.config.optimizer` has it for functions.
    config.graph_options.CopyFrom(_tf.eager_context().config.graph_options)
    with tf.Graph().as_default():
        result = OptimizeGraph(config, meta, cluster=cluster)
    for node in result.node:
        node.attr.pop(_KEPT, None)
    return result


def _cluster_with(gpus: Iterable[str]) -> Any:
    """Return a virtual cluster of a CPU and of GPUs that are not there."""
    cpu = NamedDevice(name=_CPU)
    cpu.properties.type = "CPU"
    devices = [cpu]
    for name in gpus:
        gpu = NamedDevice(name=name)
        gpu.properties.type = "GPU"
        # Grappler leaves half precision as it is from 7.0 up, as on all current ones.
        gpu.properties.environment["architecture"] = "9.0"
        devices.append(gpu)
    return Cluster(devices=devices)


def is_determinism_enabled() -> bool:
    """Tell whether `tf.config.experimental.enable_op_determinism` was called."""
    # TensorFlow does not keep the promise for sums of three or more (`AddN`) whose
    # terms other ops read too: the order of its sums depends on which ops have run.
    return bool(_tf.is_op_determinism_enabled())


def is_compiled_by_xla(graph: Graph) -> bool:
    """Tell whether XLA will compile the ops that are now being added to `graph`.

    So it is while a `tf.function` with `jit_compile=True` is traced, and while any
    function, loop body or branch is traced from within one.

    TensorFlow does not trace a function again when a compiled one calls it after all: a
    function that was traced before, outside, keeps the function built then.

    TensorFlow knows this during the trace only. Afterwards, and for decisions made when
    a graph runs, the answer is False: auto-clustering of a Session
    (`global_jit_level`), of a process (`tf.config.optimizer.set_jit`) or by the
    environment (`TF_XLA_FLAGS`).

    Example:
        >>> import tensorflow as tf
        >>> from geutil.graph.runtime import is_compiled_by_xla
        >>> answers = []
        >>> def body():
        ...     answers.append(is_compiled_by_xla(tf.compat.v1.get_default_graph()))
        >>> tf.function(body)()
        >>> tf.function(body, jit_compile=True)()
        >>> answers
        [False, True]
    """
    require_graph(graph)
    return bool(GraphOrParentsInXlaContext(graph))


def is_on_mesh(graph: Graph) -> bool:
    """Tell whether a function reads variables of a mesh of DTensor."""
    # TensorFlow has DTensor compile such a function, with rules for the ops that it
    # knows. A function of a mesh that reads no variable cannot be distinguished from
    # another one while it is traced.
    around: Any = graph
    while is_func_graph(around):
        # DTensor is the only custom device of TensorFlow itself.
        if any(":CUSTOM:" in str(outer.device) for outer, _ in around.captures):
            return True
        around = around.outer_graph
    return False


# Grappler's layout optimizer turns the channels-last ops of a GPU into channels-first
# ones, with a transposition wherever the two meet, if a graph trains in float32; so
# says `GetSrcAndDstDataFormats` in TensorFlow's generic_layout_optimizer.cc. A step
# whose checkpoints were chosen holds these transposed copies besides: a ResNet50 of 64
# images that was planned to hold 1,683 MB takes 2,951 and 1.17 times as long
# (docs/measured.md, "On a GPU"). The pass leaves out nodes that it may not remove.
_NOT_REMOVED = "_grappler_do_not_remove"
_CHANNELS_LAST = (b"NHWC", b"NDHWC")
# Layout-sensitive in TensorFlow's generic_layout_optimizer_transposer.cc.
_LAYOUT_SENSITIVE = frozenset(
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


def keep_image_layouts(graph: Graph) -> None:
    """Have the channels-last ops of a graph keep their layout on GPUs."""
    # They lose the fusions with a bias and an activation that Grappler makes otherwise,
    # so nothing is done to ops on other devices, nor where the user has switched the
    # layout optimizer off, or asks for `auto_mixed_precision`, which leaves ops out
    # that keep their layout.
    state.on_completion(graph, mark_image_layouts)


def turns_images(graph: Graph) -> bool:
    """Tell whether Grappler is left to turn the images of a graph for a GPU."""
    options = tf.config.optimizer.get_experimental_options()
    is_left = options.get("auto_mixed_precision") and not _keeps_layouts(options)
    return bool(is_left) and any(True for _ in _layout_sensitive(graph))


def _keeps_layouts(options: Mapping[str, Any]) -> bool:
    return options.get("layout_optimizer") is False


def _layout_sensitive(graph: Graph) -> Iterator[Operation]:
    """Yield the ops on GPUs whose layout Grappler may change."""
    usual = kind_of(planned_for(graph))
    for op in graph.get_operations():
        if op.type in _LAYOUT_SENSITIVE and _device_type(op, usual) == "GPU":
            yield op


def mark_image_layouts(use: state.Use) -> None:
    """Mark the channels-last ops of a graph that is complete."""
    options = tf.config.optimizer.get_experimental_options()
    if _keeps_layouts(options) or options.get("auto_mixed_precision"):
        return
    for op in _layout_sensitive(use.graph):
        attributes = op.node_def.attr
        # A Session that has run an op sees no change of it.
        can_change = use.is_function or not state.has_been_run(use.graph, (op,))
        if attributes["data_format"].s in _CHANNELS_LAST and can_change:
            op._set_attr(_NOT_REMOVED, tf.compat.v1.AttrValue(b=True))


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
    return _convolution_body(op) is not None


def inlined_convolution(op: Operation) -> Tensor:
    """Make the ops of such a function beside its call; return its result."""
    body = _convolution_body(op)
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
    for flag in ("_XlaCompile", _NOT_REMOVED):
        convolution.attr[flag].b = True


def _convolution_body(op: Operation) -> FlatBody | None:
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
