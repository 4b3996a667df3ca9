"""The timeline of a traced step, from records made by hand and from real ones."""

import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil.memory import predict
from geutil.memory.measurement.child import aligned
from geutil.memory.measurement.trace import timeline_of
from tests.memory.measurement.test_measure import MIB, SIDE
from tests.memory.tracing import run_traced

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


def metadata_of(*nodes, device=CPU, allocator="cpu"):
    """Return a RunMetadata with nodes of (name, start, [(micros, bytes)], outputs)."""
    metadata = tf.compat.v1.RunMetadata()
    devices = metadata.step_stats.dev_stats.add(device=device)
    for name, start, records, outputs in nodes:
        stats = devices.node_stats.add(node_name=name)
        stats.all_start_micros = start
        stats.all_start_nanos = 1000 * start
        if records:
            memory = stats.memory.add(allocator_name=allocator)
            for micros, size in records:
                memory.allocation_records.add(alloc_micros=micros, alloc_bytes=size)
        for slot, size in outputs:
            description = stats.output.add(slot=slot).tensor_description
            description.allocation_description.allocated_bytes = size
    return metadata


def trace(metadata, types=None, device="CPU:0"):
    names = [s.node_name for d in metadata.step_stats.dev_stats for s in d.node_stats]
    types = types or dict.fromkeys(names, "Exp")
    return timeline_of(metadata, types, device, variable_bytes=7)


def held(timeline):
    return [(tensor.name, tensor.bytes) for tensor in timeline.at_peak]


def test_levels_and_the_tensors_at_the_peak():
    timeline = trace(
        metadata_of(
            ("a", 10, [(11, 100), (35, -100)], [(0, 100)]),
            ("b", 20, [(21, 30), (22, 60), (29, -60)], [(0, 30)]),
            ("c", 30, [(31, 80)], [(0, 80)]),
            ("d", 40, [], [(0, 80)]),
        )
    )
    levels = [(moment.op, moment.bytes) for moment in timeline.moments]
    assert levels == [("a", 100), ("b", 190), ("c", 210), ("d", 110)]
    assert timeline.peak == 210
    assert held(timeline) == [("a:0", 100), ("c:0", 80), ("b:0", 30)]
    assert timeline.variable_bytes == 7


def test_single_records():
    # Whatever is no output is temporary.
    timeline = trace(metadata_of(("a", 1, [(2, 5), (2, 9), (3, -9)], [(1, 5)])))
    assert held(timeline) == [("a (temporary)", 9), ("a:1", 5)]
    # Ops are in the order of execution.
    timeline = trace(
        metadata_of(("late", 20, [(21, 1)], []), ("early", 10, [(11, 1)], []))
    )
    assert [moment.op for moment in timeline.moments] == ["early", "late"]
    # A release goes before an allocation in the same microsecond.
    timeline = trace(
        metadata_of(("a", 10, [(11, 50), (20, -50)], []), ("b", 20, [(20, 50)], []))
    )
    assert timeline.peak == 50
    assert [moment.bytes for moment in timeline.moments] == [50, 50]
    # A buffer that lives for less than a microsecond counts.
    assert trace(metadata_of(("a", 10, [(11, 50), (11, -50)], []))).peak == 50
    # Ops that do no work are left out.
    metadata = metadata_of(("c", 1, [], []), ("_SOURCE", 0, [], []), ("r", 2, [], []))
    timeline = trace(metadata, {"c": "Const", "r": "Relu"})
    assert [moment.op for moment in timeline.moments] == ["r"]
    timeline = trace(tf.compat.v1.RunMetadata())
    assert (timeline.moments, timeline.at_peak, timeline.peak) == ((), (), 0)


def test_the_memory_of_a_gpu_and_that_of_its_host_stay_apart():
    metadata = metadata_of(("a", 1, [(2, 30)], []), allocator="GPU_0_bfc")
    metadata.MergeFrom(metadata_of(("b", 3, [(4, 50)], []), allocator="gpu_host_bfc"))
    metadata.MergeFrom(
        metadata_of(("a", 1, [(2, 30)], []), device="/device:GPU:0/stream:all")
    )
    assert trace(metadata, device="GPU:0").peak == 30
    assert trace(metadata, device="CPU:0").peak == 50


