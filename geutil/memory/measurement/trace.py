"""The timeline of a traced step, from TensorFlow's records.

Each kernel's allocations are recorded with the microsecond and the bytes asked for, and
the release of each as a negative size under the kernel that allocated it.
"""

# A variable that is changed while its value is still to be read gets a new buffer, and
# one that is assigned takes over the value's. That buffer stays; the old one becomes
# free, once it has been read. It was allocated before the step, so the records know
# nothing of that. Of received tensors the records tell when they came, but not that
# they were allocated, nor when they were released. Their size is that of the sent
# tensor; they are held until their readers have ended, or those of tensors in the same
# buffer.

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import tensorflow as tf

from geutil.graph.op_types import types_in
from geutil.graph.walks import walk
from geutil.memory import program
from geutil.memory.kernels import cpu
from geutil.memory.timeline import TRACE, LiveTensor, Moment, Timeline

# The end of the label of a transfer's record.
TRANSFER = re.compile(r"(\S+) from (\S+) to (\S+)$")
CONTROL = "^"


@dataclass(frozen=True)
class _Buffer:
    """A buffer of a traced step."""

    tensor: LiveTensor
    # The place of the record that made it among those of the device.
    execution: int
    # In microseconds, as is the end: None if it is held to the end.
    begin: int
    end: int | None


def _end(stats: Any) -> int:
    """Return the microsecond in which an execution ended."""
    return int(stats.all_start_micros + stats.all_end_rel_micros)


def maker_of(name: str) -> tuple[str, int]:
    """Return the node and the output that an input names."""
    node, _, place = name.removeprefix(CONTROL).partition(":")
    return node, int(place or 0)


@dataclass(frozen=True)
class _DataEdges:
    """The edges of the graph that ran, but for control edges, by names of its nodes."""

    inputs: Mapping[str, Sequence[tuple[str, int]]]
    readers: Mapping[tuple[str, int], Sequence[Any]]

    @classmethod
    def of(cls, nodes: Iterable[Any]) -> _DataEdges:
        """Return the edges of `NodeDef`s."""
        inputs: dict[str, list[tuple[str, int]]] = {}
        readers: dict[tuple[str, int], list[Any]] = {}
        for node in nodes:
            read = [maker_of(n) for n in node.input if not n.startswith(CONTROL)]
            inputs[node.name] = read
            for tensor in read:
                readers.setdefault(tensor, []).append(node)
        return cls(inputs, readers)


def _updates(
    nodes: Sequence[Any],
    edges: _DataEdges,
    executions: Iterable[Any],
    buffers: Collection[str],
) -> Mapping[str, int]:
    """Map new buffers of variables to the microsecond when the old ones get free."""
    started = {stats.node_name: stats.all_start_micros for stats in executions}
    ended = {stats.node_name: _end(stats) for stats in executions}
    free_at: dict[str, int] = {}
    seen: set[tuple[str, int]] = set()
    for node in nodes:
        assigns = node.op == "AssignVariableOp"
        if node.name not in started or not (assigns or cpu.updates_variable(node.op)):
            continue
        free = ended[node.name]
        handle, *values = edges.inputs[node.name]
        for read in edges.readers[handle]:
            # A read before the change holds the old buffer for all of its readers.
            is_read = read.op == "ReadVariableOp"
            if is_read and started.get(read.name, free) < started[node.name]:
                free = max(free, *(ended.get(n, 0) for n in _readers(read, edges)), 0)
        if assigns:
            for buffer in _taken_over(values[0], edges, buffers, seen):
                free_at[buffer] = free
        else:
            free_at[f"{node.name} (temporary)"] = free
    return free_at


def _taken_over(
    value: tuple[str, int],
    edges: _DataEdges,
    buffers: Collection[str],
    seen: set[tuple[str, int]],
) -> Iterator[str]:
    """Yield the tensors whose buffers a value may lie in."""

    # An op that allocates nothing writes into, or forwards, a buffer of an input: a
    # gradient's is multiplied in place, subtracted from the variable in place,
    # assigned.
    def behind(tensor: tuple[str, int]) -> Sequence[tuple[str, int]]:
        if "{}:{}".format(*tensor) in buffers or tensor in seen:
            return ()
        seen.add(tensor)
        return edges.inputs.get(tensor[0], ())

    names = ("{}:{}".format(*tensor) for tensor in walk([value], behind))
    yield from filter(buffers.__contains__, names)


