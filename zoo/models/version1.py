"""Graphs as TensorFlow 1 made them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from zoo.subject import Draw, GraphOfVersion1, flow_of, ints, words

v1 = tf.compat.v1
_RNG_SEED = 3


def _graph(
    build: Callable[..., dict[str, tf.Tensor]],
    inputs: dict[str, tf.TensorSpec],
    resources: bool = False,
    control_flow_v2: bool = False,
    frozen: bool = True,
    norms: int | None = None,
    **draws: Draw,
) -> GraphOfVersion1:
    """Build a graph with version 1's variables and control flow."""
    graph = tf.Graph()
    variables = v1.variable_scope("", use_resource=resources)
    with flow_of(control_flow_v2), graph.as_default(), variables:
        v1.set_random_seed(1)
        placeholders = {
            name: v1.placeholder(spec.dtype, spec.shape, name)
            for name, spec in inputs.items()
        }
        outputs = build(**placeholders)
        session = _started()
    return GraphOfVersion1(
        session, inputs, outputs, draws, norms, frozen, control_flow_v2
    )


def _started() -> Any:
    session = v1.Session()
    session.run([v1.global_variables_initializer(), v1.tables_initializer()])
    return session


def _variable(name: str, shape: list[int], scale: float = 0.3) -> Any:
    values = np.random.default_rng(len(name)).standard_normal(shape) * scale
    return v1.get_variable(name, initializer=values.astype(np.float32))


def _slim_norm(x: Any, scope: str) -> Any:
    """Normalize as slim's batch_norm does for inference."""
    channels = int(x.shape[-1])
    rng = np.random.default_rng(channels)

    def made(name: str, values: Any, trainable: bool) -> Any:
        return v1.get_variable(
            f"{scope}/BatchNorm/{name}",
            initializer=values.astype(np.float32),
            trainable=trainable,
        )

    y, _, _ = v1.nn.fused_batch_norm(
        x,
        made("gamma", rng.uniform(0.7, 1.3, channels), True),
        made("beta", rng.standard_normal(channels) * 0.1, True),
        made("moving_mean", rng.standard_normal(channels) * 0.3, False),
        made("moving_variance", rng.uniform(0.5, 1.5, channels), False),
        is_training=False,
    )
    return y


def _slim() -> GraphOfVersion1:
    def build(x: Any) -> dict[str, tf.Tensor]:
        for index, filters in enumerate((8, 16)):
            scope = f"MobilenetV1/Conv2d_{index}"
            kernel = _variable(f"{scope}/weights", [3, 3, int(x.shape[-1]), filters])
            x = tf.nn.conv2d(x, kernel, 2, "SAME")
            x = tf.nn.relu6(_slim_norm(x, scope))
            kernel = _variable(f"{scope}/depthwise_weights", [3, 3, filters, 1])
            x = tf.nn.depthwise_conv2d(x, kernel, [1, 1, 1, 1], "SAME")
            x = tf.nn.relu6(_slim_norm(x, f"{scope}_depthwise"))
        x = tf.reduce_mean(x, [1, 2])
        logits = tf.matmul(x, _variable("Logits/weights", [16, 10]))
        return {"logits": tf.nn.bias_add(logits, _variable("Logits/biases", [10]))}

    return _graph(build, {"x": tf.TensorSpec([None, 32, 32, 3], tf.float32)}, norms=4)


def _dynamic_rnn() -> GraphOfVersion1:
    def build(x: Any) -> dict[str, tf.Tensor]:
        kernel, bias = _variable("cell/kernel", [12, 8]), _variable("cell/bias", [8])
        steps = tf.transpose(x, [1, 0, 2])
        states = v1.TensorArray(tf.float32, tf.shape(steps)[0])

        def step(i: Any, state: Any, states: Any) -> Any:
            joined = tf.concat([tf.gather(steps, i), state], 1)
            state = tf.tanh(tf.matmul(joined, kernel) + bias)
            return i + 1, state, states.write(i, state)

        start = tf.zeros([tf.shape(x)[0], 8])
        _, last, states = v1.while_loop(
            lambda i, *_: i < tf.shape(steps)[0], step, [0, start, states]
        )
        states = tf.transpose(states.stack(), [1, 0, 2])
        return {
            "states": tf.identity(states, "states"),
            "last": tf.identity(last, "last"),
        }

    return _graph(build, {"x": tf.TensorSpec([None, 5, 4], tf.float32)})


