"""Edits of graphs that a Session runs on a cluster, against the unedited graph."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from geutil.errors import MeasurementError
from geutil.gradients import gradients
from geutil.memory import measure, predict_by_device
from geutil.memory.placement import default_device, full_name
from geutil.memory.predicting import executed_step
from geutil.quantize import quantize
from tests.distribute.cluster import TASKS, Cluster, Net, v1

DEVICES = [full_name(task, default_device([])) for task in TASKS]
SECONDS = 240


@pytest.fixture(scope="module")
def cluster():
    opened = Cluster()
    yield opened
    opened.close()


def plain_gradients(net):
    with net.graph.as_default():
        return v1.gradients(net.loss, net.weights, colocate_gradients_with_ops=True)


def saving_gradients(net, mode):
    with net.graph.as_default():
        return gradients(net.loss, net.weights, checkpoints=mode)


def close(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        size = np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * size)


def traced(net, target, fetches):
    """Return the `RunMetadata` of a second step."""
    options = v1.RunOptions(
        trace_level=v1.RunOptions.FULL_TRACE, output_partition_graphs=True
    )
    metadata = v1.RunMetadata()
    with net.session(target) as session:
        session.run(fetches, {net.x: net.value})
        session.run(fetches, {net.x: net.value}, options, metadata)
    return metadata


def ran_on(metadata):
    """Return the device of each node that ran, but for transfers."""
    return {
        node.name: node.device
        for part in metadata.partition_graphs
        for node in part.node
        if node.op not in ("_Send", "_Recv")
    }


def test_folded_norms_equal_the_unfolded_graph(cluster):
    expected = Net().run(cluster.target, ["y:0"])
    net = Net()
    before = {op.name for op in net.graph.get_operations()}
    report = fold_batch_norms(net.graph)
    assert len(report.folded) == 4
    added = [op for op in net.graph.get_operations() if op.name not in before]
    for op in added:
        assert op.device == TASKS[int(op.name.partition("/")[0][-1]) // 2], op.name
    assert added
    close(net.run(cluster.target, ["y:0"]), expected, 1e-6)


@pytest.mark.parametrize("is_training", [True, False])
def test_quantized_graphs_equal_those_of_one_device(cluster, is_training):
    results = []
    for target in (cluster.target, ""):
        net = Net()
        if not target:
            for op in net.graph.get_operations():
                op._set_device("")
        fold_batch_norms(net.graph)
        before = {op.name for op in net.graph.get_operations()}
        report = quantize(net.graph, is_training=is_training)
        fetches = [report.tensor(net.y)]
        if is_training:
            with net.graph.as_default():
                fetches += tf.gradients(net.loss, net.weights)
        with net.session(target) as session:
            found = session.run(fetches, {net.x: net.value})
            # What a step has learnt is read behind it.
            found += session.run(list(report.variables.values()))
        results.append(found)
        if target:
            added = [op for op in net.graph.get_operations() if op.name not in before]
            own = {o.name: o.device for o in added if o.name.startswith("layer")}
            assert len([o for o in added if "FakeQuant" in o.type]) > 8
            for name, device in own.items():
                kept = TASKS[int(name.partition("/")[0][-1]) // 2]
                kind = net.graph.get_operation_by_name(name).type
                # TensorFlow gives them none either: they go with the variable.
                follows = kind in ("Const", "ReadVariableOp") and not device
                assert device == kept or follows, name
            where = ran_on(traced(net, target, fetches))
            for name in own:
                if name in where:
                    task = int(name.partition("/")[0][-1]) // 2
                    assert where[name] == DEVICES[task], name
    close(*results, 1e-6)


@pytest.mark.parametrize("mode", ["memory", "speed", "collection"])
def test_saving_gradients_equal_plain_ones(cluster, mode):
    net = Net(layers=16)
    if mode == "collection":
        for i in (3, 7, 11):
            relu = net.graph.get_tensor_by_name(f"layer{i}/relu:0")
            net.graph.add_to_collection("checkpoints", relu)
    plain = plain_gradients(net)
    expected = net.run(cluster.target, plain)
    before = {op.name for op in net.graph.get_operations()}
    saving = saving_gradients(net, mode)
    added = [op for op in net.graph.get_operations() if op.name not in before]
    again = [op for op in added if op.name.startswith("recomputed")]
    assert len(again) > 8
    for op in again:
        if "/layer" in op.name and op.device:
            layer = int(op.name.partition("/layer")[2].partition("/")[0])
            assert op.device == TASKS[layer // 8], op.name
    where = ran_on(traced(net, cluster.target, saving))
    ran = [op.name for op in again if op.name in where and "/layer" in op.name]
    assert len(ran) > 8
    for name in ran:
        layer = int(name.partition("/layer")[2].partition("/")[0])
        assert where[name] == DEVICES[layer // 8], name
    close(net.run(cluster.target, saving), expected, 1e-5)


def fetched(net, kind):
    if kind == "forward":
        return [net.y]
    return plain_gradients(net) if kind == "plain" else saving_gradients(net, kind)


@pytest.mark.parametrize("kind", ["forward", "plain", "memory"])
def test_placement_and_cuts_are_those_of_tensorflow(cluster, kind):
    """Whatever ran was where it is said to be, and nothing else was sent."""
    net = Net(layers=6)
    fetches = fetched(net, kind)
    metadata = traced(net, cluster.target, fetches)
    where = ran_on(metadata)
    step = executed_step(fetches, None, None, True, True)
    said = dict(zip((op.name for op in step.ops), step.devices, strict=True))
    both = [name for name in where if name in said]
    # Passes for oneDNN rename nothing that is left.
    assert len(both) > 0.9 * len(where)
    assert {n: where[n] for n in both} == {n: said[n] for n in both}

    found = predict_by_device(fetches)
    sent = {
        (node.input[0], node.attr["send_device"].s, node.attr["recv_device"].s)
        for part in metadata.partition_graphs
        for node in part.node
        if node.op == "_Send" and not node.attr["client_terminated"].b
    }
    sent = {
        (name if ":" in name else f"{name}:0", one.decode(), other.decode())
        for name, one, other in sent
        # For a control edge a constant without elements is sent.
        if "/ctrl_S" not in name
    }
    assert {(t, c.source, c.target) for c in found.cuts for t in c.tensors} == sent


@pytest.mark.parametrize("place", [0, 1])
def test_small_steps_are_predicted_to_the_byte(place):
    """A received tensor may be written into, if the transport lets go of it in time."""
    value = np.ones([500, 1000], np.float32)
    with tf.Graph().as_default() as graph:
        with tf.device(TASKS[0]):
            x = v1.placeholder(tf.float32, [500, 1000], name="x")
            w = v1.get_variable(
                "w", initializer=tf.ones([1000, 1000]), use_resource=True
            )
            h = tf.nn.relu(tf.matmul(x, w), name="h")
        with tf.device(TASKS[1]):
            # No chain of ops of one input: Grappler would make one op of it, here.
            read = [h + 1.0, tf.reduce_max(h)] if place else [h + 1.0]
            y = tf.add_n([tf.reduce_sum(t) for t in read], name="y")
    found = measure((graph, y, {x: value}), steps=1, timeout=SECONDS)
    predicted = predict_by_device(y, measured=found)
    first, second = predicted.devices
    # What is sent is not written into what was there.
    assert first.peak == first.measured == 4 * 10**6
    assert second.received == 2 * 10**6
    assert second.peak == pytest.approx(4 * 10**6, abs=64)
    assert second.peak - second.received <= second.measured <= second.peak


@functools.cache
def measured(kind, layers, placed):
    """Return the measured peaks of a step, and the predicted ones."""
    net = Net(layers=layers, pixels=24, width=16, batch=8)
    if not placed:
        for op in net.graph.get_operations():
            op._set_device("")
    fetches = fetched(net, kind)
    found = measure((net.graph, fetches, {net.x: net.value}), steps=1, timeout=SECONDS)
    return found, predict_by_device(fetches, measured=found, worst=True)


@pytest.mark.parametrize("kind", ["plain", "memory", "speed"])
def test_the_peak_of_each_process_is_measured_and_predicted(kind):
    found, predicted = measured(kind, 20, True)
    sent_once = 8 * 24 * 24 * 16 * 4
    assert [row.device for row in found.devices] == DEVICES
    assert [row.device for row in predicted.devices] == DEVICES
    for row, own in zip(found.devices, predicted.devices, strict=True):
        # Two records that share nothing, and of other steps: of kernels, and of the
        # process' allocator, which rounds up, and counts nothing of small buffers.
        # What is sent is held while it is on its way, by the load of the machine: one
        # of the two steps may have held a whole such tensor more, and no part of one.
        apart = row.allocator_peak - row.trace_peak
        missed = min(abs(apart - times * sent_once) for times in (-1, 0, 1))
        assert missed <= 0.04 * row.trace_peak
        assert own.measured == row.trace_peak
        assert own.worst.peak >= row.trace_peak
        assert abs(own.peak - row.trace_peak) <= sent_once + 0.02 * own.peak
    assert found.trace_peak == max(row.trace_peak for row in found.devices)


@pytest.mark.parametrize(("kind", "most"), [("memory", 0.52), ("speed", 0.62)])
def test_checkpoints_save_in_each_process_as_on_one(kind, most):
    """20 layers, 10 for each process, against 10 in one process."""
    plain, _ = measured("plain", 20, True)
    saving, _ = measured(kind, 20, True)
    alone = measured(kind, 10, False)[0].peak / measured("plain", 10, False)[0].peak
    for before, after in zip(plain.devices, saving.devices, strict=True):
        share = after.trace_peak / before.trace_peak
        assert share < most
        assert share < alone + 0.12


def test_functions_on_tasks_are_refused():
    with tf.Graph().as_default() as graph, tf.device("/job:worker/task:1"):
        y = tf.ones([4]) * 2.0
    with pytest.raises(MeasurementError, match=r"pass \(graph, fetches, feeds\)"):
        measure((graph, y, {}), jit_compile=True)


def test_a_worker_that_fails_ends_the_measurement():
    with tf.Graph().as_default() as graph, tf.device("/job:worker/task:1"):
        x = v1.placeholder(tf.float32, [2])
        y = tf.debugging.assert_greater(x, 1.0)
    with pytest.raises(MeasurementError, match="InvalidArgumentError"):
        measure((graph, y, {x: np.zeros(2, np.float32)}), steps=1, timeout=SECONDS)


def test_a_measurement_that_takes_too_long_ends_its_workers():
    with tf.Graph().as_default() as graph, tf.device("/job:worker/task:1"):
        rounds = tf.while_loop(lambda i: i < 2**30, lambda i: i + 1, [tf.constant(0)])
    with pytest.raises(MeasurementError, match="not measured within 15 s"):
        measure((graph, rounds, {}), steps=1, timeout=15)
    deadline = time.monotonic() + 60
    while running_workers() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert running_workers() == []


def running_workers():
    """Return the workers on this machine that a measurement of these tests started."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_bytes().decode(errors="replace").split("\0")
            if "geutil.memory.measuring.worker" in words:
                # Others measure, too: theirs have the folders that they were given.
                found += [w for w in words if w.startswith(tempfile.gettempdir())]
    return [path for path in found if not Path(path).exists()]


def test_a_step_whose_worker_is_killed_and_a_new_session():
    """The runtime's own error, and the graph computes the same once it is back."""
    opened = Cluster()
    try:
        net = Net()
        with net.graph.as_default(), tf.device(TASKS[1]):
            rounds = v1.placeholder_with_default(2, [], "rounds")
            waited = tf.while_loop(
                lambda i: i < rounds, lambda i: (i + 1,), [tf.constant(0)]
            )
        fold_batch_norms(net.graph)
        fetches = [*saving_gradients(net, "speed"), waited]
        expected = net.run(opened.target, fetches)
        session = net.session(opened.target)
        killer = threading.Timer(2.0, opened.kill, [1])
        killer.start()
        start = time.monotonic()
        with pytest.raises((tf.errors.UnavailableError, tf.errors.AbortedError)):
            session.run(fetches, {net.x: net.value, rounds: 2**31 - 1})
        # It had begun, and does not wait for the end of the loop.
        assert 1.0 < time.monotonic() - start < 60
        killer.join()
        opened.restart(1)
        close(net.run(opened.target, fetches), expected, 0)
        # Before the worker is back, this would wait for it.
        session.close()
    finally:
        opened.close()
