"""Handwritten digits from training to int8, run by TFLite: how many are told right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from examples import int8
from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import (
    calibrate,
    compare_int8,
    equalize,
    experimental_create_training_graph,
    quantize,
    reestimate_batch_norm,
    to_int8,
)
from tests.quantize.digits import (
    Digits,
    accuracy,
    batches,
    digits,
    int8_accuracy,
    network,
    train,
    train_in_graphs,
)
from tests.quantize.tiny import of_ranges
from tests.settings import needs_eager, slow
from tests.thorough import chosen, thorough

pytestmark = [needs_eager, slow]

METHODS = ["moving_average", "min_max", "percentile", "entropy", "mse"]


@dataclass
class Trained:
    """A trained network, its data, and how many percent it tells right."""

    network: Any
    digits: Digits
    weights: list[Any]
    accuracy: float

    def opened(self, **options):
        """Return it as a model: folded and quantized, with the weights of training."""
        self.network.set_weights(self.weights)
        m = model.open(self.network)
        report = fold_batch_norms(m)
        assert (len(report.folded), report.refused) == (4, ())
        assert quantize(m, **options).coverage == 1.0
        return m

    def sample(self):
        chosen = list(batches(self.digits.train, 0))[:8]
        return [{"image": x} for x, _ in chosen]

    def fine_tuned(self, epochs=3, **options):
        m = self.opened(is_training=True, ema_decay=0.99, **options)
        function, (output,) = m.to_function(), m.outputs
        variables = self.network.trainable_variables
        train(
            lambda x: function(image=x)[output],
            variables,
            self.digits.train,
            epochs,
            5e-4,
        )
        return m

    def lost(self, m):
        """Return how many points int8 is below float."""
        return self.accuracy - int8_accuracy(m, self.digits.test)


@pytest.fixture(scope="module")
def trained():
    data, net = digits(), network()
    train(
        lambda x: net(x, training=True), net.trainable_variables, data.train, 10, 2e-3
    )
    x, y = data.test
    found = accuracy(net(x, training=False), y)
    assert found > 97.0
    assert len(y) == 599
    return Trained(net, data, net.get_weights(), found)


@thorough
@pytest.mark.parametrize("method", METHODS)
def test_calibrated_after_training(trained, method):
    m = trained.opened(is_training=False)
    calibrate(m, trained.sample(), method)
    assert trained.lost(m) <= 1.0


def test_eight_bits_trained_with_a_delay_and_reestimated(trained):
    m = trained.fine_tuned(quant_delay=20, epochs=2)
    assert trained.lost(m) <= 0.5
    report = reestimate_batch_norm(m, trained.sample())
    assert [entry.folded for entry in report.reestimated] == [True] * 4
    calibrate(m, trained.sample())
    assert trained.lost(m) <= 1.0


@thorough
def test_four_bit_weights_trained(trained):
    m = trained.fine_tuned(weight_bits=4)
    assert trained.lost(m) <= 2.0


@pytest.mark.parametrize("statistics", chosen(["exact", "one_pass"], "one_pass"))
@pytest.mark.parametrize(
    ("bits", "points"), [pytest.param(8, 0.5, marks=thorough), (4, 2.0)]
)
def test_trained_with_folded_norms_a_delay_and_a_freeze(
    trained, bits, points, statistics
):
    trained.network.set_weights(trained.weights)
    made = []

    def prepared(logits):
        made.append(
            experimental_create_training_graph(
                logits.graph,
                weight_bits=bits,
                quant_delay=20,
                freeze_bn_delay=60,
                statistics=statistics,
            )
        )
        return made[-1].tensor(logits)

    train_in_graphs(trained.network, prepared, trained.digits.train, 3, 5e-4)
    (report,) = made
    assert len(report.folds.folded) == 4
    assert int(report.step) == 3 * len(list(batches(trained.digits.train, 0)))
    m = model.open(trained.network)
    fold_batch_norms(m)
    evaluated = quantize(
        m, is_training=False, weight_bits=bits, variables=report.variables
    )
    # All ranges of the model are those that were learnt.
    assert evaluated.variables.keys() == of_ranges(report.variables).keys()
    assert trained.lost(m) <= points
    comparison = compare_int8(m, to_int8(m), {"image": trained.digits.test[0]})
    (logits,) = comparison.outputs
    assert comparison.float_ops == ()
    assert logits.share(1) >= (0.99 if bits == 8 else 0.9)
    assert logits.agreement == 1.0


def test_per_tensor_with_equalization(trained):
    trained.network.set_weights(trained.weights)
    m = model.open(trained.network)
    fold_batch_norms(m)
    report = equalize(m, replace_relu6=True)
    assert any(entry.replaced for entry in report.equalized)
    quantize(m, is_training=False, per_channel=False)
    calibrate(m, trained.sample())
    assert trained.lost(m) <= 1.0


def test_int8_does_what_the_simulation_does(trained):
    m = trained.opened(is_training=False)
    calibrate(m, trained.sample())
    comparison = compare_int8(m, to_int8(m), {"image": trained.digits.test[0]})
    (logits,) = comparison.outputs
    assert comparison.float_ops == ()
    assert comparison.samples == 599
    assert logits.share(1) >= 0.999
    assert logits.most <= 2
    assert logits.agreement == 1.0
    assert trained.lost(m) <= 1.0


@thorough
def test_the_example(capsys):
    assert int8.main() == 0
    assert "FAILED" not in capsys.readouterr().out
