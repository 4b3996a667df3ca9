"""The memory of a step on several devices, each for itself, and their exchanges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.graph.runtime import share_memory
from geutil.graph.types import GivenShapes, Operation, Tensor, type_name
from geutil.memory import executor
from geutil.memory.bounds import THREADS, WorstCase, check_threads, worst_of
from geutil.memory.buffers import Simulation
from geutil.memory.costs import tensor_bytes
from geutil.memory.kernels import onednn
from geutil.memory.program import Node, Program
from geutil.memory.read import constant_bytes, variable_bytes
from geutil.memory.step_prediction import Step, executed_step, fetches_of, step_program
from geutil.memory.timeline import LiveTensor, Measurement, Timeline
from geutil.select.selections import graph_of_all
from geutil.sizes import size_text

_RULES = "CPU:0"
"""The device whose rules hold for all: tensors in a host's memory count, too."""
_SHOWN = 3
"""How many tensors of a cut the text names."""


@dataclass(frozen=True)
class Cut:
    """The tensors that go from one device to another in a step.

    Attributes:
        source: the device that sends, by its full name.
        target: the device that receives.
        tensors: the names of the tensors, in the step after Grappler. Each is sent
            once, however many ops read it there.
        bytes: their total size.
        copied: whether each has a second buffer at the target. The CPU devices of one
            process pass tensors without a copy.
    """

    source: str
    target: str
    tensors: tuple[str, ...]
    bytes: int
    copied: bool

    def __str__(self) -> str:
        names = ", ".join(f"'{name}'" for name in self.tensors[:_SHOWN])
        rest = len(self.tensors) - _SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        way = "" if self.copied else ", in one memory"
        return (
            f"{self.source} -> {self.target}: {size_text(self.bytes)}{way}: "
            f"{names}{more}"
        )


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device in a step.

    Attributes:
        device: its full name.
        timeline: the prediction, with the device's own variables and constants.
        worst: the most that it holds under any schedule; None if not requested.
        measured: the measured peak in bytes; None if there is none.
        received: the bytes that it receives.
        sent: the bytes that it sends.
    """

    device: str
    timeline: Timeline = field(repr=False)
    worst: WorstCase | None = field(repr=False)
    measured: int | None
    received: int
    sent: int

    @property
    def peak(self) -> int:
        """The predicted peak in bytes, variables and constants apart."""
        return self.timeline.peak

    def __str__(self) -> str:
        index = self.timeline.peak_index
        where = "" if index is None else f" at '{self.timeline.moments[index].op}'"
        parts = [f"predicted {size_text(self.peak)}{where}"]
        if self.worst is not None:
            parts.append(f"at most {size_text(self.worst.peak)}")
        if self.measured is not None:
            parts.append(f"measured {size_text(self.measured)}")
        parts += [
            f"variables {size_text(self.timeline.variable_bytes)}",
            f"constants {size_text(self.timeline.constant_bytes)}",
            f"receives {size_text(self.received)}",
            f"sends {size_text(self.sent)}",
        ]
        return f"{self.device}: {', '.join(parts)}"


@dataclass(frozen=True)
class MemoryByDevice:
    """The memory of each device of a step, and the tensors that cross between them.

    Attributes:
        devices: the devices, sorted by name.
        cuts: the tensors from each device to each other one, sorted by device names.
    """

    devices: tuple[DeviceMemory, ...]
    cuts: tuple[Cut, ...]

    def __getitem__(self, device: str) -> DeviceMemory:
        """Return a device's memory, by its full name."""
        for row in self.devices:
            if row.device == device:
                return row
        names = ", ".join(row.device for row in self.devices)
        raise KeyError(f"{device}; the devices of the step are {names}")

    def __str__(self) -> str:
        lines = [f"peaks of {len(self.devices)} device(s) (1 MB = 10^6 bytes)"]
        lines += [f"  {row}" for row in self.devices]
        if self.cuts:
            lines += ["sent in a step", *(f"  {cut}" for cut in self.cuts)]
        return "\n".join(lines)


