"""TensorFlow as it runs: placement, XLA, determinism, Grappler, gradients and tapes.

A Session merges an op's device string with those of the ops that share a resource or
are colocated with it. An op without a device then runs on the first task's GPU or CPU,
but for ops that go with others: those that make one tensor of nothing go with their
readers, and those that read only a shape with their inputs. Ops that have no kernel for
a GPU go to the CPU beside it, with all ops that must be where they are.

A Session or function optimizes its graph before it runs it: ops are folded, merged and
removed. The optimized graph can be read off here without running anything, and images
keep the layout that the graph has.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.graph import (
    _tf,
    adjacency,
    creation,
    function_calls,
    op_types,
    state,
    types,
)
from geutil.graph.function_calls import is_compiled_call
from geutil.graph.protos import AttrValue, FlatBody, MetaGraphDef, flat_body
from geutil.graph.types import Graph, Operation, Tensor, is_func_graph, require_graph
from geutil.graph.walks import DisjointSets

_ANY_DEVICE = "DEFAULT"


# TensorFlow's wheels for Linux register the kernels of GPUs, present or not.
@dataclass(frozen=True)
class RegisteredKernel:
    """The kernel of an op on a type of device."""

    # The inputs, by place, that it reads in the memory of the host.
    host_inputs: frozenset[int]
    host_outputs: frozenset[int]  # The outputs that it makes there.


def has_kernels(device_type: str) -> bool:
    """Return whether this TensorFlow was built for a type of device, such as "GPU"."""
    return any(k.device_type == device_type for k in _registered("MatMul"))


def kernel_of(op: Operation, device_type: str) -> RegisteredKernel | None:
    """Return the kernel of an op on "CPU" or "GPU", None if it has none there."""
    # An op without any kernel, such as one that is named for a function, has an empty
    # one.
    kernels = _registered(op.type)
    if not kernels:
        return RegisteredKernel(frozenset(), frozenset())
    found = None
    for kernel in kernels:
        if kernel.device_type not in (device_type, _ANY_DEVICE):
            continue
        if all(c.admits(op) for c in kernel.constraints):
            found = kernel
            if kernel.device_type == device_type:
                break
    if found is None:
        return None
    if not found.host_args:
        return RegisteredKernel(frozenset(), frozenset())
    definition = _tf.get_op_def(op.type)
    return RegisteredKernel(
        _places(op, definition.input_arg, found.host_args),
        _places(op, definition.output_arg, found.host_args),
    )


@dataclass(frozen=True)
class _Constraint:
    """The types that an attribute may have, as numbers."""

    name: str
    allowed: frozenset[int]

    def admits(self, op: Operation) -> bool:
        """Return whether an op's attribute is one of the types, or only such."""
        value = op.get_attr(self.name)
        types = value if isinstance(value, list) else [value]
        return all(dtype.as_datatype_enum in self.allowed for dtype in types)


@dataclass(frozen=True)
class _Registration:
    """A kernel, as TensorFlow registers it."""

    device_type: str
    constraints: tuple[_Constraint, ...]
    host_args: frozenset[str]


@functools.cache
def _registered(op_type: str) -> tuple[_Registration, ...]:
    """Return the kernels of an op type, those of highest priority first."""
    listed = _tf.get_registered_kernels_for_op(op_type).kernel
    return tuple(
        _Registration(
            kernel.device_type,
            tuple(
                _Constraint(c.name, frozenset(c.allowed_values.list.type))
                for c in kernel.constraint
                if c.allowed_values.list.type
            ),
            frozenset(kernel.host_memory_arg),
        )
        for kernel in sorted(listed, key=lambda kernel: -kernel.priority)
    )


def _places(
    op: Operation, args: Iterable[Any], named: frozenset[str]
) -> frozenset[int]:
    """Return the places of named arguments, each of one tensor or of several."""
    places: list[int] = []
    begin = 0
    for arg in args:
        count = 1
        if arg.number_attr:
            count = op.get_attr(arg.number_attr)
        elif arg.type_list_attr:
            count = len(op.get_attr(arg.type_list_attr))
        if arg.name in named:
            places += range(begin, begin + count)
        begin += count
    return frozenset(places)


