"""The formulas, on arrays and on tensors."""

import numpy as np
import pytest
import tensorflow as tf

from geutil.batchnorm.fold_arithmetic import (
    Affine,
    along_axes,
    rsqrt,
    scale_and_offset,
    shift_through,
)

KINDS = {"arrays": np.asarray, "tensors": tf.constant}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def random(*shape):
    return np.random.default_rng(len(shape)).uniform(0.5, 2.0, shape)


def test_rsqrt(kind):
    value = random(5)
    np.testing.assert_allclose(rsqrt(kind(value)), 1 / np.sqrt(value), rtol=1e-12)


def test_scale_and_offset_are_those_of_tensorflow(kind):
    x, mean, variance = random(7, 4), random(4) - 1, random(4)
    for affine in ((), ("gamma",), ("gamma", "beta"), ("beta",)):
        given = {name: random(4) - 1 for name in affine}
        scale, offset = scale_and_offset(
            kind(mean), kind(variance), 1e-3, **{n: kind(v) for n, v in given.items()}
        )
        expected = tf.nn.batch_normalization(
            x, mean, variance, given.get("beta"), given.get("gamma"), 1e-3
        )
        np.testing.assert_allclose(x * scale + offset, expected, rtol=1e-12)


def test_along_axes_counts_channels_outer_first(kind):
    weights = random(2, 3, 4, 5)
    for axes in ((2, 3), (3,), (0,), (1, 3)):
        sizes = [weights.shape[axis] for axis in axes]
        value = random(int(np.prod(sizes)))
        product = weights * along_axes(kind(value), 4, axes, sizes)
        order = [*(axis for axis in range(4) if axis not in axes), *axes]
        expected = np.transpose(weights, order).reshape(-1, value.size) * value
        found = np.transpose(product, order).reshape(-1, value.size)
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_along_axes_leaves_scalars(kind):
    assert along_axes(kind(2.0), 4, (3,), (5,)).shape == ()


def test_a_shift_through_a_convolution(kind):
    shift = random(4)
    image = np.broadcast_to(shift, (1, 3, 3, 4))
    plain, depthwise = random(3, 3, 4, 5), random(3, 3, 4, 2)
    for weights, axes, expected in (
        (plain, [3], tf.nn.conv2d(image, plain, 1, "VALID")),
        (depthwise, [2, 3], tf.nn.depthwise_conv2d(image, depthwise, [1] * 4, "VALID")),
    ):
        found = shift_through(kind(weights), kind(shift.reshape(1, 1, 4, 1)), axes)
        np.testing.assert_allclose(found, expected[0, 0, 0], rtol=1e-12)


def test_affine_steps(kind):
    a, b, c, x = random(4), random(4) - 1, random(4), random(4)
    steps = Affine().plus(kind(b)).times(kind(a)).plus(kind(c)).times(kind(b))
    expected = ((x + b) * a + c) * b
    np.testing.assert_allclose(x * steps.scale + steps.offset, expected, rtol=1e-12)


def test_an_affine_of_nothing_is_nothing():
    assert Affine().scale is None
    assert Affine().times(2.0).offset is None
    assert Affine().plus(2.0).scale is None
