"""Training norms are folded with their moving statistics where that is asked for."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.batchnorm import fold_batch_norms
from tests.batchnorm.checking import (
    EPSILON,
    built_together,
    data_types,
    run,
)
from tests.batchnorm.networks import with_random_norms


class Moving:
    """A conv, and what a norm in training or at inference reads."""

    def __init__(self, b, kind="resource variables"):
        b.parameters = kind
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


def updated(norm, mean, variance, by_difference=False):
    for variable, value in ((norm.mean, mean), (norm.variance, variance)):
        value = tf.reshape(value, [4])
        if by_difference:
            tf.compat.v1.assign_sub(variable, (variable - value) * 0.1)
        else:
            tf.compat.v1.assign(variable, variable * 0.9 + value * (1 - 0.9))


def with_moments(norm, keepdims=False, by_difference=False):
    mean, variance = tf.nn.moments(norm.y, [0, 1, 2], keepdims=keepdims)
    updated(norm, mean, variance, by_difference)
    return norm.normalized(mean, variance)


def with_kept_dimensions(norm):
    return with_moments(norm, keepdims=True)


def with_decrements(norm):
    return with_moments(norm, by_difference=True)


def with_mean_of_squares(norm):
    mean = tf.reduce_mean(norm.y, [0, 1, 2])
    variance = tf.reduce_mean(tf.square(norm.y), [0, 1, 2]) - tf.square(mean)
    updated(norm, mean, variance)
    return norm.normalized(mean, variance)


def fused_that_moves(norm):
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


def fused_that_is_followed(norm):
    y, mean, variance = tf.compat.v1.nn.fused_batch_norm(
        norm.y, norm.scale, norm.offset, epsilon=EPSILON, is_training=True
    )
    updated(norm, mean, variance, by_difference=True)
    return y


NORMS = [
    with_moments,
    with_kept_dimensions,
    with_decrements,
    with_mean_of_squares,
    fused_that_moves,
    fused_that_is_followed,
]


def test_moving_statistics_stand_in():
    kinds = ("resource variables", "ref variables")
    cases = [(norm, kind) for norm in NORMS for kind in kinds]

    def together(training):
        def build(norm, kind):
            def built(b):
                made = Moving(b, kind)
                return norm(made) if training else made.inference()

            return built

        builds = {f"case_{i}/": build(*case) for i, case in enumerate(cases)}
        return built_together(builds, kinds)

    outs = [f"case_{i}/out:0" for i in range(len(cases))]
    expected = run(*together(False), outs)
    graph, feeds = together(True)
    assert len(fold_batch_norms(graph).refused) == len(cases)
    report = fold_batch_norms(graph, assume_inference=True)
    assert len(report.folded) == len(cases), report
    ge.verify(graph)
    again = fold_batch_norms(graph, assume_inference=True)
    assert (again.folded, again.refused) == ((), ())
    wrong = {}
    for i, value in enumerate(run(graph, feeds, outs)):
        types = data_types(graph, f"case_{i}/out")
        counts = types["Mul"], types["Mean"], types["BiasAdd"]
        error = np.abs(value - expected[i]).max() / np.ptp(expected[i])
        if counts != (0, 0, 1) or not error <= 1e-5:
            wrong[cases[i]] = counts, error
    assert not wrong, wrong


def without_updates(norm, mean, variance):
    pass


def with_updates_by_two(norm, mean, variance):
    for _ in range(2):
        for value in (mean, variance):
            tf.compat.v1.assign(norm.variable(np.zeros(4)), value)


def with_updates_of_the_mean(norm, mean, variance):
    tf.compat.v1.assign(norm.mean, norm.mean * 0.9 + mean * 0.1)


@pytest.mark.parametrize("fused", (False, True))
def test_no_moving_statistics_are_known(fused):
    def build(update):
        def built(b):
            norm = Moving(b)
            if fused:
                y, mean, variance = tf.compat.v1.nn.fused_batch_norm(
                    norm.y, norm.scale, norm.offset, epsilon=EPSILON, is_training=True
                )
            else:
                mean, variance = tf.nn.moments(norm.y, [0, 1, 2])
                y = norm.normalized(mean, variance)
            update(norm, mean, variance)
            return y

        return built

    updates = without_updates, with_updates_by_two, with_updates_of_the_mean
    builds = {f"{update.__name__}/": build(update) for update in updates}
    graph, _ = built_together(builds, ["resource variables"])
    before = graph.as_graph_def()
    report = fold_batch_norms(graph, assume_inference=True)
    assert len(report.refused) == 3
    for entry in report.refused:
        assert "no moving statistics are known" in entry.reason, entry
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
