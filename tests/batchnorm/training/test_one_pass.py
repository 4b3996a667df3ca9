"""Folds that run each layer once: what runs, whose statistics they are, refusals."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from geutil.graph import verify
from geutil.quantize import quantize
from tests.batchnorm.training.nets import EPSILON, FoldedConv, close, update, variable

v1 = tf.compat.v1
CHANNELS = 4


def _live(graph):
    """Return the types of ops that run in a call of a function's graph."""
    queue = [t.op for t in graph.outputs] + list(graph.control_outputs)
    seen = set(queue)
    for op in queue:
        for before in (*(t.op for t in op.inputs), *op.control_inputs):
            if before not in seen:
                seen.add(before)
                queue.append(before)
    return [op.type for op in seen]


def _net():
    """Norms that are one op, in training as tf_keras builds them."""
    k = pytest.importorskip("tf_keras")
    k.utils.set_random_seed(0)
    x = y = k.Input((8, 8, 3))
    for make in (
        lambda: k.layers.Conv2D(6, 3),
        lambda: k.layers.DepthwiseConv2D(3, use_bias=False),
        lambda: k.layers.Conv2DTranspose(4, 3, strides=2),
    ):
        y = k.layers.BatchNormalization(epsilon=0.1)(make()(y))
        y = k.layers.ReLU()(y)
    y = k.layers.Dense(5)(k.layers.GlobalAveragePooling2D()(y))
    y = k.layers.BatchNormalization(epsilon=0.1)(y)
    model = k.Model(x, k.layers.Activation("tanh")(y))
    random = np.random.default_rng(0)
    for layer in model.layers:
        if isinstance(layer, k.layers.BatchNormalization):
            layer.set_weights(
                [random.uniform(0.5, 2.0, w.shape) for w in layer.get_weights()]
            )
    return model


def _traced(model, **options):
    @tf.function(autograph=False)
    def step(x):
        y = tf.identity(model(x, training=True))
        graph = v1.get_default_graph()
        if options:
            report = fold_batch_norms(graph, is_training=True, strict=True, **options)
            assert len(report.folded) == 4
        handles = [graph.capture(v.handle) for v in model.trainable_variables]
        return y, tf.gradients(tf.reduce_sum(y**2 + y), [x, *handles])

    return step


CONVOLUTIONS = ("Conv2D", "DepthwiseConv2dNative", "MatMul")


def test_each_layer_runs_once():
    counts = {}
    for statistics in (None, "exact", "one_pass"):
        options = {} if statistics is None else {"statistics": statistics}
        step = _traced(_net(), **options)
        graph = step.get_concrete_function(tf.TensorSpec([2, 8, 8, 3])).graph
        counts[statistics] = Counter(
            kind for kind in _live(graph) if kind.startswith(CONVOLUTIONS)
        )
    assert counts["one_pass"] == counts[None]
    # Those of the gradients of data and weights among them.
    assert counts["one_pass"].total() >= 3 * 4
    assert counts["exact"].total() > counts["one_pass"].total()


def test_an_architecture_of_tf_keras():
    folded, plain = _net(), _net()
    steps = _traced(folded, statistics="one_pass"), _traced(plain)
    for seed in range(3):
        shape = (4, *folded.input_shape[1:])
        x = np.float32(np.random.default_rng(seed).normal(size=shape))
        (y, gradients), (other, others) = (step(tf.constant(x)) for step in steps)
        close([y.numpy()], [other.numpy()])
        size = max(np.abs(g).max() for g in others)
        for one, two in zip(gradients, others, strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=1e-5 * size)
        close(folded.get_weights(), plain.get_weights())


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["one range", "by channel"])
def test_the_norm_is_that_of_the_quantized_weights(fused, per_channel):
    net = FoldedConv(fused, bias=True, statistics="one_pass")
    with net.graph.as_default():
        quantize(net.graph, weight_bits=3, per_channel=per_channel)
        verify(net.graph)
        conv = net.graph.get_operation_by_name("conv_fold")
        parts = [net.out, conv.inputs[1], conv.inputs[0]]
        gradients = tf.gradients(tf.reduce_sum(net.out**2), [net.gamma_, net.beta_])
        start = v1.global_variables_initializer()
    data = np.float32(np.random.default_rng(0).normal(size=(3, 5, 5, 3)))
    with v1.Session(graph=net.graph) as session:
        session.run(start)
        (out, weights, x), gradients, _ = session.run(
            [parts, gradients, net.updates], {net.x: data}
        )
        averages = session.run(net.averages)
    scale = net.gamma / np.sqrt(net.variance + EPSILON)
    assert np.abs(weights - net.kernel * scale).max() > 0.05
    y = np.float64(x) @ (weights[0, 0] / scale) + net.bias
    mean, deviation = y.mean((0, 1, 2)), np.sqrt(y.var((0, 1, 2)) + EPSILON)
    normal = (y - mean) / deviation
    expected = np.maximum(normal * net.gamma + net.beta, 0)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5)
    through = 2 * expected
    close(gradients, [(through * normal).sum((0, 1, 2)), through.sum((0, 1, 2))])
    variance = y.var((0, 1, 2), ddof=int(fused))
    old = net.mean, net.variance
    close(
        averages,
        [0.9 * a + 0.1 * b for a, b in zip(old, (mean, variance), strict=True)],
    )


