"""Measures a step in a fresh process, which runs a `Job`, for a `Measurement`."""

from __future__ import annotations

import functools
import os
import pickle
import pickletools
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError, MeasurementError
from geutil.graph import functions, op_types, protos, resource_variables, types
from geutil.graph.functions import bindings, side_effects, write_stand_in
from geutil.graph.protos import all_nodes
from geutil.graph.runtime import Task, tasks_of
from geutil.graph.types import Graph, Operation, Tensor
from geutil.memory.timeline import Measurement
from geutil.select.walks import get_backward_walk_ops


@dataclass(frozen=True)
class MeasureOptions:
    """How to measure; see `measure`."""

    steps: int
    inter_op_threads: int | None
    intra_op_threads: int | None
    grappler: bool
    onednn: bool | None
    jit_compile: bool
    timeout: float | None


@dataclass(frozen=True)
class VariableSpec:
    """A variable of a graph."""

    # Makes its handle or, of a version 1 variable, its reference.
    op: str
    # Variables of the same key are one.
    key: str
    dtype: str
    # An array; None where `initial`, a tensor of the initial graph, yields it.
    value: Any = None
    initial: str | None = None


@dataclass(frozen=True)
class GraphJob:
    """A graph to run."""

    # Serialized; every resource variable is a VarHandleOp.
    graph_def: bytes
    op_types: Mapping[str, str]
    fetches: tuple[str, ...]
    feeds: Mapping[str, Any]
    variables: tuple[VariableSpec, ...]
    # Computes initial values.
    initial_graph_def: bytes
    as_function: bool
    cpus: int
    # The tasks of a cluster that it names, the Session's target first; () if it runs in
    # one process.
    tasks: tuple[Task, ...] = ()


@dataclass(frozen=True)
class CallJob:
    """A callable to call: the pickle of it, its arguments and its keyword arguments."""

    pickled: bytes


Job = GraphJob | CallJob


def _variables_of(
    graph: Graph, graph_def: Any, handles: Mapping[str, Any], session: Any
) -> tuple[tuple[VariableSpec, ...], list[Tensor]]:
    """Return the variables of a part of a graph, and the tensors they start with."""
    objects = _objects(graph)
    nodes = [node for node in graph_def.node if node.op in op_types.VARIABLES]
    others = sorted(set(handles) - {node.name for node in nodes})
    if others:
        raise MeasurementError(
            f"{others} stand for resources that are no variables (tables, iterators or "
            "the like), which only their own process has; measure a callable of an "
            "importable module"
        )
    specs, initials = [], []
    for node in nodes:
        value = initial = None
        variable = objects.get(node.name)
        if node.name in handles:
            value = resource_variables.value_behind(handles[node.name])
        elif variable is None:
            value = _zeros(node)
        elif session is not None:
            value = session.run(variable)
        else:
            # Of Assign and AssignVariableOp alike; `initial_value` is refused in
            # eager code.
            initial = variable.initializer.inputs[1]
            initials.append(initial)
        key = node.attr["shared_name"].s.decode() or node.name
        dtype = tf.as_dtype(node.attr["dtype"].type).name
        name = None if initial is None else initial.name
        specs.append(VariableSpec(node.name, key, dtype, value, name))
    return tuple(specs), initials


def _objects(graph: Graph) -> dict[str, Any]:
    """Return the variables in the collections of a graph by the name of their op."""
    keys = tf.compat.v1.GraphKeys
    elements = [
        *graph.get_collection(keys.GLOBAL_VARIABLES),
        *graph.get_collection(keys.LOCAL_VARIABLES),
    ]
    return {e.op.name: e for e in elements if types.is_op(getattr(e, "op", None))}


def _zeros(node: Any) -> Any:
    shape = tf.TensorShape(node.attr["shape"].shape)
    if not shape.is_fully_defined():
        raise MeasurementError(
            f"variable '{node.name}' has shape {shape} and no initial value; make it "
            "with tf.Variable, so that the graph's collections know it"
        )
    dtype = tf.as_dtype(node.attr["dtype"].type)
    return np.zeros(shape.as_list(), dtype.as_numpy_dtype)


