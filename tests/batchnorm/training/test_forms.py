"""Other ways to write a batch norm in training, and to keep its moving averages."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from geutil.graph import verify
from tests.batchnorm.checking import data_types, needed
from tests.batchnorm.training.nets import (
    CHANNELS,
    EPSILON,
    STATISTICS,
    Averages,
    Net,
    Trial,
    close,
    update,
    variable,
)
from tests.settings import edges
from tests.thorough import crossed

v1 = tf.compat.v1


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


def _frozen_norm(y):
    """A norm with fixed statistics, of a frozen layer, between layer and norm."""
    fixed = np.linspace(0.5, 2.0, CHANNELS, dtype=np.float32)
    return tf.nn.batch_normalization(y, *(fixed * i for i in range(1, 5)), EPSILON)


def _pooled(y):
    return tf.image.resize(tf.nn.avg_pool2d(y, 2, 1, "SAME"), [4, 5])


class Formed(Net):
    """A net whose norm is in one of the forms."""

    def __init__(
        self, form, layer="conv", zero=False, one=False, between=None, resource=True
    ):
        super().__init__(layer, False, bias=False, resource=resource)
        self.form, self.one, self.between = form, one, between or tf.identity
        name = getattr(form, "__name__", str(form))
        self.name = f"{name}, {layer}, zero: {zero}, one value: {one}"
        if zero:
            self.variables.remove(self.gamma)
            self.gamma = variable(np.zeros(CHANNELS))
            self.variables.append(self.gamma)

    def input(self):
        values, x = super().input()
        return (values[:1, :1, :1] if self.one else values), x

    def linear(self, x):
        return self.between(super().linear(x))

    def trained(self, x, averages):
        p = Parameters(self.gamma, self.beta, averages)
        y, updates = self.form(self.linear(x), p)
        return self._heads(y), updates


FORMS: list[Callable] = [
    *(
        partial(Formed, form)
        for form in (
            _mean_of_squares,
            _divided,
            _powers,
            _bessel,
            _shadows,
            _first_version,
            _second_version,
            _averaging,
        )
    ),
    partial(Formed, _bessel, "transposed"),
    partial(Formed, _bessel, between=_frozen_norm),
    partial(Formed, _bessel, between=_pooled),
    # A gamma of zero gives no NaN.
    partial(Formed, _bessel, zero=True),
    partial(Formed, _averaging, zero=True),
    # In a batch of one value Bessel's correction has nothing to correct.
    partial(Formed, _second_version, one=True),
]


@pytest.mark.parametrize(
    ("delay", "statistics"), crossed([3, None], STATISTICS, together=1)
)
def test_norms(delay, statistics):
    trial = Trial(FORMS, delay, statistics)
    # One net has a frozen norm, too, which goes through the layer in exact folds.
    assert len(trial.report.folded) == len(FORMS) + (statistics == "exact")
    trial.check()
    before = edges(trial.graph)
    # A second time nothing changes.
    report = trial.fold()
    assert report.folded == ()
    assert all("outside of scope" in entry.reason for entry in report.refused)
    assert before == edges(trial.graph)


def _moments(x, p, keepdims=True):
    mean, variance = tf.nn.moments(x, [0, 1, 2], keepdims=keepdims)
    y = tf.nn.batch_normalization(x, mean, variance, p.beta, p.gamma, EPSILON)
    mean, variance = (tf.reshape(t, [CHANNELS]) for t in (mean, variance))
    return y, _updates(p.averages, mean, variance, by_difference=False)


def _moved_by_itself(x, p):
    statistics = {"mean": p.averages.mean, "variance": p.averages.variance}
    y, *_ = tf.raw_ops.FusedBatchNormV3(
        x=x,
        scale=p.gamma,
        offset=p.beta,
        epsilon=EPSILON,
        exponential_avg_factor=0.1,
        **statistics,
    )
    return y, []


FOR_INFERENCE = [
    partial(_moments, keepdims=False),
    *(_moments, _divided, _mean_of_squares, _first_version, _moved_by_itself),
]


def test_moving_statistics_stand_in_at_inference():
    """A graph that was traced for training, folded as one for inference on request."""
    with tf.Graph().as_default() as graph:
        built, expected, feeds = [], [], {}
        for place, form in enumerate([*FOR_INFERENCE] * 2):
            net = Formed(form, resource=place < len(FOR_INFERENCE))
            data, x = net.input()
            averages, feeds[x] = net.averages(), data
            expected += net.deployed(x, averages)
            with tf.name_scope(f"trained/case_{place}"):
                heads, _ = net.trained(x, averages)
                built += [tf.identity(y, name="out") for y in heads]
        options = {"scope": "trained"}
        plain = fold_batch_norms(graph, **options)
        asked = [e for e in plain.refused if "is_training=True" in e.reason]
        assert (plain.folded, len(asked)) == ((), 2 * len(FOR_INFERENCE))
        report = fold_batch_norms(graph, assume_inference=True, **options)
        verify(graph)
        assert len(report.folded) == len(asked)
        again = fold_batch_norms(graph, assume_inference=True, **options)
        assert again.folded == ()
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            close(*session.run((built, expected), feeds))
    types = [data_types(graph, y.op.name) for y in built]
    counts = [(t["Mul"], t["Mean"], t["BiasAdd"]) for t in types]
    assert counts == [(0, 0, 1)] * len(built)


def test_a_fused_norm_is_not_run_any_more():
    trial = Trial([partial(Formed, _averaging)], None, "exact")
    ((values, updates),) = trial.values
    types = {op.type for op in needed(values[0], *updates)}
    assert not any(name.startswith("FusedBatchNorm") for name in types)