def _readers(read: Any, edges: _DataEdges) -> list[str]:
    """Return the nodes that read the buffer of a node's only result."""
    readers = list(edges.readers.get((read.name, 0), ()))
    # The list grows while it is gone through.
    for node in readers:
        if cpu.passes_on(node.op):
            readers += edges.readers.get((node.name, 0), ())
    return [node.name for node in readers]


# Events of one microsecond are ordered so: a kernel takes longer on a large buffer, so
# a large buffer that is released was allocated before.
_RELEASE, _START, _ALLOCATION, _RELEASE_AT_ONCE = range(4)
_GPU_ALLOCATOR = re.compile(r"gpu_(async_)?0", re.IGNORECASE)
_STREAM = "/stream:"
# Ops that hand over tensors that are there, and ops of the runtime around the graph.
_NO_WORK = types_in(
    "Const Placeholder VarHandleOp _Arg _HostRecv _HostSend _Recv _Retval _Send"
)


def timeline_of(
    run_metadata: Any,
    op_types: Mapping[str, str],
    device: str,
    *,
    variable_bytes: int,
    on: str | None = None,
) -> Timeline:
    """Return the timeline of a step, traced with its partition graphs."""
    # `op_types` are those of the graph before Grappler changed it. With `device`
    # "GPU:0" the memory of the first GPU counts, else that of the host; with `on`, a
    # device's full name, only tensors that its ops made or received from other
    # processes.
    nodes = [
        node
        for part in run_metadata.partition_graphs
        for node in part.node
        if on is None or node.device == on
    ]
    types = {node.name: node.op for node in nodes} | dict(op_types)
    # On a GPU the streams repeat the kernels of the device, without allocations.
    executions = [
        stats
        for own in run_metadata.step_stats.dev_stats
        if _STREAM not in own.device and on in (None, own.device)
        for stats in own.node_stats
    ]
    executions.sort(key=lambda stats: stats.all_start_nanos)
    buffers = [
        b
        for i, stats in enumerate(executions)
        for b in _buffers(stats, i, types, device)
    ]
    buffer_names = {buffer.tensor.name for buffer in buffers}
    edges = _DataEdges.of(nodes)
    updates = _updates(nodes, edges, executions, buffer_names)
    buffers = [
        b if b.end is not None else replace(b, end=updates.get(b.tensor.name))
        for b in buffers
    ]
    names = [stats.node_name for stats in executions]
    if on is not None:
        readers = _Readers(nodes, edges, executions, buffer_names)
        receipts = _receipts(run_metadata, on, executions, readers)
        for receipt in receipts:
            names[receipt.execution] = receipt.tensor.name
        buffers += receipts
    levels, at_peak = _replay(executions, buffers)
    allocating = {buffer.execution for buffer in buffers}
    made = Counter[int]()
    for buffer in buffers:
        made[buffer.execution] += buffer.tensor.bytes
    phases = _phases(names, nodes, made)
    seconds = [
        (stats.op_end_rel_micros - stats.op_start_rel_micros) / 1e6
        for stats in executions
    ]
    moments = tuple(
        moment
        for i, moment in enumerate(map(Moment, names, levels, phases, seconds))
        if i in allocating or types.get(moment.op, "_Arg") not in _NO_WORK
    )
    # With the constants that Grappler folded.
    constant_bytes = sum(_constant_bytes(node) for node in nodes)
    return Timeline(moments, at_peak, variable_bytes, constant_bytes, TRACE)


def timelines_by_device(
    run_metadata: Any, op_types: Mapping[str, str], variables: Mapping[str, int]
) -> dict[str, Timeline]:
    """Return the timelines of a step by the full names of devices, in their order."""
    # Of GPUs only the first one of a process has records that are read.
    sizes: Counter[str] = Counter()
    for node in chain.from_iterable(p.node for p in run_metadata.partition_graphs):
        sizes[node.device] += variables.get(node.name, 0)
    timelines = {}
    for name, size in sorted(sizes.items()):
        kind = name.rpartition("device:")[2]
        if kind == "GPU:0" or kind.startswith("CPU:"):
            timelines[name] = timeline_of(
                run_metadata, op_types, kind, variable_bytes=size, on=name
            )
    return timelines


