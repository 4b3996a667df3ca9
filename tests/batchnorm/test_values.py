"""Constants are evaluated as TensorFlow evaluates them, without rounding."""

import numpy as np
import tensorflow as tf

from geutil.batchnorm.build import as_vector, constant, unrounded

A = np.random.default_rng(0).uniform(0.5, 2.0, (2, 3))
B = np.random.default_rng(1).uniform(0.5, 2.0, 3)

EXPRESSIONS = {
    "arithmetic": lambda a, b: (a + b) * a - b / a,
    "old addition": lambda a, b: tf.raw_ops.Add(x=a, y=b),
    "bias": tf.nn.bias_add,
    "roots": lambda a, b: tf.sqrt(a) * tf.math.rsqrt(b),
    "powers": lambda a, b: tf.pow(a, -0.5) + tf.square(b),
    "functions": lambda a, b: tf.exp(-a) + tf.math.reciprocal(b),
    "bounds": lambda a, b: tf.minimum(tf.maximum(a, b), 1.5),
    "identities": lambda a, b: tf.identity(tf.stop_gradient(a)),
    "reshape": lambda a, b: tf.reshape(a, [3, -1]),
    "transpose": lambda a, b: tf.transpose(a),
    "expand": lambda a, b: tf.expand_dims(a, -1),
    "squeeze": lambda a, b: tf.squeeze(tf.expand_dims(a, 1), [1]),
    "squeeze all": lambda a, b: tf.squeeze(tf.expand_dims(b, 1)),
    "concat": lambda a, b: tf.concat([a, a], 1),
    "pack": lambda a, b: tf.stack([b, b], 1),
    "slice": lambda a, b: a[:, 1:],
    "split": lambda a, b: tf.split(a, 3, 1)[1],
    "log": lambda a, b: tf.math.log(a),
    "sum": lambda a, b: tf.reduce_sum(a, 0) + tf.reduce_mean(a, 1, keepdims=True),
    "fill": lambda a, b: tf.fill([3], tf.constant(2.0, tf.float64)) + b,
    "cast": lambda a, b: tf.cast(tf.constant([1, 2, 3]), tf.float64) * b,
    "likes": lambda a, b: tf.raw_ops.OnesLike(x=a) + tf.raw_ops.ZerosLike(x=a),
    "softplus": lambda a, b: tf.math.softplus(a),
}


# Not known here: the fold is made of ops then, and is right as well.
UNKNOWN = {"slice", "split", "sum", "softplus"}


def test_expressions():
    with tf.Graph().as_default() as graph:
        a, b = tf.constant(A), tf.constant(B)
        values = {name: build(a, b) for name, build in EXPRESSIONS.items()}
        with tf.compat.v1.Session(graph=graph) as session:
            expected = session.run(values)
    found = {name: constant(value) for name, value in values.items()}
    assert {name for name, value in found.items() if value is None} == UNKNOWN
    for name in set(EXPRESSIONS) - UNKNOWN:
        assert found[name].dtype == np.float64
        np.testing.assert_allclose(
            found[name], expected[name], rtol=1e-12, err_msg=name
        )


def test_values_in_single_precision_and_what_has_none(graph):
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.int32):
        value = constant(tf.constant([1, 2], dtype))
        np.testing.assert_array_equal(value, [1.0, 2.0])
        assert value.dtype == np.float64
    # It is not rounded on the way.
    value = tf.constant(1.0, tf.float32) + tf.constant(2.0**-40, tf.float32)
    for _ in range(3000):
        value = tf.negative(value)
    assert constant(value) == 1.0 + 2.0**-40
    assert constant(2.0 * tf.compat.v1.get_variable("v", [3])) is None
    assert constant(2.0 * tf.compat.v1.placeholder(tf.float32, [3])) is None
    assert constant(tf.constant("text")) is None


def test_unrounded(graph):
    source = tf.constant([1.0])
    half = tf.identity(tf.cast(source, tf.float16))
    assert unrounded(half) is source
    assert unrounded(tf.cast(half, tf.float32)).dtype == tf.float32
    integer = tf.cast(tf.constant([1]), tf.float32)
    assert unrounded(integer) is integer


def test_vectors_and_scalars():
    for shape in ((4,), (1, 4), (1, 1, 4, 1)):
        value = np.arange(4.0).reshape(shape)
        np.testing.assert_array_equal(as_vector(value), np.arange(4.0))
        np.testing.assert_array_equal(as_vector(tf.constant(value)), np.arange(4.0))
    for shape in ((), (1,), (1, 1, 1, 1)):
        assert as_vector(np.ones(shape)).shape == ()
        assert as_vector(tf.ones(shape)).shape == ()