LOCALHOST = "localhost"
"""The job of a process that is in no cluster."""
_PARAMETERS = "ps"
_READS_A_SHAPE = frozenset(("Rank", "Shape", "Size"))
Task = tuple[str, int]


@functools.cache
def _spec(device: str) -> tf.DeviceSpec:
    return tf.DeviceSpec.from_string(device)


def tasks_of(devices: Iterable[str]) -> list[Task]:
    """Return the tasks of a cluster that devices name, parameter servers last.

    The first one is that of ops without a device. "/job:worker" is its task 0.

    Example:
        >>> tasks_of(["/job:ps/task:0", "", "/job:worker/task:1", "/device:CPU:1"])
        [('worker', 1), ('ps', 0)]
    """
    specs = [_spec(device) for device in dict.fromkeys(devices)]
    tasks = {(s.job, s.task or 0) for s in specs if s.job not in (None, LOCALHOST)}
    return sorted(tasks, key=lambda task: (task[0] == _PARAMETERS, task))


def full_name(device: str, default: str) -> str:
    """Return a device by its full name, parts that it leaves open as in another one.

    Example:
        >>> full_name("/task:1", "/job:worker/replica:0/task:0/device:CPU:0")
        '/job:worker/replica:0/task:1/device:CPU:0'
    """
    return str(_spec(default).make_merged_spec(_spec(device)).to_string())


def default_device(devices: Iterable[str]) -> str:
    """Return the full name of the device of ops that name none, by those of others."""
    job, task = next(iter(tasks_of(devices)), (LOCALHOST, 0))
    has_gpu = job == LOCALHOST and tf.config.get_visible_devices("GPU")
    kind = "GPU" if has_gpu else "CPU"
    return f"/job:{job}/replica:0/task:{task}/device:{kind}:0"


def checked_default(device: str | None, devices: Iterable[str]) -> str:
    """Return the full name of the device of ops that name none, if it is a device."""
    default = default_device(devices)
    if device is None:
        return default
    try:
        name = full_name(device, default)
        if (_spec(name).device_index or 0) < 0:
            raise ValueError(name)
    except (TypeError, ValueError, AttributeError) as error:
        raise ArgumentTypeError(
            f"{device!r} is no device; pass one like 'GPU:0' or '/job:worker/task:0'"
        ) from error
    return name


def kind_of(device: str | None) -> str:
    """Return "CPU" or "GPU", of None that of the device of ops that name none.

    Raises ArgumentTypeError for a string that is no device.

    Example:
        >>> kind_of("/device:GPU:0"), kind_of("GPU:1"), kind_of("CPU:0")
        ('GPU', 'GPU', 'CPU')
    """
    return str(_spec(checked_default(device, ())).device_type)


class _Planned:
    """The device that the steps of a graph are planned for, if one was named."""

    device: str | None = None


def plan_for(graph: Graph, device: str | None) -> None:
    """Note the device that the steps of a graph are planned for, if one is named."""
    if device is not None:
        state.slot(graph, _Planned).device = device


@contextmanager
def planning_for(graph: Graph, device: str | None) -> Iterator[None]:
    """Plan steps of a graph for a device, unless the block raises."""
    earlier = planned_for(graph)
    plan_for(graph, device)
    try:
        yield
    except BaseException:
        state.slot(graph, _Planned).device = earlier
        raise


def planned_for(graph: Graph) -> str | None:
    """Return the device that a graph was planned for; None if none was named."""
    return state.slot(graph, _Planned).device


def share_memory(one: str, other: str) -> bool:
    """Return whether devices, by full names, share memory, as CPUs of a process do."""
    specs = _spec(one), _spec(other)
    tasks = {(spec.job, spec.replica, spec.task) for spec in specs}
    return len(tasks) == 1 and all(spec.device_type == "CPU" for spec in specs)


def places_of(
    ops: Sequence[Operation], fed: Collection[Operation], default: str
) -> dict[str, str]:
    """Return the device of each op by its name, as a Session places them."""
    # Fed outputs come in at `default`, the full name of the device of ops that name
    # none.
    named = {full_name(device, default) for device in {op.device for op in ops}}
    if len(named) <= 1 and all(kind_of(device) == "CPU" for device in named):
        (device,) = named or {default}
        places = dict.fromkeys((op.name for op in ops), device)
    else:
        places = _merged(ops, default)
    return places | dict.fromkeys((op.name for op in fed), default)


