"""A step runs in its planned order, whatever the number of threads."""

import random
from itertools import product

import networkx as nx
import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.gradients import gradients, last_report
from geutil.memory import predict, simulate, step_program, worst_case
from tests.gradients.checking import assert_close, dependencies, gates, run, waiting
from tests.memory.test_schedule import any_order
from tests.memory.tracing import optimized, peak_of, trace
from tests.thorough import chosen

v1 = tf.compat.v1
WIDTH = 512


def normalized(h, name):
    """Return a batch norm made of simple ops, whose gradient has several ways."""
    with tf.name_scope(name):
        mean, variance = tf.nn.moments(h, [0])
        return tf.nn.batch_normalization(h, mean, variance, None, None, 1e-3)


def network(x, layers=4):
    kept = []
    for i in range(layers):
        x = tf.nn.relu6(normalized(tf.tanh(tf.sin(x)), f"norm{i}"))
        kept.append(x)
    return tf.reduce_sum(tf.sin(x)), kept


def branches(x, count=6):
    """Return branches that nothing orders, of which each ends in something small."""
    return tf.add_n(
        [
            tf.reduce_mean(tf.sin(tf.tanh(tf.cos(x * float(i + 1)))), axis=0)
            for i in range(count)
        ]
    )


def test_values_and_validity():
    start = np.random.default_rng(0).normal(size=[64, WIDTH]).astype("float32")
    for recomputes in (True, False):
        with tf.Graph().as_default() as graph:
            x = tf.constant(start)
            z, kept = network(x) if recomputes else (tf.sin(branches(x)), None)
            plain = tf.gradients(z, x)
            gradients(z, x, checkpoints=kept, order=False)
            assert not waiting(graph)
            ours = gradients(z, x, checkpoints=kept)
            report = last_report()
            assert waiting(graph)
            assert report.peak <= report.plain_peak
            assert report.worst < report.plain_worst
            ge.verify(graph)
            for optimize in (False, True):
                assert_close(*run(graph, [ours, plain], optimize=optimize))


def most_held(fetch, tries=20):
    """Return the highest peak of some random orders that a graph's edges allow."""
    program = step_program([fetch])
    orders = (any_order(program, random.Random(seed)) for seed in range(tries))
    return max(simulate(program, order).peak for order in orders)


def test_edges_allow_no_order_that_holds_more():
    held = {}
    for order in (True, False):
        with tf.Graph().as_default():
            x = tf.identity(tf.ones([64, WIDTH]))
            z, kept = network(x)
            (ours,) = gradients(z, x, checkpoints=kept, order=order)
            held[order] = most_held(ours)
            if order:
                peak = last_report().peak
    assert held[True] <= 1.05 * peak
    # Otherwise nothing would be tested.
    assert held[False] > 1.1 * peak


def test_the_forward_pass_is_ordered():
    """Branches of which each holds much while it runs, one after the other."""
    bytes_each = 2048 * WIDTH * 4
    peaks = []
    for order in (False, True):
        with tf.Graph().as_default():
            x = v1.placeholder(tf.float32, [2048, WIDTH])
            h = tf.stop_gradient(branches(x))
            w = tf.constant(np.ones([WIDTH], np.float32))
            z = tf.reduce_sum(w * h)
            (slope,) = gradients(z, w, checkpoints=None, order=order)
            peaks.append(worst_case([z, slope], threads=None).peak)
    free, ordered = peaks
    # All branches at once, or what one op of one of them reads and makes.
    assert free >= 6 * bytes_each
    assert ordered < 2.1 * bytes_each


def test_the_loss_alone_does_not_run_the_backward_pass(graph):
    x = tf.constant(np.ones([64, WIDTH], np.float32))
    z, kept = network(x)
    before = nx.ancestors(dependencies(graph), z.op)
    gradients(z, x, checkpoints=kept)
    added = nx.ancestors(dependencies(graph), z.op) - before
    assert all(op.name.startswith("ordered/") for op in added)