def _phases(
    names: Sequence[str], nodes: Sequence[Any], made: Mapping[int, int]
) -> list[str]:
    """Return the phases of ops by the graph that ran and the bytes they `made`."""
    kinds = {node.name: node.op for node in nodes}
    inputs = {node.name: [maker_of(name)[0] for name in node.input] for node in nodes}
    ran: dict[str, int] = {}
    steps: list[program.Ran] = []
    for place, name in enumerate(names):
        reads = [ran[i] for i in inputs.get(name, ()) if i in ran]
        size = made.get(place, 0)
        steps.append(program.Ran(name, kinds.get(name, ""), reads, size))
        ran[name] = place
    return program.phases_of(steps)


def _constant_bytes(node: Any) -> int:
    if node.op != "Const":
        return 0
    tensor = node.attr["value"].tensor
    elements = math.prod(dim.size for dim in tensor.tensor_shape.dim)
    return elements * int(tf.as_dtype(tensor.dtype).size or 0)


def _buffers(
    stats: Any, execution: int, types: Mapping[str, str], device: str
) -> Iterator[_Buffer]:
    """Yield the buffers that one kernel allocated."""
    slots = [
        (o.tensor_description.allocation_description.allocated_bytes, o.slot)
        for o in stats.output
    ]
    for used in stats.memory:
        # A kernel of a GPU also takes memory of the host, measured on a CPU alone.
        on_gpu = _GPU_ALLOCATOR.match(used.allocator_name) is not None
        if on_gpu != (device == "GPU:0"):
            continue
        records = [(r.alloc_micros, r.alloc_bytes) for r in used.allocation_records]
        released: dict[int, list[int]] = {}
        # Records name no buffer: of equal sizes, the first that came goes first.
        for micros, size in reversed(records):
            if size < 0:
                released.setdefault(-size, []).append(micros)
        for micros, size in records:
            if size > 0:
                name = _name(stats.node_name, slots, size)
                tensor = LiveTensor(name, types.get(stats.node_name, ""), size)
                ends = released.get(size)
                yield _Buffer(tensor, execution, micros, ends.pop() if ends else None)


def _name(node: str, slots: list[tuple[int, int]], size: int) -> str:
    """Return the output that a buffer was made for; take it from the slots."""
    for i, (bytes_, slot) in enumerate(slots):
        if bytes_ == size:
            del slots[i]
            return f"{node}:{slot}"
    return f"{node} (temporary)"


def _replay(
    executions: list[Any], buffers: list[_Buffer]
) -> tuple[list[int], tuple[LiveTensor, ...]]:
    """Return the most bytes held during each execution, and the buffers at the peak."""
    # The level of an execution is that at its start or after an allocation of its own.
    events = [(s.all_start_micros, _START, i) for i, s in enumerate(executions)]
    for i, buffer in enumerate(buffers):
        begin, end = buffer.begin, buffer.end
        events.append((begin, _ALLOCATION, i))
        if end is not None:
            kind = _RELEASE_AT_ONCE if end <= begin else _RELEASE
            events.append((max(end, begin), kind, i))
    levels = [0] * len(executions)
    held: dict[int, LiveTensor] = {}
    held_bytes = peak = 0
    at_peak: Iterable[LiveTensor] = ()
    for _, kind, i in sorted(events):
        if kind in (_RELEASE, _RELEASE_AT_ONCE):
            held_bytes -= held.pop(i).bytes
            continue
        if kind == _ALLOCATION:
            held[i] = buffers[i].tensor
            held_bytes += held[i].bytes
        execution = i if kind == _START else buffers[i].execution
        levels[execution] = max(levels[execution], held_bytes)
        if held_bytes > peak:
            peak, at_peak = held_bytes, list(held.values())
    return levels, tuple(sorted(at_peak, key=lambda tensor: -tensor.bytes))


