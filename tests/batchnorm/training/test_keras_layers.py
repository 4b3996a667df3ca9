"""Training folds of the layers that Keras has, each with a norm behind it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from geutil.batchnorm import fold_batch_norms
from tests.batchnorm.networks import with_random_norms
from tests.batchnorm.training.nets import STATISTICS, close


def _norm(**options):
    return layers.BatchNormalization(epsilon=0.1, **options)


def _behind(shape, *others):
    def make():
        x = y = keras.Input(shape)
        for make_layer in others:
            y = make_layer()(y)
        return keras.Model(x, layers.ReLU()(y))

    return make


def _shared_norm():
    """The norm's averages move twice in a step."""
    x, norm = keras.Input((9, 9, 3)), _norm()
    one = norm(layers.Conv2D(4, 3)(x))
    two = layers.ReLU()(norm(layers.Conv2D(4, 3, use_bias=False)(x)))
    return keras.Model(x, layers.Add()([one, two]))


def _other_axis():
    x = keras.Input((9, 9, 3))
    y = layers.Permute((3, 1, 2))(layers.Conv2D(4, 3)(x))
    return keras.Model(x, layers.ReLU()(_norm(axis=1)(y)))


MODELS = {
    "conv 1d": _behind((9, 3), lambda: layers.Conv1D(4, 3, padding="same"), _norm),
    "causal": _behind(
        (9, 3), lambda: layers.Conv1D(4, 3, padding="causal", dilation_rate=2), _norm
    ),
    "separable 1d": _behind((9, 3), lambda: layers.SeparableConv1D(4, 3), _norm),
    "grouped": _behind((9, 9, 4), lambda: layers.Conv2D(4, 3, groups=2), _norm),
    "conv 3d": _behind((5, 5, 5, 2), lambda: layers.Conv3D(4, 3), _norm),
    "transposed": _behind(
        (9, 9, 3), lambda: layers.Conv2DTranspose(4, 3, strides=2), _norm
    ),
    "dense of rank 3": _behind((9, 3), lambda: layers.Dense(4), _norm),
    "einsum": _behind(
        (9, 3),
        lambda: layers.EinsumDense("abc,cd->abd", (None, 4), bias_axes="d"),
        _norm,
    ),
    "other axis": _other_axis,
    "shared norm": _shared_norm,
}


def _steps(make, x, modes, *, statistics=None):
    """Return what a model computes in each mode, in turn, and how many folds it has."""
    keras.utils.set_random_seed(1)
    model, folds = with_random_norms(make()), []

    @tf.function
    def step(x, training):
        y = tf.identity(model(x, training=training))
        loss = tf.reduce_mean(tf.sin(y) * tf.sqrt(1.0 + y**2))
        graph = tf.compat.v1.get_default_graph()
        if statistics:
            report = fold_batch_norms(
                graph,
                is_training=True,
                freeze_batch_norm_delay=2,
                statistics=statistics,
            )
            folds.append((len(report.folded), len(report.refused)))
        handles = [graph.capture(v.value.handle) for v in model.trainable_variables]
        return [y, *tf.gradients(loss, [x, *handles])]

    values = [[v.numpy() for v in step(tf.constant(x), mode)] for mode in modes]
    return values, model.get_weights(), folds


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("name", MODELS)
def test_a_layer(name, statistics):
    make = MODELS[name]
    shape = (8, *make().input_shape[1:])
    x = np.float32(np.random.default_rng(0).normal(size=shape))
    folded, weights, folds = _steps(make, x, (True, True), statistics=statistics)
    plain, weights_of_plain, _ = _steps(make, x, (True, False))
    for one, other in zip(folded, plain, strict=True):
        close(one, other)
    close(weights, weights_of_plain)
    assert folds == [(2 if name == "shared norm" else 1, 0)]


MASKED = _behind((9, 3), layers.Masking, lambda: layers.Dense(4), _norm)


def _with_gaps():
    x = np.float32(np.random.default_rng(0).normal(size=(8, 9, 3)))
    x[1, 4:] = x[5, :2] = 0
    return x


def test_a_norm_under_a_mask():
    """Its statistics are sums over sums of the mask."""
    x = _with_gaps()
    folded, weights, folds = _steps(MASKED, x, (True, True), statistics="exact")
    plain, weights_of_plain, _ = _steps(MASKED, x, (True, False))
    for one, other in zip(folded, plain, strict=True):
        close(one, other)
    close(weights, weights_of_plain)
    assert folds == [(1, 0)]


def test_a_norm_under_a_mask_is_not_folded_in_one_pass():
    assert _steps(MASKED, _with_gaps(), (True,), statistics="one_pass")[2] == [(0, 1)]
