"""The measuring process: `python -m geutil.memory.measurement.child JOB RESULT`."""

from __future__ import annotations

import gc
import pickle
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import MeasurementError
from geutil.graph import creation, functions, runtime
from geutil.graph.function_calls import COMPILED
from geutil.graph.op_types import MERGES
from geutil.graph.protos import all_nodes
from geutil.memory.measurement import (
    CallJob,
    GraphJob,
    Job,
    MeasureOptions,
    VariableSpec,
)
from geutil.memory.measurement.trace import (
    CONTROL,
    TRANSFER,
    maker_of,
    timeline_of,
    timelines_by_device,
)
from geutil.memory.timeline import DeviceMeasurement, Environment, Measurement, Timeline

Step = Callable[[], Any]
_ALIGNMENT = 64
"""Bytes, of the buffers of TensorFlow's kernels."""
_TRIES = 50
"""Traced steps, of which one has a record of each transfer."""


class SessionStep:
    """A step that runs a graph in a Session, of a task of a cluster if there is one."""

    def __init__(
        self,
        job: GraphJob,
        options: MeasureOptions,
        values: dict[str, Any],
        target: str = "",
    ) -> None:
        graph = _imported(job.graph_def)
        self._fetches = list(job.fetches)
        self._feeds = {name: aligned(value) for name, value in job.feeds.items()}
        self._session = tf.compat.v1.Session(
            target, graph=graph, config=session_config(job, options)
        )
        _assign(self._session, job.variables, values)

    def __call__(self) -> None:
        """Run one step."""
        self._session.run(self._fetches, self._feeds)

    def close(self) -> None:
        """Close the Session; a task that has ended lets this wait without end."""
        self._session.close()

    def trace(self) -> Any:
        """Run a step, or some; return the `RunMetadata` of one with all records."""
        return complete_trace(self._traced)

    def _traced(self) -> Any:
        metadata = tf.compat.v1.RunMetadata()
        options = tf.compat.v1.RunOptions(
            trace_level=tf.compat.v1.RunOptions.FULL_TRACE, output_partition_graphs=True
        )
        self._session.run(self._fetches, self._feeds, options, metadata)
        return metadata


def complete_trace(trace: Callable[[], Any]) -> Any:
    """Return the first `RunMetadata` of `trace` with a record of each transfer."""
    # TensorFlow switches the records of transfers on when a traced step begins, and
    # waits for no worker to have done so: earlier transfers have no record. A few steps
    # in a hundred lack some, more where the machine is busy.
    for _ in range(_TRIES):
        run_metadata = trace()
        lacking = unrecorded_transfers(run_metadata)
        if not lacking:
            return run_metadata
    raise MeasurementError(
        f"the records of each of {_TRIES} traced steps lack transfers between "
        f"processes (of the last one {', '.join(lacking)}): measure again while the "
        "machine is less busy"
    )


def unrecorded_transfers(run_metadata: Any) -> list[str]:
    """Return the edges between processes that carried more than is recorded."""
    recorded: Counter[tuple[str, str]] = Counter()
    ran: Counter[tuple[str, str]] = Counter()
    for own in run_metadata.step_stats.dev_stats:
        for stats in own.node_stats:
            ran[own.device, stats.node_name] += 1
            if match := TRANSFER.search(stats.timeline_label):
                recorded[match[1], match[3]] += 1
    lacking = set()
    for part in run_metadata.partition_graphs:
        carried = _carried(part.node, ran)
        for node in part.node:
            # A `_Recv` of the client takes a feed, which no process sends.
            if node.op == "_Recv" and not node.attr["client_terminated"].b:
                edge = node.attr["tensor_name"].s.decode()
                sender = node.attr["send_device"].s.decode()
                ends = (
                    device.partition("/device:")[0] for device in (sender, node.device)
                )
                # Within one process, tensors are handed over without a record.
                is_far = len(set(ends)) > 1
                if is_far and recorded[edge, node.device] < carried[node.name]:
                    lacking.add(edge)
    return sorted(lacking)


def _carried(nodes: Sequence[Any], ran: Mapping[tuple[str, str], int]) -> Counter[str]:
    """Return how often, at least, each node of a part had a result that was read."""
    carried: Counter[str] = Counter()
    for node in nodes:
        # A merge runs with whichever of its inputs there is; a send is not recorded.
        times = ran.get((node.device, node.name), 0) if node.op not in MERGES else 0
        for name in node.input:
            if not name.startswith(CONTROL):
                maker, _ = maker_of(name)
                carried[maker] = max(carried[maker], times, node.op == "_Send")
    return carried


