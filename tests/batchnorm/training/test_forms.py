"""Other ways to write a batch norm in training, and to keep its moving averages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import tensorflow as tf

from tests.batchnorm.training.nets import (
    EPSILON,
    STATISTICS,
    Averages,
    close,
    fold_scope,
    update,
    variable,
)

v1 = tf.compat.v1
CHANNELS = 4


@dataclass
class Parameters:
    """What a norm reads."""

    gamma: tf.Variable
    beta: tf.Variable
    averages: Averages


def _updates(averages, mean, variance, by_difference=True):
    pairs = (averages.mean, mean), (averages.variance, variance)
    return [update(*pair, by_difference) for pair in pairs]


def _mean_of_squares(x, p):
    """The variance as the mean of squares without the square of the mean."""
    mean = tf.reduce_mean(x, [0, 1, 2], keepdims=True)
    squares = tf.reduce_mean(tf.square(x), [0, 1, 2], keepdims=True)
    mean, squares = tf.squeeze(mean), tf.squeeze(squares)
    variance = tf.reshape(squares - mean * mean, [CHANNELS])
    y = tf.nn.batch_normalization(x, mean, variance, p.beta, p.gamma, EPSILON)
    return y, _updates(p.averages, mean, variance)


def _divided(x, p):
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    y = (x - mean) / tf.sqrt(variance + EPSILON) * p.gamma + p.beta
    return y, _updates(p.averages, mean, variance)


def _powers(x, p):
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    y = (x - mean) * tf.pow(variance + EPSILON, -0.5) * p.gamma + p.beta
    return y, _updates(p.averages, mean, variance, by_difference=False)


def _bessel(x, p):
    """The moving variance is of the unbiased one."""
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    y = tf.nn.batch_normalization(x, mean, variance, p.beta, p.gamma, EPSILON)
    count = tf.cast(tf.size(x) // CHANNELS, tf.float32)
    return y, _updates(p.averages, mean, variance * (count / (count - 1.0)))


def _shadows(x, p):
    """The moving averages of tf.train.ExponentialMovingAverage."""
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    y = tf.nn.batch_normalization(x, mean, variance, p.beta, p.gamma, EPSILON)
    average = tf.train.ExponentialMovingAverage(0.9)
    apply = average.apply([mean, variance])
    p.averages.mean = average.average(mean)
    p.averages.variance = average.average(variance)
    return y, [apply]


def _first_version(x, p):
    y, mean, variance, *_ = tf.raw_ops.FusedBatchNorm(
        x=x, scale=p.gamma, offset=p.beta, mean=[], variance=[], epsilon=EPSILON
    )
    return y, _updates(p.averages, mean, variance)


def _second_version(x, p):
    y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV2(
        x=x, scale=p.gamma, offset=p.beta, mean=[], variance=[], epsilon=EPSILON
    )
    return y, _updates(p.averages, mean, variance, by_difference=False)


def _averaging(x, p):
    """The op averages, and its results are assigned as they are."""
    y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=x,
        scale=p.gamma,
        offset=p.beta,
        mean=p.averages.mean,
        variance=p.averages.variance,
        epsilon=EPSILON,
        exponential_avg_factor=0.25,
    )
    moved = v1.assign(p.averages.mean, mean), v1.assign(p.averages.variance, variance)
    return y, list(moved)


FORMS: list[Callable] = [
    _mean_of_squares,
    _divided,
    _powers,
    _bessel,
    _shadows,
    _first_version,
    _second_version,
    _averaging,
]


def _conv(x, weights):
    return tf.nn.conv2d(x, weights, 1, "SAME")


def _transposed(x, weights):
    shape = tf.concat([tf.shape(x)[:3] * [1, 2, 2], [CHANNELS]], 0)
    return tf.nn.conv2d_transpose(x, tf.transpose(weights, [0, 1, 3, 2]), shape, 2)


def _frozen_norm_between(x, weights):
    """A norm with fixed statistics, of a frozen layer, between layer and norm."""
    y = tf.nn.conv2d(x, weights, 2, "SAME")
    fixed = [tf.constant([0.5, 1.0, 1.5, 2.0]) * i for i in range(1, 5)]
    return tf.nn.batch_normalization(y, *fixed, EPSILON)


class Pair:
    """A norm folded, and the same one as it was, in one graph."""

    def __init__(self, form, delay, layer=_conv, gamma=None, statistics="exact"):
        random = np.random.default_rng(0)
        gamma = random.uniform(0.5, 2.0, CHANNELS) if gamma is None else gamma
        mean, spread = random.normal(size=CHANNELS), random.uniform(0.5, 2, CHANNELS)
        self.data = np.float32(random.normal(size=(3, 6, 6, 3)))
        self.graph = tf.Graph()
        with self.graph.as_default():
            x = self.x = v1.placeholder(tf.float32, [None, None, None, 3])
            weights = variable(random.normal(size=(3, 3, 3, CHANNELS)))
            scale, shift = variable(gamma), variable(random.normal(size=CHANNELS))
            made = []
            for scope in ("folded", "unfolded"):
                moving = [variable(v, trainable=False) for v in (mean, spread)]
                p = Parameters(scale, shift, Averages(*moving))
                with tf.name_scope(scope):
                    y, updates = form(layer(x, weights), p)
                    made.append((tf.nn.relu(y), updates, p.averages))
            self.report = fold_scope(self.graph, delay, statistics)
            averages = made[0][2]
            y = tf.nn.batch_normalization(
                layer(x, weights),
                averages.mean,
                averages.variance,
                shift,
                scale,
                EPSILON,
            )
            made.append((tf.nn.relu(y), [], averages))
            self.parts = [
                (self._values(y, [x, weights, scale, shift]), updates)
                for y, updates, _ in made
            ]
            self.moving = [[a.mean, a.variance] for _, _, a in made]
            self.start = v1.global_variables_initializer()

    def _values(self, y, xs):
        loss = tf.reduce_mean(tf.sin(y) * tf.sqrt(1.0 + y**2))
        return [y, *tf.gradients(loss, xs)]

    def run(self, session, *parts):
        fetched = [self.parts[i] for i in parts]
        return [values for values, _ in session.run(fetched, {self.x: self.data})]


def _check(pair, delay):
    with v1.Session(graph=pair.graph) as session:
        session.run(pair.start)
        for _ in range(2):
            close(*pair.run(session, 0, 1))
            close(*session.run(pair.moving[:2]))
        if delay is not None:
            before = session.run(pair.moving[0])
            for _ in range(2):
                close(*pair.run(session, 0, 2))
            for one, other in zip(session.run(pair.moving[0]), before, strict=True):
                assert (one == other).all()


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("delay", [None, 3])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.strip("_"))
def test_norms(form, delay, statistics):
    pair = Pair(form, delay, statistics=statistics)
    assert len(pair.report.folded) == 1
    _check(pair, delay)


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("layer", [_transposed, _frozen_norm_between])
def test_layers(layer, statistics):
    pair = Pair(_bessel, 3, layer, statistics=statistics)
    assert len(pair.report.folded) >= 1
    _check(pair, 3)


def test_a_fused_norm_is_not_run_any_more():
    pair = Pair(_averaging, None)
    conv = pair.parts[0][0][0].op
    behind, queue = set(), [conv, *(u.op for u in pair.parts[0][1])]
    while queue:
        op = queue.pop()
        if op not in behind:
            behind.add(op)
            queue += [t.op for t in op.inputs]
    assert not [op.name for op in behind if op.type.startswith("FusedBatchNorm")]


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("form", [_bessel, _averaging])
def test_a_gamma_of_zero_gives_no_nan(form, statistics):
    pair = Pair(form, 3, gamma=np.zeros(CHANNELS), statistics=statistics)
    _check(pair, 3)


@pytest.mark.parametrize("statistics", STATISTICS)
def test_a_batch_of_one_value(statistics):
    """Bessel's correction has nothing to correct."""
    pair = Pair(_second_version, None, statistics=statistics)
    pair.data = pair.data[:1, :1, :1]
    _check(pair, None)


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("delay", [None, 3])
def test_a_second_time_nothing_changes(delay, statistics):
    for form in (_bessel, _averaging):
        pair = Pair(form, delay, statistics=statistics)
        before = [
            (op.name, [t.name for t in op.inputs]) for op in pair.graph.get_operations()
        ]
        report = fold_scope(pair.graph, delay, statistics)
        assert report.folded == ()
        assert all("outside of scope" in entry.reason for entry in report.refused)
        after = pair.graph.get_operations()
        assert before == [(op.name, [t.name for t in op.inputs]) for op in after]