@tf.autograph.experimental.do_not_convert
def predict_by_device(
    ys_or_fetches: Any,
    *,
    feeds: Iterable[Tensor] | None = None,
    shapes: GivenShapes | None = None,
    default: str | None = None,
    worst: bool = False,
    threads: int | None = THREADS,
    measured: Measurement | None = None,
    grappler: bool = True,
    onednn: bool | None = None,
) -> MemoryByDevice:
    """Predict the memory of each device in one step, and the tensors that cross.

    The step is placed on its devices, optimized and partitioned as by a Session, and
    simulated with one inter-op thread for each device, each of which runs an op in
    turn. Buffers are counted as by `predict`, with the variables and constants of each
    device separate. A tensor that another device reads is sent there once, as soon as
    it is made: the sender holds it until then, and the receiver from then until its
    last reader there has run. The CPU devices of one process share a memory: there the
    buffer stays the sender's until the last reader on any device has run. Feeds enter
    and fetches leave at the default device. The devices that the graph names are
    assumed to exist. A function counts on the device of its call.

    Args:
        ys_or_fetches: the fetches of the step, as in `predict`.
        feeds: as in `predict`.
        shapes: as in `predict`.
        default: the device of ops that name none, which is that of the Session's
            target. None: the first task that the graph names, preferably of a job other
            than "ps".
        worst: also bound the memory of each device under any schedule.
        threads: how many ops run at once in that bound, on all devices together.
        measured: a measurement of the same step, to report its peaks as well.
        grappler: as in `predict`.
        onednn: as in `predict`.

    Returns:
        A row for each device, and a cut for each pair that exchanges tensors.

    Raises:
        ArgumentTypeError: a fetch is not an op or tensor of a graph, `default` not a
            device, `measured` not a `Measurement`, or `threads` not a number from 1 up.
        SelectionError: the fetches belong to different graphs.
        PredictionError: there are no fetches, or sizes depend on unknown dimensions.
        MissingExtraError: OR-Tools is not installed, with `worst`.

    Cost: that of `predict`; besides, linear in devices times ops. With `worst`, that of
        `worst_case` for each device.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.memory import predict_by_device
        >>> with tf.Graph().as_default():
        ...     with tf.device("/job:worker/task:0"):
        ...         x = tf.compat.v1.placeholder(tf.float32, [500, 1000])
        ...         y = tf.matmul(x, tf.ones([1000, 1000]), name="y")
        ...     with tf.device("/job:worker/task:1"):
        ...         z = tf.reduce_sum(y)
        >>> found = predict_by_device(z)
        >>> [row.peak for row in found.devices]
        [2000000, 2000004]
        >>> [(cut.tensors, cut.bytes) for cut in found.cuts]
        [(('y:0',), 2000000), (('Sum:0',), 4)]
    """
    if not isinstance(measured, Measurement | None):
        raise ArgumentTypeError(
            f"measured is what geutil.memory.measure returns, got {type_name(measured)}"
        )
    check_threads(threads)
    step = executed_step(
        ys_or_fetches, feeds, shapes, grappler, onednn, default, rules=_RULES
    )
    names = sorted({*step.devices, step.home})
    parts = _split(step, names)
    step.check()
    timelines = _timelines(step, parts, names)
    worst_cases = _worst_cases(parts, names, threads) if worst else {}
    rows = [
        DeviceMemory(
            name,
            timelines[number],
            worst_cases.get(number),
            measured.peak_of(name) if measured is not None else None,
            sum(c.bytes for c in parts.crossings if c.target == number),
            sum(c.bytes for c in parts.crossings if c.source == number),
        )
        for number, name in enumerate(names)
    ]
    return MemoryByDevice(tuple(rows), _cuts(parts, names))


def device_peaks(
    ys_or_fetches: Any, devices: Sequence[str], device_of: Callable[[Operation], str]
) -> tuple[int, ...]:
    """Predict the peak of a step on each of several devices, one thread to each."""
    # As `predict`, without Grappler and oneDNN; variables, constants and feeds do not
    # count. A received tensor is held from the earliest moment at which it can arrive.
    program = step_program(ys_or_fetches)
    graph: Any = graph_of_all(fetches_of(ys_or_fetches))
    here: dict[str, set[int]] = {device: set() for device in devices}
    made: dict[int, Tensor] = {}
    for i, node in enumerate(program.nodes):
        op = graph.get_operation_by_name(node.name)
        here[device_of(op)].add(i)
        # A received variable or constant has the size of its tensor.
        made.update(zip(node.outputs, op.outputs, strict=False))

    def size_of(tensor: int) -> int:
        return program.sizes[tensor] or tensor_bytes(made[tensor])

    own = [program.held_on(here[device], received=size_of) for device in devices]
    return tuple(executor.simulate(part).peak for part in own)


