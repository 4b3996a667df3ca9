"""Numbers that scale data before a layer, which the converter takes for weights.

Behind images that are scaled by 1/255 it made weights of zeros: it multiplied them, and
stored them in the steps that they had before.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.quantize import quantize, to_tflite
from tests.quantize.test_blocks import run
from tests.settings import needs_eager
from tests.thorough import crossed

pytestmark = needs_eager
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=[1, 8, 8, 3]).astype(np.float32)
KERNEL = RANDOM.normal(size=[3, 3, 3, 8]).astype(np.float32)
FILTER = RANDOM.normal(size=[3, 3, 3, 1]).astype(np.float32)


def convolved(x):
    return tf.nn.conv2d(x, KERNEL[:, :, : x.shape[-1]], 1, "VALID")


LAYERS = {
    "conv": lambda f: lambda x: convolved(f(x)),
    "depthwise": lambda f: (
        lambda x: tf.nn.depthwise_conv2d(f(x), FILTER, [1, 1, 1, 1], "VALID")
    ),
    "padded": lambda f: (
        lambda x: convolved(tf.pad(f(x), [[0, 0], [1, 1], [1, 1], [0, 0]]))
    ),
    "one channel": lambda f: lambda x: convolved(f(x[..., :1])),
    "two layers": lambda f: lambda x: convolved(f(convolved(x))[..., :3]),
    "behind": lambda f: lambda x: f(convolved(x)),
}
FACTORS = {
    "small": lambda x: x * (1 / 255),
    "large": lambda x: 100.0 * x,
    "quotient": lambda x: x / 127.5,
    "several axes": lambda x: x * tf.fill([1, 1, 1, 1], 0.003),
    "sum": lambda x: (x + 1.0) * 0.003,
    "between": lambda x: x / 127.5 - 1.0,
}
SCHEMES = ("weight_only_int8", "weight_only_int4", "dynamic_range")


@pytest.mark.parametrize(
    ("layer", "factor", "scheme"), crossed(LAYERS, FACTORS, SCHEMES)
)
def test_files_compute_what_is_simulated(layer, factor, scheme):
    network = LAYERS[layer](FACTORS[factor])
    m = model.open(
        tf.function(
            lambda x: {"y": network(x)},
            input_signature=[tf.TensorSpec([1, 8, 8, 3], name="x")],
        )
    )
    exact = m.run(X)["y"]
    blob = to_tflite(m, scheme=scheme)
    quantize(m, is_training=False, scheme=scheme)
    simulated = m.run(X)["y"]
    found = run(blob, X)
    span = np.abs(exact).max()
    np.testing.assert_allclose(found, simulated, rtol=0, atol=1e-5 * span)
    assert np.abs(found - exact).max() < 0.2 * span