class FunctionStep:
    """A step that calls a graph as a function, compiled if that is asked for."""

    def __init__(
        self, job: GraphJob, options: MeasureOptions, values: dict[str, Any]
    ) -> None:
        # A function holds its variables weakly.
        self._variables = {key: tf.Variable(value) for key, value in values.items()}
        constants = map(tf.constant, job.feeds.values())
        self._feeds = {f"feed_{i}": value for i, value in enumerate(constants)}
        function = _function(job, self._variables, self._feeds)

        def call(**arguments: Any) -> Any:
            return functions.call_function(function, arguments)

        self._call = call
        if options.jit_compile:
            self._call = tf.function(call, jit_compile=True, autograph=False)

    def __call__(self) -> None:
        """Run one step, to its end."""
        self._call(**self._feeds)
        # The kernels of a GPU run behind the program.
        tf.test.experimental.sync_devices()


def initial_values(job: GraphJob) -> dict[str, Any]:
    """Return the values that the variables start with, by key."""
    values = {spec.key: spec.value for spec in job.variables}
    initials = {s.key: s.initial for s in job.variables if s.initial is not None}
    if initials:
        graph = _imported(job.initial_graph_def)
        with tf.compat.v1.Session(graph=graph) as session:
            values |= session.run(initials)
    return values


def aligned(array: Any) -> Any:
    """Return an equal array that a Session takes as it is, where it copies others."""
    if array.dtype == object:
        return array
    room = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    view = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def _imported(serialized: bytes) -> tf.Graph:
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(
            tf.compat.v1.GraphDef.FromString(serialized), name=""
        )
    return graph


def session_config(job: GraphJob, options: MeasureOptions) -> Any:
    """Return the `ConfigProto` of a Session, and of a server that runs it."""
    config = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=options.inter_op_threads or 0,
        intra_op_parallelism_threads=options.intra_op_threads or 0,
        device_count={"CPU": job.cpus},
        allow_soft_placement=True,
    )
    rewriting = config.graph_options.rewrite_options
    rewriting.disable_meta_optimizer = not options.grappler
    return config


def _assign(
    session: Any, specs: Sequence[VariableSpec], values: dict[str, Any]
) -> None:
    """Give the variables of a Session's graph their values."""
    feeds, assigns = {}, []
    with session.graph.as_default():
        for spec in specs:
            (holder,) = session.graph.get_operation_by_name(spec.op).outputs
            value = values[spec.key]
            placeholder = tf.compat.v1.placeholder(spec.dtype, np.shape(value))
            feeds[placeholder] = value
            if holder.dtype == tf.resource:
                assign = tf.raw_ops.AssignVariableOp(resource=holder, value=placeholder)
            else:
                assign = tf.raw_ops.Assign(ref=holder, value=placeholder).op
            assigns.append(assign)
    # In one run: each run with new ops costs time for the whole graph.
    session.run(assigns, feeds)


def _function(
    job: GraphJob, variables: dict[str, Any], feeds: dict[str, tf.Tensor]
) -> Any:
    """Return the graph as a ConcreteFunction over real variables."""
    graph_def = tf.compat.v1.GraphDef.FromString(job.graph_def)
    by_op = {spec.op: variables[spec.key] for spec in job.variables}
    for node in graph_def.node:
        if node.name in by_op:
            # A function gets its variables' handles from outside.
            node.op = "Placeholder"
            node.ClearField("attr")
            node.attr["dtype"].type = tf.resource.as_datatype_enum
    graph = functions.new_function_graph("step")
    with graph.as_default():
        inputs = {
            name: tf.compat.v1.placeholder(value.dtype, value.shape)
            for name, value in feeds.items()
        }
        replaced = dict(zip(job.feeds, inputs.values(), strict=True))
        for op, variable in by_op.items():
            replaced[f"{op}:0"] = creation.capture(graph, variable.handle)
        elements = tf.graph_util.import_graph_def(
            graph_def, replaced, return_elements=list(job.fetches), name=""
        )
    outputs = {
        f"fetch_{i}": e for i, e in enumerate(elements) if isinstance(e, tf.Tensor)
    }
    effects = [e for e in elements if isinstance(e, tf.Operation)]
    return functions.build_function(
        graph, inputs, outputs, effects, list(variables.values())
    )


_STATUS = Path("/proc/self/status")


Meter = Callable[[], int | None]
"""Returns the highest growth in bytes since it was made, None where it is not known."""


def resident_meter() -> Meter:
    """Measure how far the process grows from now on. Linux only."""
    try:
        start = _status("VmRSS")
        # This resets the high-water mark (proc(5)).
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return lambda: None
    return lambda: max(_status("VmHWM") - start, 0)


