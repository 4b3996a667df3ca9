"""Received tensors of a traced step: what workers hold of what others have sent.

The records of a step tell when a tensor came, but not that it was allocated, nor when
it was released. Its size is that of what was sent; it is held until what reads it has
ended, or what lies in the same buffer.

TensorFlow switches the records of transfers on when a traced step begins, and waits for
no worker to have done so: what arrives before has no record. A few steps in a hundred
lack some, more where the machine is busy; `complete_trace` runs another one then.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.errors import MeasurementError
from geutil.graph.op_types import MERGES
from geutil.memory.timeline import LiveTensor

# The end of the label of a transfer's record.
_TRANSFER = re.compile(r"(\S+) from (\S+) to (\S+)$")
_CONTROL = "^"
_TRIES = 50
"""Traced steps, of which one has a record of each transfer."""


@dataclass(frozen=True)
class TracedBuffer:
    """A buffer of a traced step.

    Attributes:
        tensor: what it was made for.
        execution: the place of the record that made it among those of the device.
        begin: the microsecond in which it is there.
        end: the one in which it is free; None if it is held to the end.
    """

    tensor: LiveTensor
    execution: int
    begin: int
    end: int | None


def receipts_of(
    run_metadata: Any,
    device: str,
    executions: Sequence[Any],
    buffers: Collection[str],
) -> list[TracedBuffer]:
    """Return what a device received in a step, in the order of the records.

    Args:
        run_metadata: the `RunMetadata` of the step, with the partition graphs.
        device: the device by its full name.
        executions: the `NodeExecStats` of the device.
        buffers: the names of the tensors that the device allocated buffers for.
    """
    found = [
        (i, match)
        for i, stats in enumerate(executions)
        if (match := _TRANSFER.search(stats.timeline_label)) and match[3] == device
    ]
    if not found:
        return []
    sent = _Sent(run_metadata)
    readers = _Readers(run_metadata, device, executions, buffers)
    begins: dict[str, list[int]] = {}
    for i, match in found:
        begins.setdefault(match[1], []).append(end_of(executions[i]))
    receipts = []
    for i, match in found:
        begin = end_of(executions[i])
        # In a loop the same edge is received again.
        later = min((b for b in begins[match[1]] if b > begin), default=None)
        name, size = sent.tensor(match[1], match[2])
        end = readers.last_end(match[1], size, begin, later)
        tensor = LiveTensor(f"{name} (received)", "_Recv", size)
        receipts.append(TracedBuffer(tensor, i, begin, end))
    return receipts


def complete_trace(trace: Callable[[], Any]) -> Any:
    """Return the `RunMetadata` of a step that has a record of each transfer.

    `trace` runs a step, and returns its `RunMetadata`, with the partition graphs.

    Raises:
        MeasurementError: each of fifty steps lacked some.
    """
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
    """Return the edges between processes that carried more than the records tell.

    Labels of edges, sorted. Cost: linear in the nodes, edges and records.
    """
    recorded: Counter[tuple[str, str]] = Counter()
    ran: Counter[tuple[str, str]] = Counter()
    for own in run_metadata.step_stats.dev_stats:
        for stats in own.node_stats:
            ran[own.device, stats.node_name] += 1
            if match := _TRANSFER.search(stats.timeline_label):
                recorded[match[1], match[3]] += 1
    lacking = set()
    for part in run_metadata.partition_graphs:
        carried = _carried(part.node, ran)
        for node in part.node:
            if node.op == "_Recv" and not node.attr["client_terminated"].b:
                edge = node.attr["tensor_name"].s.decode()
                sender = node.attr["send_device"].s.decode()
                if (
                    _process(sender) != _process(node.device)
                    and recorded[edge, node.device] < carried[node.name]
                ):
                    lacking.add(edge)
    return sorted(lacking)


def _carried(nodes: Sequence[Any], ran: Mapping[tuple[str, str], int]) -> Counter[str]:
    """Return how often, at least, each node of a part had a result that was read."""
    carried: Counter[str] = Counter()
    for node in nodes:
        # A merge runs with whichever of its inputs there is; a send is not recorded.
        times = ran.get((node.device, node.name), 0) if node.op not in MERGES else 0
        for name in node.input:
            if not name.startswith(_CONTROL):
                maker, _ = maker_of(name)
                carried[maker] = max(carried[maker], times, node.op == "_Send")
    return carried


def _process(device: str) -> str:
    return device.partition("/device:")[0]


def end_of(stats: Any) -> int:
    """Return the microsecond in which an execution ended."""
    return int(stats.all_start_micros + stats.all_end_rel_micros)


def maker_of(name: str) -> tuple[str, int]:
    """Return the node and the output that an input names."""
    node, _, place = name.removeprefix(_CONTROL).partition(":")
    return node, int(place or 0)


class _Sent:
    """Tells what the edges between devices carry."""

    def __init__(self, run_metadata: Any) -> None:
        self._inputs: dict[tuple[str, str], str] = {}
        for part in run_metadata.partition_graphs:
            for node in part.node:
                if node.op == "_Send":
                    edge = node.attr["tensor_name"].s.decode()
                    self._inputs[edge, node.device] = node.input[0]
        self._sizes = {
            (device.device, stats.node_name, output.slot): _bytes(output)
            for device in run_metadata.step_stats.dev_stats
            for stats in device.node_stats
            for output in stats.output
        }

    def tensor(self, edge: str, device: str) -> tuple[str, int]:
        """Return the name of what goes over an edge, and its size in bytes."""
        node, slot = maker_of(self._inputs[edge, device])
        # What only orders the step is sent as a constant without elements.
        return f"{node}:{slot}", self._sizes.get((device, node, slot), 0)


def _bytes(output: Any) -> int:
    description = output.tensor_description
    elements = math.prod(dim.size for dim in description.shape.dim)
    dtype = tf.as_dtype(description.dtype) if description.dtype else None
    known = dtype is not None and dtype not in (tf.resource, tf.variant, tf.string)
    return elements * int(dtype.size) if dtype is not None and known else 0


class _Readers:
    """Tells when the buffers of received tensors have been read on a device."""

    def __init__(
        self,
        run_metadata: Any,
        device: str,
        executions: Sequence[Any],
        buffers: Collection[str],
    ) -> None:
        self._buffers = buffers
        self._after: dict[tuple[str, int], list[str]] = {}
        self._inputs: dict[str, list[tuple[str, int]]] = {}
        self._receives: dict[str, str] = {}
        self._sends: set[str] = set()
        for part in run_metadata.partition_graphs:
            for node in part.node:
                if node.device == device:
                    self._note(node)
        # An op in a loop has a record each time it runs.
        self._stats: dict[str, list[Any]] = {}
        self._addresses: dict[tuple[str, int], int] = {}
        for stats in executions:
            self._stats.setdefault(stats.node_name, []).append(stats)
            for output in stats.output:
                address = output.tensor_description.allocation_description.ptr
                self._addresses[stats.node_name, output.slot] = address

    def _note(self, node: Any) -> None:
        if node.op == "_Recv":
            self._receives[node.attr["tensor_name"].s.decode()] = node.name
        elif node.op == "_Send":
            self._sends.add(node.name)
        for name in node.input:
            if not name.startswith(_CONTROL):
                self._after.setdefault(maker_of(name), []).append(node.name)
                self._inputs.setdefault(node.name, []).append(maker_of(name))

    def last_end(
        self, edge: str, size: int, begin: int, later: int | None
    ) -> int | None:
        """Return when a buffer is free that has come over an edge at a time.

        `later` is when the next one comes over the edge, None if none does.
        """
        ends = []
        for reader in self._reading(self._receives[edge], size):
            if reader in self._sends:
                # It is sent on, to the caller: nothing tells when that is over.
                return later
            ends += [end_of(stats) for stats in self._stats.get(reader, ())]
        return max(
            (e for e in ends if begin <= e and (later is None or e <= later)),
            default=begin,
        )

    def _reading(self, receiver: str, size: int) -> Iterator[str]:
        """Yield the nodes that read a buffer, in whatever tensor it lies."""
        waiting = [(receiver, 0)]
        seen = set(waiting)
        while waiting:
            read = waiting.pop()
            for reader in self._after.get(read, ()):
                yield reader
                for tensor in self._in_place(reader, read, size):
                    if tensor not in seen:
                        seen.add(tensor)
                        waiting.append(tensor)

    def _in_place(
        self, node: str, read: tuple[str, int], size: int
    ) -> Iterator[tuple[str, int]]:
        """Yield the results of a node that lie in the buffer of what it has read."""
        others = {
            self._addresses.get(tensor)
            for tensor in self._inputs.get(node, ())
            if tensor != read
        }
        for stats in self._stats.get(node, ())[:1]:
            for output in stats.output:
                tensor = f"{node}:{output.slot}"
                allocated = output.tensor_description.allocation_description
                if (
                    allocated.allocated_bytes == size
                    and tensor not in self._buffers
                    and allocated.ptr not in others
                ):
                    yield node, output.slot
