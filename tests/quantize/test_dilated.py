"""Dilated convolutions: one int8 kernel, whatever is known of batch and size."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import calibrate, compare_int8, quantize, to_int8
from tests.quantize.converted import kinds, samples
from tests.settings import needs_eager

pytestmark = needs_eager

layers = tf.keras.layers
SPREAD = {"SPACE_TO_BATCH_ND", "BATCH_TO_SPACE_ND"}


def in_file(network, sizes, data=None):
    """Return the types of the ops in the file, and what the comparison says."""
    m = model.open(network)
    fold_batch_norms(m)
    assert quantize(m, is_training=False).coverage == 1.0
    (name,) = m.inputs
    x = np.random.default_rng(0).normal(size=(2, *sizes)).astype(np.float32)
    calibrate(m, {name: x}, "min_max")
    blob = to_int8(m)
    return kinds(blob), compare_int8(m, blob, data or {name: x})


def network(shape, layer, *others, batch=None):
    tf.keras.utils.set_random_seed(0)
    inputs = layers.Input(shape, batch_size=batch)
    x = layer(inputs)
    for other in others:
        x = other(x)
    return tf.keras.Model(inputs, x)


LAYERS = {
    "conv": (lambda: layers.Conv2D(4, 3, dilation_rate=2, padding="same"), (12, 13, 3)),
    "uneven": (lambda: layers.Conv2D(4, 3, dilation_rate=(2, 3)), (12, 13, 3)),
    "even window": (
        lambda: layers.Conv2D(4, 2, dilation_rate=3, padding="same"),
        (9, 9, 3),
    ),
    "depthwise": (
        lambda: layers.DepthwiseConv2D(3, dilation_rate=2, padding="same"),
        (12, 13, 3),
    ),
    "conv1d": (lambda: layers.Conv1D(4, 3, dilation_rate=2, padding="same"), (15, 3)),
    "causal": (lambda: layers.Conv1D(4, 3, dilation_rate=4, padding="causal"), (15, 3)),
}


@pytest.mark.parametrize("sizes_known", [True, False])
@pytest.mark.parametrize("case", LAYERS)
def test_a_dilated_convolution_is_one_kernel_at_any_batch(case, sizes_known):
    make, shape = LAYERS[case]
    given = shape if sizes_known else (*[None] * (len(shape) - 1), shape[-1])
    found, comparison = in_file(network(given, make(), layers.ReLU()), shape)
    assert comparison.float_ops == ()
    assert comparison.most <= 1
    assert not SPREAD & set(found)
    assert sum(kind.endswith("CONV_2D") for kind in found) == 1
    assert "ADD" not in found


@pytest.mark.parametrize("case", ["conv", "depthwise", "conv1d"])
def test_with_a_folded_norm(case):
    make, shape = LAYERS[case]
    net = network(shape, make(), layers.BatchNormalization(), layers.ReLU(6.0))
    random = np.random.default_rng(1)
    for variable in net.layers[2].weights:
        variable.assign(random.uniform(0.5, 2.0, variable.shape))
    found, comparison = in_file(net, shape)
    assert comparison.float_ops == ()
    assert comparison.most <= 1
    assert not SPREAD & set(found)


def test_rates_one_after_another():
    rates = [
        layers.Conv2D(4, 3, dilation_rate=rate, padding="same", activation="relu")
        for rate in (1, 2, 4)
    ]
    found, comparison = in_file(network((None, None, 3), *rates), (16, 16, 3))
    assert found == ["CONV_2D"] * 3
    assert comparison.most <= 2


MOVED = {
    "zeros that are neither none nor all": ([[1, 2], [3, 2]], [[0, 0], [0, 0]], True),
    "cropped on both sides": ([[4, 5], [3, 6]], [[1, 2], [0, 1]], True),
    "cropped from the data": ([[0, 1], [0, 1]], [[1, 0], [1, 0]], False),
}


@pytest.mark.parametrize("case", MOVED)
def test_moves_that_were_written_by_hand(case):
    paddings, crops, is_one_kernel = MOVED[case]
    kernel = np.random.default_rng(0).normal(size=(3, 3, 2, 4)).astype(np.float32)

    @tf.function(input_signature=[tf.TensorSpec([None, 9, 9, 2], name="x")])
    def function(x):
        y = tf.space_to_batch(x, [2, 2], paddings)
        y = tf.nn.conv2d(y, kernel, 1, "VALID")
        return {"y": tf.nn.relu(tf.batch_to_space(y, [2, 2], crops))}

    m = model.open(function)
    quantize(m, is_training=False)
    data = samples(m.inputs)
    calibrate(m, data)
    blob = to_int8(m)
    comparison = compare_int8(m, blob, data)
    assert comparison.most <= 1
    assert comparison.float_ops == ()
    assert bool(SPREAD & set(kinds(blob))) != is_one_kernel


def test_a_middle_that_is_read_elsewhere_stays_three_kernels():
    kernel = np.random.default_rng(0).normal(size=(3, 3, 2, 4)).astype(np.float32)

    @tf.function(input_signature=[tf.TensorSpec([None, 8, 8, 2], name="x")])
    def function(x):
        spread = tf.space_to_batch(x, [2, 2], [[2, 2], [2, 2]])
        y = tf.nn.conv2d(spread, kernel, 1, "VALID")
        y = tf.nn.relu(tf.batch_to_space(y, [2, 2], [[0, 0], [0, 0]]))
        return {"y": y, "spread": spread}

    m = model.open(function)
    quantize(m, is_training=False)
    data = samples(m.inputs)
    calibrate(m, data)
    blob = to_int8(m)
    comparison = compare_int8(m, blob, data)
    assert comparison.most <= 2
    assert comparison.float_ops == ()
    assert set(kinds(blob)) >= SPREAD


def test_a_window_that_does_not_fit_into_the_smallest_image():
    found, comparison = in_file(
        network((None, None, 3), layers.Conv2D(4, 5)), (16, 16, 3)
    )
    assert found == ["CONV_2D"]
    assert comparison.float_ops == ()
    assert comparison.most <= 1
