"""What geutil saves, converted by `tf.lite` and run by an interpreter."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from geutil import model as geutil_model
from geutil.graph.tflite_runtime import new_interpreter

layers = tf.keras.layers
IMAGES = np.random.default_rng(0).normal(size=(1, 8, 8, 3)).astype(np.float32)


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


def test_what_is_saved_is_converted(tmp_path):
    model = network()
    m = geutil_model.open(model).cut(outputs=["scores", "middle"])
    spec = tf.TensorSpec([None, 6, 6, 4], name="middle")
    top = tf.function(lambda middle: {"top": tf.reduce_max(middle, [1, 2])}, [spec])
    path = m.append(geutil_model.open(top)).save(tmp_path / "saved")
    content = tf.lite.TFLiteConverter.from_saved_model(str(path)).convert()
    runner = new_interpreter(content, delegates=True).get_signature_runner()
    found = runner(image=IMAGES)
    hidden = tf.keras.Model(model.inputs, model.get_layer("middle").output)(IMAGES)
    expected = {"scores": model(IMAGES), "top": tf.reduce_max(hidden, [1, 2])}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, 1e-4, 1e-6, err_msg=name)