def test_a_gamma_of_zero_learns_with_quantized_weights():
    """As blocks start that shall do nothing at first."""
    with tf.Graph().as_default() as graph:
        x = tf.constant(np.random.default_rng(0).normal(size=(4, 5, 5, 3)), tf.float32)
        x = v1.placeholder_with_default(x, [None, 5, 5, 3])
        kernel = variable(np.random.default_rng(1).normal(size=(3, 3, 3, CHANNELS)))
        made = []
        gamma = variable(np.zeros(CHANNELS))
        for scope in ("folded", "unfolded"):
            with tf.name_scope(scope):
                y = tf.nn.conv2d(x, kernel, 1, "SAME")
                mean, spread = tf.nn.moments(y, [0, 1, 2])
                kept = [variable(np.ones(CHANNELS), trainable=False) for _ in range(2)]
                _ = update(kept[0], mean, True), update(kept[1], spread, True)
                made.append(
                    tf.nn.batch_normalization(y, mean, spread, None, gamma, EPSILON)
                )
                made[-1] = tf.nn.relu(made[-1] + 1.0)
        fold_batch_norms(graph, is_training=True, scope="folded", statistics="one_pass")
        quantize(graph, scope="folded")
        weights = np.random.default_rng(2).normal(size=(4, 5, 5, CHANNELS))
        losses = [tf.reduce_sum(y * np.float32(weights)) for y in made]
        gradients = [tf.gradients(loss, gamma)[0] for loss in losses]
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            folded, plain = session.run(gradients)
    # Data and weights have 8 bits; what they round is small beside the gradients.
    np.testing.assert_allclose(folded, plain, atol=0.05 * np.abs(plain).max())
    assert np.abs(plain).min() > 1.0


# -- more readers ----------------------------------------------------------------------


def _graph_with(build):
    """Build a graph of a convolution, with what `build` makes of it; fold it."""
    results = []
    random = np.random.default_rng(0)
    data = np.float32(random.normal(size=(6, 5, 5, 3)))
    kernel = np.float32(random.normal(size=(3, 3, 3, CHANNELS)))
    for folds in (True, False):
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [None, 5, 5, 3], "x")
            w = variable(kernel)
            y = tf.nn.conv2d(x, w, 1, "SAME", name="conv")
            values = [*build(y)]
            if folds:
                report = fold_batch_norms(
                    graph, is_training=True, statistics="one_pass"
                )
                verify(graph)
            values += tf.gradients(tf.add_n([tf.reduce_sum(v**2) for v in values]), w)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                results.append(session.run(values, {x: data}))
    return report, graph, results


def _norm(y, name, part=None):
    with tf.name_scope(name):
        mean, spread = tf.nn.moments(y if part is None else part, [0, 1, 2])
        for statistic in (mean, spread):
            update(variable(np.ones(CHANNELS), trainable=False), statistic, True)
        z = tf.nn.batch_normalization(y, mean, spread, None, None, EPSILON)
        return tf.nn.relu(z)


def test_several_norms_of_one_layer():
    report, _, results = _graph_with(
        lambda y: [_norm(y, "one"), 2.0 * _norm(tf.identity(y), "two")]
    )
    assert len(report.folded) == 2
    close(*results)


def test_a_layer_that_something_else_reads():
    report, _, results = _graph_with(lambda y: [_norm(y, "norm"), tf.sigmoid(y)])
    assert len(report.folded) == 1
    close(*results)


# -- refusals --------------------------------------------------------------------------


def _of_squares(y):
    """The variance is around another mean than the norm's."""
    mean = tf.reduce_mean(y, [0, 1, 2])
    spread = tf.reduce_mean(tf.math.squared_difference(y, 0.5), [0, 1, 2])
    for statistic in (mean, spread):
        update(variable(np.ones(CHANNELS), trainable=False), statistic, True)
    z = tf.nn.batch_normalization(y, mean, spread, None, None, EPSILON)
    return [tf.nn.relu(z)]


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda y: [_norm(y, "norm", y[:2])], "is no mean of what the norm reads"),
        (_of_squares, "is no variance of what the norm reads"),
    ],
    ids=["part of the batch", "another mean"],
)
def test_statistics_of_something_else_are_refused(build, reason):
    report, _, results = _graph_with(build)
    assert report.folded == ()
    (refused,) = report.refused
    assert refused.reason == f"{reason}; pass statistics='exact'"
    close(*results)
