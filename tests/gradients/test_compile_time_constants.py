"""No barrier holds back what XLA must know when it compiles: shapes, axes, sizes."""

import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import gradients
from tests.thorough import chosen

SEED = [1, 2]
# Of x, with n rows of 8, its shape s and a zero z: all computed, as XLA folds them.
ROWS = {
    "argmax": lambda x, n, s, z: x + tf.cast(tf.argmax(x, z), tf.float32),
    "band_part": lambda x, n, s, z: x + tf.linalg.band_part(x, n // 2, z),
    "bincount": lambda x, n, s, z: x + tf.math.bincount(tf.range(8), [1.0] * 8, z + 8),
    "broadcast": lambda x, n, s, z: x + tf.broadcast_to(x[:1], s),
    "concat": lambda x, n, s, z: tf.concat([x, x], z)[:n],
    "cumsum": lambda x, n, s, z: tf.cumsum(x, z + 1),
    "diagonal": lambda x, n, s, z: x + tf.linalg.diag(x[0], k=z, num_rows=8)[:1],
    "expand": lambda x, n, s, z: tf.squeeze(tf.expand_dims(x, z), 0),
    "fill": lambda x, n, s, z: x * tf.fill(s, 2.0),
    "gather": lambda x, n, s, z: tf.gather(x, [1, 0, 2, 3, 4, 5, 6, 7], axis=z + 1),
    "layer_norm": lambda x, n, s, z: (
        x * tf.math.rsqrt(tf.reduce_mean(x**2, -1)[:, None])
    ),
    "map": lambda x, n, s, z: tf.map_fn(tf.tanh, x),
    "mirror": lambda x, n, s, z: tf.pad(x, [[n // 2, 0], [0, 0]], "REFLECT")[:n],
    "one_hot": lambda x, n, s, z: x + tf.one_hot(tf.zeros([n], tf.int32), z + 8),
    "pad": lambda x, n, s, z: tf.pad(x, [[n // 2, 0], [0, 0]])[:n],
    "random": lambda x, n, s, z: x * tf.random.stateless_normal(s, SEED),
    "range_of_floats": lambda x, n, s, z: x + tf.range(tf.cast(n, tf.float32))[:, None],
    "reshape": lambda x, n, s, z: tf.reshape(tf.reshape(x, [n * 8]), s),
    "resize": lambda x, n, s, z: tf.image.resize(x[None, ..., None], s)[0, ..., 0],
    "reverse": lambda x, n, s, z: tf.reverse(x, z[None]),
    "roll": lambda x, n, s, z: tf.roll(x, n // 2, z),
    "scatter": lambda x, n, s, z: x + tf.scatter_nd(tf.range(n)[:, None], x, s),
    "segments": lambda x, n, s, z: tf.math.unsorted_segment_sum(x, tf.range(n), n),
    "slice": lambda x, n, s, z: tf.slice(
        tf.concat([x, x], 0), tf.stack([n // 2, 0]), s
    ),
    "split": lambda x, n, s, z: tf.concat(tf.split(x, [z + 3, 5], 1), 1),
    "stitch": lambda x, n, s, z: tf.dynamic_stitch([tf.range(n)], [x]),
    "strided": lambda x, n, s, z: tf.concat([x, x], 0)[n // 2 : n // 2 + n],
    "sum": lambda x, n, s, z: x * tf.reduce_sum(x, z, keepdims=True),
    "tile": lambda x, n, s, z: x + tf.tile(x[:1], tf.stack([n, 1])),
    "top": lambda x, n, s, z: x + tf.math.top_k(x, z + 1).values,
    "transpose": lambda x, n, s, z: tf.transpose(tf.transpose(x, tf.stack([z + 1, z]))),
    "truth": lambda x, n, s, z: x * tf.cast(tf.reduce_any(x > 0, z), tf.float32),
    "turns": lambda x, n, s, z: tf.while_loop(
        lambda i, _: i < n,
        lambda i, y: (i + 1, tf.tanh(y)),
        (0, x),
        maximum_iterations=9,
    )[1],
    "upsample": lambda x, n, s, z: tf.nn.conv2d_transpose(
        x[None, ..., None], tf.ones([1] * 4), tf.concat([[1], s, [1]], 0), 1
    )[0, ..., 0],
}
# Each of these failed in a way of its own.
TOGETHER = "gather range_of_floats expand truth layer_norm"


@pytest.mark.parametrize("names", chosen([TOGETHER, *ROWS], TOGETHER))
def test_steps_compile_and_are_as_plain_ones(names):
    x = np.random.default_rng(0).normal(size=(6, 8)).astype("f")
    weights = tf.random.stateless_normal([8, 8], SEED) / 3

    def gradients_by(take):
        def step(x, weights):
            kept, end = [], x
            for name in names.split() * 2:
                end = tf.tanh(end @ weights)
                kept.append(end)
                shape = tf.shape(end)
                rows = ROWS[name](end, shape[0], shape, shape[0] * 0)
                end = tf.tanh(tf.ensure_shape(rows, [None, 8]) * 0.5 + 0.1)
            return take(tf.reduce_sum(end * end), [x, weights], kept)

        specs = [tf.TensorSpec([None, 8]), tf.TensorSpec([8, 8])]
        function = tf.function(step, specs, jit_compile=True, autograph=False)
        return function(x, weights)

    expected = gradients_by(lambda y, xs, _: tf.gradients(y, xs))
    found = gradients_by(lambda y, xs, kept: gradients(y, xs, checkpoints=kept))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
