"""TFLite files of the tests, each converted once."""

import contextlib
import functools
import io
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import tensorflow as tf

from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import calibrate, quantize, to_int8
from geutil.tflite.schema import IDENTIFIER, schema

PIXELS = 16
IMAGE = np.random.default_rng(0).random((1, PIXELS, PIXELS, 3), np.float32)


def once(make):
    """Cache a maker of files, whose names and weights depend on no earlier test."""

    @functools.cache
    def made():
        tf.keras.utils.clear_session(free_memory=False)
        tf.keras.utils.set_random_seed(0)
        return make()

    return functools.wraps(make)(made)


@dataclass(frozen=True)
class Sample:
    """A model, and the file that was made from it."""

    model: Any
    blob: bytes


def _units(x, channels, stride, name):
    """Return an inverted residual block, as those of MobileNetV2 are."""
    k = tf.keras.layers
    y = k.Conv2D(3 * x.shape[-1], 1, use_bias=False, name=f"{name}_expand")(x)
    y = k.ReLU(6.0, name=f"{name}_relu1")(k.BatchNormalization(name=f"{name}_bn1")(y))
    y = k.DepthwiseConv2D(3, stride, "same", use_bias=False, name=f"{name}_dw")(y)
    y = k.ReLU(6.0, name=f"{name}_relu2")(k.BatchNormalization(name=f"{name}_bn2")(y))
    y = k.Conv2D(channels, 1, use_bias=False, name=f"{name}_project")(y)
    y = k.BatchNormalization(name=f"{name}_bn3")(y)
    if stride == 1 and channels == x.shape[-1]:
        return k.Add(name=f"{name}_add")([x, y])
    return y


@once
def network():
    """Return a small MobileNetV2 whose batch norms have random statistics."""
    k = tf.keras.layers
    tf.keras.utils.set_random_seed(1)
    x = image = k.Input((PIXELS, PIXELS, 3), name="image")
    x = k.Conv2D(8, 3, 2, "same", use_bias=False, name="stem")(x)
    x = k.ReLU(6.0, name="stem_relu")(k.BatchNormalization(name="stem_bn")(x))
    x = _units(_units(x, 8, 1, "first"), 12, 2, "second")
    x = k.GlobalAveragePooling2D(name="pool")(x)
    net = tf.keras.Model(image, k.Dense(10, activation="softmax", name="head")(x))
    random = np.random.default_rng(1)
    for v in net.variables:
        if "moving_variance" in v.path:
            v.assign(random.uniform(0.5, 1.5, v.shape))
        elif "moving_mean" in v.path:
            # Far from zero they would leave nothing above it behind a Relu.
            v.assign(random.normal(scale=0.1, size=v.shape))
    return net


def saved(m):
    """Return the float file of a model."""
    with tempfile.TemporaryDirectory() as folder:
        return m.save(Path(folder) / "m.tflite", "tflite").read_bytes()


@once
def floats():
    m = model.open(network())
    fold_batch_norms(m)
    return Sample(m, saved(m))


@once
def unfolded():
    m = model.open(network())
    return Sample(m, saved(m))


@once
def int8():
    m = model.open(network())
    fold_batch_norms(m)
    quantize(m, is_training=False)
    (name,) = m.inputs
    calibrate(m, [{name: IMAGE}])
    return Sample(m, to_int8(m))


@once
def mixed():
    """Return a file in int8 but for a sine, which TFLite computes in floats."""
    kernels = np.random.default_rng(2).normal(size=(2, 3, 3, 3, 3)).astype(np.float32)

    @tf.function(input_signature=[tf.TensorSpec([1, PIXELS, PIXELS, 3], name="x")])
    def body(x):
        x = tf.nn.relu(tf.nn.conv2d(x, kernels[0], 1, "SAME", name="before/conv"))
        x = tf.sin(x, name="between/sine")
        return {"y": tf.nn.conv2d(x, kernels[1], 1, "SAME", name="behind/conv")}

    m = model.open(body)
    quantize(m, is_training=False)
    calibrate(m, [{"x": IMAGE}])
    return Sample(m, to_int8(m))


