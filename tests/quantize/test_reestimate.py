"""Re-estimation of batch norms, against numpy on what Keras computes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.quantize import calibrate, quantize, reestimate_batch_norm
from tests.quantize.small_networks import normal, opened, spec
from tests.settings import needs_eager
from tests.thorough import crossed

pytestmark = needs_eager

PARTS = {"one": [24], "many": [8, 8, 8], "uneven": [3, 20, 1]}
X = normal(24, 8, 8, 3, seed=1) * 2 + 1


class Network:
    """A Keras network with a branch, and its norms in order."""

    def __init__(self):
        keras = tf.keras.layers
        tf.keras.utils.set_random_seed(0)
        x = image = keras.Input((8, 8, 3), name="x")
        x = left = self.norm(keras.Conv2D(6, 3, use_bias=False)(x), "relu")
        x = self.norm(keras.DepthwiseConv2D(3, padding="same")(x), "relu6")
        x = self.norm(keras.Conv2D(6, 1)(x))
        right = self.norm(keras.Conv2D(6, 1, use_bias=False)(left))
        x = keras.Add()([x, right])
        x = keras.Dense(4)(keras.GlobalAveragePooling2D()(x))
        self.keras = tf.keras.Model(image, x)
        layers = self.keras.layers
        self.norms = [la for la in layers if isinstance(la, keras.BatchNormalization)]
        generator = np.random.default_rng(0)
        for norm in self.norms:
            norm.gamma.assign(generator.uniform(0.5, 2.0, 6))
            norm.beta.assign(generator.normal(size=6))
            norm.moving_mean.assign(generator.normal(size=6))
            norm.moving_variance.assign(generator.uniform(0.5, 2.0, 6))

    def norm(self, x, activation=None):
        x = tf.keras.layers.BatchNormalization()(x)
        return x if activation is None else tf.keras.layers.Activation(activation)(x)

    def statistics(self):
        """Return the mean and variance of each norm as they are."""
        return [(n.moving_mean.numpy(), n.moving_variance.numpy()) for n in self.norms]

    def expected(self):
        """Set each norm by numpy on what Keras gives it; put the old ones back."""
        before = self.keras.get_weights()
        for norm in self.norms:
            given = tf.keras.Model(self.keras.inputs, norm.input)
            values = given(X, training=False).numpy().astype(np.float64)
            norm.moving_mean.assign(values.mean((0, 1, 2)))
            norm.moving_variance.assign(values.var((0, 1, 2)))
        found = self.statistics()
        self.keras.set_weights(before)
        return found


@pytest.fixture
def network():
    return Network()


def parts(sizes):
    ends = np.cumsum(sizes)
    return [{"x": X[end - n : end]} for n, end in zip(sizes, ends, strict=True)]


def near(found, wanted, tolerance=1e-5):
    assert len(found) == len(wanted)
    for pair, other in zip(found, wanted, strict=True):
        for a, b in zip(pair, other, strict=True):
            assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


@pytest.mark.parametrize(("sizes", "folded"), crossed(PARTS, [False, True], together=1))
def test_statistics_are_those_of_numpy(network, folded, sizes):
    """Of a generator, which is gone through once."""
    wanted = network.expected()
    m = model.open(network.keras)
    if folded:
        assert not fold_batch_norms(m).refused
    report = reestimate_batch_norm(m, (part for part in parts(PARTS[sizes])))
    assert [entry.folded for entry in report.reestimated] == [folded] * 4
    assert (report.missed, report.batches) == ((), len(PARTS[sizes]))
    near(network.statistics(), wanted)
    # The model reads the variables, and computes what Keras does with them.
    (y,) = m.run(x=X).values()
    exact = network.keras(X, training=False).numpy()
    assert np.abs(y - exact).max() <= 1e-4 * np.abs(exact).max()


@pytest.mark.parametrize("delay", [None, 2])
def test_a_quantized_network_sees_what_it_quantizes(network, delay):
    wanted = network.expected()
    # Ranges are those of the network with the right statistics.
    for norm, (mean, variance) in zip(network.norms, wanted, strict=True):
        norm.moving_mean.assign(mean)
        norm.moving_variance.assign(variance)
    m = model.open(network.keras)
    fold_batch_norms(m)
    quantize(m, is_training=True, quant_delay=delay)
    calibrate(m, {"x": X}, "min_max")
    ranges = {
        n: v.numpy() for n, v in m.variables.items() if n.endswith(("min", "max"))
    }
    wanted = network.expected()
    reestimate_batch_norm(m, {"x": X})
    # Within the noise of eight bits, and not nearer: the rounding is in it.
    near(network.statistics(), wanted, 0.05)
    with pytest.raises(AssertionError):
        near(network.statistics(), wanted, 1e-5)
    for name, value in ranges.items():
        np.testing.assert_array_equal(m.variables[name].numpy(), value)


def test_channels_that_are_multiplied_by_zero_keep_theirs_when_folded(network):
    network.norms[1].gamma.assign([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    before, wanted = network.statistics(), network.expected()
    m = model.open(network.keras)
    fold_batch_norms(m)
    report = reestimate_batch_norm(m, {"x": X})
    assert [entry.kept for entry in report.reestimated] == [0, 2, 0, 0]
    assert "2 kept" in str(report)
    zeros = network.norms[1].gamma.numpy() == 0
    for kind in (0, 1):
        found = network.statistics()[1][kind]
        np.testing.assert_array_equal(found[zeros], before[1][kind][zeros])
        np.testing.assert_allclose(found[~zeros], wanted[1][kind][~zeros], rtol=1e-4)


def fused(data_format, **options):
    shape = [2, 4, 4, 3] if data_format == "NHWC" else [2, 3, 4, 4]
    variables = [tf.Variable(v) for v in (normal(3), normal(3) ** 2 + 0.1)]
    gamma, beta = normal(3, seed=2), normal(3, seed=3)

    def compute(x):
        made = tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=gamma,
            offset=beta,
            mean=variables[0],
            variance=variables[1],
            is_training=False,
            data_format=data_format,
        )
        return {"y": made.y}

    return opened(compute, spec(shape, "x")), variables, normal(*shape, seed=4)


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_fused_norms(data_format):
    m, (mean, variance), x = fused(data_format)
    x = x.astype(np.float64)
    report = reestimate_batch_norm(m, {"x": x})
    assert len(report.reestimated) == 1
    axes = (0, 1, 2) if data_format == "NHWC" else (0, 2, 3)
    np.testing.assert_allclose(mean.numpy(), x.mean(axes), rtol=1e-5)
    np.testing.assert_allclose(variance.numpy(), x.var(axes), rtol=1e-5)


def test_a_norm_that_subtracts_first():
    mean, variance = tf.Variable(normal(5)), tf.Variable(np.ones(5, np.float32))
    m = opened(
        lambda x: {"y": (x - mean) * tf.math.rsqrt(variance + 1e-3) + 2.0},
        spec([None, 5], "x"),
    )
    x = normal(40, 5, seed=3).astype(np.float64) * 3 + 1
    reestimate_batch_norm(m, {"x": x})
    np.testing.assert_allclose(mean.numpy(), x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(variance.numpy(), x.var(0), rtol=1e-5)


def test_frozen_norms_are_listed(network):
    report = reestimate_batch_norm(model.open(network.keras).freeze(), {"x": X})
    assert not report.reestimated
    assert [entry.reason for entry in report.missed] == [
        "has a constant for its variance, which is frozen"
    ] * 4
    assert "0 of 4 batch norm(s)" in str(report)


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_bad_data_changes_nothing(network):
    m = model.open(network.keras)
    before = network.statistics()
    broken = X.copy()
    broken[3, 0, 0, 0] = np.nan
    with pytest.raises(QuantizeError, match=r"NaN or infinite values; no variable was"):
        reestimate_batch_norm(m, [{"x": X}, {"x": broken}])
    with pytest.raises(QuantizeError, match="the dataset is empty"):
        reestimate_batch_norm(m, [])
    with pytest.raises(QuantizeError, match="batch 0 has shape"):
        reestimate_batch_norm(m, {"x": X[:, :4]})
    for pair, other in zip(network.statistics(), before, strict=True):
        np.testing.assert_array_equal(pair, other)


def test_what_is_no_model_is_refused():
    with pytest.raises(ArgumentTypeError, match=r"geutil\.model\.open"):
        reestimate_batch_norm(tf.Graph(), {"x": X})
