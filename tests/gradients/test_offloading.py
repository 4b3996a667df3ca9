"""Tensors that leave a GPU which is not there, and what its memory holds meanwhile."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import (
    Budget,
    by_type,
    checkpointed,
    explain,
    gradients,
    last_report,
)
from geutil.graph.runtime import kind_of
from geutil.memory import Node, Program, predict, worst_case
from geutil.memory.executor import simulate_with_copies
from geutil.memory.step_prediction import executed_step

GPU = "GPU:0"
LAYERS, ROWS, WIDTH = 24, 512, 128
BYTES = ROWS * WIDTH * 4
weights = [tf.Variable(tf.eye(WIDTH)) for _ in range(LAYERS)]


def loss_of(x):
    for w in weights:
        x = tf.tanh(x @ w)
    return tf.reduce_mean(x)


def traced(**options):
    @tf.function(autograph=False)
    def step(x):
        loss = loss_of(x)
        slopes = gradients(loss, weights, device=GPU, **options)
        for w, slope in zip(weights, slopes, strict=True):
            w.assign_sub(slope)
        return loss

    return step.get_concrete_function(tf.TensorSpec([ROWS, WIDTH]))


def asked_for(function):
    return [*function.graph.outputs, *function.graph.control_outputs]


def test_checkpoints_are_chosen_knowing_that_they_are_away():
    traced(checkpoints="memory")
    without = last_report()
    function = traced(checkpoints="memory", offload=True)
    report = last_report(function)
    assert report.offloaded and not report.warnings
    assert report.peak <= 0.75 * without.peak
    # Host and device are reported apart.
    assert report.offloaded_bytes == len(report.offloaded) * BYTES
    assert f"{len(report.offloaded)} tensors, " in str(report)
    assert without.offloaded_bytes == 0
    # The finished step holds what is reported, and by less than is sent in all.
    assert predict(asked_for(function)).peak == pytest.approx(report.peak, rel=0.2)
    assert report.worst < without.peak + 3 * BYTES


def test_nothing_is_sent_where_that_would_not_help():
    # Nothing is kept long enough: the gradients of one large weight are the peak.
    w = tf.Variable(tf.ones([2048, 512]))

    @tf.function(autograph=False)
    def step(x):
        loss = tf.reduce_mean(tf.tanh(tf.tanh(x @ w)))
        report = explain(loss, w, checkpoints="memory", offload=True, device=GPU)
        assert not report.offloaded
        assert report.offloaded_bytes == 0
        assert any("nothing is offloaded" in told for told in report.warnings)
        return loss

    step.get_concrete_function(tf.TensorSpec([32, 2048]))


def test_a_budget_says_that_nothing_travels():
    @tf.function(autograph=False)
    def step(x):
        loss = loss_of(x)
        slow = Budget("60%", offload=True, bandwidth=1e3)
        report = explain(loss, weights, checkpoints=slow, device=GPU)
        assert not report.offloaded
        assert any("nothing is offloaded: to compute" in t for t in report.warnings)
        fast = Budget("60%", offload=True, bandwidth=1e12)
        report = explain(loss, weights, checkpoints=fast, device=GPU)
        assert report.offloaded and not report.warnings
        return loss

    step.get_concrete_function(tf.TensorSpec([ROWS, WIDTH]))


def on_streams(function, *, waits):
    """Return the peak on a GPU that is fed far ahead of its copies."""
    step = executed_step(asked_for(function), None, None, True, None, GPU)
    program = step.program
    on_host = [kind_of(device) == "CPU" for device in step.devices]
    copies = {
        i
        for i, node in enumerate(program.nodes)
        if "offloaded/" in node.name
        and any(on_host[program.makers[t]] != on_host[i] for t in node.inputs)
    }
    if not waits:
        # Without the ops of the device that wait for those of the host.
        nodes = [
            node.changed(
                controls=[c for c in node.controls if on_host[i] or not on_host[c]]
            )
            for i, node in enumerate(program.nodes)
        ]
        program = replace(program, nodes=nodes)
    # A copy takes as long as ten layers.
    seconds = [10.0 if i in copies else 1.0 for i in range(len(program.nodes))]
    return simulate_with_copies(program, copies, seconds)[0].peak


@pytest.mark.parametrize("checkpoints", ["memory", by_type("Tanh")])
def test_the_peak_holds_where_ops_are_enqueued_ahead_of_copies(checkpoints):
    function = traced(checkpoints=checkpoints, offload=True)
    report = last_report(function)
    sent = report.offloaded_bytes
    # As measured on a card: all that is sent is there at once.
    assert on_streams(function, waits=False) > 0.8 * sent
    held = on_streams(function, waits=True)
    assert held <= 1.05 * report.peak
    assert held <= worst_case(asked_for(function), device=GPU).peak


def test_a_sent_tensor_is_held_until_its_copy_has_ended():
    # Three tensors of 10 bytes are made and sent; nothing else reads them.
    nodes = [Node(f"x{i}", "Op", [], [i], [i - 1][:i]) for i in range(3)]
    nodes += [Node(f"sent{i}", "Op", [i], [3 + i]) for i in range(3)]
    program = Program(nodes, [10, 10, 10, 0, 0, 0])
    copies = {3, 4, 5}
    run, seconds = simulate_with_copies(program, copies, [1, 1, 1, 5, 5, 5], 0.0)
    assert run.peak == 30
    assert seconds == 1 + 3 * 5
    quick, _ = simulate_with_copies(program, copies, [1.0] * 3 + [0.0] * 3, 2.0)
    assert quick.peak == 10
    # Each is made when the one before has arrived.
    waiting = [n.changed(controls=[2 + i][:i]) for i, n in enumerate(nodes[:3])]
    program = replace(program, nodes=[*waiting, *nodes[3:]])
    run, seconds = simulate_with_copies(program, copies, [1, 1, 1, 5, 5, 5], 0.0)
    assert (run.peak, seconds) == (10, 18)


@pytest.mark.parametrize("nested", [False, True])
def test_a_call_sends_while_tensorflow_differentiates_its_graph(nested):
    # TensorFlow has counted the readers of forward ops by then, and waits for a
    # gradient from each: an op that waits for a copy must not become another one yet.
    def loss_of_two(x):
        for w in weights:
            x = tf.sin(tf.tanh(x @ w))
        return tf.reduce_mean(x)

    saving = checkpointed(loss_of_two, checkpoints=by_type("Sin"), offload=True)
    x = tf.random.stateless_normal([ROWS, WIDTH], [1, 2])

    def slopes(function):
        with tf.GradientTape() as tape:
            loss = function(x)
        return tape.gradient(loss, weights)

    called = tf.function(saving, autograph=False) if nested else saving
    step = tf.function(lambda: slopes(called), autograph=False)
    found = step()
    assert last_report().offloaded
    for slope, plain in zip(found, slopes(loss_of_two), strict=True):
        np.testing.assert_allclose(slope, plain, rtol=1e-5, atol=1e-8)
