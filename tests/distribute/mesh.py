"""Steps on a mesh of DTensor, in a process of its own, against no mesh at all.

Called with what is done to the network. The last line that it prints has the largest
difference of a tensor, as a part of its largest value: edited and unedited.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from geutil.batchnorm import fold_batch_norms
from geutil.gradients import gradients
from geutil.quantize import quantize

BATCH, DEPTH, CHANNELS = 8, 4, 6
rng = np.random.default_rng(0)


def values() -> list[np.ndarray[Any, Any]]:
    """Return the weights of the layers, each with those of its norm."""
    found: list[np.ndarray[Any, Any]] = []
    for _ in range(DEPTH):
        found.append(rng.normal(size=(3, 3, CHANNELS, CHANNELS)) / 4)
        found += [rng.uniform(0.5, 1.5, CHANNELS), rng.normal(size=CHANNELS)]
        found += [rng.normal(size=CHANNELS), rng.uniform(0.5, 1.5, CHANNELS)]
    return [np.float32(v) for v in found]


def forward(x: Any, variables: Sequence[Any], *, is_training: bool) -> Any:
    for i in range(DEPTH):
        kernel, scale, offset, mean, variance = variables[5 * i : 5 * i + 5]
        x = tf.nn.conv2d(x, kernel, 1, "SAME")
        if is_training:
            moments = tf.nn.moments(x, [0, 1, 2])
            for moving, new in zip((mean, variance), moments, strict=True):
                moving.assign(0.9 * moving + 0.1 * new)
        else:
            moments = mean, variance
        x = tf.nn.batch_normalization(x, *moments, offset, scale, 1e-3)
        x = tf.nn.relu(x)
    return tf.reduce_mean(x, [1, 2])


def stepped(x: Any, variables: Sequence[Any], edits: Sequence[str]) -> list[Any]:
    is_training = "train" in edits

    @tf.function
    def step(x: Any) -> list[Any]:
        y = forward(x, variables, is_training=is_training)
        graph = tf.compat.v1.get_default_graph()
        if "fold" in edits:
            print(fold_batch_norms(graph, is_training=is_training))
        if "quantize" in edits:
            report = quantize(graph, is_training=is_training)
            y = report.tensor(y)
        loss = tf.reduce_sum(tf.tanh(y)) / BATCH
        read = [v for i, v in enumerate(variables) if i % 5 < 3]
        handles = [v.handle for v in read]
        modes = [edit for edit in edits if edit in ("memory", "speed")]
        if modes:
            return [loss, *gradients(loss, handles, checkpoints=modes[0])]
        return [loss, *tf.gradients(loss, handles)]

    return list(step(x))


def on_mesh(x: Any, weights: Sequence[Any], edits: Sequence[str]) -> list[Any]:
    devices = ["CPU:0", "CPU:1"]
    mesh = dtensor.create_mesh([("batch", 2)], devices=devices)

    def copied(value: Any) -> Any:
        layout = dtensor.Layout.replicated(mesh, rank=value.ndim)
        return dtensor.DVariable(dtensor.copy_to_mesh(tf.constant(value), layout))

    parts = [tf.constant(part) for part in np.split(x, 2)]
    layout = dtensor.Layout.batch_sharded(mesh, "batch", rank=x.ndim)
    variables = [copied(value) for value in weights]
    found = stepped(dtensor.pack(parts, layout), variables, edits)
    return [
        dtensor.unpack(t)[0].numpy()
        for t in (*found, *(v.read_value() for v in variables))
    ]


def main(edits: Sequence[str]) -> None:
    device = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        device, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    weights = values()
    x = np.float32(rng.normal(size=(BATCH, 8, 8, CHANNELS)))
    here = [tf.Variable(value) for value in weights]
    plain = [edit for edit in edits if edit in ("train", "quantize")]
    expected = [t.numpy() for t in (*stepped(tf.constant(x), here, plain), *here)]
    for done in (edits, plain):
        found = on_mesh(x, weights, done)
        differences = [
            float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-3))
            for a, b in zip(expected, found, strict=True)
        ]
        print(max(differences), end=" ")


if __name__ == "__main__":
    main(sys.argv[1].split(","))