def test_every_session_holds_what_was_predicted(graph):
    """In the first step everything runs in another order, unless it is held to one."""
    x = v1.placeholder(tf.float32, [2048, WIDTH])
    z, kept = network(x)
    (ours,) = gradients(z, x, checkpoints=kept)
    fetch = tf.reduce_sum(ours)
    peak = last_report().peak
    assert predict(fetch).peak == pytest.approx(peak, rel=0.03)
    feed = {x: np.ones([2048, WIDTH], np.float32)}
    for threads, before in product((1, 2, 8, 8), (0, 1)):
        how = {"threads": threads, "before": before}
        assert peak_of(trace(graph, fetch, feed, **how)) <= 1.05 * peak, how


@pytest.mark.parametrize("made", [branches, lambda x: tf.sin(x) * tf.cos(x) * 3.0])
def test_ops_that_a_session_has_run_are_left_alone(made, graph):
    """A Session would not see that they have to wait."""
    x = tf.constant(np.ones([64, WIDTH], np.float32))
    y = made(x)
    with v1.Session() as session:
        session.run(y)
        before = [list(op.inputs) for op in graph.get_operations()]
        z = tf.reduce_sum(tf.sin(y))
        ours = gradients(z, x, checkpoints=None)
        after = [list(op.inputs) for op in graph.get_operations()]
        for old, new in zip(before, after, strict=False):
            assert all(a is b for a, b in zip(old, new, strict=True))
        assert_close(*session.run([ours, tf.gradients(z, x)]))


def test_towers_do_not_wait_for_each_other_nor_their_weight_gradients_for_sums(graph):
    w = tf.ones([WIDTH, WIDTH])
    losses = []
    for place in ("/device:CPU:0", "/device:CPU:1"):
        with tf.device(place):
            h = tf.tanh(tf.matmul(tf.tanh(tf.matmul(tf.ones([64, WIDTH]), w)), w))
            losses.append((tf.reduce_sum(tf.sin(h)), h))
    gradients([z for z, _ in losses], w, checkpoints=[h for _, h in losses])
    both = {
        op
        for op in graph.get_operations()
        if len({t.op.device for t in op.inputs} - {""}) > 1
    }
    assert both
    waited = {c for op in waiting(graph) for c in op.control_inputs}
    assert waited
    assert not waited & both
    for op in waiting(graph):
        places = {c.device for c in (*op.control_inputs, *op.inputs[0].consumers())}
        assert len(places - {""}) < 2, op.name


def gelu(x):
    """Return Keras' formula, in whose gradient products meet constants."""
    return 0.5 * x * tf.math.erfc(-x * 0.5**0.5)


def small_weights():
    """Return what makes constants of a size, each other ones."""
    random = np.random.default_rng(0)
    return lambda *size: tf.constant(random.normal(scale=0.05, size=size), tf.float32)


def gated(h):
    """Return the gated unit of GPT-OSS: products of products, and masks."""
    gate = tf.minimum(h[:, ::2], 1.0)
    linear = tf.clip_by_value(h[:, 1::2], -1.0, 1.0)
    return (linear + 1.0) * (gate * tf.sigmoid(gate * 1.702))


@pytest.mark.parametrize("checkpoints", chosen([None, "memory"], "memory"))
def test_products_of_products_run_in_their_turn(checkpoints, graph):
    weight = small_weights()
    x = h = v1.placeholder(tf.float32, [2048, 64])
    for _ in range(4):
        h = h + tf.matmul(gated(tf.matmul(h, weight(64, 512))), weight(256, 64))
    z = tf.reduce_sum(tf.tanh(h))
    (slope,) = gradients(z, x, checkpoints=checkpoints)
    peak = last_report().peak
    # In the forward pass nothing waits for masks, which may make room early.
    assert 0.9 * peak < predict(slope).peak < 1.03 * peak
    worst = worst_case([z, slope], threads=None)
    assert worst.reached < 1.05 * peak
    assert worst.peak < 1.15 * peak


@pytest.mark.parametrize("checkpoints", chosen([None, "memory"], "memory"))
def test_constants_that_grappler_pushes_down_let_nothing_run_early(checkpoints, graph):
    weight = small_weights()
    x = h = v1.placeholder(tf.float32, [2048, 64])
    for block in range(4):
        h = tf.nn.l2_normalize(h, 1)
        h = h + tf.matmul(gelu(tf.matmul(h, weight(64, 256))), weight(256, 64))
        h = h[::2] if block else h
    z = tf.reduce_sum(tf.tanh(h))
    fetch = tf.reduce_sum(gradients(z, x, checkpoints=checkpoints)[0])
    assert predict(fetch).peak < 1.05 * last_report().peak