@dataclass(frozen=True)
class Crossing:
    """A tensor that is sent to another device; tensors and devices are numbers."""

    tensor: int
    source: int
    target: int
    bytes: int
    # Devices of one memory pass a tensor on: no second buffer.
    copied: bool


@dataclass(frozen=True)
class Split:
    """A program with its receipts, each right behind the maker of its tensor."""

    program: Program
    # The device of each node, by its name.
    devices: dict[str, int]
    crossings: Sequence[Crossing]

    def numbers(self, program: Program) -> list[int]:
        """Return the device of each node of the program, whatever its order is now."""
        return [self.devices[node.name] for node in program.nodes]


def split(
    program: Program,
    devices: Sequence[int],
    size_of: Callable[[int], int],
    shared: Callable[[int, int], bool],
    home: int,
) -> Split:
    """Return a program with a receipt for each tensor and device that it is sent to."""
    # Each node comes after its inputs, and fetched tensors are sent to the device
    # `home`. `size_of` knows a tensor's bytes also where `Program.sizes` has 0;
    # `shared` tells whether one device reads another's tensors where they are.
    made_on = {tensor: devices[i] for tensor, i in program.makers.items()}
    reads = {(t, home) for t in program.fetched}
    for node, device in zip(program.nodes, devices, strict=True):
        reads.update((t, device) for t in node.inputs)
    crossings = [
        Crossing(t, made_on[t], device, size_of(t), not shared(made_on[t], device))
        for t, device in sorted(reads)
        if made_on[t] != device
    ]
    # Devices of one memory pass it on: no buffer of its own.
    copied = [crossing for crossing in crossings if crossing.copied]
    sizes = [*program.sizes, *(crossing.bytes for crossing in copied)]
    there = {(c.tensor, c.target): n for n, c in enumerate(copied, len(program.sizes))}
    targets: dict[int, list[int]] = {}
    for tensor, target in there:
        targets.setdefault(tensor, []).append(target)
    nodes: list[Node] = []
    device_of: dict[str, int] = {}
    place: list[int] = []
    for node, device in zip(program.nodes, devices, strict=True):
        place.append(len(nodes))
        # A variable is where its updates are: those tensors are never received.
        inputs = [there.get((t, device), t) for t in node.inputs]
        # A sent tensor lies where a network card could read it: a kernel takes over an
        # input for that only if the input does, too. A received one may still be in the
        # hands of the transport when its first reader starts: it is not taken over.
        reuses = [
            (out, at)
            for out, at in node.reuses
            if inputs[at] == node.inputs[at]
            and (node.outputs[out] not in targets or inputs[at] in targets)
        ]
        nodes.append(node.changed(inputs=inputs, reuses=reuses))
        device_of[node.name] = device
        for out, tensor in enumerate(node.outputs):
            for target in targets.get(tensor, ()):
                name = f"{node.name}:{out}{executor.RECEIVED} {target}"
                nodes.append(
                    Node(name, executor.RECEIVE, [tensor], [there[tensor, target]])
                )
                device_of[name] = target
    nodes = [node.renumbered(place) for node in nodes]
    fetched = [there.get((t, home), t) for t in program.fetched]
    program = replace(program, nodes=nodes, sizes=sizes, fetched=fetched)
    return Split(program, device_of, crossings)


def _split(step: Step, names: Sequence[str]) -> Split:
    """Return the step with the receipts of its devices."""
    number_of = {name: number for number, name in enumerate(names)}
    tensors = {
        number: tensor
        for node, op in zip(step.program.nodes, step.ops, strict=True)
        for number, tensor in zip(node.outputs, op.outputs, strict=False)
    }

    def size_of(tensor: int) -> int:
        # A tensor that is held all the time counts 0 in a program, and is sent all the
        # same.
        size = step.program.sizes[tensor]
        return size or (step.size_of(tensors[tensor]) if tensor in tensors else 0)

    return split(
        step.program,
        [number_of[device] for device in step.devices],
        size_of,
        lambda one, other: share_memory(names[one], names[other]),
        number_of[step.home],
    )