def _merged(ops: Sequence[Operation], default: str) -> dict[str, str]:
    """Return the devices by the rules of TensorFlow's placer."""
    group_of = _groups(ops)
    members: dict[str, list[Operation]] = {}
    for op in ops:
        members.setdefault(group_of[op.name], []).append(op)
    places: dict[str, str] = {}
    makers: list[Operation] = []
    for group in members.values():
        spec = _spec(group[0].device)
        for other in group[1:]:
            # The first op decides: it is the one that makes a variable.
            spec = _spec(other.device).make_merged_spec(spec)
        device = _with_kernels(full_name(str(spec.to_string()), default), group)
        places |= dict.fromkeys((op.name for op in group), device)
    for op in ops:
        if len(members[group_of[op.name]]) > 1 or op.device:
            continue
        if op.type in _READS_A_SHAPE:
            places[op.name] = places.get(op.inputs[0].op.name, places[op.name])
        elif not op.inputs and len(op.outputs) == 1:
            makers.append(op)
    readers: dict[str, list[str]] = {}
    for op in ops:
        for before in (*(t.op for t in op.inputs), *op.control_inputs):
            readers.setdefault(before.name, []).append(op.name)
    for op in makers:
        found = {places[reader] for reader in readers.get(op.name, ())}
        if len(found) == 1:
            places[op.name] = found.pop()
    return places


def _with_kernels(device: str, group: Iterable[Operation]) -> str:
    """Return a device, or the CPU beside it if an op of a group has no kernel there."""
    kind = _spec(device).device_type
    if kind == "CPU" or all(kernel_of(op, kind) for op in group):
        return device
    return str(_spec(device).replace(device_type="CPU", device_index=0).to_string())


def _groups(ops: Sequence[Operation]) -> dict[str, str]:
    """Return the group of each op: those that must be on one device."""
    names = {op.name for op in ops}
    groups = DisjointSets(names)
    for op in ops:
        tied = [
            tensor.op.name
            for i, tensor in enumerate(op.inputs)
            if tensor.dtype == tf.resource or adjacency.takes_reference(op, i)
        ]
        tied += colocation_names(op)
        for other in tied:
            if other in names:
                groups.join(op.name, other)
    return {op.name: groups.leader(op.name) for op in ops}


COLOCATION = "_class"
_COLOCATED = b"loc:@"
"""An op names those that it shall share a device with in its `_class` attribute, behind
this prefix; other entries of that attribute are kept as they are."""


def class_entries(op: Operation) -> list[bytes]:
    """Return the entries of the `_class` attribute; [] when there is none."""
    try:
        return list(op.get_attr(COLOCATION))
    except ValueError:
        return []


def colocation_names(op: Operation) -> list[str]:
    """Return the names of the ops that `op` is colocated with."""
    return [
        entry.removeprefix(_COLOCATED).decode()
        for entry in class_entries(op)
        if entry.startswith(_COLOCATED)
    ]


def rename_entries(
    entries: Iterable[bytes], rename: Callable[[str], str | None]
) -> list[bytes]:
    """Return `entries` with each colocation name renamed, or dropped for None."""
    renamed = []
    for entry in entries:
        # `_class` may have other entries, which stay.
        if not entry.startswith(_COLOCATED):
            renamed.append(entry)
            continue
        name = rename(entry.removeprefix(_COLOCATED).decode())
        if name is not None:
            renamed.append(_COLOCATED + name.encode())
    return renamed


def drop_missing_colocation(op: Operation) -> None:
    """Remove colocations of `op` with ops that its graph does not have."""
    entries = class_entries(op)
    if not entries:
        return
    remaining_entries = rename_entries(
        entries, lambda n: n if _has_op(op.graph, n) else None
    )
    if remaining_entries != entries:
        set_class_entries(op, remaining_entries)


def _has_op(graph: Graph, name: str) -> bool:
    try:
        graph.get_operation_by_name(name)
    except KeyError:
        return False
    return True