def test_gelus_by_a_tangent_that_run_again_are_computed_in_their_turn(graph):
    # The sum behind the tangent made a buffer as soon as it could: 17 % more.
    weight = small_weights()
    h = v1.placeholder(tf.float32, [2048, 16])
    weights = []
    for _ in range(2):
        weights += [weight(16, 256), weight(256, 16)]
        y = tf.nn.gelu(tf.matmul(h, weights[-2]), approximate=True)
        h = h + tf.matmul(y, weights[-1])
    z = tf.reduce_sum(tf.tanh(h))
    slopes = gradients(z, weights, checkpoints="memory", holds_gradients=True)
    assert last_report().recomputed
    assert predict(slopes).peak < 1.03 * last_report().peak


@pytest.mark.parametrize(("rows", "with_norms"), [(64, True), (256, False)])
def test_nothing_runs_again_where_the_order_alone_does_as_well(rows, with_norms, graph):
    """The gradients of all weights, which are held, are most of the peak."""
    weight = small_weights()
    h = v1.placeholder(tf.float32, [rows, 256])
    weights = [weight(256, 256) for _ in range(6)]
    for w in weights:
        h = tf.matmul(h, w)
        h = tf.nn.relu(normalized(h, "norm") if with_norms else h)
    loss = tf.reduce_sum(h * h)
    peaks = []
    for checkpoints in (None, "memory", "speed"):
        gradients(loss, weights, checkpoints=checkpoints, holds_gradients=True)
        assert last_report().recomputed == (), checkpoints
        peaks.append(last_report().peak)
    assert max(peaks) == peaks[0]


@pytest.mark.parametrize("activation", [tf.nn.relu, tf.tanh])
def test_pools_stay_behind_the_activation_that_runs_again(activation, graph):
    """Grappler pools first else, and the gradient needs eight bytes for each value."""
    shape = [8, 32, 32, 4]
    weight = small_weights()
    x = h = v1.placeholder(tf.float32, shape)
    tensors, weights = [], []
    for _ in range(2):
        weights.append(weight(3, 3, 4, 4))
        h = tf.nn.bias_add(tf.nn.conv2d(h, weights[-1], 1, "SAME"), weight(4))
        tensors.append(h)
        h = tf.nn.max_pool2d(activation(h), 2, 2, "SAME")
        tensors.append(h)
    loss = tf.reduce_sum(h * h)
    plain = tf.gradients(loss, weights)
    slopes = gradients(loss, weights, checkpoints=tensors, min_checkpoint_size=0)
    assert last_report().recomputed
    peak = last_report().peak
    feed = {x: np.sin(np.arange(float(np.prod(shape)))).reshape(shape)}
    with v1.Session(graph=graph) as session:
        assert_close(session.run(slopes, feed), session.run(plain, feed))
    assert peak_of(trace(graph, slopes, feed)) <= 1.03 * peak
    run = optimized(graph, slopes)
    pool_gradients = [n for n in run.values() if n.op == "MaxPoolGrad"]
    assert pool_gradients
    assert {run[n.input[1]].op for n in pool_gradients} == {"MaxPool"}
    assert predict(slopes).peak <= 1.01 * peak


def test_the_first_segment_waits_for_weight_gradients_before_it(graph):
    """What the backward pass starts with holds the largest gradient of many models."""
    random = np.random.default_rng(0)
    weights = [
        tf.constant(random.normal(size=[32, 32]).astype("float32") / 6)
        for _ in range(5)
    ]
    h = tf.ones([64, 32])
    kept = []
    for w in weights:
        h = tf.tanh(tf.matmul(tf.sin(h), w))
        kept.append(h)
    loss = tf.reduce_sum(h)
    ours = gradients(loss, weights, checkpoints=kept, min_checkpoint_size=0)
    first = gates(graph)[0]
    # Of the last layer nothing is recomputed first: its input is kept.
    started = [op.name for op in first.control_inputs]
    assert any("TanhGrad" in name or "MatMul" in name for name in started)
    assert not any(op.type in ("Identity", "Fill") for op in first.control_inputs)
    assert_close(*run(graph, [ours, tf.gradients(loss, weights)]))