def _cuts(parts: Split, names: Sequence[str]) -> tuple[Cut, ...]:
    """Return the tensors that cross between each two devices."""
    tensor_names = {
        tensor: f"{node.name}:{i}"
        for node in parts.program.nodes
        for i, tensor in enumerate(node.outputs)
    }
    crossings: dict[tuple[int, int], list[Crossing]] = {}
    for crossing in parts.crossings:
        crossings.setdefault((crossing.source, crossing.target), []).append(crossing)
    return tuple(
        Cut(
            names[source],
            names[target],
            tuple(tensor_names[c.tensor] for c in found),
            sum(c.bytes for c in found),
            found[0].copied,
        )
        for (source, target), found in sorted(crossings.items())
    )


def _worst_cases(
    parts: Split, names: Sequence[str], threads: int | None
) -> dict[int, WorstCase]:
    """Return the most that each device can hold, by number."""
    program = onednn.with_onednn(parts.program)
    devices = parts.numbers(program)
    found = {}
    for number in range(len(names)):
        here = {i for i, device in enumerate(devices) if device == number}
        worst = worst_of(program.held_on(here, in_place=True), threads)
        found[number] = replace(worst, tensors=tuple(map(_plain, worst.tensors)))
    return found


def _timelines(step: Step, parts: Split, names: Sequence[str]) -> list[Timeline]:
    """Return the timeline of each device, of the order that has its median peak."""
    runs: list[list[Timeline]] = [[] for _ in names]
    for seed in range(executor.SEEDS):
        program = onednn.with_onednn(parts.program, seed)
        devices = parts.numbers(program)
        run = executor.simulate(program, executor.joint_order(program, devices, seed))
        whole = run.timeline()
        for number in range(len(names)):
            runs[number].append(_own_part(run, whole, devices, number))
    held = {name: [0, 0] for name in names}
    for op, device in zip(step.ops, step.devices, strict=True):
        held[device][0] += variable_bytes(op)
        held[device][1] += constant_bytes([op], step.size_of)
    return [
        replace(
            step.timed(
                sorted(runs[number], key=lambda line: line.peak)[executor.SEEDS // 2]
            ),
            variable_bytes=held[name][0],
            constant_bytes=held[name][1],
        )
        for number, name in enumerate(names)
    ]


def _own_part(
    run: Simulation, whole: Timeline, devices: Sequence[int], device: int
) -> Timeline:
    """Return the timeline of one device: its ops, and the buffers that they made."""
    own = [at for at, i in enumerate(run.order) if devices[i] == device]
    made_here = {whole.moments[at].op for at in own}
    lives = [life for life in whole.lifetimes if life.op in made_here]
    moves = [0] * (len(run.order) + 1)
    for life in lives:
        moves[life.first] += life.tensor.bytes
        moves[life.last + 1] -= life.tensor.bytes
    levels = list(accumulate(moves))
    peak = max(own, key=levels.__getitem__, default=-1)
    at_peak = [life.tensor for life in lives if life.first <= peak <= life.last]
    moments = ((levels[at], whole.moments[at]) for at in own)
    return replace(
        whole,
        moments=tuple(replace(m, op=_plain_name(m.op), bytes=n) for n, m in moments),
        at_peak=tuple(sorted(map(_plain, at_peak), key=lambda live: -live.bytes)),
        lifetimes=tuple(
            replace(
                life,
                tensor=_plain(life.tensor),
                op=_plain_name(life.op),
                first=bisect_left(own, life.first),
                last=bisect_right(own, life.last) - 1,
            )
            for life in lives
        ),
    )


def _plain(live: LiveTensor) -> LiveTensor:
    return replace(live, name=_plain_name(live.name))


def _plain_name(name: str) -> str:
    """Return the name of a received tensor or its receipt without their numbers."""
    before, mark, _ = name.partition(executor.RECEIVED)
    return before + mark
