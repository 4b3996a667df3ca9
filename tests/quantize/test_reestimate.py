"""Re-estimation of batch norms, against numpy on what Keras computes."""

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.quantize import calibrate, quantize, reestimate_batch_norm
from tests.batchnorm.calibrated import norms_of
from tests.quantize.converted import opened, spec
from tests.quantize.small_networks import normal, separable
from tests.settings import needs_eager
from tests.thorough import crossed

pytestmark = needs_eager

PARTS = {"one": [24], "many": [8, 8, 8], "uneven": [3, 20, 1]}
X = normal(24, 8, 8, 3, seed=1) * 2 + 1


class Network:
    """A Keras network with branches, and its norms in order."""

    def __init__(self):
        tf.keras.utils.set_random_seed(0)
        self.keras = separable(X, blocks=1)
        self.norms = norms_of(self.keras)
        generator = np.random.default_rng(0)
        for norm in self.norms:
            shape = norm.gamma.shape
            norm.gamma.assign(generator.uniform(0.5, 2.0, shape))
            norm.beta.assign(generator.normal(size=shape))
            norm.moving_mean.assign(generator.normal(size=shape))
            norm.moving_variance.assign(generator.uniform(0.5, 2.0, shape))

    def statistics(self):
        """Return the mean and variance of each norm as they are."""
        return [(n.moving_mean.numpy(), n.moving_variance.numpy()) for n in self.norms]

    def expected(self):
        """Set each norm by numpy on what Keras gives it; put the old ones back."""
        before = self.keras.get_weights()
        for norm in self.norms:
            given = tf.keras.Model(self.keras.input, norm.input)
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
    return [{"image": X[end - n : end]} for n, end in zip(sizes, ends, strict=True)]


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
    (y,) = m.run(image=X).values()
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
    calibrate(m, {"image": X}, "min_max")
    ranges = {
        n: v.numpy() for n, v in m.variables.items() if n.endswith(("min", "max"))
    }
    wanted = network.expected()
    reestimate_batch_norm(m, {"image": X})
    # Within the noise of eight bits, and not nearer: the rounding is in it.
    near(network.statistics(), wanted, 0.05)
    with pytest.raises(AssertionError):
        near(network.statistics(), wanted, 1e-5)
    for name, value in ranges.items():
        np.testing.assert_array_equal(m.variables[name].numpy(), value)


def test_channels_that_are_multiplied_by_zero_keep_theirs_when_folded(network):
    network.norms[1].gamma.assign([1.0, 0.0, 1.0, 0.0] + [1.0] * 20)
    before, wanted = network.statistics(), network.expected()
    m = model.open(network.keras)
    fold_batch_norms(m)
    report = reestimate_batch_norm(m, {"image": X})
    assert [entry.kept for entry in report.reestimated] == [0, 2, 0, 0]
    assert "2 kept" in str(report)
    zeros = network.norms[1].gamma.numpy() == 0
    for kind in (0, 1):
        found = network.statistics()[1][kind]
        np.testing.assert_array_equal(found[zeros], before[1][kind][zeros])
        np.testing.assert_allclose(found[~zeros], wanted[1][kind][~zeros], rtol=1e-4)


def test_norms_of_other_forms():
    """Fused ones with channels last and first, and one that subtracts first."""
    means = [tf.Variable(normal(3)) for _ in range(3)]
    variances = [tf.Variable(normal(3) ** 2 + 0.1) for _ in range(3)]

    def fused(x, place, data_format):
        return tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=normal(3, seed=2),
            offset=normal(3, seed=3),
            mean=means[place],
            variance=variances[place],
            is_training=False,
            data_format=data_format,
        ).y

    def compute(last, first, rows):
        y = (rows - means[2]) * tf.math.rsqrt(variances[2] + 1e-3) + 2.0
        return {"a": fused(last, 0, "NHWC"), "b": fused(first, 1, "NCHW"), "c": y}

    specs = (
        spec(2, 4, 4, 3, name="last"),
        spec(2, 3, 4, 4, name="first"),
        spec(40, 3, name="rows"),
    )
    data = {s.name: 3.0 * normal(*s.shape, seed=4) + 1.0 for s in specs}
    report = reestimate_batch_norm(opened(compute, *specs), data)
    assert len(report.reestimated) == 3
    axes = (0, 1, 2), (0, 2, 3), 0
    for x, along, mean, variance in zip(
        data.values(), axes, means, variances, strict=True
    ):
        x = x.astype(np.float64)
        np.testing.assert_allclose(mean.numpy(), x.mean(along), rtol=1e-5)
        np.testing.assert_allclose(variance.numpy(), x.var(along), rtol=1e-5)


def test_frozen_norms_are_listed(network):
    report = reestimate_batch_norm(model.open(network.keras).freeze(), {"image": X})
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
        reestimate_batch_norm(m, [{"image": X}, {"image": broken}])
    with pytest.raises(QuantizeError, match="the dataset is empty"):
        reestimate_batch_norm(m, [])
    with pytest.raises(QuantizeError, match="batch 0 has shape"):
        reestimate_batch_norm(m, {"image": X[:, :4]})
    for pair, other in zip(network.statistics(), before, strict=True):
        np.testing.assert_array_equal(pair, other)


def test_what_is_no_model_is_refused():
    with pytest.raises(ArgumentTypeError, match=r"geutil\.model\.open"):
        reestimate_batch_norm(tf.Graph(), {"image": X})
