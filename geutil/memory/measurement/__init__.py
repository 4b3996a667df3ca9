"""Measures a step in a fresh process, which runs a `Job`, for a `Measurement`."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from geutil.errors import MeasurementError
from geutil.memory.measurement.jobs import GraphJob, Job, MeasureOptions, job_of
from geutil.memory.timeline import Measurement

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