def _graph_job(
    graph: Graph,
    fetches: Sequence[Any],
    feeds: Sequence[tuple[Tensor, Any]],
    bound: Sequence[tuple[Any, Tensor]],
    session: Any,
    *,
    as_function: bool,
) -> GraphJob:
    """Return the job that runs a graph; `bound`: eager tensors, placeholders."""
    ops = get_backward_walk_ops(_ops_of(fetches), control_inputs=True)
    needed = {op.name for op in ops}
    value_by_name = {t.name: value for t, value in feeds}
    outside = {t.op.name: e for e, t in bound if t.op.name in needed}
    handles = {n: e for n, e in outside.items() if e.dtype in (tf.resource, tf.variant)}
    value_by_name |= {
        f"{n}:0": _array(n, e) for n, e in outside.items() if n not in handles
    }
    _check_placeholders(fetches, [t for t, _ in feeds], outside)

    graph_def = _part(graph, needed)
    for node in all_nodes(graph_def):
        if node.op in op_types.PYTHON_CALLS:
            raise MeasurementError(
                f"'{node.name}' ({node.op}) calls Python of this process; measure a "
                "callable of an importable module that builds and runs the graph"
            )
    # A handle leads to a resource of this process: the child makes one in its place.
    for node in graph_def.node:
        if node.name in handles:
            write_stand_in(node, handles[node.name])
    tasks = tasks_of(node.device for node in all_nodes(graph_def))
    if tasks and as_function:
        raise MeasurementError(
            f"the ops are on {len(tasks)} task(s) of a cluster, '{tasks[0][0]}' among "
            "them: functions, and what XLA compiles, are measured in one process; pass "
            "(graph, fetches, feeds) without jit_compile"
        )
    variables, initials = _variables_of(graph, graph_def, handles, session)
    return GraphJob(
        graph_def=graph_def.SerializeToString(),
        op_types={node.name: node.op for node in graph_def.node},
        fetches=tuple(dict.fromkeys(fetch.name for fetch in fetches)),
        feeds=value_by_name,
        variables=variables,
        initial_graph_def=_initial_part(graph, initials) if initials else b"",
        as_function=as_function,
        cpus=_cpus(graph_def),
        tasks=tuple(tasks),
    )


def _ops_of(fetches: Iterable[Any]) -> list[Operation]:
    return [fetch if types.is_op(fetch) else fetch.op for fetch in fetches]


def _array(name: str, external: Any) -> Any:
    if not hasattr(external, "numpy"):
        raise MeasurementError(
            f"'{name}' stands for a tensor of another graph; feed it a value"
        )
    return external.numpy()


def _check_placeholders(
    fetches: Sequence[Any], fed: Sequence[Tensor], outside: Collection[str]
) -> None:
    """Raise `MeasurementError` if a placeholder that is needed has no value."""
    given = {id(t) for t in fed}
    seeds = _ops_of(fetch for fetch in fetches if id(fetch) not in given)
    ops = get_backward_walk_ops(seeds, stop_at_ts=fed, control_inputs=True)
    open_ops = [op for op in ops if op.type == "Placeholder" and op.name not in outside]
    missing = [op.name for op in open_ops if id(op.outputs[0]) not in given]
    if missing:
        raise MeasurementError(f"placeholders without a value: {missing}; feed them")


def _part(graph: Graph, names: set[str]) -> Any:
    """Return the `GraphDef` of some ops and of the functions that they call."""
    try:
        whole = graph.as_graph_def()
    except (ValueError, tf.errors.OpError) as error:
        raise MeasurementError(
            "the graph holds more constants than fit into one protobuf (2 GB); keep "
            f"large values in variables or feeds: {error}"
        ) from error
    part = tf.compat.v1.GraphDef(versions=whole.versions)
    part.node.extend(node for node in whole.node if node.name in names)
    called = protos.Library(whole.library).still_called(part.node)
    part.library.CopyFrom(called)
    for node in part.node:
        if "_class" in node.attr:
            # Colocation with ops that are not there.
            places = node.attr["_class"].list.s
            kept = [p for p in places if p.decode().removeprefix("loc:@") in names]
            del node.attr["_class"]
            if kept:
                node.attr["_class"].list.s.extend(kept)
    return part


