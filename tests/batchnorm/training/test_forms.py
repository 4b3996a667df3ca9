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
from tests.thorough import crossed

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


class Pairs:
    """Norms folded, and the same ones as they were and as deployed, in one graph."""

    def __init__(self, forms, delay, layer=_conv, gamma=None, statistics="exact"):
        random = np.random.default_rng(0)
        gamma = random.uniform(0.5, 2.0, CHANNELS) if gamma is None else gamma
        mean, spread = random.normal(size=CHANNELS), random.uniform(0.5, 2, CHANNELS)
        self.data = np.float32(random.normal(size=(3, 6, 6, 3)))
        self.graph, self.names = tf.Graph(), [form.__name__ for form in forms]
        with self.graph.as_default():
            self.x = v1.placeholder(tf.float32, [None, None, None, 3])
            kernel, offset = random.normal(size=(3, 3, 3, 4)), random.normal(size=4)
            made = []
            for form in forms:
                # Each has data of its own to ask for the gradient of.
                read = [tf.identity(self.x), *map(variable, (kernel, gamma, offset))]
                x, weights, scale, shift = read
                scopes = []
                for scope in ("folded/net", "unfolded/net"):
                    moving = [variable(v, trainable=False) for v in (mean, spread)]
                    p = Parameters(scale, shift, Averages(*moving))
                    with tf.name_scope(scope):
                        y, updates = form(layer(x, weights), p)
                        scopes.append((tf.nn.relu(y), updates, p.averages))
                made.append((read, scopes))
            self.report = fold_scope(self.graph, delay, statistics)
            self.parts, self.moving = [], []
            for (x, weights, scale, shift), scopes in made:
                kept = scopes[0][2]
                y = tf.nn.batch_normalization(
                    layer(x, weights), kept.mean, kept.variance, shift, scale, EPSILON
                )
                scopes.append((tf.nn.relu(y), [], kept))
                self.parts.append(
                    [
                        (self._values(y, [x, weights, scale, shift]), updates)
                        for y, updates, _ in scopes
                    ]
                )
                self.moving.append([[a.mean, a.variance] for *_, a in scopes])
            self.start = v1.global_variables_initializer()

    def _values(self, y, xs):
        loss = tf.reduce_mean(tf.sin(y) * tf.sqrt(1.0 + y**2))
        return [y, *tf.gradients(loss, xs)]

    def run(self, session, *parts):
        """Run a step, and return for each norm the values of the parts."""
        fetched = [[part[i] for i in parts] for part in self.parts]
        found = session.run(fetched, {self.x: self.data})
        return [[values for values, _ in one] for one in found]


def _check(pairs, delay):
    wrong = {}

    def check_close(found):
        for name, (actual, expected) in zip(pairs.names, found, strict=True):
            try:
                close(actual, expected)
            except AssertionError as error:
                wrong[name] = str(error)

    with v1.Session(graph=pairs.graph) as session:
        session.run(pairs.start)
        for _ in range(2):
            check_close(pairs.run(session, 0, 1))
            check_close(session.run([moving[:2] for moving in pairs.moving]))
        if delay is not None:
            kept = [moving[0] for moving in pairs.moving]
            before = session.run(kept)
            for _ in range(2):
                check_close(pairs.run(session, 0, 2))
            np.testing.assert_array_equal(session.run(kept), before)
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("delay", "statistics"), crossed([3, None], STATISTICS, together=1)
)
def test_norms(delay, statistics):
    pairs = Pairs(FORMS, delay, statistics=statistics)
    assert len(pairs.report.folded) == len(FORMS)
    _check(pairs, delay)
    before = [
        (op.name, [t.name for t in op.inputs]) for op in pairs.graph.get_operations()
    ]
    # A second time nothing changes.
    report = fold_scope(pairs.graph, delay, statistics)
    assert report.folded == ()
    assert all("outside of scope" in entry.reason for entry in report.refused)
    after = pairs.graph.get_operations()
    assert before == [(op.name, [t.name for t in op.inputs]) for op in after]


@pytest.mark.parametrize(
    ("layer", "statistics"),
    crossed([_transposed, _frozen_norm_between], STATISTICS, together=1),
)
def test_layers(layer, statistics):
    pairs = Pairs([_bessel], 3, layer, statistics=statistics)
    assert len(pairs.report.folded) >= 1
    _check(pairs, 3)


def test_a_fused_norm_is_not_run_any_more():
    pairs = Pairs([_averaging], None)
    values, updates = pairs.parts[0][0]
    behind, queue = set(), [values[0].op, *(u.op for u in updates)]
    while queue:
        op = queue.pop()
        if op not in behind:
            behind.add(op)
            queue += [t.op for t in op.inputs]
    assert not [op.name for op in behind if op.type.startswith("FusedBatchNorm")]


@pytest.mark.parametrize("statistics", STATISTICS)
def test_a_gamma_of_zero_gives_no_nan(statistics):
    zero = np.zeros(CHANNELS)
    _check(Pairs([_bessel, _averaging], 3, gamma=zero, statistics=statistics), 3)


@pytest.mark.parametrize("statistics", STATISTICS)
def test_a_batch_of_one_value(statistics):
    """Bessel's correction has nothing to correct."""
    pairs = Pairs([_second_version], None, statistics=statistics)
    pairs.data = pairs.data[:1, :1, :1]
    _check(pairs, None)
