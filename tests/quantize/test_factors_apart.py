"""Numbers that scale data before a layer, which the converter takes for weights.

Behind images that are scaled by 1/255 it made weights of zeros: it multiplied them, and
stored them in the steps that they had before.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.quantize import to_tflite
from tests.quantize.converted import Together, alternate, spec
from tests.settings import needs_eager

pytestmark = needs_eager
RANDOM = np.random.default_rng(0)
KERNEL = RANDOM.normal(size=[3, 3, 3, 8]).astype(np.float32)


def convolved(x, kernel):
    return tf.nn.conv2d(x, kernel[:, :, : x.shape[-1]], 1, "VALID")


LAYERS = {
    "conv": lambda f, k: lambda x: convolved(f(x), k),
    "depthwise": lambda f, k: (
        lambda x: tf.nn.depthwise_conv2d(f(x), k[..., :1], [1, 1, 1, 1], "VALID")
    ),
    "padded": lambda f, k: (
        lambda x: convolved(tf.pad(f(x), [[0, 0], [1, 1], [1, 1], [0, 0]]), k)
    ),
    "one channel": lambda f, k: lambda x: convolved(f(x[..., :1]), k),
    "two layers": lambda f, k: (
        lambda x: convolved(f(convolved(x, k))[..., :3], k[::-1])
    ),
    "behind": lambda f, k: lambda x: f(convolved(x, k)),
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


@pytest.mark.parametrize("scheme", SCHEMES)
def test_files_compute_what_is_simulated(scheme):
    # Each has weights of its own.
    rows = alternate(SCHEMES, LAYERS, FACTORS, every=len(SCHEMES))
    cases = {
        f"{layer}, {factor}": (
            LAYERS[layer](FACTORS[factor], KERNEL * np.float32(1 + 0.01 * n)),
            (spec(1, 8, 8, 3),),
        )
        for n, (of, layer, factor) in enumerate(rows)
        if of == scheme
    }
    made, wrong = Together(cases, scheme=scheme), {}
    for case, ((simulated, found),) in made.results().items():
        (given,) = (v for n, v in made.data.items() if made.is_of(n, case))
        exact = cases[case][0](tf.constant(given)).numpy()
        span = np.abs(exact).max()
        off = np.abs(found - simulated).max(), np.abs(found - exact).max()
        if off[0] > 1e-5 * span or off[1] >= 0.2 * span:
            wrong[case] = off
    assert wrong == {}
    # A file that is made of the float model is the same one.
    plain = model.open(made.traced)
    assert to_tflite(plain, scheme=scheme) == made.blob
