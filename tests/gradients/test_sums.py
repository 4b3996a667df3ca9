"""Gradients that are added up: one after the other, with the same result."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from geutil.gradients import gradients
from geutil.select import get_backward_walk_ops
from tests.gradients.checking import assert_close, assert_same, flat, run
from tests.thorough import some

v1 = tf.compat.v1


def fan_out(x, ways):
    """Return a tensor that depends on `x` in several ways, and a checkpoint."""
    a = tf.sin(x)
    y = tf.add_n([tf.tanh(a * (0.1 + 0.3 * i)) for i in range(ways)])
    return tf.reduce_sum(tf.exp(tf.sin(y))), y


def matrix():
    return tf.constant(np.linspace(-1, 1, 4096).reshape(64, 64), tf.float32)


def sums(gradients):
    """Return how many tensors each sum behind some gradients adds."""
    behind = get_backward_walk_ops(flat(gradients), control_inputs=True)
    return [
        len(op.inputs)
        for op in behind
        if op.type == "AddN" and not op.name.startswith("AddN")
    ]


def values(count, take):
    """Return the gradient of a sum of so many tensors, as Grappler lets it run."""
    start = np.random.default_rng(0).normal(size=[64, 64])
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [64, 64])
        return run(graph, take(*fan_out(x, count), x), {x: start}, optimize=True)


def ours(z, y, x):
    slopes = gradients(z, x, checkpoints=[y])
    assert set(sums(slopes)) == {2}
    return slopes


def plain(z, _, x):
    return tf.gradients(z, x)


# With 20, buffers are free in such an order that the kernel begins with another tensor.
@pytest.mark.parametrize("count", some([*range(2, 20), 25], 6))
def test_same_bits_as_with_grappler(count):
    assert_same(values(count, ours), values(count, plain))


def test_products_with_a_common_factor_stay_together(graph):
    x = matrix()
    a = tf.sin(x)
    b = tf.tanh(a)
    z = tf.reduce_sum(tf.exp(tf.sin(b))) + tf.reduce_sum(a * b * b)
    ours = gradients(z, x, checkpoints=[b])
    assert_close(*run(graph, [ours, tf.gradients(z, x)], optimize=True))


def test_a_gradient_that_is_a_sum_itself(graph):
    w = matrix()
    h = tf.ones([32, 64])
    kept = []
    for _ in range(5):
        h = tf.matmul(tf.tanh(h), w)
        kept.append(h)
    ours = gradients(tf.reduce_sum(tf.sin(h)), w, checkpoints=kept)
    plain = tf.gradients(tf.reduce_sum(tf.sin(h)), w)
    assert set(sums(ours)) == {2}
    assert_close(*run(graph, [ours, plain]))
    # Without recomputation sums stay as they are.
    assert 5 in sums(gradients(tf.reduce_sum(tf.sin(h)), w, checkpoints=[w]))


def test_what_waits_for_a_sum_waits_for_the_new_one(graph):
    # The gradient of sin waits for what comes in before it computes the cosine.
    x = tf.constant(np.linspace(-1, 1, 4096).astype("float32"))
    z, y = fan_out(tf.identity(x), 4)
    (ours,) = gradients(z, x, checkpoints=[y])
    behind = get_backward_walk_ops([ours], control_inputs=True)
    waiting = [
        op
        for op in behind
        if any(c.type == "AddN" for c in op.control_inputs) and op.type == "Cos"
    ]
    assert waiting
    # Of the old sums nothing is left that would run.
    assert all(len(op.inputs) == 2 for op in behind if "_grad/AddN" in op.name)
    assert np.isfinite(run(graph, ours)).all()


def test_slices_whose_values_are_a_sum(graph):
    @tf.custom_gradient
    def rows(table):
        def grad(dy):
            return tf.IndexedSlices(dy, tf.range(64), tf.constant([64, 64]))

        return tf.identity(table), grad

    table = matrix()
    a = rows(table)
    y = tf.add_n([tf.sin(tf.sin(a)), tf.tanh(tf.sin(a)), tf.exp(tf.sin(a))])
    y += tf.cos(a) * tf.sigmoid(a)
    z = tf.reduce_sum(tf.exp(tf.sin(y)))
    (ours,) = gradients(z, table, checkpoints=[y])
    (plain,) = tf.gradients(z, table)
    assert isinstance(ours, tf.IndexedSlices)
    assert plain.values.op.type == "AddN" and len(plain.values.op.inputs) > 2
    assert set(sums([ours])) == {2}
    assert_close(*run(graph, [[ours.values], [plain.values]]))


def test_grappler_turns_no_sum_into_a_variable():
    def optimized(take):
        """Return the ops of the optimized graph of a step with large gradients."""

        @tf.function(autograph=False)
        def step(x):
            z, y = fan_out(tf.sin(x), 3)
            return take(z, x, y)

        function = step.get_concrete_function(tf.TensorSpec([1000, 10_000]))
        context.context().enable_run_metadata()
        try:
            function(tf.ones([1000, 10_000]))
            metadata = context.context().export_run_metadata()
        finally:
            context.context().disable_run_metadata()
        return [node for part in metadata.partition_graphs for node in part.node]

    # The fact: 40 MB of zeros, as a constant that the graph holds from then on.
    plain = optimized(lambda z, x, y: tf.gradients(z, x))
    assert any(node.op == "TemporaryVariable" for node in plain)
    assert any(node.name.endswith("/tmp_var_zeros") for node in plain)
    ours = optimized(lambda z, x, y: gradients(z, x, checkpoints=[y]))
    assert not any(node.op == "TemporaryVariable" for node in ours)
