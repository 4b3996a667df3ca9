"""Keras applications: opened, cut, differentiated, saved and loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from geutil import model as geutil_model
from tests.thorough import thorough

# Of many layers; `test_small_models.py` has few of each kind.
pytestmark = [thorough, pytest.mark.usefixtures("as_they_are")]
MIDDLES = {
    "ResNet50": "conv3_block4_out",
    "MobileNetV2": "block_6_project_BN",
    "MobileNetV3Small": "expanded_conv_3_project_bn",
    "EfficientNetB0": "block4a_project_bn",
    "DenseNet121": "pool3_pool",
    "InceptionV3": "mixed5",
    "ConvNeXtTiny": "convnext_tiny_downsampling_block_1",
}
"""A layer that all paths from the input to the output go through."""


@dataclass(frozen=True)
class Network:
    """A Keras application in memory, and on disk as TensorFlow alone saved it."""

    model: Any
    middle: str
    images: np.ndarray
    saved: Path


@pytest.fixture(scope="module", params=MIDDLES)
def network(request, tmp_path_factory):
    tf.keras.utils.set_random_seed(0)
    pixels = 75 if request.param == "InceptionV3" else 32
    model = getattr(tf.keras.applications, request.param)(
        weights=None,
        input_shape=(pixels, pixels, 3),
        classes=5,
        classifier_activation=None,
        **({"alpha": 0.35} if request.param == "MobileNetV2" else {}),
    )
    enliven(model)
    shape = 2, pixels, pixels, 3
    images = np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)
    folder = tmp_path_factory.mktemp("networks") / "saved"
    module = tf.Module()
    module.model = model
    module.serve = tf.function(
        lambda image: {"scores": model(image, training=False)},
        [tf.TensorSpec([None, *shape[1:]], name="image")],
    )
    tf.saved_model.save(module, str(folder), {"serving_default": module.serve})
    return Network(model, MIDDLES[request.param], images, folder)


def enliven(model: Any) -> None:
    """Give a network statistics and scales with which its output follows its input.

    As they are made, moving statistics are 0 and 1, and the signal dies on the way.
    """
    random = np.random.default_rng(3)
    kind = tf.keras.layers.BatchNormalization
    norms = [layer for layer in model.layers if isinstance(layer, kind)]
    for layer in norms:
        layer.momentum = 0.0
    if norms:
        images = random.uniform(-1, 1, (8, *model.input_shape[1:]))
        model(images.astype(np.float32), training=True)
    for layer in norms:
        variance = layer.moving_variance.numpy()
        # A channel that hardly moves in eight images must not rule all others.
        layer.moving_variance.assign(np.maximum(variance, 0.1 * variance.mean()))
    for variable in model.variables:
        if "layer_scale" in variable.path:
            variable.assign(random.uniform(0.2, 0.4, variable.shape))


def evaluate(model, values):
    """Return what a Keras model computes, as a function of TensorFlow."""
    return tf.function(lambda x: model(x, training=False))(values).numpy()


def test_a_keras_model_is_opened_and_differentiated(network):
    m = geutil_model.open(network.model)
    (name,), (output,) = m.inputs, m.outputs
    assert output == network.model.output_names[0]
    assert list(m.variables) == [v.path for v in network.model.variables]
    for variable in network.model.variables:
        assert m.variables[variable.path] is variable.value
    value = m.run(**{name: network.images})[output]
    np.testing.assert_array_equal(value, evaluate(network.model, network.images))
    variables = [v.value for v in network.model.trainable_variables]

    def gradients(function):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(function(network.images)))
        return tape.gradient(loss, variables)

    function = m.to_function()
    found = gradients(lambda x: function(x)[output])
    expected = tf.function(gradients)(lambda x: network.model(x, training=False))
    for g, e, v in zip(found, expected, variables, strict=True):
        g, e = tf.convert_to_tensor(g), tf.convert_to_tensor(e)
        atol = 2e-4 * np.abs(e).max()
        np.testing.assert_allclose(g, e, rtol=2e-3, atol=atol, err_msg=v.name)


def test_a_saved_model_its_head_and_its_tail_are_saved(network, fresh, tmp_path):
    m = geutil_model.open(network.saved)
    images, middle = {"image": network.images}, network.middle
    loaded = tf.saved_model.load(str(network.saved))
    serve = loaded.signatures["serving_default"]
    scores = serve(image=tf.constant(network.images))["scores"].numpy()
    np.testing.assert_array_equal(m.run(**images)["scores"], scores)
    head = m.cut(outputs={"middle": middle})
    tail = m.cut(inputs={"middle": middle})
    assert (list(head.inputs), list(head.outputs)) == (["image"], ["middle"])
    assert (list(tail.inputs), list(tail.outputs)) == (["middle"], ["scores"])
    for name, part in {"whole": m, "head": head, "tail": tail}.items():
        part.save(tmp_path / name)
    calls = [("run", "serving_default", images), ("variables",)]
    (whole, in_whole), (first, in_head) = fresh.do_all(
        (tmp_path / "whole", calls), (tmp_path / "head", calls), plain=True
    )
    second, in_tail = fresh.do(
        tmp_path / "tail",
        [("run", "serving_default", first), ("variables",)],
        plain=True,
    )
    assert list(whole) == ["scores"]
    np.testing.assert_array_equal(whole["scores"], scores)
    np.testing.assert_array_equal(second["scores"], scores)
    keras = network.model
    between = keras.get_layer(middle).output
    of_head = tf.keras.Model(keras.inputs, between)
    expected = evaluate(of_head, network.images)
    # Keras computes by other ops, up to rounding.
    atol = 1e-4 * np.abs(expected).max()
    np.testing.assert_allclose(first["middle"], expected, rtol=1e-4, atol=atol)
    # A tf.Module does not track the seeds of dropout layers.
    assert in_whole == {
        v.value.name.partition(":")[0]: (list(v.shape), v.trainable)
        for v in keras.variables
        if "seed_generator" not in v.path
    }
    # Each part has the variables that Keras' own parts have, and no others.
    assert set(in_head) == names(of_head)
    assert set(in_tail) == names(tf.keras.Model(between, keras.outputs))


def names(model):
    """Return the variables that inference reads, by the names TensorFlow gives them."""
    names = {v.value.name.partition(":")[0] for v in model.variables}
    # Keras numbers layers by process.
    unread = re.compile(r"(seed_generator|normalization)(_\d+)?/")
    return {name for name in names if not unread.match(name)}
