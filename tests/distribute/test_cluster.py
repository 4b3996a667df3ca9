"""Edits of graphs that a Session runs on a cluster, against the unedited graph."""

import functools
import os
import pickle
import re
import threading

import numpy as np
import pytest
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from geutil.errors import MeasurementError
from geutil.gradients import gradients
from geutil.graph.runtime import default_device, full_name, uses_onednn
from geutil.memory import measure, predict_by_device
from geutil.memory.measurement.cluster import READ, READY, START_RESIDENT, Worker
from geutil.memory.step_prediction import executed_step
from geutil.quantize import quantize
from tests.distribute.cluster import TASKS, Cluster, Net, v1
from tests.distribute.programs import REUSE, held_ports
from tests.processes import forked, run_python

DEVICES = [full_name(task, default_device([])) for task in TASKS]


@pytest.fixture(scope="module")
def cluster():
    opened = Cluster()
    yield opened
    opened.close()


def gradients_of(net, mode):
    """Return the gradients of all weights: plain ones, or those of a mode."""
    with net.graph.as_default():
        if mode == "plain":
            return v1.gradients(net.loss, net.weights, colocate_gradients_with_ops=True)
        return gradients(net.loss, net.weights, checkpoints=mode)


def close(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        size = np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * size)


def traced(net, target, fetches):
    """Return the `RunMetadata` of a second step, and what the step computes."""
    options = v1.RunOptions(
        trace_level=v1.RunOptions.FULL_TRACE, output_partition_graphs=True
    )
    metadata = v1.RunMetadata()
    with net.session(target) as session:
        session.run(fetches, {net.x: net.value})
        found = session.run(fetches, {net.x: net.value}, options, metadata)
    return metadata, found


def ran_on(metadata):
    """Return the device of each node that ran, but for transfers."""
    return {
        node.name: node.device
        for part in metadata.partition_graphs
        for node in part.node
        if node.op not in ("_Send", "_Recv")
    }


def misplaced(net, devices, places):
    """Return the devices, by name, of ops of a layer that are not where it is."""
    wrong = {}
    for name, device in devices.items():
        found = re.search(r"layer(\d+)/", name)
        if found and device != places[net.task_of(int(found[1]))]:
            wrong[name] = device
    return wrong


def test_folded_norms_equal_the_unfolded_graph(cluster):
    expected = Net().run(cluster.target, ["y:0"])
    net = Net()
    assert len(fold_batch_norms(net.graph).folded) == 4
    added = {op.name: op.device for op in net.added()}
    assert added
    assert all(name.startswith("layer") for name in added)
    assert misplaced(net, added, TASKS) == {}
    close(net.run(cluster.target, ["y:0"]), expected, 1e-6)


@pytest.mark.parametrize("is_training", [True, False])
def test_quantized_graphs_equal_those_of_one_device(cluster, is_training):
    results = []
    for target in ("", cluster.target):
        net = Net(placed=bool(target))
        fold_batch_norms(net.graph)
        net.added()
        report = quantize(net.graph, is_training=is_training)
        added = net.added()
        fetches = [report.tensor(net.y)]
        if is_training:
            with net.graph.as_default():
                fetches += tf.gradients(net.loss, net.weights)
        with net.session(target) as session:
            found = session.run(fetches, {net.x: net.value})
            # What a step has learnt is read behind it.
            found += session.run(list(report.variables.values()))
        results.append(found)
    close(*results, 1e-6)
    assert len([op for op in added if "FakeQuant" in op.type]) > 8
    # TensorFlow gives these none either: they go with the variable.
    follow = ("Const", "ReadVariableOp")
    own = {op.name: op.device for op in added if op.device or op.type not in follow}
    assert misplaced(net, own, TASKS) == {}
    where = ran_on(traced(net, cluster.target, fetches)[0])
    ran = {op.name: where[op.name] for op in added if op.name in where}
    assert misplaced(net, ran, DEVICES) == {}


def test_saving_gradients_equal_plain_ones(cluster):
    expected = None
    for mode in ("plain", "memory", "speed", "collection"):
        net = Net(layers=10)
        for i in (2, 5, 8):
            relu = net.graph.get_tensor_by_name(f"layer{i}/relu:0")
            net.graph.add_to_collection("checkpoints", relu)
        fetches = gradients_of(net, mode)
        if mode == "plain":
            expected = net.run(cluster.target, fetches)
            continue
        again = [op for op in net.added() if op.name.startswith("recomputed")]
        assert len(again) > 8, mode
        devices = {op.name: op.device for op in again if op.device}
        assert misplaced(net, devices, TASKS) == {}, mode
        metadata, found = traced(net, cluster.target, fetches)
        where = ran_on(metadata)
        ran = {op.name: where[op.name] for op in again if op.name in where}
        assert len([name for name in ran if "/layer" in name]) > 8, mode
        assert misplaced(net, ran, DEVICES) == {}, mode
        close(found, expected, 1e-5)


@pytest.mark.parametrize("kind", ["forward", "plain", "memory"])
def test_placement_and_cuts_are_those_of_tensorflow(cluster, kind):
    """Whatever ran was where it is said to be, and nothing else was sent."""
    net = Net(layers=6)
    fetches = [net.y] if kind == "forward" else gradients_of(net, kind)
    metadata, _ = traced(net, cluster.target, fetches)
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


@pytest.fixture
def forked_cluster():
    """Measurements on a cluster start no process."""
    with forked():
        yield


