"""TensorFlow as it runs.

XLA, determinism, Grappler, its own gradients and tapes, even where they are patched.

A Session or function optimizes its graph before it runs it: ops are folded, merged and
removed. The optimized graph can be read off here without running anything.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import tensorflow as tf

from geutil.graph import _tf
from geutil.graph._tf import (
    AutographStatus,
    Cluster,
    GraphOrParentsInXlaContext,
    IsMklEnabled,
    IsTrainable,
    NamedDevice,
    OptimizeGraph,
)
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