def set_class_entries(op: Operation, entries: Iterable[bytes]) -> None:
    """Set the `_class` attribute of `op`."""
    value = AttrValue(list=AttrValue.ListValue(s=list(entries)))
    op._set_attr(COLOCATION, value)


F = TypeVar("F", bound=Callable[..., Any])
Backward = Callable[..., Sequence[Any]]


def uses_onednn() -> bool:
    """Return whether TensorFlow uses oneDNN, and with it the allocator that counts."""
    return bool(_tf.IsMklEnabled())


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
    """Return whether a tape of this thread may be recording now."""
    return bool(_tf.could_possibly_record())


def is_watched(tensor: Any) -> bool:
    """Return whether a tape would record an op that reads `tensor`."""
    return bool(_tf.should_record_backprop([tensor]))


def is_differentiable(tensor: Tensor) -> bool:
    """Return whether gradients flow through this dtype, or handles of variables."""
    return bool(_tf.IsTrainable(tensor))


def without_recording(make: Callable[[], Any]) -> Any:
    """Return the result of `make`, which no tape records."""
    with _tf.stop_recording():
        return make()


def has_tangents(values: Iterable[Any]) -> bool:
    """Return whether a `tf.autodiff.ForwardAccumulator` follows one of some values."""
    tensors = [getattr(value, "handle", value) for value in values]
    tensors = [t for t in tensors if isinstance(t, tf.Tensor)]
    return bool(tensors) and bool(_tf.pack_tangents(tensors).tangents)


def record_on_tapes(
    name: str, outputs: Sequence[Tensor], inputs: Sequence[Any], backward: Backward
) -> None:
    """Record on all open tapes that an op computed `outputs` from `inputs`."""
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
    if context.status is not _tf.AutographStatus.ENABLED:
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
        if COLOCATION in node.attr:
            # Grappler drops colocation when it is run from Python; a Session keeps it,
            # and does not merge ops that differ in it.
            node.attr[_KEPT].CopyFrom(node.attr[COLOCATION])
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
        result = _tf.OptimizeGraph(config, meta, cluster=cluster)
    for node in result.node:
        node.attr.pop(_KEPT, None)
    return result


def _cluster_with(gpus: Iterable[str]) -> Any:
    """Return a virtual cluster of a CPU and of GPUs that are not there."""
    cpu = _tf.NamedDevice(name=_CPU)
    cpu.properties.type = "CPU"
    devices = [cpu]
    for name in gpus:
        gpu = _tf.NamedDevice(name=name)
        gpu.properties.type = "GPU"
        # Grappler leaves half precision as it is from 7.0 up, as on all current ones.
        gpu.properties.environment["architecture"] = "9.0"
        devices.append(gpu)
    return _tf.Cluster(devices=devices)


def is_determinism_enabled() -> bool:
    """Return whether `tf.config.experimental.enable_op_determinism` was called."""
    # TensorFlow does not keep the promise for sums of three or more (`AddN`) whose
    # terms other ops read too: the order of its sums depends on which ops have run.
    return bool(_tf.is_op_determinism_enabled())


def is_compiled_by_xla(graph: Graph) -> bool:
    """Return whether XLA will compile the ops that are now being added to `graph`.

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
    return bool(_tf.GraphOrParentsInXlaContext(graph))


def is_on_mesh(graph: Graph) -> bool:
    """Return whether a function reads variables of a mesh of DTensor."""
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
    """Keep the layout of the channels-last ops of a graph on GPUs."""
    # They lose the fusions with a bias and an activation that Grappler makes otherwise,
    # so nothing is done to ops on other devices, nor where the user has switched the
    # layout optimizer off, or asks for `auto_mixed_precision`, which leaves ops out
    # that keep their layout.
    state.on_completion(graph, mark_image_layouts)


def turns_images(graph: Graph) -> bool:
    """Return whether Grappler is left to turn the images of a graph for a GPU."""
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
    """Return whether an op calls a function of one convolution of its arguments."""
    return _convolution_body(op) is not None


def inlined_convolution(op: Operation) -> Tensor:
    """Build the ops of such a function beside its call; return its result."""
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
    definition = function_calls.definition_in(op.graph, op.get_attr("f").name)
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