def _initial_part(graph: Graph, initials: list[Tensor]) -> bytes:
    ops = get_backward_walk_ops(initials, control_inputs=True)
    part = _part(graph, {op.name for op in ops})
    for node in all_nodes(part):
        # Values are computed in the measuring process, which is no task of a cluster.
        node.device = ""
    return bytes(part.SerializeToString())


def _cpus(graph_def: Any) -> int:
    """Return how many CPU devices the device strings of a graph ask for."""
    devices = {node.device for node in all_nodes(graph_def) if node.device}
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    indices = [s.device_index or 0 for s in specs if s.device_type == "CPU"]
    return 1 + max(indices, default=0)


def job_of(
    what: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    session: Any,
    jit_compile: bool,
) -> tuple[Job, bool]:
    """Return the job that `measure` is asked for, and whether XLA compiles it."""
    if isinstance(what, tuple):
        if args or kwargs:
            raise ArgumentTypeError(
                "args and kwargs go with a callable; values for a graph are its feeds"
            )
        return _job_of_graph(what, session, jit_compile), jit_compile
    if session is not None:
        raise ArgumentTypeError("session goes with (graph, fetches, feeds)")
    function = what
    if isinstance(what, tf.types.experimental.PolymorphicFunction):
        function = what.get_concrete_function(*args, **kwargs)
    if isinstance(function, tf.types.experimental.ConcreteFunction):
        compiled = jit_compile or functions.is_compiled(function)
        traced_from = what if function is not what else None
        return _job_of_function(function, args, kwargs, traced_from), compiled
    if not callable(what):
        raise ArgumentTypeError(
            f"cannot measure a {types.type_name(what)}; pass (graph, fetches, feeds), "
            "a tf.function, a ConcreteFunction or another callable"
        )
    if jit_compile:
        raise ArgumentTypeError(
            "jit_compile goes with a graph or a tf.function; decorate what the "
            "callable calls with tf.function(jit_compile=True)"
        )
    return CallJob(_pickled(what, args, kwargs)), False


def _job_of_graph(what: tuple[Any, ...], session: Any, jit_compile: bool) -> Job:
    """Return the job of (graph, fetches, feeds); refuse any other tuple."""
    if len(what) != 3 or not types.is_graph(what[0]):
        kinds = ", ".join(types.type_name(part) for part in what)
        raise ArgumentTypeError(
            f"expected (graph, fetches, feeds), got a tuple of ({kinds})"
        )
    graph, fetches, feeds = what
    flat = tf.nest.flatten(fetches, expand_composites=True)
    if not flat:
        raise ArgumentTypeError("there is nothing to fetch; name an op or a tensor")
    fetched = [_in_graph(graph, fetch) for fetch in flat]
    fed = [_feed(graph, tensor, value) for tensor, value in _pairs(feeds)]
    bound = bindings(graph) if hasattr(graph, "captures") else []
    return _graph_job(graph, fetched, fed, bound, session, as_function=jit_compile)


def _job_of_function(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], traced_from: Any
) -> Job:
    try:
        bound = functions.bound_arguments(function, args, kwargs, traced_from)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"args and kwargs do not fit the function: {error}"
        ) from error
    fetches = [*function.outputs, *side_effects(function.graph)]
    return _graph_job(function.graph, fetches, [], bound, None, as_function=True)


def _feed(graph: Graph, tensor: Any, value: Any) -> tuple[Tensor, Any]:
    """Return a feed as a tensor of the graph and an array that fits it."""
    tensor = _in_graph(graph, tensor)
    if not types.is_tensor(tensor):
        raise ArgumentTypeError(
            f"'{tensor.name}' is an op; feed a tensor, for example '{tensor.name}:0'"
        )
    array = np.asarray(value, tensor.dtype.as_numpy_dtype)
    if not tensor.shape.is_compatible_with(array.shape):
        raise MeasurementError(
            f"a value of shape {array.shape} does not fit '{tensor.name}' of shape "
            f"{tensor.shape}"
        )
    return tensor, array


