"""What a step asks TensorFlow's allocator for, by TensorFlow's profiler.

The allocator's own counter adds up the chunks that it hands out, which can be nearly
twice as large as what was asked for. The profiler notes both for each chunk. Neither
counts what is smaller than 256 KiB, which comes from elsewhere.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

_SIGNS = {"MemoryAllocation": 1, "MemoryDeallocation": -1}
_PICOSECONDS = 1000


class Allocation(NamedTuple):
    """A moment at which memory is taken or given back.

    Attributes:
        time: in picoseconds.
        requested: the bytes that were asked for, negative where they are given back.
        chunk: the bytes that were handed out, likewise.
    """

    time: int
    requested: int
    chunk: int


def peaks(run: Callable[[], Any]) -> tuple[int, int]:
    """Return the most bytes that were held at once during a call.

    Returns:
        By what was asked for, and by the chunks that were handed out for it.
    """
    requested = chunks = most_requested = most_chunks = 0
    for moment in _allocations(run):
        requested += moment.requested
        chunks += moment.chunk
        most_requested = max(most_requested, requested)
        most_chunks = max(most_chunks, chunks)
    return most_requested, most_chunks


def _allocations(run: Callable[[], Any]) -> list[Allocation]:
    """Return what is taken and given back during a call, in order of time."""
    options = tf.profiler.experimental.ProfilerOptions(
        host_tracer_level=3, python_tracer_level=0, device_tracer_level=0
    )
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder, options=options):
            run()
            tf.test.experimental.sync_devices()
        (file,) = Path(folder).rglob("*.xplane.pb")
        content = file.read_bytes()
    return sorted(_read(content), key=lambda allocation: allocation.time)


def _read(content: bytes) -> Iterator[Allocation]:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(content)
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                sign = _SIGNS.get(plane.event_metadata[event.metadata_id].name)
                if sign is None:
                    continue
                stats = {
                    plane.stat_metadata[stat.metadata_id].name: stat.int64_value
                    for stat in event.stats
                }
                yield Allocation(
                    line.timestamp_ns * _PICOSECONDS + event.offset_ps,
                    sign * stats["requested_bytes"],
                    sign * stats["allocation_bytes"],
                )
