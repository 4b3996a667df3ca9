"""Folds that run each layer once: what runs, whose statistics they are, refusals."""

from __future__ import annotations

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from geutil.batchnorm import fold_batch_norms
from geutil.graph import verify
from geutil.quantize import quantize
from tests.batchnorm.networks import with_random_norms
from tests.batchnorm.training.nets import EPSILON, close, update, variable

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


def _keras_net(groups=2):
    """Squeeze and excitation, groups, a transposed convolution, a dense layer."""
    keras.utils.set_random_seed(0)
    x = keras.Input((8, 8, 4))
    y = layers.Conv2D(8, 3, groups=groups)(x)
    y = layers.Activation("swish")(layers.BatchNormalization(epsilon=0.1)(y))
    gate = layers.GlobalAveragePooling2D(keepdims=True)(y)
    y = layers.Multiply()([y, layers.Conv2D(8, 1, activation="sigmoid")(gate)])
    y = layers.Conv2DTranspose(6, 3, strides=2, use_bias=False)(y)
    y = layers.ReLU()(layers.BatchNormalization(epsilon=0.1)(y))
    y = layers.DepthwiseConv2D(3, depth_multiplier=2)(y)
    y = layers.ReLU(6.0)(layers.BatchNormalization(epsilon=0.1)(y))
    y = layers.Dense(5)(layers.GlobalAveragePooling2D()(y))
    y = layers.BatchNormalization(epsilon=0.1)(y)
    return with_random_norms(keras.Model(x, layers.Activation("tanh")(y)))


def _traced(model, **options):
    @tf.function(autograph=False)
    def step(x):
        y = tf.identity(model(x, training=True))
        graph = v1.get_default_graph()
        if options:
            report = fold_batch_norms(graph, is_training=True, strict=True, **options)
            assert len(report.folded) == 4
        handles = [_handle(graph, v) for v in model.trainable_variables]
        return y, tf.gradients(tf.reduce_sum(y**2 + y), [x, *handles])

    return step


def _handle(graph, variable):
    # A variable of tf_keras is TensorFlow's own, one of Keras has such a one.
    own = variable if hasattr(variable, "handle") else variable.value
    return graph.capture(own.handle)


CONVOLUTIONS = ("Conv2D", "DepthwiseConv2dNative", "MatMul")


def test_each_layer_runs_once():
    counts = {}
    for statistics in (None, "exact", "one_pass"):
        options = {} if statistics is None else {"statistics": statistics}
        # Keras calls a function for groups, and the fold inlines it.
        step = _traced(_keras_net(groups=1), **options)
        graph = step.get_concrete_function(tf.TensorSpec([2, 8, 8, 4])).graph
        counts[statistics] = Counter(
            kind for kind in _live(graph) if kind.startswith(CONVOLUTIONS)
        )
    assert counts["one_pass"] == counts[None]
    # Those of the gradients of data and weights among them.
    assert counts["one_pass"].total() >= 3 * 5
    assert counts["exact"].total() > counts["one_pass"].total()


def _tf_keras_net():
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


@pytest.mark.parametrize("make", [_keras_net, _tf_keras_net])
def test_architectures_with_all_kinds_of_layers(make):
    folded, plain = make(), make()
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


class Quantized:
    """A convolution with a bias and a norm, folded, whose weights are quantized."""

    def __init__(self, fused, per_channel, bits):
        random = np.random.default_rng(0)
        self.data = np.float32(random.normal(size=(3, 5, 5, 3)))
        self.gamma = random.normal(size=CHANNELS)
        self.beta, self.bias, self.mean = random.normal(size=(3, CHANNELS))
        self.variance = random.uniform(0.2, 5.0, CHANNELS)
        self.kernel = random.normal(size=(1, 1, 3, CHANNELS))
        with tf.Graph().as_default() as self.graph:
            self.x = v1.placeholder(tf.float32, [None, 5, 5, 3])
            y = tf.nn.conv2d(self.x, variable(self.kernel), 1, "SAME", name="conv")
            y = tf.nn.bias_add(y, variable(self.bias))
            gamma, beta = variable(self.gamma), variable(self.beta)
            if fused:
                z, *batch = v1.nn.fused_batch_norm(y, gamma, beta, epsilon=EPSILON)
            else:
                batch = tf.nn.moments(y, [0, 1, 2])
                z = tf.nn.batch_normalization(y, *batch, beta, gamma, EPSILON)
            averages = [
                variable(v, trainable=False) for v in (self.mean, self.variance)
            ]
            self.updates = [
                update(average, statistic, True)
                for average, statistic in zip(averages, batch, strict=True)
            ]
            out = tf.nn.relu(z, name="result")
            fold_batch_norms(self.graph, is_training=True, statistics="one_pass")
            quantize(self.graph, weight_bits=bits, per_channel=per_channel)
            verify(self.graph)
            conv = self.graph.get_operation_by_name("conv_fold")
            self.parts = [out, conv.inputs[1], conv.inputs[0]]
            self.averages = averages
            self.gradients = tf.gradients(tf.reduce_sum(out**2), [gamma, beta])
            self.start = v1.global_variables_initializer()


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["one range", "by channel"])
def test_the_norm_is_that_of_the_quantized_weights(fused, per_channel):
    net = Quantized(fused, per_channel, 3)
    with v1.Session(graph=net.graph) as session:
        session.run(net.start)
        (out, weights, x), gradients, _ = session.run(
            [net.parts, net.gradients, net.updates], {net.x: net.data}
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