def _while() -> GraphOfVersion1:
    def build(x: Any, times: Any) -> dict[str, tf.Tensor]:
        w = _variable("w", [4, 4])
        _, y = v1.while_loop(
            lambda i, _: i < times, lambda i, y: (i + 1, tf.tanh(y @ w)), [0, x]
        )
        return {"y": tf.identity(y, "y")}

    inputs = {
        "x": tf.TensorSpec([None, 4], tf.float32),
        "times": tf.TensorSpec([], tf.int32),
    }
    return _graph(build, inputs, times=ints(3, 4))


def _cond() -> GraphOfVersion1:
    def build(x: Any, is_training: Any) -> dict[str, tf.Tensor]:
        w = _variable("w", [4, 4])
        y = tf.matmul(x, w)
        y = v1.cond(is_training, lambda: tf.nn.relu(y), lambda: tf.tanh(y @ w))
        return {"y": tf.identity(y, "y")}

    inputs = {
        "x": tf.TensorSpec([None, 4], tf.float32),
        "is_training": tf.TensorSpec([], tf.bool),
    }
    return _graph(build, inputs)


def _functional() -> GraphOfVersion1:
    def build(x: Any) -> dict[str, tf.Tensor]:
        w = _variable("w", [4, 4])
        _, y = v1.while_loop(
            lambda i, _: i < 3, lambda i, y: (i + 1, tf.tanh(y @ w)), [0, x]
        )
        y = v1.cond(tf.reduce_sum(y) > 0, lambda: y + 1, lambda: y - 1)
        return {"y": tf.identity(y, "y")}

    return _graph(
        build,
        {"x": tf.TensorSpec([None, 4], tf.float32)},
        resources=True,
        control_flow_v2=True,
        frozen=False,
    )


def _partitioned() -> GraphOfVersion1:
    def build(x: Any) -> dict[str, tf.Tensor]:
        w = v1.get_variable(
            "w",
            [8, 6],
            initializer=v1.random_normal_initializer(seed=1),
            partitioner=v1.fixed_size_partitioner(2),
        )
        table = v1.get_variable(
            "table",
            [10, 6],
            initializer=v1.random_normal_initializer(seed=2),
            partitioner=v1.fixed_size_partitioner(3),
        )
        y = tf.matmul(x, tf.convert_to_tensor(w))
        near = v1.nn.embedding_lookup(table, tf.argmax(y, 1), "div")
        return {"y": tf.identity(y + near, "y")}

    return _graph(build, {"x": tf.TensorSpec([None, 8], tf.float32)})


def _ref_updates() -> GraphOfVersion1:
    def build(x: Any) -> dict[str, tf.Tensor]:
        w = _variable("w", [4, 4])
        shadow = v1.get_variable("shadow", initializer=tf.zeros([4, 4]))
        y = tf.matmul(x, w.read_value()) + tf.reduce_sum(shadow)
        return {"y": tf.identity(y, "y")}

    return _graph(build, {"x": tf.TensorSpec([None, 4], tf.float32)})


def _table() -> GraphOfVersion1:
    def build(word: Any) -> dict[str, tf.Tensor]:
        keys = tf.constant(["red", "green", "blue"])
        initializer = tf.lookup.KeyValueTensorInitializer(
            keys, tf.constant([1, 2, 3], tf.int64)
        )
        table = v1.lookup.StaticHashTable(initializer, 0)
        y = tf.gather(_variable("embeddings", [4, 6]), table.lookup(word))
        return {"y": tf.identity(y, "y")}

    return _graph(
        build,
        {"word": tf.TensorSpec([None], tf.string)},
        frozen=False,
        word=words("red", "green", "blue", "none"),
    )


BUILDERS: dict[str, Callable[[], GraphOfVersion1]] = {
    "SlimMobileNet": _slim,
    "DynamicRnn": _dynamic_rnn,
    "WhileV1": _while,
    "CondV1": _cond,
    "FunctionalV1": _functional,
    "Partitioned": _partitioned,
    "RefVariables": _ref_updates,
    "TableV1": _table,
}