def converted(net, **options):
    """Return what TensorFlow's converter makes of a Keras model."""
    converter = tf.lite.TFLiteConverter.from_keras_model(net)
    for name, value in options.items():
        setattr(converter, name, value)
    with contextlib.redirect_stdout(io.StringIO()):
        return converter.convert()


@once
def dynamic_range():
    k = tf.keras.layers
    net = tf.keras.Sequential([k.Input((64,)), k.Dense(64, "relu"), k.Dense(3)])
    blob = converted(net, optimizations=[tf.lite.Optimize.DEFAULT])
    return Sample(model.open(net), blob)


@once
def attention():
    """Return a file of a transformer's block on patches of an image."""
    k = tf.keras.layers
    x = image = k.Input((PIXELS, PIXELS, 3), batch_size=1, name="image")
    x = k.Conv2D(8, 4, 4, name="patches")(x)
    x = k.Reshape((16, 8), name="rows")(x)
    y = k.LayerNormalization(name="norm1")(x)
    x = k.Add()([x, k.MultiHeadAttention(2, 4, name="attention")(y, y)])
    y = k.Dense(16, activation="gelu", name="wide")(k.LayerNormalization()(x))
    x = k.GlobalAveragePooling1D()(k.Add()([x, k.Dense(8, name="narrow")(y)]))
    net = tf.keras.Model(image, k.Dense(3, name="head")(x))
    return Sample(model.open(net), converted(net))


@once
def lstm():
    k = tf.keras.layers
    x = k.Input((5, 4), batch_size=1)
    net = tf.keras.Model(x, k.Dense(2, name="head")(k.LSTM(6, name="memory")(x)))
    return Sample(model.open(net), converted(net))


FLOWS = [tf.TensorSpec([3, 4], name="x"), tf.TensorSpec([], tf.int32, name="n")]


def flowing(x, n):
    """Compute by a loop and a conditional."""
    i = tf.constant(0)
    while i < n:
        x = tf.nn.relu(x, name="in_loop") - 1.0
        i += 1
    return tf.cond(n > 2, lambda: tf.tanh(x), lambda: tf.exp(x))


@once
def flow():
    """Return a file of a loop and a conditional."""

    @tf.function(input_signature=FLOWS)
    def body(x, n):
        return {"y": flowing(x, n)}

    m = model.open(body, inline=False)
    return Sample(m, saved(m))


class _Coder(tf.Module):
    def __init__(self):
        super().__init__()
        self.codes = tf.Variable(tf.ones([3, 4]))

    @tf.function(input_signature=[tf.TensorSpec([None, 3], name="x")])
    def encode(self, x):
        return {"code": x @ self.codes}

    @tf.function(input_signature=[tf.TensorSpec([None, 4], name="code")])
    def decode(self, code):
        return {"x": code @ tf.transpose(self.codes)}


@once
def two_signatures():
    coder = _Coder()
    with tempfile.TemporaryDirectory() as folder:
        methods = {"encode": coder.encode, "decode": coder.decode}
        tf.saved_model.save(coder, folder, signatures=methods)
        converter = tf.lite.TFLiteConverter.from_saved_model(folder)
        return Sample(model.open(folder, signature="encode"), converter.convert())


@once
def flex():
    @tf.function(input_signature=[tf.TensorSpec([3, 3], name="x")])
    def body(x):
        return {"y": tf.linalg.cholesky(x)}

    m = model.open(body)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.tflite"
        m.save(path, "tflite", select_tf_ops=True)
        return Sample(m, path.read_bytes())


def unpacked(blob):
    """Return a file as the schema's own objects, to be broken or changed."""
    return schema().ModelT.InitFromObj(schema().Model.GetRootAs(blob, 0))


def packed(file):
    """Return the bytes of the schema's objects."""
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(file.Pack(builder), IDENTIFIER)
    return bytes(builder.Output())


SAMPLES = {
    f.__name__: f
    for f in (
        *(floats, unfolded, int8, mixed, dynamic_range, attention),
        *(lstm, flow, two_signatures, flex),
    )
}
