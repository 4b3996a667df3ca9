"""Training norms are folded with their moving statistics where that is asked for."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.batchnorm import fold_batch_norms
from tests.batchnorm.checking import EPSILON, built, data_types, run
from tests.batchnorm.networks import with_random_norms


class Moving:
    """A conv and a training norm, or the inference norm that it turns into."""

    def __init__(self, b, training, kind="resource variables"):
        b.parameters = kind
        self.training = training
        self.b = b
        x = b.data(2, 6, 6, 3, known=(0,))
        self.y = tf.nn.conv2d(x, b.weights(3, 3, 3, 4), 1, "SAME") + b.weights(4)
        self.scale, self.offset = b.positive(4), b.weights(4)
        self.mean = self.variable(b.random.normal(size=4))
        self.variance = self.variable(b.random.uniform(0.5, 2.0, size=4))

    def variable(self, value):
        self.b._count += 1
        return tf.compat.v1.get_variable(
            f"moving_{self.b._count}",
            initializer=np.float32(value),
            use_resource=self.b.parameters == "resource variables",
        )

    def normalized(self, mean, variance):
        return tf.nn.batch_normalization(
            self.y, mean, variance, self.offset, self.scale, EPSILON, name="norm"
        )

    def inference(self):
        return self.normalized(self.mean, self.variance)


def with_moments(b, training, kind, keepdims=False):
    norm = Moving(b, training, kind)
    if not training:
        return norm.inference()
    mean, variance = tf.nn.moments(norm.y, [0, 1, 2], keepdims=keepdims)
    for variable, value in ((norm.mean, mean), (norm.variance, variance)):
        value = tf.reshape(value, [4])
        tf.compat.v1.assign(variable, variable * 0.9 + value * (1 - 0.9))
    return norm.normalized(mean, variance)


def with_kept_dimensions(b, training, kind):
    return with_moments(b, training, kind, keepdims=True)


def with_decrements(b, training, kind):
    norm = Moving(b, training, kind)
    if not training:
        return norm.inference()
    mean, variance = tf.nn.moments(norm.y, [0, 1, 2])
    for variable, value in ((norm.mean, mean), (norm.variance, variance)):
        tf.compat.v1.assign_sub(variable, (variable - value) * 0.1)
    return norm.normalized(mean, variance)


def with_mean_of_squares(b, training, kind):
    norm = Moving(b, training, kind)
    if not training:
        return norm.inference()
    mean = tf.reduce_mean(norm.y, [0, 1, 2])
    variance = tf.reduce_mean(tf.square(norm.y), [0, 1, 2]) - tf.square(mean)
    for variable, value in ((norm.mean, mean), (norm.variance, variance)):
        tf.compat.v1.assign(variable, variable * 0.9 + value * (1 - 0.9))
    return norm.normalized(mean, variance)


def fused_that_moves(b, training, kind):
    norm = Moving(b, training, kind)
    if not training:
        return norm.inference()
    return tf.raw_ops.FusedBatchNormV3(
        x=norm.y,
        scale=norm.scale,
        offset=norm.offset,
        mean=norm.mean,
        variance=norm.variance,
        epsilon=EPSILON,
        exponential_avg_factor=0.1,
        is_training=True,
    ).y


def fused_that_is_followed(b, training, kind):
    norm = Moving(b, training, kind)
    if not training:
        return norm.inference()
    y, mean, variance = tf.compat.v1.nn.fused_batch_norm(
        norm.y, norm.scale, norm.offset, epsilon=EPSILON, is_training=True
    )
    for variable, value in ((norm.mean, mean), (norm.variance, variance)):
        tf.compat.v1.assign_sub(variable, (variable - value) * 0.1)
    return y


@pytest.mark.parametrize("kind", ("resource variables", "ref variables"))
@pytest.mark.parametrize(
    "build",
    (
        with_moments,
        with_kept_dimensions,
        with_decrements,
        with_mean_of_squares,
        fused_that_moves,
        fused_that_is_followed,
    ),
)
def test_moving_statistics_stand_in(build, kind):
    expected = run(*built(lambda b: build(b, False, kind)))
    graph, feeds = built(lambda b: build(b, True, kind))
    assert len(fold_batch_norms(graph).refused) == 1
    report = fold_batch_norms(graph, assume_inference=True)
    assert len(report.folded) == 1, report
    ge.verify(graph)
    types = data_types(graph)
    assert (types["Mul"], types["Mean"], types["BiasAdd"]) == (0, 0, 1)
    again = fold_batch_norms(graph, assume_inference=True)
    assert not again.folded
    assert not again.refused
    assert np.abs(run(graph, feeds) - expected).max() <= 1e-5 * np.ptp(expected)


def without_updates(norm, mean, variance):
    pass


def with_updates_by_two(norm, mean, variance):
    for _ in range(2):
        for value in (mean, variance):
            tf.compat.v1.assign(norm.variable(np.zeros(4)), value)


def with_updates_of_the_mean(norm, mean, variance):
    tf.compat.v1.assign(norm.mean, norm.mean * 0.9 + mean * 0.1)


@pytest.mark.parametrize(
    "update", (without_updates, with_updates_by_two, with_updates_of_the_mean)
)
@pytest.mark.parametrize("fused", (False, True))
def test_no_moving_statistics_are_known(update, fused):
    def build(b):
        norm = Moving(b, True)
        if fused:
            y, mean, variance = tf.compat.v1.nn.fused_batch_norm(
                norm.y, norm.scale, norm.offset, epsilon=EPSILON, is_training=True
            )
        else:
            mean, variance = tf.nn.moments(norm.y, [0, 1, 2])
            y = norm.normalized(mean, variance)
        update(norm, mean, variance)
        return y

    graph, _ = built(build)
    before = graph.as_graph_def()
    (refused,) = fold_batch_norms(graph, assume_inference=True).refused
    assert "no moving statistics are known" in refused.reason
    assert graph.as_graph_def() == before


@pytest.mark.parametrize("layer", ("conv", "dense", "mixed precision"))
def test_keras_models_that_were_traced_for_training(layer):
    x = keras.Input((6, 6, 3))
    policy = "mixed_float16" if layer == "mixed precision" else "float32"
    if layer == "dense":
        y = keras.layers.Dense(4, dtype=policy)(x)
    else:
        y = keras.layers.Conv2D(4, 3, dtype=policy)(x)
    y = keras.layers.BatchNormalization(dtype=policy)(y)
    model = with_random_norms(keras.Model(x, keras.layers.ReLU(dtype="float32")(y)))
    value = np.random.default_rng(0).normal(size=(2, 6, 6, 3)).astype(np.float32)
    expected = model(value, training=False).numpy()
    traced = tf.function(lambda x: model(x, training=True), autograph=False)
    opened = ge.model.open(traced.get_concrete_function(tf.TensorSpec((None, 6, 6, 3))))
    (refused,) = fold_batch_norms(opened).refused
    assert "is_training=True" in refused.reason
    report = fold_batch_norms(opened, assume_inference=True)
    assert len(report.folded) == 1, report
    (found,) = opened.run(x=value).values()
    bound = 1e-5 if policy == "float32" else 5e-3
    assert np.abs(found - expected).max() <= bound * np.ptp(expected)
