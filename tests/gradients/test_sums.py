"""Gradients that are added up: one after the other, with the same result."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from geutil.gradients import gradients
from geutil.gradients.tape.building import additions
from geutil.select import get_backward_walk_ops
from tests.gradients.checking import assert_close, assert_same, flat, run
from tests.settings import slow
from tests.thorough import some

v1 = tf.compat.v1
pytestmark = slow


def fan_out(x, ways):
    """Return a tensor that depends on `x` in several ways, and a checkpoint."""
    a = tf.sin(x)
    y = tf.add_n([tf.tanh(a * (0.1 + 0.3 * i)) for i in range(ways)])
    return tf.reduce_sum(tf.exp(tf.sin(y))), y


def sums(gradients):
    """Return how many tensors each sum behind some gradients adds."""
    behind = get_backward_walk_ops(flat(gradients), control_inputs=True)
    return [
        len(op.inputs)
        for op in behind
        if op.type == "AddN" and not op.name.startswith("AddN")
    ]


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("ways", [2, 3, 4, 9, 10, 25])
def test_values(ways, optimize):
    start = np.random.default_rng(ways).normal(size=[64, 64]).astype("float32")
    with tf.Graph().as_default() as graph:
        x = tf.constant(start)
        z, y = fan_out(tf.identity(x), ways)
        plain = tf.gradients(z, x)
        ours = gradients(z, x, checkpoints=[y])
        assert set(sums(ours)) == {2}
        assert_close(*run(graph, [ours, plain], optimize=optimize))


# With 20, buffers are free in such an order that the kernel begins with another tensor.
@pytest.mark.parametrize("ways", some([*range(2, 20), 25], 6))
def test_same_bits_as_with_grappler(ways):
    start = np.random.default_rng(ways).normal(size=[64, 64]).astype("float32")

    def values(take):
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [64, 64])
            z, y = fan_out(x, ways)
            return run(graph, take(z, x, y), {x: start}, optimize=True)

    expected = values(lambda z, x, y: tf.gradients(z, x))
    assert_same(values(lambda z, x, y: gradients(z, x, checkpoints=[y])), expected)


@pytest.mark.parametrize("count", range(2, 30))
def test_every_tensor_is_added_once_and_in_the_order_of_the_kernel(count):
    random = np.random.default_rng(count)
    tensors = list(random.normal(size=[count, 1000]).astype("float32"))
    expected = tf.add_n(tensors).numpy()
    for first, second in additions(count):
        tensors.append(tensors[first] + tensors[second])
    np.testing.assert_array_equal(tensors[-1], expected)


def test_products_with_a_common_factor_stay_together():
    with tf.Graph().as_default() as graph:
        x = tf.constant(np.linspace(-1, 1, 4096).reshape(64, 64).astype("float32"))
        a = tf.sin(x)
        b = tf.tanh(a)
        z = tf.reduce_sum(tf.exp(tf.sin(b))) + tf.reduce_sum(a * b * b)
        ours = gradients(z, x, checkpoints=[b])
        assert_close(*run(graph, [ours, tf.gradients(z, x)], optimize=True))


def test_a_gradient_that_is_a_sum_itself():
    with tf.Graph().as_default() as graph:
        w = tf.constant(np.linspace(-1, 1, 4096).reshape(64, 64).astype("float32"))
        h = tf.ones([32, 64])
        kept = []
        for _ in range(5):
            h = tf.matmul(tf.tanh(h), w)
            kept.append(h)
        ours = gradients(tf.reduce_sum(tf.sin(h)), w, checkpoints=kept)
        plain = tf.gradients(tf.reduce_sum(tf.sin(h)), w)
        assert set(sums(ours)) == {2}
        assert_close(*run(graph, [ours, plain]))


def test_what_waits_for_a_sum_waits_for_the_new_one():
    # The gradient of sin waits for what comes in before it computes the cosine.
    with tf.Graph().as_default() as graph:
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


def test_sums_of_slices_stay_slices():
    with tf.Graph().as_default() as graph:
        table = tf.constant(np.linspace(-1, 1, 4096).reshape(64, 64).astype("float32"))
        rows = [tf.gather(table, [i, i + 1, 2 * i]) for i in range(4)]
        h = tf.concat([tf.tanh(tf.sin(r)) for r in rows], 0)
        z = tf.reduce_sum(tf.tanh(tf.sin(h)))
        ours = gradients(z, table, checkpoints=[h], min_checkpoint_size=0)
        plain = tf.gradients(z, table)
        assert isinstance(ours[0], tf.IndexedSlices)
        dense = [tf.convert_to_tensor(g) for g in (*ours, *plain)]
        a, b = run(graph, dense)
        assert_close([a], [b])


def test_slices_whose_values_are_a_sum():
    @tf.custom_gradient
    def rows(table):
        def grad(dy):
            return tf.IndexedSlices(dy, tf.range(64), tf.constant([64, 64]))

        return tf.identity(table), grad

    with tf.Graph().as_default() as graph:
        table = tf.constant(np.linspace(-1, 1, 4096).reshape(64, 64).astype("float32"))
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


def test_without_recomputation_sums_stay_as_they_are():
    with tf.Graph().as_default():
        x = tf.ones([64, 64])
        z, _ = fan_out(x, 4)
        assert 4 in sums(gradients(z, x, checkpoints=[x]))


def test_loops_of_version_1_keep_their_sums():
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            x = tf.constant(np.linspace(0.1, 1, 2048).astype("float32"))
            h = tf.tanh(tf.sin(x))
            h = tf.while_loop(
                lambda i, h: i < 3,
                lambda i, h: (i + 1, tf.sin(h) * x + tf.cos(h) * x + tf.tanh(h) * x),
                (0, h),
            )[1]
            z = tf.reduce_sum(tf.exp(tf.sin(h)))
            ours = gradients(z, x, checkpoints=[h])
            plain = tf.gradients(z, x)
            assert_close(*run(graph, [ours, plain]))
    finally:
        v1.enable_control_flow_v2()


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
