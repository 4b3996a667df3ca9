"""Networks that were traced with a fixed batch size get another one.

The reference is the Keras model itself, called on the other batch size.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model

layers, keras = tf.keras.layers, tf.keras


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
    "transformer": transformer,
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


def check(m, network, batch):
    """Compare with Keras: to five digits of the largest number."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=[batch, *network.input_shape[1:]]).astype(np.float32)
    wanted = network(x, training=False).numpy()
    (found,) = m.run(x=x).values()
    assert found.shape == wanted.shape
    largest = np.abs(wanted).max()
    assert np.abs(wanted[0] - wanted[1:]).max(initial=0) > 1e-3 * largest or batch == 1
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("name", NETWORKS)
def test_one_to_others_and_four_to_any(name):
    network = NETWORKS[name]()
    free = traced(network, 1).set_batch_size(None)
    assert free.inputs["x"].shape[0] is None
    for batch in (1, 3):
        check(free, network, batch)
    fixed = free.set_batch_size(2)
    assert fixed.inputs["x"].shape[0] == 2
    check(fixed, network, 2)
    check(traced(network, 4).set_batch_size(None), network, 3)
