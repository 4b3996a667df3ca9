"""Models whose graphs call functions, and what they compute in plain eager code."""

import numpy as np
import tensorflow as tf

import geutil as ge
from geutil import model

X = np.array([0.3, -0.7], np.float32)
X_SPEC = tf.TensorSpec([2], name="x")


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def gradients(function, x, variables=()):
    """Return the gradients of the sum of a function's results.

    Args:
        x: what the function is given: a tensor, or several by name.
        variables: whose gradients come behind those of `x`.
    """
    # Anew for each name, even if one tensor is given for several.
    new = tf.identity
    x = {n: new(v) for n, v in x.items()} if isinstance(x, dict) else new(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return tape.gradient(y, [x, *variables])


def slopes(function, inputs):
    """Return the gradients of the squares of the outputs, by the inputs' names."""

    def squares(x):
        return [y**2 for y in function(**x).values() if y.dtype.is_floating]

    return {n: s for n, s in gradients(squares, inputs)[0].items() if s is not None}


def key_of(opened, part):
    """Return the one function of a model whose name holds `part`."""
    (key,) = (key for key in opened.functions if part in key)
    return key


def body_of(opened, part):
    return opened.functions[key_of(opened, part)]


def only(tensors):
    (tensor,) = tensors
    return tensor


def op_of(body, kind):
    """Return the one op of a type that the body runs."""
    return only(op for op in body.needed_ops() if op.type == kind)


def swap_op(body, kind, function):
    """Put `function` of the same inputs in the place of the op of a type."""
    op = op_of(body, kind)
    with body.graph.as_default():
        new = function(*op.inputs)
    ge.reroute_ts(new, op.outputs[0], cannot_modify=[new.op])
    return new


class Nested:
    """A call, a loop that calls and a branch that calls, all the same function."""

    def __init__(self):
        v = self.v = tf.Variable([1.0, 2.0], name="v")

        @tf.function
        def inner(x):
            return tf.multiply(tf.sin(x), 2.0)

        @tf.function
        def outer(x):
            return inner(x) + v

        @tf.function(input_signature=[X_SPEC])
        def function(x):
            y = outer(x)
            _, y = tf.while_loop(
                lambda i, _: i < 3, lambda i, y: (i + 1, inner(y) + v), [0, y]
            )
            then = lambda: inner(y)  # noqa: E731
            return {"y": tf.cond(tf.reduce_sum(y) > 0, then, lambda: y)}

        self.function = function
        self.model = model.open(function, inline=False)

    def reference(self, x, inner=lambda x: tf.sin(x) * 2.0):
        y = inner(x) + self.v
        for _ in range(3):
            y = inner(y) + self.v
        return inner(y) if tf.reduce_sum(y) > 0 else y


def loop_model():
    """Return a model of y = cos applied three times, with an unused loop variable."""

    @tf.function(input_signature=[X_SPEC])
    def function(x):
        def body(i, y, unused):
            return i + 1, tf.cos(y, name="step"), unused

        _, y, unused = tf.while_loop(
            lambda i, *_: i < 3, body, [0, x, tf.constant([5.0, 6.0], name="five")]
        )
        return {"y": y, "unused": unused}

    return model.open(function, inline=False)


def branch_model():
    """Return a model of y = sin x if sum x > 0 else -x."""

    @tf.function(input_signature=[X_SPEC])
    def function(x):
        then, other = lambda: tf.sin(x), lambda: -x
        return {"y": tf.cond(tf.reduce_sum(x) > 0, then, other)}

    return model.open(function, inline=False)


def case_model():
    """Return a model that computes sin, cos or tan of x."""

    @tf.function(input_signature=[tf.TensorSpec([], tf.int32, "i"), X_SPEC])
    def function(i, x):
        branches = [lambda: tf.sin(x), lambda: tf.cos(x), lambda: tf.tan(x)]
        return {"y": tf.switch_case(i, branches)}

    return model.open(function, inline=False)


def call_model():
    """Return a model of y = f(x) - f(2 x), where f has two results."""

    @tf.function
    def f(x, k):
        return tf.multiply(tf.exp(x), k), tf.negative(x)

    @tf.function(input_signature=[X_SPEC])
    def function(x):
        a, b = f(x, tf.constant(3.0))
        c, _ = f(x * 2.0, tf.constant(4.0))
        return {"y": a - c, "z": b}

    return model.open(function, inline=False)


def everything(opened):
    """Return all that an edit of a model's functions could change."""
    graphs = [opened.graph, *(opened.functions[key].live for key in opened.functions)]
    return [graph.as_graph_def(add_shapes=True) for graph in graphs], [
        (key, list(body.inputs), list(body.outputs), [op.name for op in body.callers])
        for key, body in opened.functions.items()
    ]
