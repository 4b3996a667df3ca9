"""The pickles between the two processes: the job, and the measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from geutil.memory.placement import Task
from geutil.memory.sizes import megabytes
from geutil.memory.timeline import Timeline

TRACE = "allocation records of a traced Session"
ALLOCATOR = "allocator statistics"
RESIDENT = "resident-set high-water mark"


@dataclass(frozen=True)
class Environment:
    """What a measurement depends on besides the graph.

    Attributes:
        tensorflow: its version.
        device: the device whose memory was measured, for example "CPU:0".
        onednn: whether oneDNN was on.
        grappler: whether Grappler was on.
        jit_compile: whether XLA compiled the step.
        inter_op_threads: how many ops could run at once; None is TensorFlow's default.
        intra_op_threads: how many threads could share one op; None is the default.
    """

    tensorflow: str
    device: str
    onednn: bool
    grappler: bool
    jit_compile: bool
    inter_op_threads: int | None
    intra_op_threads: int | None

    def __str__(self) -> str:
        def on(flag: bool) -> str:
            return "on" if flag else "off"

        def threads(number: int | None) -> str:
            return "default" if number is None else str(number)

        return (
            f"TensorFlow {self.tensorflow} on {self.device}, oneDNN {on(self.onednn)}, "
            f"Grappler {on(self.grappler)}, XLA {on(self.jit_compile)}, "
            f"threads: inter-op {threads(self.inter_op_threads)}, "
            f"intra-op {threads(self.intra_op_threads)}"
        )


@dataclass(frozen=True)
class DeviceMeasurement:
    """What one device of a step needed, above what it held before.

    Attributes:
        device: its full name.
        trace_peak: as in `Measurement`, of what the device made and received.
        allocator_peak: that of the device's process; None where it keeps no statistics,
            or where several devices are of one process.
        resident_peak: how far the device's process grew; None likewise.
        timeline: the memory of the device op by op; None where there are no records.
    """

    device: str
    trace_peak: int | None
    allocator_peak: int | None
    resident_peak: int | None
    timeline: Timeline | None

    @property
    def peak(self) -> int | None:
        """The peak in bytes, from the best source there is; None without any."""
        for peak in (self.trace_peak, self.allocator_peak, self.resident_peak):
            if peak is not None:
                return peak
        return None

    def __str__(self) -> str:
        peaks = [
            (TRACE, self.trace_peak),
            (ALLOCATOR, self.allocator_peak),
            (RESIDENT, self.resident_peak),
        ]
        parts = [f"{megabytes(p)} by {name}" for name, p in peaks if p is not None]
        return f"{self.device}: {', '.join(parts) or 'nothing'}"


@dataclass(frozen=True)
class Measurement:
    """What a step needed, above what the process held before it.

    Variables, arguments and feeds are held before, and are not counted.

    Attributes:
        trace_peak: the peak by the allocation records of a traced step: exact, in
            the bytes that were asked for. A function is traced as a Session that runs
            its graph, which may order the ops a little differently. None where there
            are no records.
        allocator_peak: the peak by the statistics of TensorFlow's allocator, which
            counts the chunks that it hands out: up to twice what was asked for. On the
            CPU it counts nothing at all of what is smaller than 256 KiB. None where it
            keeps none: on the CPU with oneDNN off.
        resident_peak: how far the process grew. Beside the step it holds what
            Grappler and XLA needed to compile it, and what the allocator keeps
            unused. None where the system does not tell: elsewhere than on Linux.
        timeline: the memory op by op; None where there are no records.
        seconds: the time of each step; the first step, which compiles, is not one.
        environment: what else the figures depend on.
        partly_compiled: whether XLA compiles calls in the step. The records, and the
            timeline, lack what these make and hold; the allocator counts it. So the
            larger of both figures is the peak.
        devices: the devices of the step by name, each for itself. Of several tasks, the
            peaks and the timeline above are those of the fullest one; of several
            devices of one process, those of all together.
    """

    trace_peak: int | None
    allocator_peak: int | None
    resident_peak: int | None
    timeline: Timeline | None
    seconds: tuple[float, ...]
    environment: Environment
    partly_compiled: bool = False
    devices: tuple[DeviceMeasurement, ...] = ()

    def peak_of(self, device: str) -> int | None:
        """Return the peak of a device, by its full name; None if it was not there."""
        peaks = [row.peak for row in self.devices if row.device == device]
        return peaks[0] if peaks else None

    @property
    def steps(self) -> int:
        """How many steps were timed."""
        return len(self.seconds)

    @property
    def peak(self) -> int:
        """The peak in bytes, from the best source there is."""
        return self._best[0]

    @property
    def source(self) -> str:
        """Where `peak` comes from."""
        return self._best[1]

    @property
    def _best(self) -> tuple[int, str]:
        for peak, source in self._peaks():
            if peak is not None:
                return peak, source
        return 0, "nothing"

    def _peaks(self) -> list[tuple[int | None, str]]:
        peaks = [
            (self.trace_peak, TRACE),
            (self.allocator_peak, ALLOCATOR),
            (self.resident_peak, RESIDENT),
        ]
        if self.partly_compiled and (self.allocator_peak or 0) > (self.trace_peak or 0):
            peaks[:2] = reversed(peaks[:2])
        return peaks

    def __str__(self) -> str:
        lines = [f"peak {megabytes(self.peak)} by {self.source} (1 MB = 10^6 bytes)"]
        lines += [
            f"  {source}: {'none' if peak is None else megabytes(peak)}"
            for peak, source in self._peaks()
            if source != self.source
        ]
        times = f"{median(self.seconds):.3g} s" if self.seconds else "none"
        lines += [f"  step time: {times} (median of {self.steps})"]
        lines.append(f"  {self.environment}")
        if len(self.devices) > 1:
            lines += [f"  {row}" for row in self.devices]
        return "\n".join(lines)


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
    """A variable of a graph.

    Attributes:
        op: the op that makes its handle or, of a version 1 variable, its reference.
        key: variables of the same key are one.
        dtype: the name of its dtype.
        value: its value as an array; None for what `initial` yields.
        initial: the tensor of the initial graph that holds its value, else None.
    """

    op: str
    key: str
    dtype: str
    value: Any = None
    initial: str | None = None


@dataclass(frozen=True)
class GraphJob:
    """A graph to run.

    Attributes:
        graph_def: the serialized `GraphDef`; every resource variable is a VarHandleOp.
        op_types: the types of its ops by name.
        fetches: the names of tensors, and of ops to run.
        feeds: values by tensor name.
        variables: what it reads and assigns.
        initial_graph_def: the serialized `GraphDef` that computes initial values.
        as_function: whether to run it as a function, and not in a Session.
        cpus: how many CPU devices it names.
        tasks: the tasks of a cluster that it names, the Session's target first; () if
            it runs in one process.
    """

    graph_def: bytes
    op_types: Mapping[str, str]
    fetches: tuple[str, ...]
    feeds: Mapping[str, Any]
    variables: tuple[VariableSpec, ...]
    initial_graph_def: bytes
    as_function: bool
    cpus: int
    tasks: tuple[Task, ...] = ()


@dataclass(frozen=True)
class CallJob:
    """A callable to call.

    Attributes:
        pickled: the pickle of (callable, positional arguments, keyword arguments).
    """

    pickled: bytes


Job = GraphJob | CallJob
