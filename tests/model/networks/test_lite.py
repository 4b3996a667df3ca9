"""What geutil saves, converted by `tf.lite` and run by an interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model as geutil_model
from geutil.graph.tflite_runtime import new_interpreter

layers = tf.keras.layers
IMAGES = np.random.default_rng(0).normal(size=(1, 8, 8, 3)).astype(np.float32)


@pytest.fixture
def network():
    tf.keras.utils.set_random_seed(0)
    x = image = tf.keras.Input([8, 8, 3], name="image")
    x = layers.Conv2D(4, 3, padding="same", use_bias=False)(x)
    x = layers.ReLU(6.0)(layers.BatchNormalization()(x))
    x = layers.DepthwiseConv2D(3, name="middle")(x)
    x = layers.Dropout(0.5)(layers.GlobalAveragePooling2D()(x))
    model = tf.keras.Model(image, layers.Dense(3, name="scores")(x))
    for v in model.variables:
        if "moving" in v.path:
            v.assign(np.random.default_rng(1).uniform(0.5, 1.5, v.shape))
    return model


def run(content, **inputs):
    runner = new_interpreter(content, delegates=True).get_signature_runner()
    return runner(**inputs)


def converted(path):
    return tf.lite.TFLiteConverter.from_saved_model(str(path)).convert()


def test_what_is_saved_is_converted(network, tmp_path):
    m = geutil_model.open(network)
    outputs = run(converted(m.save(tmp_path / "saved")), image=IMAGES)
    np.testing.assert_allclose(outputs["scores"], network(IMAGES), rtol=1e-4, atol=1e-6)
    middle = [o for o in m.graph.get_operations() if "Depthwise" in o.type][-1]
    spec = tf.TensorSpec([None, *middle.outputs[0].shape[1:]], name="hidden")
    top = tf.function(lambda hidden: {"top": tf.reduce_max(hidden, [1, 2])}, [spec])
    part = m.cut(outputs={"hidden": middle}).append(geutil_model.open(top))
    outputs = run(converted(part.save(tmp_path / "part")), image=IMAGES)
    expected = part.run(image=IMAGES)["top"]
    np.testing.assert_allclose(outputs["top"], expected, rtol=1e-4, atol=1e-6)
