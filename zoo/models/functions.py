"""Functions that hold what networks rarely do, and Keras networks of other kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from zoo.subject import Draw, Function, ints, of_keras, words


def _values(seed: int, *shape: int) -> Any:
    values = np.random.default_rng(seed).standard_normal(shape) * 0.3
    return values.astype(np.float32)


def _of(
    call: Callable[..., dict[str, Any]],
    inputs: Mapping[str, tf.TensorSpec],
    kept: Any = (),
    **draws: Draw,
) -> Function:
    holder = tf.Module()
    holder.kept = list(kept)
    return Function(call, inputs, holder, draws)


_X = {"x": tf.TensorSpec([None, 4], tf.float32)}


def _strings() -> Function:
    keys = tf.constant(["red", "green", "blue"])
    initializer = tf.lookup.KeyValueTensorInitializer(
        keys, tf.constant([1, 2, 3], tf.int64)
    )
    table = tf.lookup.StaticHashTable(initializer, 0)
    embeddings = tf.Variable(_values(1, 4, 6))

    def call(text: Any) -> dict[str, Any]:
        parts = tf.strings.split(tf.strings.lower(text))
        found = tf.ragged.map_flat_values(table.lookup, parts)
        vectors = tf.ragged.map_flat_values(lambda i: tf.gather(embeddings, i), found)
        return {"mean": tf.reduce_mean(vectors, 1), "upper": tf.strings.upper(text)}

    text = words("Red green", "blue", "green Blue none", "none")
    inputs = {"text": tf.TensorSpec([None], tf.string)}
    return _of(call, inputs, [table, embeddings], text=text)


def _ragged() -> Function:
    w = tf.Variable(_values(2, 4, 4))

    def call(x: Any, lengths: Any) -> dict[str, Any]:
        rows = tf.RaggedTensor.from_tensor(x, lengths)
        sums = tf.reduce_sum(tf.ragged.map_flat_values(lambda v: v @ w, rows), 1)
        return {"sums": sums, "padded": rows.to_tensor(shape=[None, 6, 4])}

    inputs = {
        "x": tf.TensorSpec([None, 6, 4], tf.float32),
        "lengths": tf.TensorSpec([None], tf.int64),
    }
    return _of(call, inputs, [w], lengths=ints(1, 7))


def _map_fn() -> Function:
    w = tf.Variable(_values(3, 4, 4))

    def call(x: Any) -> dict[str, Any]:
        return {"y": tf.map_fn(lambda row: tf.linalg.matvec(w, tf.tanh(row)), x)}

    return _of(call, _X, [w])


def _scan() -> Function:
    w = tf.Variable(_values(4, 4, 4))

    def call(x: Any) -> dict[str, Any]:
        steps = tf.transpose(x, [1, 0, 2])
        start = tf.zeros_like(steps[0])
        states = tf.scan(lambda s, v: tf.tanh(s @ w + v), steps, start)
        return {"y": tf.transpose(states, [1, 0, 2])}

    return _of(call, {"x": tf.TensorSpec([None, 5, 4], tf.float32)}, [w])


def _cond() -> Function:
    w = tf.Variable(_values(5, 4, 4))

    def call(x: Any) -> dict[str, Any]:
        y = x @ w
        above = tf.reduce_sum(y) > 0
        return {"y": tf.cond(above, lambda: tf.nn.relu(y), lambda: tf.tanh(y @ w))}

    return _of(call, _X, [w])


def _switch() -> Function:
    w = tf.Variable(_values(6, 4, 4))

    def call(x: Any, branch: Any) -> dict[str, Any]:
        branches = [lambda: x @ w, lambda: tf.tanh(x), lambda: tf.nn.softmax(x @ w)]
        return {"y": tf.switch_case(branch, branches)}

    inputs = {**_X, "branch": tf.TensorSpec([], tf.int32)}
    return _of(call, inputs, [w], branch=ints(0, 3))


def _while() -> Function:
    w = tf.Variable(_values(7, 4, 4))

    def call(x: Any) -> dict[str, Any]:
        def step(i: Any, y: Any) -> Any:
            return i + 1, tf.tanh(y @ w)

        _, y = tf.while_loop(lambda i, _: i < 4, step, [0, x])
        return {"y": y}

    return _of(call, _X, [w])


def _complex() -> Function:
    w = tf.Variable(_values(8, 4, 4))

    def call(x: Any) -> dict[str, Any]:
        spectrum = tf.signal.fft(tf.complex(x @ w, x))
        return {"spectrum": spectrum, "power": tf.abs(spectrum)}

    return _of(call, _X, [w])


def _half() -> Function:
    w = tf.Variable(_values(9, 4, 8).astype(np.float16))

    def call(x: Any) -> dict[str, Any]:
        y = tf.nn.relu(x @ w)
        return {"y": y, "z": tf.cast(tf.cast(y, tf.bfloat16) * 2, tf.float32)}

    return _of(call, {"x": tf.TensorSpec([None, 4], tf.float16)}, [w])


def _signatures() -> Function:
    w = tf.Variable(_values(10, 4, 6))

    def call(x: Any) -> dict[str, Any]:
        return {"y": tf.tanh(x @ w)}

    def back(y: Any) -> dict[str, Any]:
        return {"x": tf.matmul(y, w, transpose_b=True)}

    subject = _of(call, _X, [w])
    spec = tf.TensorSpec([None, 6], tf.float32, "y")
    subject.signatures = {
        "back": tf.function(back).get_concrete_function(y=spec),
        "again": tf.function(call).get_concrete_function(**_X),
    }
    return subject


def _mixed_precision() -> Function:
    layers = tf.keras.layers
    x = image = layers.Input([16, 16, 3], name="x")
    for filters in (8, 16):
        half: dict[str, Any] = {"dtype": "mixed_float16"}
        x = layers.Conv2D(filters, 3, 2, "same", use_bias=False, **half)(x)
        x = layers.BatchNormalization(**half)(x)
        x = layers.ReLU(**half)(x)
    x = layers.GlobalAveragePooling2D(dtype="mixed_float16")(x)
    return of_keras(tf.keras.Model(image, layers.Dense(10, dtype="float32")(x)))


def _recurrent() -> Function:
    layers = tf.keras.layers
    x = words_ = layers.Input([6, 4], name="x")
    x = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(x)
    x = layers.GRU(8)(x)
    return of_keras(tf.keras.Model(words_, layers.Dense(4)(x)))


def _conv_1d() -> Function:
    layers = tf.keras.layers
    x = sound = layers.Input([64, 2], name="x")
    for rate in (1, 2, 4):
        x = layers.Conv1D(8, 3, padding="causal", dilation_rate=rate)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return of_keras(tf.keras.Model(sound, layers.Dense(4)(x)))


def _conv_3d() -> Function:
    layers = tf.keras.layers
    x = video = layers.Input([4, 8, 8, 2], name="x")
    x = layers.Conv3D(4, 3, padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.GlobalAveragePooling3D()(x)
    return of_keras(tf.keras.Model(video, layers.Dense(4)(x)))


def _unet() -> Function:
    layers = tf.keras.layers

    def block(x: Any, filters: int) -> Any:
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        return layers.ReLU()(layers.BatchNormalization()(x))

    image = layers.Input([16, 16, 3], name="x")
    first = block(image, 8)
    second = block(layers.MaxPooling2D()(first), 16)
    up = layers.Conv2DTranspose(8, 3, 2, "same", activation="relu")(second)
    joined = block(layers.Concatenate()([first, up]), 8)
    return of_keras(tf.keras.Model(image, layers.Conv2D(2, 1)(joined)))


def _sparse_experts() -> Function:
    """A mixture of experts by one-hot gates, with several inputs and outputs."""
    layers = tf.keras.layers
    image = layers.Input([8], name="x")
    gates = layers.Dense(4, "softmax")(image)
    experts = [layers.Dense(6, "relu")(image) for _ in range(4)]
    stacked = layers.Lambda(lambda t: tf.stack(t, 1))(experts)
    best = layers.Lambda(lambda g: tf.one_hot(tf.argmax(g, -1), 4)[..., None])(gates)
    chosen = layers.Lambda(lambda t: tf.reduce_sum(t[0] * t[1], 1))([stacked, best])
    return of_keras(tf.keras.Model(image, [layers.Dense(4)(chosen), gates]))


BUILDERS: dict[str, Callable[[], Function]] = {
    "Strings": _strings,
    "Ragged": _ragged,
    "MapFn": _map_fn,
    "Scan": _scan,
    "Cond": _cond,
    "Switch": _switch,
    "While": _while,
    "Complex": _complex,
    "Half": _half,
    "Signatures": _signatures,
    "MixedPrecision": _mixed_precision,
    "Recurrent": _recurrent,
    "Conv1D": _conv_1d,
    "Conv3D": _conv_3d,
    "UNet": _unet,
    "Experts": _sparse_experts,
}
