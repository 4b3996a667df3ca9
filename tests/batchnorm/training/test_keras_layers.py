"""Training folds of the layers that Keras has, each with a norm behind it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from geutil.batchnorm import fold_batch_norms
from tests.batchnorm.calibrated import with_random_norms
from tests.batchnorm.test_norms import KERAS
from tests.batchnorm.training.nets import STATISTICS, check_close, close
from tests.thorough import chosen


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


LAYERS = ("row", "causal row", "separable row", "cube", "transposed", "dense", "einsum")
MODELS = {name: _behind(*KERAS[name][:2], _norm) for name in LAYERS}
MODELS |= {"other axis": _other_axis, "shared norm": _shared_norm}


def _steps(makes, x, modes, *, statistics=None):
    """Return what models compute in each mode, in turn, and how many folds they have.

    They are one model, whose inputs and outputs have their names.
    """
    keras.utils.set_random_seed(1)
    models = {name.replace(" ", "_"): make() for name, make in makes.items()}
    model = keras.Model(
        {name: one.input for name, one in models.items()},
        {name: one.output for name, one in models.items()},
    )
    folds, weights = [], with_random_norms(model).trainable_variables

    @tf.function
    def step(x, training):
        y = {n: tf.identity(t) for n, t in model(x, training=training).items()}
        losses = [tf.reduce_mean(tf.sin(t) * tf.sqrt(1.0 + t**2)) for t in y.values()]
        graph = tf.compat.v1.get_default_graph()
        if statistics:
            report = fold_batch_norms(
                graph,
                is_training=True,
                freeze_batch_norm_delay=2,
                statistics=statistics,
            )
            folds.append((len(report.folded), len(report.refused)))
        read = {f"data of {name}": t for name, t in x.items()}
        for place, v in enumerate(weights):
            read[f"weight {place}, {v.name}"] = graph.capture(v.value.handle)
        gradients = tf.gradients(tf.add_n(losses), list(read.values()))
        return {**y, **dict(zip(read, gradients, strict=True))}

    values = []
    for mode in modes:
        found = step({name: tf.constant(v) for name, v in x.items()}, mode)
        values.append({name: value.numpy() for name, value in found.items()})
    return values, model.get_weights(), folds


def _check(folded, plain):
    for steps in zip(folded[0], plain[0], strict=True):
        check_close(*({n: [value] for n, value in step.items()} for step in steps))
    close(folded[1], plain[1])


@pytest.mark.parametrize("turn", chosen(range(2), 0))
@pytest.mark.parametrize("statistics", STATISTICS)
def test_layers(statistics, turn):
    """Every other one with each kind of statistics."""
    first = (STATISTICS.index(statistics) + turn) % 2
    makes = dict(list(MODELS.items())[first::2])
    random, x = np.random.default_rng(0), {}
    for name, make in makes.items():
        shape = (8, *make().input_shape[1:])
        x[name.replace(" ", "_")] = np.float32(random.normal(size=shape))
    folded = _steps(makes, x, (True, True), statistics=statistics)
    _check(folded, _steps(makes, x, (True, False)))
    # One norm is shared by two layers.
    assert folded[2] == [(len(makes) + ("shared norm" in makes), 0)]


MASKED = {"x": _behind((9, 3), layers.Masking, lambda: layers.Dense(4), _norm)}


def test_a_norm_under_a_mask():
    """Its statistics are sums over sums of the mask, and not those of one pass."""
    gaps = np.float32(np.random.default_rng(0).normal(size=(8, 9, 3)))
    gaps[1, 4:] = gaps[5, :2] = 0
    x = {"x": gaps}
    folded = _steps(MASKED, x, (True, True), statistics="exact")
    _check(folded, _steps(MASKED, x, (True, False)))
    assert folded[2] == [(1, 0)]
    assert _steps(MASKED, x, (True,), statistics="one_pass")[2] == [(0, 1)]
