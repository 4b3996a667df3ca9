"""Memory by device: against one device, brute force over partitions, and refusals."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil.errors import ArgumentTypeError, PredictionError, SelectionError
from geutil.graph.runtime import places_of, tasks_of
from geutil.memory import Node, Program, predict, predict_by_device
from geutil.memory.bounds import worst_of
from geutil.memory.by_device import split
from geutil.memory.executor import is_receipt, joint_order, simulate
from tests.memory.networks import attention, chain, training_step, unet
from tests.memory.refusals import refused
from tests.memory.test_executor import programs

v1 = tf.compat.v1
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
WORKERS = [f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(3)]
MEGABYTE = 1_000_000


def never(one, other):
    return False


@st.composite
def placed(draw):
    """Programs, and a device for each node of them."""
    program = draw(programs())
    count = len(program.nodes)
    return program, draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))


def own_part(program, numbers, device):
    here = {i for i, number in enumerate(numbers) if number == device}
    return program.held_on(here, in_place=True)


@given(placed(), st.integers(0, 2))
def test_each_tensor_is_sent_once_to_each_device(given_program, home):
    program, devices = given_program
    parts = split(program, devices, program.sizes.__getitem__, never, home)
    expected = set()
    for i, node in enumerate(program.nodes):
        for tensor in node.outputs:
            readers = {
                devices[j]
                for j, other in enumerate(program.nodes)
                if tensor in other.inputs
            }
            readers |= {home} if tensor in program.fetched else set()
            expected |= {(tensor, devices[i], where) for where in readers}
    expected = {(t, one, other) for t, one, other in expected if one != other}
    sent = [(c.tensor, c.source, c.target) for c in parts.crossings]
    assert sorted(sent) == sorted(expected)
    numbers = parts.numbers(parts.program)
    maker = {t: i for i, n in enumerate(parts.program.nodes) for t in n.outputs}
    # Only receipts read what another device has made.
    for i, node in enumerate(parts.program.nodes):
        for tensor in node.inputs:
            assert is_receipt(node) or numbers[maker[tensor]] == numbers[i]
        assert all(c < len(parts.program.nodes) for c in node.controls)


def held_by(program, order, devices, device):
    """Return the most bytes that a device holds, by its buffers one by one.

    An independent reckoning for programs whose tensors all have buffers of their own.
    """
    step = {node: at for at, node in enumerate(order)}
    peak = 0
    for now in range(len(order)):
        held = 0
        for i, node in enumerate(program.nodes):
            if devices[i] != device:
                continue
            for tensor in node.outputs:
                ends = [step[i]]
                ends += [
                    step[j] for j, n in enumerate(program.nodes) if tensor in n.inputs
                ]
                last = len(order) if tensor in program.fetched else max(ends)
                if step[i] <= now <= last:
                    held += program.sizes[tensor]
            if step[i] == now:
                held += node.temporary
        peak = max(peak, held)
    return peak


@given(placed(), st.integers(0, 3))
def test_peaks_of_devices_are_those_of_their_buffers(given_program, seed):
    program, devices = given_program
    bare = [n.changed(aliases=(), reuses=(), updates=()) for n in program.nodes]
    program = Program(bare, program.sizes, program.fetched)
    for own, order, held in run_by_device(program, devices, seed):
        assert simulate(own, order).peak == held


@given(placed(), st.booleans(), st.integers(0, 3))
def test_no_order_exceeds_the_worst_case_of_a_device(given_program, shared, seed):
    for own, order, _ in run_by_device(*given_program, seed, shared=shared):
        assert simulate(own, order).peak <= worst_of(own, None).peak


def run_by_device(program, devices, seed, *, shared=False):
    """Yield the program of each device, the order of all, and what it holds of it."""
    parts = split(
        program, devices, program.sizes.__getitem__, lambda one, other: shared, 0
    )
    numbers = parts.numbers(parts.program)
    order = joint_order(parts.program, numbers, seed)
    for device in range(3):
        own = own_part(parts.program, numbers, device)
        yield own, order, held_by(parts.program, order, numbers, device)


def test_one_device_holds_what_is_predicted():
    for network in (chain, unet, attention):
        step = training_step(network)
        (row,) = predict_by_device(step.fetches).devices
        whole = predict(step.fetches)
        assert (row.device, row.peak) == (CPU, whole.peak), network
        # Of buffers of one size either may come first.
        assert sorted(row.timeline.at_peak, key=str) == sorted(whole.at_peak, key=str)
        assert replace(row.timeline, at_peak=whole.at_peak) == whole
        assert not whole.note


def two_tasks():
    """A tensor of 2 MB that two ops of another task read, and one of 4 bytes back."""
    with tf.Graph().as_default() as graph:
        with tf.device("/job:worker/task:0"):
            x = v1.placeholder(tf.float32, [500, 1000], name="x")
            w = v1.get_variable("w", [1000, 1000], use_resource=True)
            h = tf.matmul(x, w, name="h")
        with tf.device("/job:worker/task:1"):
            tf.add(
                tf.reduce_sum(tf.exp(h, name="e")), tf.reduce_max(h, name="m"), name="y"
            )
    return graph


def test_a_tensor_is_held_by_both_sides_of_a_cut():
    found = predict_by_device(two_tasks().get_tensor_by_name("y:0"), worst=True)
    first, second = found.devices
    assert [first.device, second.device] == WORKERS[:2]
    # There it is the receipt, and the exponential, since the maximum reads it, too.
    assert first.peak == 2 * MEGABYTE
    assert second.peak == pytest.approx(4 * MEGABYTE, abs=32)
    assert second.worst.peak >= second.peak
    assert (first.sent, first.received) == (2 * MEGABYTE, 4)
    assert (second.sent, second.received) == (4, 2 * MEGABYTE)
    assert first.timeline.variable_bytes == 4 * MEGABYTE
    assert second.timeline.variable_bytes == 0
    assert [(c.source, c.target, c.tensors, c.bytes) for c in found.cuts] == [
        (WORKERS[0], WORKERS[1], ("h:0",), 2 * MEGABYTE),
        (WORKERS[1], WORKERS[0], ("y:0",), 4),
    ]
    names = [live.name for live in second.timeline.at_peak]
    assert "h:0 (received)" in names
    assert found[WORKERS[1]] is second
    with pytest.raises(KeyError, match="the devices of the step are"):
        found["/job:worker/task:1"]
    assert str(found).splitlines()[-2] == (
        f"  {WORKERS[0]} -> {WORKERS[1]}: 2.0 MB: 'h:0'"
    )


def test_predictions_of_the_whole_say_that_they_are_sums():
    timeline = predict(two_tasks().get_tensor_by_name("y:0"))
    assert "the sum over 2 devices" in str(timeline)
    assert "geutil.memory.predict_by_device" in timeline.note
    with tf.Graph().as_default(), tf.device("/job:worker/task:1"):
        alone = tf.exp(tf.ones([3]), name="alone")
    assert not predict(alone).note


def test_devices_of_one_process_share_a_memory(graph):
    with tf.device("/device:CPU:0"):
        x = v1.placeholder(tf.float32, [500, 1000])
        h = tf.exp(x, name="h")
    with tf.device("/device:CPU:1"):
        y = tf.reduce_sum(h)
    found = predict_by_device(y)
    assert [row.peak for row in found.devices] == [2 * MEGABYTE, 4]
    assert [cut.copied for cut in found.cuts] == [False, False]
    assert "in one memory" in str(found.cuts[0])


def test_feeds_come_in_at_the_default_device():
    with tf.Graph().as_default(), tf.device("/job:worker/task:1"):
        x = v1.placeholder(tf.float32, [500, 1000], name="x")
        y = tf.exp(x, name="y")
    (only,) = predict_by_device(y).devices
    assert (only.device, only.received) == (WORKERS[1], 0)
    found = predict_by_device(y, default="/job:worker/task:0")
    assert [cut.tensors for cut in found.cuts] == [("x:0",), ("y:0",)]
    assert [row.peak for row in found.devices] == [2 * MEGABYTE, 4 * MEGABYTE]


def test_ops_without_a_device_go_where_tensorflow_puts_them(graph):
    free = tf.constant(1.0, name="free")
    shared = tf.constant(1.0, name="shared")
    with tf.device("/job:worker/task:2"):
        a = tf.exp(free, name="a") + shared
        v = v1.get_variable("v", [3], use_resource=True)
    read = v.read_value()
    shape = tf.raw_ops.Shape(input=a, name="shape")
    tf.add(tf.exp(shared, name="other"), read[0], name="last")
    with v1.colocate_with(a.op):
        tf.sin(shared, name="near")
    places = places_of(graph.get_operations(), [], WORKERS[0])
    assert places["free"] == WORKERS[2]
    assert places["shared"] == WORKERS[0]
    assert places[shape.op.name] == WORKERS[2]
    assert places[read.op.name] in WORKERS
    assert places["near"] == WORKERS[2]
    assert places["last"] == WORKERS[0]


def test_tasks_come_with_parameter_servers_last():
    assert tasks_of(["/job:ps/task:1", "/job:worker", "/job:ps", "/device:CPU:1"]) == [
        ("worker", 0),
        ("ps", 0),
        ("ps", 1),
    ]
    assert tasks_of([CPU, ""]) == []


def test_what_is_refused():
    with tf.Graph().as_default():
        y = tf.exp(v1.placeholder(tf.float32, [None, 3], name="x"))
    with tf.Graph().as_default():
        other = tf.ones([3])
    for fetches, options, error, reason in (
        (y, {}, PredictionError, "of 'x:0'; pass shapes="),
        ([y, other], {}, SelectionError, "graph"),
        (np.ones(3), {}, ArgumentTypeError, "expected ops or tensors"),
        (other, {"default": "/nowhere"}, ArgumentTypeError, "'/nowhere' is no device"),
        (other, {"measured": 3}, ArgumentTypeError, "measured is what"),
        (other, {"worst": True, "threads": 0}, ArgumentTypeError, "from 1 up"),
    ):
        with refused(error, reason):
            predict_by_device(fetches, **options)


def test_a_receipt_is_made_when_the_tensor_is():
    """It waits for no reader: early tensors are held there for late readers."""
    nodes = [
        Node("a", "Exp", outputs=[0]),
        Node("b", "Exp", inputs=[0], outputs=[1]),
        Node("c", "Exp", inputs=[1], outputs=[2]),
        Node("late", "AddN", inputs=[0, 2], outputs=[3]),
    ]
    program = Program(nodes, [10, 10, 10, 1], fetched=[3])
    parts = split(program, [0, 0, 0, 1], program.sizes.__getitem__, never, 1)
    numbers = parts.numbers(parts.program)
    order = joint_order(parts.program, numbers)
    names = [parts.program.nodes[i].name.partition(":")[0] for i in order]
    assert names == ["a", "a", "b", "c", "c", "late"]
    assert simulate(own_part(parts.program, numbers, 1), order).peak == 21