@given(
    st.lists(
        st.tuples(st.integers(1, 1000), st.integers(0, 60), st.integers(0, 60)),
        max_size=20,
    )
)
def test_the_peak_is_that_of_the_intervals(drawn):
    # All times differ, so there is one truth: count at each time what is held then.
    intervals = [
        (size, 100 * min(a, b) + i, 100 * max(a, b) + 50 + i)
        for i, (size, a, b) in enumerate(drawn)
    ]
    timeline = trace(
        metadata_of(
            *(
                (f"n{i}", begin, [(begin, size), (end, -size)], [(0, size)])
                for i, (size, begin, end) in enumerate(intervals)
            )
        )
    )
    at = {
        time: sum(size for size, begin, end in intervals if begin <= time < end)
        for _, time, _ in intervals
    }
    assert timeline.peak == max(at.values(), default=0)
    assert sum(tensor.bytes for tensor in timeline.at_peak) == timeline.peak
    assert [m.bytes for m in timeline.moments] == [at[t] for t in sorted(at)]


def chain(x):
    for _ in range(5):
        x = tf.reverse(x, [0])
    return x


def fan(x):
    parts = [tf.reverse(x, [0]), tf.reverse(x, [1]), tf.reverse(x, [0, 1])]
    return tf.concat(parts, 0)


def in_place(x):
    return tf.exp(tf.tanh(tf.reverse(x, [0])))


def test_known_allocations():
    """Computed by hand; test_measure asks the allocator, in a process of its own.

    A reverse needs its input and its output; the input of the first is fed; a unary op
    writes into its input's buffer; a concat of three holds them and as much.
    """
    for build, mebibytes in ((chain, 2), (fan, 6), (in_place, 1)):
        with tf.Graph().as_default() as graph:
            x = tf.compat.v1.placeholder(tf.float32, [SIDE, SIDE], name="x")
            y = build(x)
        assert run_and_trace(graph, y.op, x).peak == mebibytes * MIB, build


def run_and_trace(graph, fetch, x):
    """Return the timeline of a step with one thread in a Session."""
    feed = {x: aligned(np.ones([SIDE, SIDE], np.float32))}
    # With Grappler, two reverses would be none.
    _, metadata = run_traced(graph, fetch, feed, grappler=False, before=1)
    return timeline_of(metadata, {}, "CPU:0", variable_bytes=0)


def updated(count, update):
    """Return what updates of variables one after the other hold: traced, predicted.

    Args:
        count: how many there are.
        update: makes the last op of an update, of a variable and its value before.
    """
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [SIDE, SIDE], name="x")
        waits = []
        for i in range(count):
            v = tf.compat.v1.get_variable(f"v{i}", [SIDE, SIDE], use_resource=True)
            with tf.control_dependencies(waits):
                value = v.read_value()
                waits = [update(x, v, value)]
    predicted = predict(waits[0], grappler=False).peak
    return run_and_trace(graph, waits[0], x).peak / MIB, predicted / MIB


def test_the_old_buffers_of_variables_are_let_go():
    """By hand: the new buffer beside what is made of the old one, which then is free.

    The second reverse and buffer come when the first are gone; in the records the
    first buffer never is.
    """

    def change_first(x, v, value):
        with tf.control_dependencies([value]):
            change = v.assign_sub(x, read_value=False)
        with tf.control_dependencies([change]):
            return tf.reverse(value, [0]).op

    def read_first(x, v, value):
        with tf.control_dependencies([tf.reverse(value, [0])]):
            return v.assign_sub(x, read_value=False)

    assert updated(4, change_first) == (2, 2)
    assert updated(4, read_first) == (1, 1)


def test_what_is_assigned_takes_the_place_of_what_was():
    def assign(x, v, value):
        return v.assign(tf.reverse(x, [0]), read_value=False)

    def assign_in_place(x, v, value):
        """The product and the difference are written over the reversed `x`."""
        return v.assign(value - 0.1 * tf.reverse(x, [0]), read_value=False)

    assert updated(3, assign) == (1, 1)
    assert updated(3, assign_in_place) == (1, 1)
