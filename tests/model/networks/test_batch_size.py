"""Networks that were traced with a fixed batch size get another one.

The reference is the Keras model itself, called on the other batch size.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from tests.thorough import chosen

layers, keras = tf.keras.layers, tf.keras


def application(name, pixels=32):
    def build():
        tf.keras.utils.set_random_seed(0)
        make = getattr(keras.applications, name)
        return make(
            weights=None,
            input_shape=(pixels, pixels, 3),
            classes=10,
            classifier_activation=None,
        )

    return build


def transformer():
    x = keras.Input((6, 8))
    h = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    h = layers.LayerNormalization()(h + layers.Dense(8)(layers.Dense(16, "gelu")(h)))
    return keras.Model(x, layers.Dense(3)(layers.Flatten()(h)))


def recurrent(layer, **options):
    def build():
        x = keras.Input((5, 3))
        return keras.Model(x, layer(4, **options)(x))

    return build


def decoder():
    x = keras.Input((4, 4, 3))
    h = layers.Conv2DTranspose(5, 3, strides=2, padding="same")(x)
    h = layers.UpSampling2D()(layers.Reshape((8, 4, 10))(h))
    return keras.Model(x, layers.Permute((2, 1, 3))(h))


NETWORKS = {
    "MobileNetV2": application("MobileNetV2"),
    "ResNet50": application("ResNet50"),
    "MobileNetV3Small": application("MobileNetV3Small"),
    "InceptionV3": application("InceptionV3", 75),
    "EfficientNetB0": application("EfficientNetB0"),
    "DenseNet121": application("DenseNet121"),
    "ConvNeXtTiny": application("ConvNeXtTiny"),
    "transformer": transformer,
    "LSTM": recurrent(layers.LSTM),
    "GRU": recurrent(layers.GRU, return_sequences=True),
    "LSTM both ways": recurrent(
        lambda units: layers.Bidirectional(layers.LSTM(units, return_sequences=True))
    ),
    "decoder": decoder,
}


def traced(network, batch):
    spec = tf.TensorSpec([batch, *network.input_shape[1:]], name="x")
    function = tf.function(lambda x: network(x, training=False), autograph=False)
    return model.open(function.get_concrete_function(spec))


def check(m, network, batch, scale=1.0):
    """Compare with Keras: to five digits of the largest number."""
    rng = np.random.default_rng(3)
    x = scale * rng.normal(size=[batch, *network.input_shape[1:]])
    x = x.astype(np.float32)
    wanted = network(x, training=False).numpy()
    (found,) = m.run(x=x).values()
    assert found.shape == wanted.shape
    largest = np.abs(wanted).max()
    assert np.abs(wanted[0] - wanted[1:]).max(initial=0) > 1e-3 * largest or batch == 1
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * largest)


QUICK = [n for n in NETWORKS if not hasattr(keras.applications, n)]


@pytest.mark.parametrize("name", chosen(NETWORKS, *QUICK))
def test_one_to_others_and_four_to_any(name):
    network = NETWORKS[name]()
    m = traced(network, 1)
    samples = None
    if name == "MobileNetV3Small":
        # It scales pixels down first: rows of small numbers come out the same.
        rng = np.random.default_rng(5)
        samples = {"x": rng.uniform(0, 255, [4, 32, 32, 3]).astype(np.float32)}
    free = m.set_batch_size(None, samples=samples)
    assert free.inputs["x"].shape[0] is None
    scale = 1.0 if samples is None else 100.0
    for batch in (1, 3):
        check(free, network, batch, scale)
    for before, batch in [(free, 2), (m, 4)]:
        fixed = before.set_batch_size(batch, samples=samples)
        assert fixed.inputs["x"].shape[0] == batch
        check(fixed, network, batch, scale)
    if name in QUICK:
        check(traced(network, 4).set_batch_size(None), network, 3)


def test_saved_and_loaded_with_any_batch(tmp_path):
    network = transformer()
    free = traced(network, 1).set_batch_size(None)
    loaded = tf.saved_model.load(str(free.save(tmp_path / "free")))
    x = np.random.default_rng(0).normal(size=[5, 6, 8]).astype(np.float32)
    (found,) = loaded.signatures["serving_default"](tf.constant(x)).values()
    np.testing.assert_allclose(found, network(x), rtol=1e-4, atol=1e-5)