def _status(field: str) -> int:
    """Return a size from the kernel's notes on this process, in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"{_STATUS} has no {field}")
    return int(match[1]) * 1024


def allocator_meter(device: str) -> Meter:
    """Measure the bytes that TensorFlow's allocator hands out from now on."""
    info = partial(tf.config.experimental.get_memory_info, device)
    try:
        tf.config.experimental.reset_memory_stats(device)
        start = info()["current"]
    # On the CPU there are statistics with oneDNN's allocator only.
    except ValueError:
        return lambda: None
    return lambda: int(info()["peak"] - start)


def run(job: Job, options: MeasureOptions) -> Measurement:
    """Run the steps of a job and measure them; once in a process."""
    _configure(job, options)
    device = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
    step = _step(job, options)
    gc.collect()
    # The process keeps the memory of the first step, so its growth counts from here.
    resident = resident_meter()
    step()
    # Objects that the first step makes and keeps are no part of a step's peak.
    allocator = allocator_meter(device)
    seconds = tuple(timed(step) for _ in range(options.steps))
    allocator_peak, resident_peak = allocator(), resident()
    timeline, devices = _traced(job, options, step, device)
    return Measurement(
        trace_peak=None if timeline is None else timeline.peak,
        allocator_peak=allocator_peak,
        resident_peak=resident_peak,
        timeline=timeline,
        seconds=seconds,
        environment=environment_of(options, device),
        partly_compiled=isinstance(job, GraphJob) and has_compiled_calls(job),
        devices=devices,
    )


def environment_of(options: MeasureOptions, device: str) -> Environment:
    """Return the surroundings of the figures of a device."""
    return Environment(
        tf.__version__,
        device,
        runtime.uses_onednn(),
        options.grappler,
        options.jit_compile,
        options.inter_op_threads,
        options.intra_op_threads,
    )


def has_compiled_calls(job: GraphJob) -> bool:
    """Return whether XLA compiles functions that a graph calls."""
    graph_def = tf.compat.v1.GraphDef.FromString(job.graph_def)
    marked = (*all_nodes(graph_def), *graph_def.library.function)
    return any(COMPILED in m.attr and m.attr[COMPILED].b for m in marked)


def _configure(job: Job, options: MeasureOptions) -> None:
    """Make the settings that must be made before TensorFlow starts."""
    if options.inter_op_threads is not None:
        tf.config.threading.set_inter_op_parallelism_threads(options.inter_op_threads)
    if options.intra_op_threads is not None:
        tf.config.threading.set_intra_op_parallelism_threads(options.intra_op_threads)
    if not options.grappler:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    tf.config.set_soft_device_placement(True)
    # TensorFlow has one CPU device by default, and the graph names more.
    if isinstance(job, GraphJob) and job.cpus > 1:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * job.cpus
        )


def _step(job: Job, options: MeasureOptions) -> Step:
    if isinstance(job, CallJob):
        function, args, kwargs = pickle.loads(job.pickled)
        return partial(function, *args, **kwargs)
    kind = FunctionStep if job.as_function else SessionStep
    return kind(job, options, initial_values(job))


def timed(step: Step) -> float:
    """Return the seconds that a step takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _traced(
    job: Job, options: MeasureOptions, step: Step, device: str
) -> tuple[Timeline | None, tuple[DeviceMeasurement, ...]]:
    """Return the timeline of one more step, None without records, and by device."""
    if isinstance(job, CallJob) or options.jit_compile:
        return None, ()
    values = initial_values(job)
    if not isinstance(step, SessionStep):
        step = SessionStep(job, options, values)
        # Grappler works and constants are made in the first step.
        step()
    metadata = step.trace()
    size = sum(int(value.nbytes) for value in values.values())
    timeline = timeline_of(metadata, job.op_types, device, variable_bytes=size)
    by_device = timelines_by_device(metadata, job.op_types, sizes_of(job, values))
    rows = [
        DeviceMeasurement(n, own.peak, None, None, own) for n, own in by_device.items()
    ]
    return timeline, tuple(rows)


def sizes_of(job: GraphJob, values: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of each variable by the name of its op."""
    return {spec.op: int(np.asarray(values[spec.key]).nbytes) for spec in job.variables}


def main(job_path: str, result_path: str) -> None:
    """Run the pickled job of one file and pickle the measurement into another."""
    job, options = pickle.loads(Path(job_path).read_bytes())
    Path(result_path).write_bytes(pickle.dumps(run(job, options)))


if __name__ == "__main__":
    main(*sys.argv[1:])
