"""A training step under a strategy of tf.distribute, in a process of its own.

Called with a strategy, what is done to the network, and a file for the numbers. Two
processes of a strategy of several workers find each other by `TF_CONFIG`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from geutil.gradients import gradients
from geutil.quantize import quantize

# TensorFlow's own tracing gives these no device either.
PLACED_LATER = ("Const", "Placeholder", "ReadVariableOp")
STEPS, BATCH, CLASSES = 4, 12, 5
layers = keras.layers


def conv_net() -> Any:
    """A network with norms, branches, and activations of several kinds."""
    image = keras.Input([8, 8, 3], name="image")
    x = layers.Conv2D(8, 3, use_bias=False, padding="same")(image)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    y = layers.DepthwiseConv2D(3, use_bias=False, padding="same")(x)
    y = layers.Activation("swish")(layers.BatchNormalization()(y))
    x = layers.Concatenate()([layers.Add()([x, y]), y])
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(CLASSES)(x))


def token_net() -> Any:
    """A network without norms: attention and products of matrices."""
    tokens = keras.Input([6, 8], name="tokens")
    x = layers.Dense(8, activation="relu")(tokens)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 4)(x, x)])
    return keras.Model(tokens, layers.Dense(CLASSES)(layers.Flatten()(x)))


def synchronized_net() -> Any:
    """A network whose norms take their statistics over all replicas."""
    image = keras.Input([8, 8, 3], name="image")
    x = layers.Conv2D(8, 3, use_bias=False, padding="same")(image)
    x = layers.ReLU()(layers.BatchNormalization(synchronized=True)(x))
    y = layers.DepthwiseConv2D(3, use_bias=False, padding="same")(x)
    y = layers.Activation("swish")(layers.BatchNormalization(synchronized=True)(y))
    x = layers.GlobalAveragePooling2D()(layers.Add()([x, y]))
    return keras.Model(image, layers.Dense(CLASSES)(x))


NETS = {"conv": conv_net, "token": token_net, "synchronized": synchronized_net}


def randomized(net: Any) -> Any:
    """Give the norms statistics that tell them from none."""
    rng = np.random.default_rng(3)
    for layer in net.layers:
        if isinstance(layer, layers.BatchNormalization):
            count = layer.gamma.shape[0]
            layer.set_weights(
                [rng.uniform(0.5, 1.5, count), rng.normal(size=count)] * 2
            )
            layer.moving_variance.assign(rng.uniform(0.5, 1.5, count))
    return net


def strategy_of(kind: str) -> Any:
    if kind in ("one", "two"):
        devices = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            devices[0], [tf.config.LogicalDeviceConfiguration()] * 2
        )
        count = ("one", "two").index(kind) + 1
        return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])
    experimental = tf.distribute.experimental
    return tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=experimental.CommunicationOptions(
            implementation=experimental.CommunicationImplementation.RING
        )
    )


class Step:
    """A training step of a network, edited in each replica."""

    def __init__(self, net: Any, edits: Sequence[str]) -> None:
        self.net = net
        self.edits = edits
        self.reports: list[Any] = []
        self.misplaced: list[str] = []

    def replica(self, x: Any, y: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        in_training = "train" in self.edits
        result = self.net(x, training=in_training)
        count = len(graph.get_operations())
        result = self.edited(graph, result)
        loss = tf.reduce_sum(tf.square(result - y)) / BATCH
        handles = [v.value for v in self.net.trainable_variables]
        if "memory" in self.edits:
            found = gradients(loss, handles, checkpoints="memory")
        else:
            found = tf.gradients(loss, handles)
        ops = graph.get_operations()[count:]
        self.misplaced += [
            f"{op.name} ({op.type})"
            for op in ops
            if not op.device
            and op.type not in ("Placeholder", "Const", "NoOp", "ReadVariableOp")
        ]
        context = tf.distribute.get_replica_context()
        found = context.all_reduce(tf.distribute.ReduceOp.SUM, found)
        for variable, gradient in zip(handles, found, strict=True):
            variable.assign_sub(0.01 * gradient)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, loss), found

    def edited(self, graph: Any, result: Any) -> Any:
        for edit in self.edits:
            if edit == "fold":
                report = fold_batch_norms(graph)
            elif edit in ("exact", "one_pass"):
                report = fold_batch_norms(graph, is_training=True, statistics=edit)
            elif edit == "freeze":
                report = fold_batch_norms(
                    graph, is_training=True, freeze_batch_norm_delay=3
                )
            elif edit == "quantize":
                report = quantize(graph, ema_decay=0.9)
                result = report.tensor(result)
            elif edit == "delayed":
                report = quantize(graph, ema_decay=0.9, quant_delay=2)
                result = report.tensor(result)
            else:
                continue
            self.reports.append(report)
        return result


def run(kind: str, name: str, edits: Sequence[str]) -> dict[str, Any]:
    strategy = strategy_of(kind)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        net = randomized(NETS[name]())
        step = Step(net, edits)
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(STEPS, BATCH, *net.input_shape[1:])).astype(np.float32)
    ys = rng.normal(size=(STEPS, BATCH, CLASSES)).astype(np.float32)
    # Each step has other extremes, and one of the replicas has them.
    xs *= np.linspace(1, 2, STEPS * BATCH).reshape([STEPS, BATCH] + [1] * (xs.ndim - 2))
    every = tf.function(lambda x, y: strategy.run(step.replica, args=(x, y)))
    numbers: dict[str, Any] = {}
    for index in range(STEPS):

        def part(context: Any, values: Any = (xs[index], ys[index])) -> Any:
            size = BATCH // context.num_replicas_in_sync
            start = context.replica_id_in_sync_group * size
            return tuple(tf.constant(v[start : start + size]) for v in values)

        x, y = (
            strategy.experimental_distribute_values_from_function(
                lambda context, place=place: part(context)[place]
            )
            for place in range(2)
        )
        loss, found = every(x, y)
        numbers[f"loss/{index}"] = strategy.experimental_local_results(loss)[0]
        for i, gradient in enumerate(found):
            local = strategy.experimental_local_results(gradient)
            numbers[f"gradient/{index}/{i}"] = local[0]
    for report in step.reports:
        for key, variable in dict(getattr(report, "variables", {})).items():
            for copy, value in enumerate(strategy.experimental_local_results(variable)):
                numbers[f"range/{copy}/{key}"] = value
        if report.step is not None:
            numbers["step"] = report.step
    for variable in net.variables:
        numbers[f"variable/{variable.path}"] = variable.value
    texts = [str(report) for report in step.reports]
    return {
        **{key: np.asarray(value) for key, value in numbers.items()},
        "reports": np.array(texts),
        "misplaced": np.array(step.misplaced),
    }


if __name__ == "__main__":
    np.savez(sys.argv[4], **run(sys.argv[1], sys.argv[2], sys.argv[3].split(",")))