def _in_graph(graph: Graph, element: Any) -> Any:
    """Return an op or tensor of the graph that is given as such or by name."""
    if isinstance(element, str):
        try:
            return graph.as_graph_element(element)
        except (KeyError, ValueError) as error:
            raise ArgumentTypeError(
                f"'{element}' is no op or tensor of the graph: {error}"
            ) from error
    if not (types.is_op(element) or types.is_tensor(element)):
        hint = "; leave out unconnected gradients" if element is None else ""
        raise ArgumentTypeError(
            "expected an op or tensor of the graph, "
            f"got {types.type_name(element)}{hint}"
        )
    if element.graph is not graph:
        raise ArgumentTypeError(f"'{element.name}' belongs to another graph")
    return element


def _pairs(feeds: Any) -> Iterable[tuple[Any, Any]]:
    """Return (tensor or name, value) for each feed."""
    if feeds is None:
        return []
    pairs = list(feeds.items() if isinstance(feeds, Mapping) else feeds)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ArgumentTypeError(
            "feeds are a mapping from tensors or their names to values, or a list of "
            "(tensor, value) pairs"
        )
    return [(types.dereference(key), value) for key, value in pairs]


def _pickled(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return a callable and its arguments, as another process can load them."""
    try:
        pickled = pickle.dumps((function, tuple(args), dict(kwargs)))
    # Objects refuse to be pickled by whatever error they like.
    except Exception as error:
        raise _not_importable(function, f"it cannot be pickled: {error}") from error
    for _, argument, _ in pickletools.genops(pickled):
        if argument == "__main__":
            raise _not_importable(function, "it is defined in the main script")
    return pickled


def _not_importable(function: Any, reason: str) -> MeasurementError:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", types.type_name(function))
    return MeasurementError(
        f"a fresh process cannot import '{name}': {reason}; put it at the top level of "
        "a module, decorate it with tf.function, or pass (graph, fetches, feeds)"
    )


_CHILD = "geutil.memory.measurement.child"
_CLUSTER = "geutil.memory.measurement.cluster"
_TAIL = 3000
"""Characters of the process's last words that a message shows."""


def run_in_child(job: Job, options: MeasureOptions) -> Measurement:
    """Run a job in a fresh process; raise MeasurementError if that fails."""
    with tempfile.TemporaryDirectory(prefix="geutil-measure-") as folder:
        # The streams hold the log of TensorFlow, so the result comes by a file.
        job_path, result_path = Path(folder, "job"), Path(folder, "result")
        with job_path.open("wb") as file:
            pickle.dump((job, options), file)
        on_cluster = isinstance(job, GraphJob) and job.tasks
        module = _CLUSTER if on_cluster else _CHILD
        command = [sys.executable, "-m", module, str(job_path), str(result_path)]
        try:
            finished = subprocess.run(
                command,
                check=False,
                capture_output=True,
                env=_environment(options),
                timeout=options.timeout,
            )
        except subprocess.TimeoutExpired as error:
            raise MeasurementError(
                f"the step was not measured within {options.timeout} s; pass a longer "
                "timeout or fewer steps"
            ) from error
        if finished.returncode != 0:
            raise MeasurementError(_last_words(finished))
        measurement: Measurement = pickle.loads(result_path.read_bytes())
        return measurement


def _environment(options: MeasureOptions) -> dict[str, str]:
    """Return the environment of the process: this one's, and where to import from."""
    environment = dict(os.environ)
    folders = [folder or str(Path.cwd()) for folder in sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # This process may hold a part of the GPU.
    environment.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    if options.onednn is not None:
        environment["TF_ENABLE_ONEDNN_OPTS"] = str(int(options.onednn))
    return environment


def _last_words(finished: subprocess.CompletedProcess[bytes]) -> str:
    code = finished.returncode
    how = f"ended with status {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        # Windows has no SIGKILL.
        if -code == getattr(signal, "SIGKILL", None):
            how += " (out of memory?)"
    words = finished.stderr.decode(errors="replace").strip()
    # The tail may begin within a line.
    tail = words[-_TAIL:].partition("\n")[2] if len(words) > _TAIL else words
    return f"the measuring process {how}; its last words:\n{tail}"


def measure(
    what: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    steps: int = 3,
    session: Any = None,
    inter_op_threads: int | None = 1,
    intra_op_threads: int | None = None,
    grappler: bool = True,
    onednn: bool | None = None,
    jit_compile: bool = False,
    timeout: float | None = None,
) -> Measurement:
    """Measure the memory and time of a step, in a fresh process.

    On a machine with a GPU the memory of the first one is measured, else the host's.
    The process runs one step, which compiles, then the timed ones, then (for a graph,
    or a function that XLA does not compile) a traced one in a Session for the timeline.

    A graph whose ops are on tasks of a cluster ("/job:worker/task:1") runs on servers
    that are started for it, one process for each task that it names, on free ports of
    this machine, on the CPU; the first task is the Session's target, parameter servers
    come last. `Measurement.devices` has the peak of each. All processes are stopped.

    Args:
        what: one of
            - `(graph, fetches, feeds)`: a `tf.Graph` or FuncGraph, run by a Session;
              tensors, ops or their names, arbitrarily nested; values by tensor or name,
              or (tensor, value) pairs. A fetched op runs, and its outputs are not held.
              The captures of a FuncGraph keep their values.
            - a `tf.function` or ConcreteFunction, called with `args` and `kwargs`.
            - any other callable that a process can import by its module and name.
              Objects that its first call makes and keeps (such as a model) count in the
              resident set's peak, not in the allocator's.
        args: positional arguments, for a function or callable.
        kwargs: keyword arguments, likewise.
        steps: how many steps are timed, at least 1.
        session: a Session with the values of a graph's variables. Without it they have
            their initial values, or with zeros if the graph has no variable object in
            its collections for them.
        inter_op_threads: how many ops run at once; None is TensorFlow's default. With
            1, the order of the ops, and so the peak, is the same in each run of this
            process, but not in another one: if several become ready together, the
            addresses of their edges decide. `worst_case` bounds the peak of any order;
            steps of `geutil.gradients` have an enforced order.
        intra_op_threads: how many threads share one op; None is TensorFlow's default.
        grappler: whether Grappler optimizes the graph.
        onednn: whether oneDNN is used; None is TensorFlow's default.
        jit_compile: whether XLA compiles the step. A function that was made with
            `jit_compile=True` is compiled anyway.
        timeout: how many seconds the process may take; None: no limit.

    Returns:
        The peak in bytes, its source, and the time of each step.

    Raises:
        ArgumentTypeError: `what`, a fetch or a feed is of an unsupported type, or
            belongs to another graph.
        MeasurementError: `steps` is less than 1; the step cannot be run in another
            process (a placeholder without a value, a resource that is not a variable,
            Python code in the graph, a callable that cannot be imported); a function,
            or a step that XLA compiles, has ops on tasks of a cluster; or the process
            failed, died or took too long. The message has its last output.

    Cost: a start of TensorFlow (about 5 s), the serialization of the graph and of the
    values, and `steps + 2` steps; one more start of TensorFlow for each task.

    Example:
        >>> import numpy as np
        >>> import tensorflow as tf
        >>> from geutil.memory import measure
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.compat.v1.placeholder(tf.float32, [1024, 1024], name="x")
        ...     y = tf.reduce_sum(tf.matmul(x, x, name="square"))
        >>> value = np.ones([1024, 1024], np.float32)
        >>> measurement = measure((graph, y, {x: value}), steps=1)
        >>> measurement.source
        'allocation records of a traced Session'
        >>> measurement.timeline.at_peak[0]
        LiveTensor(name='square:0', op_type='MatMul', bytes=4194304)
    """
    if steps < 1:
        raise MeasurementError(f"steps={steps}: at least one is needed")
    job, compiled = job_of(what, args, kwargs or {}, session, jit_compile)
    options = MeasureOptions(
        steps, inter_op_threads, intra_op_threads, grappler, onednn, compiled, timeout
    )
    return run_in_child(job, options)
