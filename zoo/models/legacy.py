"""Networks of tf_keras, whose layers emit fused norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zoo.subject import Function, of_keras, uniform

_IMAGE = (32, 32, 3)


def _network(body: Callable[[Any, Any], Any], shape: tuple[int, ...] = _IMAGE) -> Any:
    import tf_keras

    x = tf_keras.Input(shape, name="x")
    return tf_keras.Model(x, body(tf_keras.layers, x))


def _conv_net() -> Function:
    def body(layers: Any, x: Any) -> Any:
        for filters in (8, 16):
            x = layers.Conv2D(filters, 3, 2, "same", use_bias=False)(x)
            x = layers.BatchNormalization()(x)
            x = layers.ReLU(6.0)(x)
            x = layers.DepthwiseConv2D(3, 1, "same")(x)
            x = layers.BatchNormalization()(x)
            x = layers.Activation("swish")(x)
        return layers.Dense(10)(layers.GlobalAveragePooling2D()(x))

    return of_keras(_network(body))


def _layer_norm() -> Function:
    def body(layers: Any, x: Any) -> Any:
        for _ in range(2):
            y = layers.LayerNormalization()(x)
            x = x + layers.MultiHeadAttention(2, 8)(y, y)
            y = layers.Dense(32, "gelu")(layers.LayerNormalization()(x))
            x = x + layers.Dropout(0.1)(layers.Dense(16)(y))
        return layers.Dense(4)(layers.Flatten()(x))

    return of_keras(_network(body, (8, 16)))


def _group_norm() -> Function:
    def body(layers: Any, x: Any) -> Any:
        x = layers.Conv2D(16, 3, 2, "same")(x)
        x = layers.ReLU()(layers.GroupNormalization(4)(x))
        x = layers.Conv2DTranspose(8, 3, 2, "same")(x)
        return layers.ReLU()(layers.BatchNormalization()(x))

    return of_keras(_network(body))


def _recurrent() -> Function:
    def body(layers: Any, x: Any) -> Any:
        x = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(x)
        return layers.Dense(4)(layers.GRU(8)(x))

    return of_keras(_network(body, (6, 4)))


def _mobile_net() -> Function:
    import tf_keras

    network = tf_keras.applications.MobileNetV2(
        # Named, since tf_keras counts its inputs in a process.
        input_tensor=tf_keras.Input(_IMAGE, name="image"),
        alpha=0.35,
        weights=None,
        classes=10,
        classifier_activation=None,
    )
    return of_keras(network, {network.inputs[0].name: uniform(-1.0, 1.0)})


BUILDERS: dict[str, Callable[[], Function]] = {
    "FusedNorms": _conv_net,
    "LegacyLayerNorm": _layer_norm,
    "GroupNorm": _group_norm,
    "LegacyRecurrent": _recurrent,
    "LegacyMobileNetV2": _mobile_net,
}
