"""Models that read variables in every way that can be frozen, and how to compare."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tests.settings import control_flow

FLOATS = tf.TensorSpec([None, 3], tf.float32, name="x")
INTS = tf.TensorSpec([None, 4], tf.int32, name="x")


@contextmanager
def optimizer_off():
    """Switch TensorFlow's graph optimizer off, for functions built and run inside.

    It fuses ops where it sees constants, which changes the last bits of a result; what
    the ops themselves compute is compared without it.
    """
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        off = before.get("disable_meta_optimizer", False)
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": off})


@dataclass(frozen=True)
class Sample:
    """A function or Keras model, and what to call it with.

    Attributes:
        source: what is opened.
        value: its only argument.
        reference: computes the expected outputs, in order.
    """

    source: Any
    value: np.ndarray
    reference: Callable[[Any], Any]

    def expected(self):
        results = self.reference(tf.constant(self.value))
        if isinstance(results, dict):
            results = [results[name] for name in sorted(results)]
        return [np.asarray(r) for r in tf.nest.flatten(results)]


def floats(rows=2, *shape):
    values = np.random.default_rng(1).normal(size=(rows, *(shape or (3,))))
    return values.astype(np.float32)


def variable(*shape, seed=0, name="w", dtype=tf.float32):
    values = np.random.default_rng(seed).normal(size=shape)
    return tf.Variable(tf.cast(values, dtype), name=name)


def keras_sample(layers, value):
    tf.keras.utils.set_random_seed(3)
    shape, dtype = value.shape[1:], value.dtype
    model = tf.keras.Sequential([tf.keras.Input(shape, dtype=str(dtype)), *layers])
    # Moving averages and the like get values that show.
    for i, v in enumerate(model.variables):
        if v.dtype == "float32":
            noise = np.random.default_rng(i).uniform(0.5, 1.0, size=v.shape)
            v.assign(noise.astype(np.float32))
    return Sample(model, value, lambda x: tf.function(model)(x, training=False))


def cnn():
    layers = tf.keras.layers
    return keras_sample(
        [
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.DepthwiseConv2D(2),
            layers.Flatten(),
            layers.Dense(5),
        ],
        floats(2, 8, 8, 3),
    )


def lstm():
    return keras_sample([tf.keras.layers.LSTM(4, unroll=False)], floats(2, 5, 3))


def embedding():
    indices = np.array([[0, 3, 9, 1], [5, 5, 2, 0]], np.int32)
    layers = tf.keras.layers
    return keras_sample([layers.Embedding(10, 4), layers.GRU(3)], indices)


def of_function(body, value, spec=FLOATS):
    function = tf.function(body, input_signature=[spec], autograph=False)
    return Sample(function, value, function)


def gathers():
    table, batched = variable(10, 3), variable(2, 5, 3, seed=1, name="batched")

    def body(x):
        handle = table.handle
        pairs = tf.stack([x, x // 4], axis=-1)
        return {
            "rows": tf.raw_ops.ResourceGather(
                resource=handle, indices=x, dtype=tf.float32
            ),
            "batched": tf.raw_ops.ResourceGather(
                resource=batched.handle, indices=x // 2, dtype=tf.float32, batch_dims=1
            ),
            "cells": tf.raw_ops.ResourceGatherNd(
                resource=handle, indices=pairs, dtype=tf.float32
            ),
            "shape": tf.raw_ops.VariableShape(input=handle, out_type=tf.int64),
            "known": tf.raw_ops.VarIsInitializedOp(resource=handle),
            "through": tf.raw_ops.ReadVariableOp(
                resource=tf.raw_ops.Identity(input=handle), dtype=tf.float32
            ),
        }

    indices = np.array([[0, 3, 9, 1], [5, 8, 2, 0]], np.int32)
    return of_function(body, indices, INTS)


def conditional():
    v, w = variable(3), variable(3, seed=1, name="v")

    def body(x):
        return {
            "if": tf.cond(tf.reduce_sum(x) > 0, lambda: x * v, lambda: x - w),
            "else": tf.cond(tf.reduce_sum(x) < -1e3, lambda: x * v, lambda: x - w),
            "case": tf.switch_case(
                tf.shape(x)[0], [lambda: x * w, lambda: x, lambda: x + v]
            ),
        }

    return of_function(body, floats())


def calls():
    """Two variables of different shapes pass through the same two functions."""
    v, w = variable(3), variable(1, 3, seed=1, name="v")

    @tf.function(autograph=False)
    def read(handle):
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)

    read_any = read.get_concrete_function(tf.TensorSpec([], tf.resource))

    @tf.function(autograph=False)
    def scaled(x, handle):
        return x * read_any(handle)

    scale = scaled.get_concrete_function(FLOATS, tf.TensorSpec([], tf.resource))

    def body(x):
        return {"a": scale(x, v.handle), "b": scale(scale(x, w.handle), v.handle)}

    return of_function(body, floats())


def nested():
    """A loop in a branch in a call, each of which is handed the variable."""
    v = variable(3)

    @tf.function(autograph=False)
    def inner(x):
        def loop():
            return tf.while_loop(
                lambda i, _: i < tf.cast(tf.size(v), tf.int32),
                lambda i, t: (i + 1, tf.cond(i > 0, lambda: t * v, lambda: t + v)),
                [0, x],
            )[1]

        return tf.cond(tf.reduce_sum(x) > -1e3, loop, lambda: x)

    def body(x):
        return {"y": inner(x) + inner(2.0 * x)}

    return of_function(body, floats())


def dtypes():
    kinds = [tf.float32, tf.float64, tf.half, tf.bfloat16, tf.complex64, tf.complex128]
    kinds += [tf.int8, tf.uint16, tf.int32, tf.int64]
    numbers = [
        tf.Variable(tf.cast([1.5, -2, 3], kind), name=kind.name) for kind in kinds
    ]
    others = [
        tf.Variable([True, False], name="bool"),
        tf.Variable(["a", "", "ä\0b"], name="string"),
        tf.Variable(2.5, name="scalar"),
        tf.Variable(np.zeros((0, 3), np.float32), name="empty"),
        tf.Variable([np.nan, -0.0, np.inf, 1e-45], name="odd", dtype=tf.float32),
    ]

    def body(x):
        reads = {v.name.partition(":")[0]: v.read_value() for v in (*numbers, *others)}
        return {"plus": x + 0.0, **reads}

    return of_function(body, floats())


SAMPLES: dict[str, Callable[[], Sample]] = {
    "cnn": cnn,
    "lstm": lstm,
    "embedding": embedding,
    "gathers": gathers,
    "conditional": conditional,
    "calls": calls,
    "nested": nested,
    "dtypes": dtypes,
}


def version_1_loop():
    """A loop of Enter, Merge and Switch ops that is handed variables as handles."""
    with control_flow(1), tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 3], "x")
        v = tf.compat.v1.get_variable(
            "v", [4, 3], use_resource=True, initializer=tf.ones_initializer()
        )

        def step(i, t):
            row = tf.raw_ops.ResourceGather(
                resource=v.handle, indices=i, dtype=tf.float32
            )
            known = tf.raw_ops.VarIsInitializedOp(resource=v.handle)
            return i + 1, t * tf.reduce_sum(v) + row * tf.cast(known, tf.float32)

        _, y = tf.compat.v1.while_loop(lambda i, _: i < 4, step, [0, x])
        tf.identity(y, name="y")
    return graph, v
