"""Dilated convolutions: one int8 kernel, whatever is known of batch and size."""

import numpy as np
import pytest
import tensorflow as tf

from geutil import model, tflite
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import calibrate, compare_int8, quantize, to_int8
from tests.quantize.converted import Together, alternate, samples, spec
from tests.settings import needs_eager

pytestmark = needs_eager

layers = tf.keras.layers
SPREAD = {"SPACE_TO_BATCH_ND", "BATCH_TO_SPACE_ND"}


def built(layer, shape):
    layer.build((None, *shape))
    return layer


LAYERS = {
    "conv": (lambda: layers.Conv2D(4, 3, dilation_rate=2, padding="same"), (12, 13, 3)),
    "uneven": (lambda: layers.Conv2D(4, 3, dilation_rate=(2, 3)), (12, 13, 3)),
    "even window": (
        lambda: layers.Conv2D(4, 2, dilation_rate=3, padding="same"),
        (9, 9, 3),
    ),
    "depthwise": (
        lambda: layers.DepthwiseConv2D(3, dilation_rate=2, padding="same"),
        (12, 13, 3),
    ),
    "conv1d": (lambda: layers.Conv1D(4, 3, dilation_rate=2, padding="same"), (15, 3)),
    "causal": (lambda: layers.Conv1D(4, 3, dilation_rate=4, padding="causal"), (15, 3)),
}


MOVED = {
    "zeros that are neither none nor all": ([[1, 2], [3, 2]], [[0, 0], [0, 0]], True),
    "cropped on both sides": ([[4, 5], [3, 6]], [[1, 2], [0, 1]], True),
    "cropped from the data": ([[0, 1], [0, 1]], [[1, 0], [1, 0]], False),
}
KERNEL = np.random.default_rng(0).normal(size=(3, 3, 2, 4)).astype(np.float32)


def moved(paddings, crops, factor):
    def function(x):
        y = tf.space_to_batch(x, [2, 2], paddings)
        y = tf.nn.conv2d(y, factor * KERNEL, 1, "VALID")
        return tf.nn.relu(tf.batch_to_space(y, [2, 2], crops))

    return function, (spec(None, 9, 9, 2),)


def read_in_the_middle(x):
    spread = tf.space_to_batch(x, [2, 2], [[2, 2], [2, 2]])
    y = tf.nn.conv2d(spread, KERNEL, 1, "VALID")
    return tf.nn.relu(tf.batch_to_space(y, [2, 2], [[0, 0], [0, 0]])), spread


@pytest.fixture(scope="module")
def parts():
    """Return what is made of layers at known and unknown sizes, and of those moves."""
    tf.keras.utils.set_random_seed(0)
    cases = {}
    for name, sizes in alternate(LAYERS, ("known", "unknown")):
        make, shape = LAYERS[name]
        given = shape if sizes == "known" else (*[None] * (len(shape) - 1), shape[-1])
        layer = built(make(), given)
        cases[f"{name}, {sizes} sizes"] = (
            lambda a, layer=layer: tf.nn.relu(layer(a)),
            (spec(None, *given),),
            {"unknown": 13},
        )
    for index, (name, (paddings, crops, _)) in enumerate(MOVED.items()):
        cases[name] = moved(paddings, crops, np.float32(1 + index))
    cases["middle"] = read_in_the_middle, (spec(None, 8, 8, 2),)
    rates = [
        built(layers.Conv2D(4, 3, dilation_rate=rate, padding="same"), [None, None, n])
        for rate, n in ((1, 3), (2, 4), (4, 4))
    ]
    any_image = (spec(None, None, None, 3),), {"unknown": 16}
    cases["rates"] = (
        lambda a: [a := tf.nn.relu(layer(a)) for layer in rates][-1],
        *any_image,
    )
    # It does not fit into the smallest image.
    large = built(layers.Conv2D(4, 5), [None, None, 3])
    cases["a large window"] = large, *any_image
    return Together(cases).parts()


def test_a_dilated_convolution_is_one_kernel_at_any_batch_and_size(parts):
    wrong = {}
    for case, part in parts.items():
        is_moved = case == "middle" or not MOVED.get(case, (0, 0, True))[2]
        right = part.is_int8 and is_moved == bool(SPREAD & set(part.kinds))
        if "sizes" in case:
            count = sum(kind.endswith("CONV_2D") for kind in part.kinds)
            right &= count == 1 and "ADD" not in part.kinds
        if not right or part.most > (2 if case in ("middle", "rates") else 1):
            wrong[case] = part
    assert wrong == {}
    assert parts["rates"].kinds == ["CONV_2D"] * 3
    assert parts["a large window"].kinds == ["CONV_2D"]
    assert set(parts["middle"].kinds) >= SPREAD


def test_with_a_folded_norm():
    tf.keras.utils.set_random_seed(0)
    inputs, results = [], {}
    for name in ("conv", "depthwise", "conv1d"):
        make, shape = LAYERS[name]
        # Keras calls the first layer of a process that has no name "conv1d", too.
        inputs.append(layers.Input(shape, name=f"x_{name}"))
        y = layers.BatchNormalization()(make()(inputs[-1]))
        results[f"of_{name}"] = layers.ReLU(6.0)(y)
    network = tf.keras.Model(inputs, results)
    random = np.random.default_rng(1)
    for layer in network.layers:
        if isinstance(layer, layers.BatchNormalization):
            for variable in layer.weights:
                variable.assign(random.uniform(0.5, 2.0, variable.shape))
    m = model.open(network)
    assert len(fold_batch_norms(m).folded) == 3
    assert quantize(m, is_training=False).coverage == 1.0
    data = samples(m.inputs)
    calibrate(m, data, "min_max")
    blob = to_int8(m)
    comparison = compare_int8(m, blob, data)
    assert comparison.float_ops == ()
    assert {o.output: o.most for o in comparison.outputs if o.most > 1} == {}
    assert not SPREAD & {op.kind for op in tflite.open(blob).ops}