@pytest.mark.parametrize("place", [0, 1])
def test_small_steps_are_predicted_to_the_byte(place, forked_cluster):
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
    found = measure((graph, y, {x: value}), steps=1)
    predicted = predict_by_device(y, measured=found)
    first, second = predicted.devices
    # What is sent is not written into what was there.
    assert first.peak == first.measured == 4 * 10**6
    assert second.received == 2 * 10**6
    assert second.peak == pytest.approx(4 * 10**6, abs=64)
    assert second.peak - second.received <= second.measured <= second.peak


@functools.cache
def measured(kind):
    """Return the measured peaks of a step of 20 layers, and the predicted ones."""
    net = Net(20, pixels=24, width=16, batch=8)
    fetches = gradients_of(net, kind)
    found = measure((net.graph, fetches, {net.x: net.value}), steps=1)
    return found, predict_by_device(fetches, measured=found, worst=True)


# The peak next to that of plain gradients, on each of two processes.
SHARES = {"plain": 1, "memory": 0.52}


@pytest.mark.parametrize("kind", SHARES)
def test_the_peak_of_each_process_is_measured_and_predicted(kind, forked_cluster):
    (plain, _), (found, predicted) = measured("plain"), measured(kind)
    sent_once = 8 * 24 * 24 * 16 * 4
    assert [row.device for row in found.devices] == DEVICES
    assert [row.device for row in predicted.devices] == DEVICES
    for row, own in zip(found.devices, predicted.devices, strict=True):
        # Two records that share nothing, and of other steps: of kernels, and of the
        # process' allocator, which rounds up, and counts nothing of small buffers.
        # What is sent is held while it is on its way, by the load of the machine: one
        # of the two steps may have held a whole such tensor more, and no part of one.
        if uses_onednn():
            apart = row.allocator_peak - row.trace_peak
            missed = min(abs(apart - times * sent_once) for times in (-1, 0, 1))
            assert missed <= 0.04 * row.trace_peak
        assert own.measured == row.trace_peak
        assert own.worst.peak >= row.trace_peak
        assert abs(own.peak - row.trace_peak) <= sent_once + 0.02 * own.peak
        assert row.trace_peak <= SHARES[kind] * plain.peak_of(row.device)
    assert found.trace_peak == max(row.trace_peak for row in found.devices)


def test_functions_on_tasks_are_refused():
    with tf.Graph().as_default() as graph, tf.device("/job:worker/task:1"):
        y = tf.ones([4]) * 2.0
    with pytest.raises(MeasurementError, match=r"pass \(graph, fetches, feeds\)"):
        measure((graph, y, {}), jit_compile=True)


def test_a_worker_that_fails_ends_the_measurement(forked_cluster):
    with tf.Graph().as_default() as graph, tf.device("/job:worker/task:1"):
        x = v1.placeholder(tf.float32, [2])
        y = tf.debugging.assert_greater(x, 1.0)
    with pytest.raises(MeasurementError, match="InvalidArgumentError"):
        measure((graph, y, {x: np.zeros(2, np.float32)}), steps=1)


def test_a_worker_that_nobody_asks_any_more_ends(tmp_path):
    """As when the measuring process is killed: nothing holds its input open."""
    path = tmp_path / "setup"
    with held_ports(1) as (port,):
        addresses = {"worker": {0: f"127.0.0.1:{port}"}}
        path.write_bytes(pickle.dumps((addresses, b"")))
        done = run_python(
            "-m",
            "geutil.memory.measurement.cluster",
            path,
            "worker",
            "0",
            environment={**os.environ, **REUSE},
        )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().startswith(READY)


def test_a_worker_is_a_process_that_starts_reads_meters_and_ends(tmp_path, monkeypatch):
    path = tmp_path / "setup"
    for name, value in REUSE.items():
        monkeypatch.setenv(name, value)
    with held_ports(1) as (port,):
        addresses = {"worker": {0: f"127.0.0.1:{port}"}}
        path.write_bytes(pickle.dumps((addresses, b"")))
        process = Worker(path, ("worker", 0))
        assert process.is_ready()
        assert process.ask(START_RESIDENT) == []
        allocator, resident = process.ask(READ)
        process.end()
    assert allocator is None
    assert resident >= 0


def test_a_step_whose_worker_is_killed_and_a_new_session():
    """The runtime's own error, and the graph computes the same once it is back."""
    opened = Cluster()
    try:
        net = Net()
        with net.graph.as_default(), tf.device(TASKS[1]):
            begun, never = (v1.FIFOQueue(1, tf.bool, shared_name=n) for n in "bn")
            with tf.control_dependencies([begun.enqueue(True)]):
                waited = never.dequeue()
            told = begun.dequeue()
        fold_batch_norms(net.graph)
        fetches = gradients_of(net, "speed")
        expected = net.run(opened.target, fetches)
        session = net.session(opened.target)

        def kill_once_begun():
            with v1.Session(opened.target, graph=net.graph) as other:
                other.run(told)
            opened.kill(1)

        killer = threading.Thread(target=kill_once_begun)
        killer.start()
        # It ends by itself only when it hangs.
        options = v1.RunOptions(timeout_in_ms=600_000)
        with pytest.raises((tf.errors.UnavailableError, tf.errors.AbortedError)):
            session.run([*fetches, waited], {net.x: net.value}, options)
        killer.join()
        opened.start(1)
        close(net.run(opened.target, fetches), expected, 0)
        # Before the worker is back, this would wait for it.
        session.close()
    finally:
        opened.close()
