"""What is added to a layer: biases, one number for all channels, tables, in int8 files.

The forms are those that people write; the reference is the simulated model.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil.graph.tflite_files import ops_of
from geutil.quantize import calibrate, compare_int8, quantize, to_int8
from tests.quantize.small_networks import STORES_COLUMNS, normal, opened, spec
from tests.settings import needs_eager

pytestmark = needs_eager

IMAGE = spec([None, 8, 8, 3], "x")
IMAGES = normal(4, 8, 8, 3, seed=5)
KERNEL = normal(3, 3, 3, 6) * np.geomspace(0.1, 3.0, 6, dtype=np.float32)
MATRIX = normal(192, 6, seed=3)


def quantized(compute, image=IMAGE):
    m = opened(compute, image)
    quantize(m, is_training=False)
    calibrate(m, {"x": IMAGES})
    return m


def stored_as_simulated(layer):
    """Tell whether this TensorFlow's converter stores a layer's ranges."""
    return STORES_COLUMNS or layer not in ("dense", "einsum", "matmul")


LAYERS = {
    "conv": lambda x: tf.nn.conv2d(x, KERNEL, 1, "SAME"),
    "depthwise": lambda x: tf.nn.depthwise_conv2d(
        x, KERNEL[..., 4:], [1, 1, 1, 1], "SAME"
    ),
    "transposed": lambda x: tf.nn.conv2d_transpose(
        x, KERNEL.transpose(0, 1, 3, 2), [4, 8, 8, 6], 1
    ),
    "conv1d": lambda x: tf.nn.conv1d(tf.reshape(x, [-1, 64, 3]), KERNEL[0], 1, "SAME"),
    "dense": lambda x: tf.matmul(tf.reshape(x, [-1, 3]), tf.constant(KERNEL[0, 0])),
}
ONE_NUMBER = {
    "sum": lambda y: y + 2.0,
    "first": lambda y: 2.0 + y,
    "vector of one": lambda y: y + tf.constant([2.0]),
    "difference": lambda y: y - 2.0,
    "relu": lambda y: tf.nn.relu(y + 2.0),
    "relu6": lambda y: tf.nn.relu6(y + 3.0),
}


@pytest.mark.parametrize("form", ONE_NUMBER)
@pytest.mark.parametrize("layer", LAYERS)
def test_one_number_for_all_channels_is_added_to_each(layer, form):
    """The converter stores it with the steps of the first channel."""
    shared = tf.constant(2.0)

    def compute(x):
        y = ONE_NUMBER[form](LAYERS[layer](x))
        return {"y": y, "other": x + shared}

    image = spec([4, 8, 8, 3], "x") if layer == "transposed" else IMAGE
    m = quantized(compute, image)
    comparison = compare_int8(m, to_int8(m), {"x": IMAGES})
    assert comparison.most <= 1 or not stored_as_simulated(layer)


ADDENDS = {
    "vector": lambda shape: shape[-1:],
    "row": lambda shape: [1, shape[-1]],
    "number with axes": lambda shape: [1] * len(shape),
    "number with two axes": lambda shape: [1, 1],
    "table of positions": lambda shape: shape[1:],
    "table with a batch": lambda shape: [1, *shape[1:]],
    "one for each position": lambda shape: [*shape[1:-1], 1],
    "one for each row": lambda shape: [shape[-2], 1],
}
BIASES = ("vector", "row", "number with axes", "number with two axes")


@pytest.mark.parametrize("addend", ADDENDS)
@pytest.mark.parametrize("layer", [*sorted({*LAYERS} - {"dense"}), "einsum", "matmul"])
def test_what_is_added_has_any_shape_that_broadcasts(layer, addend):
    """A table of positions is no bias, and is added by a kernel of its own."""
    compute_layer = {
        **LAYERS,
        "einsum": lambda x: tf.einsum("abcd,de->abce", x, KERNEL[0, 0]),
        "matmul": lambda x: tf.matmul(tf.reshape(x, [4, 192]), MATRIX),
    }[layer]

    def compute(x):
        y = compute_layer(x)
        shape = ADDENDS[addend](y.shape.as_list())
        return {"y": tf.nn.relu(y + tf.constant(normal(*shape, seed=7)))}

    m = quantized(compute, spec([4, 8, 8, 3], "x"))
    blob = to_int8(m)
    assert [op.kind for op in ops_of(blob) if op.is_float] == []
    steps = compare_int8(m, blob, {"x": IMAGES}).most
    # Where these are two kernels, a step of the first may be two of the second.
    assert steps <= (1 if addend in BIASES else 3) or not stored_as_simulated(layer)


BETWEEN = {
    "transpose": lambda y: tf.transpose(y, [0, 3, 1, 2]),
    "pool": lambda y: tf.nn.max_pool2d(y, 2, 2, "SAME"),
    "slice": lambda y: y[:, 1:3],
    "channels": lambda y: y[..., 1:3],
    "pad": lambda y: tf.pad(y, [[0, 0], [1, 1], [1, 1], [0, 0]]),
    "tile": lambda y: tf.tile(y, [1, 1, 1, 2]),
    "gather": lambda y: tf.gather(y, [2, 0, 1, 3], axis=-1),
    "to space": lambda y: tf.nn.depth_to_space(y[..., :4], 2),
    "to depth": lambda y: tf.nn.space_to_depth(y, 2),
    "maximum": lambda y: tf.reduce_max(y, [1, 2]),
    "nearest": lambda y: tf.compat.v1.image.resize_nearest_neighbor(y, [16, 16]),
    "heads": lambda y: tf.reshape(y, [-1, 8, 8, 2, 3]),
    "flat": lambda y: tf.reshape(y, [-1, 384]),
    "squeezed": lambda y: tf.squeeze(y[:, :1], 1),
}
SHIFTS = {
    "number": lambda y: y + 2.0,
    "vector": lambda y: y + normal(y.shape[-1], seed=2),
    "relu": tf.nn.relu,
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("layer", ["conv", "dense"])
def test_a_layer_computes_in_int8_whatever_stands_before_its_bias(layer, between):
    """The converter moves biases and activations over few ops."""

    def compute(x):
        outputs = {}
        for index, (name, shift) in enumerate(SHIFTS.items()):
            kernel = tf.constant(np.roll(KERNEL, index, 0))
            if layer == "conv":
                y = tf.nn.conv2d(x, kernel, 1, "SAME")
            else:
                y = tf.einsum("abcd,de->abce", x, kernel[index, 0])
            outputs[name] = shift(BETWEEN[between](y))
        return outputs

    m = quantized(compute)
    blob = to_int8(m)
    assert [op.kind for op in ops_of(blob) if op.is_float] == []
    steps = compare_int8(m, blob, {"x": IMAGES}).most
    assert steps <= 3 or not stored_as_simulated(layer)
