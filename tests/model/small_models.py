"""Small models that tests of several modules open."""

import numpy as np
import tensorflow as tf


def affine():
    """Return y = x * w + b with a hidden tensor, and its variables."""
    w = tf.Variable([2.0, 3.0], name="w")
    b = tf.Variable([1.0, -1.0], name="b", trainable=False)

    @tf.function(input_signature=[tf.TensorSpec([None, 2], name="x")])
    def function(x):
        hidden = tf.multiply(x, w, name="hidden")
        return {"y": tf.add(hidden, b, name="sum")}

    return function, w, b


def two_signatures():
    """Return a module with signatures `encode` and `decode`.

    They share a variable, and each has one of its own.
    """
    module = tf.Module()
    module.w = tf.Variable(np.eye(3, 2, dtype=np.float32) * 2, name="weight")
    module.gain = tf.Variable(2.0, name="gain", trainable=False)
    module.bias = tf.Variable([1.0, -1.0, 0.5], name="bias")

    @tf.function(input_signature=[tf.TensorSpec([None, 3], name="x")])
    def encode(x):
        return {"code": tf.matmul(x, module.w) * module.gain}

    @tf.function(input_signature=[tf.TensorSpec([None, 2], name="code")])
    def decode(code):
        return {"x": tf.matmul(code, module.w, transpose_b=True) + module.bias}

    module.encode, module.decode = encode, decode
    return module


def save_two_signatures(path):
    module = two_signatures()
    tf.saved_model.save(
        module, str(path), {"encode": module.encode, "decode": module.decode}
    )
    return module
