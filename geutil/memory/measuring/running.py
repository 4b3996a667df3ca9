"""Runs a job in the measuring process."""

from __future__ import annotations

import gc
import time

import tensorflow as tf

from geutil.graph.snapshots import uses_onednn
from geutil.memory.measuring.job import CallJob, GraphJob, Job, Options
from geutil.memory.measuring.measurement import Environment, Measurement
from geutil.memory.measuring.process import AllocatorMeter, ResidentMeter
from geutil.memory.measuring.steps import (
    FunctionStep,
    SessionStep,
    Step,
    call_step,
    initial_values,
)
from geutil.memory.measuring.trace import timeline_of
from geutil.memory.timeline import Timeline


def run(job: Job, options: Options) -> Measurement:
    """Run the steps of a job and measure them; once in a process."""
    _configure(job, options)
    device = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
    step, session_step = _step(job, options)
    gc.collect()
    resident = ResidentMeter()
    step()
    allocator = AllocatorMeter(device)
    seconds = tuple(_timed(step) for _ in range(options.steps))
    allocator_peak, resident_peak = allocator.read(), resident.read()
    timeline = _traced(job, options, session_step, device)
    return Measurement(
        trace_peak=None if timeline is None else timeline.peak,
        allocator_peak=allocator_peak,
        resident_peak=resident_peak,
        timeline=timeline,
        seconds=seconds,
        environment=Environment(
            tf.__version__,
            device,
            uses_onednn(),
            options.grappler,
            options.jit_compile,
            options.inter_op_threads,
            options.intra_op_threads,
        ),
    )


def _configure(job: Job, options: Options) -> None:
    """Set what must be set before TensorFlow starts."""
    if options.inter_op_threads is not None:
        tf.config.threading.set_inter_op_parallelism_threads(options.inter_op_threads)
    if options.intra_op_threads is not None:
        tf.config.threading.set_intra_op_parallelism_threads(options.intra_op_threads)
    if not options.grappler:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    tf.config.set_soft_device_placement(True)
    if isinstance(job, GraphJob) and job.cpus > 1:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * job.cpus
        )


def _step(job: Job, options: Options) -> tuple[Step, SessionStep | None]:
    """Return the step, and the same as a Session's if it is one."""
    if isinstance(job, CallJob):
        return call_step(job), None
    if job.as_function:
        return FunctionStep(job, options, initial_values(job)), None
    step = SessionStep(job, options, initial_values(job))
    return step, step


def _timed(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _traced(
    job: Job, options: Options, step: SessionStep | None, device: str
) -> Timeline | None:
    """Return the timeline of one more step, None if there are no records of it."""
    if isinstance(job, CallJob) or options.jit_compile:
        return None
    values = initial_values(job)
    if step is None:
        step = SessionStep(job, options, values)
        # Grappler works and constants are made in the first step.
        step()
    return timeline_of(
        step.trace(),
        job.op_types,
        device,
        variable_bytes=sum(int(value.nbytes) for value in values.values()),
    )
