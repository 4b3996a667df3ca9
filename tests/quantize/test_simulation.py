"""The TensorFlow ops that learn and apply ranges, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil.quantize import range_variables
from geutil.quantize.spec import Format
from tests.quantize.tiny import (
    averaged,
    close,
    ends,
    session,
)
from tests.settings import evaluate

v1 = tf.compat.v1
X = np.float32(np.random.default_rng(0).normal(size=(3, 4, 5, 2)) * 3)


def _handles(low=-1.0, high=1.0, shape=()):
    made = [
        v1.get_variable(
            name,
            initializer=np.full(shape, value, np.float32),
            use_resource=True,
            trainable=False,
        )
        for name, value in (("min", low), ("max", high))
    ]
    return tuple(v.handle for v in made)


def _values(body):
    with tf.Graph().as_default() as graph:
        tensors = body()
    return evaluate(graph, tensors)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("axes", [(), (3,)], ids=str)
def test_ends_of_what_is_never_negative(axes, symmetric):
    """Nothing is looked for below zero, and nothing else changes."""
    tensors, form = [np.abs(X), X], Format(8, symmetric, axes=axes)
    for known in ([True, True], [True, False], [False, False]):
        xs = [tensors[0], np.float32(2) * tensors[0] if known[1] else tensors[1]]

        def both(known=known, xs=xs):
            xs = [tf.constant(x) for x in xs]
            informed = range_variables.ends_of(xs, form, known)
            return [*informed, *range_variables.ends_of(xs, form)]

        low, high, plain_low, plain_high = _values(both)
        np.testing.assert_array_equal(low, plain_low)
        np.testing.assert_array_equal(high, plain_high)


def test_what_is_never_negative():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [1, 4, 4, 2])
        y = tf.nn.relu6(x)
        pooled = tf.nn.max_pool2d(y, 2, 2, "SAME")
        rounded = tf.quantization.fake_quant_with_min_max_args(pooled)
        for tensor in (y, tf.reshape(rounded, [-1]), tf.nn.softmax(x), tf.abs(x)):
            assert range_variables.is_never_negative(tensor)
        for tensor in (
            x,
            -y,
            y - 1.0,
            y + x,
            tf.nn.elu(x),
            tf.nn.max_pool2d(x, 2, 2, "SAME"),
        ):
            assert not range_variables.is_never_negative(tensor)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_range_to_start_with_has_no_part_in_an_average(scale):
    data = [np.float32(np.random.default_rng(i).normal(size=20)) for i in range(40)]
    batches = [batch * np.float32(scale) for batch in data]
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32)
        handles = _handles(-6.0, 6.0)
        learnt = v1.get_variable("learnt", initializer=0.0, use_resource=True)
        _, after = range_variables.moving_average(
            [x], handles, learnt.handle, Format(), 0.9
        )
    with session(graph) as opened:
        for index, batch in enumerate(batches):
            found = opened.run(after, {x: batch})
            expected = averaged([ends(b) for b in batches[: index + 1]], 0.9)
            np.testing.assert_allclose(found, expected, rtol=3e-6)
        close(opened.run(learnt), 1 - 0.9**40)


def test_delayed_gradients():
    """Of what is not rounded they are those of the tensor, also out of range."""
    x = np.float32([-9.0, 0.3, 9.0])

    def body():
        given = tf.constant(x)
        quantized = range_variables.fake_quant(given, (-1.0, 1.0), Format())
        chosen = [
            range_variables.delayed(quantized, given, tf.constant(step, tf.int64), 3)
            for step in (2, 3)
        ]
        return [tf.gradients(t, given)[0] for t in chosen]

    early, late = _values(body)
    assert early.tolist() == [1.0, 1.0, 1.0]
    assert late.tolist() == [0.0, 1.0, 0.0]