def _receipts(
    run_metadata: Any, device: str, executions: Sequence[Any], readers: _Readers
) -> list[_Buffer]:
    """Return the received tensors of a device, in the order of the records."""
    found = [
        (i, match)
        for i, stats in enumerate(executions)
        if (match := TRANSFER.search(stats.timeline_label)) and match[3] == device
    ]
    sent = _sent(run_metadata) if found else {}
    begins: dict[str, list[int]] = {}
    for i, match in found:
        begins.setdefault(match[1], []).append(_end(executions[i]))
    receipts = []
    for i, match in found:
        begin = _end(executions[i])
        # In a loop the same edge is received again.
        later = min((b for b in begins[match[1]] if b > begin), default=None)
        name, size = sent[match[1], match[2]]
        end = readers.last_end(match[1], size, begin, later)
        tensor = LiveTensor(f"{name} (received)", "_Recv", size)
        receipts.append(_Buffer(tensor, i, begin, end))
    return receipts


def _sent(run_metadata: Any) -> Mapping[tuple[str, str], tuple[str, int]]:
    """Return the name and the bytes of each sent tensor, by its edge and its device."""
    sizes = {
        (device.device, stats.node_name, output.slot): _bytes(output)
        for device in run_metadata.step_stats.dev_stats
        for stats in device.node_stats
        for output in stats.output
    }
    sent = {}
    for node in chain.from_iterable(p.node for p in run_metadata.partition_graphs):
        if node.op == "_Send":
            maker, slot = maker_of(node.input[0])
            # A control edge is sent as a constant without elements.
            size = sizes.get((node.device, maker, slot), 0)
            edge = node.attr["tensor_name"].s.decode()
            sent[edge, node.device] = f"{maker}:{slot}", size
    return sent


def _bytes(output: Any) -> int:
    description = output.tensor_description
    elements = math.prod(dim.size for dim in description.shape.dim)
    dtype = tf.as_dtype(description.dtype) if description.dtype else tf.resource
    # The shape of these tells nothing of their bytes.
    is_known = dtype not in (tf.resource, tf.variant, tf.string)
    return elements * int(dtype.size) if is_known else 0


class _Readers:
    """Tells when the buffers of received tensors have been read on a device."""

    def __init__(
        self,
        nodes: Sequence[Any],
        edges: _DataEdges,
        executions: Sequence[Any],
        buffers: Collection[str],
    ) -> None:
        self._edges, self._buffers = edges, buffers
        receives = (node for node in nodes if node.op == "_Recv")
        self._receivers = {n.attr["tensor_name"].s.decode(): n.name for n in receives}
        # An op in a loop has a record each time it runs.
        self._stats: dict[str, list[Any]] = {}
        self._addresses: dict[tuple[str, int], int] = {}
        for stats in executions:
            self._stats.setdefault(stats.node_name, []).append(stats)
            for output in stats.output:
                address = output.tensor_description.allocation_description.ptr
                self._addresses[stats.node_name, output.slot] = address

    def last_end(
        self, edge: str, size: int, begin: int, later: int | None
    ) -> int | None:
        """Return when a buffer is free that has come over an edge at a time."""
        # `later` is when the next one comes over the edge, None if none does.
        ends = []
        for reader in self._reading(self._receivers[edge], size):
            if reader.op == "_Send":
                # It is sent on, to the caller: nothing tells when that is over.
                return later
            ends += [_end(stats) for stats in self._stats.get(reader.name, ())]
        return max(
            (e for e in ends if begin <= e and (later is None or e <= later)),
            default=begin,
        )

    def _reading(self, receiver: str, size: int) -> Iterator[Any]:
        """Yield the nodes that read a buffer, in whatever tensor it lies."""
        waiting = [(receiver, 0)]
        seen = set(waiting)
        # The list grows while it is gone through.
        for read in waiting:
            for reader in self._edges.readers.get(read, ()):
                yield reader
                new = set(self._in_place(reader.name, read, size)) - seen
                seen |= new
                waiting += sorted(new)

    def _in_place(
        self, node: str, read: tuple[str, int], size: int
    ) -> Iterator[tuple[str, int]]:
        """Yield the results of a node that lie in the buffer of an input."""
        inputs = (
            tensor for tensor in self._edges.inputs.get(node, ()) if tensor != read
        )
        others = {self._addresses.get(tensor) for tensor in inputs}
        for stats in self._stats.get(node, ())[:1]:
            for output in stats.output:
                allocated = output.tensor_description.allocation_description
                is_new = f"{node}:{output.slot}" in self._buffers
                fits = allocated.allocated_bytes == size and allocated.ptr not in others
                if fits and not is_new:
                    yield node, output.slot
