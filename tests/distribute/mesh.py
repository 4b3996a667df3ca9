"""Steps on a mesh of DTensor, against no mesh at all.

Called with jobs: what is done to the network. The results are the reports of each, and
the largest difference of a tensor, as a part of its largest value: edited and unedited.
"""

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from geutil.batchnorm import fold_batch_norms
from geutil.errors import GeutilError
from geutil.gradients import gradients
from geutil.quantize import quantize
from tests.distribute.networks import CHANNELS, forward, values, weights_of
from tests.distribute.programs import split_cpu, start

BATCH = 4


def stepped(x, variables, edits):
    is_training = "train" in edits
    weights = weights_of(variables)
    reports = []

    @tf.function(autograph=False)
    def step(x):
        y = forward(x, weights, variables, is_training=is_training)
        graph = tf.compat.v1.get_default_graph()
        if "fold" in edits:
            reports.append(str(fold_batch_norms(graph, is_training=is_training)))
        if "quantize" in edits:
            y = quantize(graph, is_training=is_training).tensor(y)
        loss = tf.reduce_sum(tf.tanh(y)) / BATCH
        handles = [v.handle for v in weights]
        modes = [edit for edit in edits if edit in ("memory", "speed")]
        if modes:
            return [loss, *gradients(loss, handles, checkpoints=modes[0])]
        return [loss, *tf.gradients(loss, handles)]

    return list(step(x)), reports


def on_mesh(x, weights, edits):
    mesh = dtensor.create_mesh([("batch", 2)], devices=["CPU:0", "CPU:1"])

    def copied(value):
        layout = dtensor.Layout.replicated(mesh, rank=value.ndim)
        return dtensor.DVariable(dtensor.copy_to_mesh(tf.constant(value), layout))

    parts = [tf.constant(part) for part in np.split(x, 2)]
    layout = dtensor.Layout.batch_sharded(mesh, "batch", rank=x.ndim)
    variables = [copied(value) for value in weights]
    found, reports = stepped(dtensor.pack(parts, layout), variables, edits)
    tensors = (*found, *(v.read_value() for v in variables))
    return [dtensor.unpack(t)[0].numpy() for t in tensors], reports


def difference(expected, found):
    return max(
        float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-3))
        for a, b in zip(expected, found, strict=True)
    )


def compared(x, weights, edits):
    plain = [edit for edit in edits if edit in ("train", "quantize")]
    try:
        found, reports = on_mesh(x, weights, edits)
    except GeutilError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    here = [tf.Variable(value) for value in weights]
    expected = [t.numpy() for t in (*stepped(tf.constant(x), here, plain)[0], *here)]
    return {
        "reports": reports,
        "edited": difference(expected, found),
        "plain": difference(expected, on_mesh(x, weights, plain)[0]),
    }


def main(*jobs):
    split_cpu()
    rng = np.random.default_rng(0)
    weights = values(rng)
    x = np.float32(rng.normal(size=(BATCH, 8, 8, CHANNELS)))
    return [compared(x, weights, edits.split(",")) for edits in jobs]


if __name__ == "__main__":
    start(main)
