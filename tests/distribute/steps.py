"""Training steps under a strategy of tf.distribute.

Called with jobs: a strategy ("one" or "two" devices of a process, or two processes that
are "workers"), a network and its edits. The results are the numbers of each job, of
workers those of each worker.
"""

import json
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import keras
import numpy as np
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from geutil.gradients import gradients, last_report
from geutil.quantize import quantize
from tests.batchnorm.calibrated import with_random_norms
from tests.distribute.programs import LIMIT, distributed, held_ports, mirrored, start

# TensorFlow's own tracing gives these no device either.
PLACED_LATER = ("Const", "NoOp", "Placeholder", "ReadVariableOp")
STEPS, BATCH, CLASSES = 4, 12, 5
layers = keras.layers


def conv_net(*, synchronized=False):
    """A network with norms, branches, and activations of several kinds.

    Synchronized norms take their statistics over all replicas.
    """

    def norm(x):
        return layers.BatchNormalization(synchronized=synchronized)(x)

    image = keras.Input([8, 8, 3], name="image")
    # Depthwise kernels take no memory for themselves: even here it pays to run again.
    first = layers.DepthwiseConv2D if synchronized else partial(layers.Conv2D, 8)
    x = first(kernel_size=3, use_bias=False, padding="same")(image)
    x = layers.ReLU()(norm(x))
    y = layers.DepthwiseConv2D(3, use_bias=False, padding="same")(x)
    y = layers.Activation("swish")(norm(y))
    x = layers.Add()([x, y])
    if not synchronized:
        x = layers.Concatenate()([x, y])
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(CLASSES)(x))


class Step:
    """A training step of a network, edited in each replica."""

    def __init__(self, net, edits):
        self.net = net
        self.edits = edits
        self.reports = []
        self.misplaced = []
        self.recomputed = []

    def replica(self, x, y):
        graph = tf.compat.v1.get_default_graph()
        result = self.net(x, training="train" in self.edits)
        count = len(graph.get_operations())
        for edit in self.edits:
            result = self.edited(graph, result, edit)
        loss = tf.reduce_sum(tf.square(result - y)) / BATCH
        handles = [v.value for v in self.net.trainable_variables]
        modes = [edit for edit in self.edits if edit in ("memory", "speed")]
        if modes:
            found = gradients(loss, handles, checkpoints=modes[0])
            self.recomputed.append(len(last_report().recomputed))
        else:
            found = tf.gradients(loss, handles)
        self.misplaced += [
            f"{op.name} ({op.type})"
            for op in graph.get_operations()[count:]
            if not op.device and op.type not in PLACED_LATER
        ]
        context = tf.distribute.get_replica_context()
        found = context.all_reduce(tf.distribute.ReduceOp.SUM, found)
        for variable, gradient in zip(handles, found, strict=True):
            variable.assign_sub(0.01 * gradient)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, loss), found

    def edited(self, graph, result, edit):
        if edit == "fold":
            self.reports.append(fold_batch_norms(graph))
        elif edit in ("exact", "one_pass", "freeze"):
            options = {"statistics": edit}
            if edit == "freeze":
                options = {"freeze_batch_norm_delay": 3}
            self.reports.append(fold_batch_norms(graph, is_training=True, **options))
        elif edit in ("quantize", "delayed"):
            delay = 2 if edit == "delayed" else 0
            self.reports.append(quantize(graph, ema_decay=0.9, quant_delay=delay))
            result = self.reports[-1].tensor(result)
        return result


def run(strategy, name, edits):
    """Return the numbers of a few steps."""
    # Layers of each job have the same names.
    keras.utils.clear_session(free_memory=False)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        net = with_random_norms(conv_net(synchronized=name == "synchronized"))
        step = Step(net, edits)
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(STEPS, BATCH, *net.input_shape[1:])).astype(np.float32)
    ys = rng.normal(size=(STEPS, BATCH, CLASSES)).astype(np.float32)
    # Each step has other extremes, and one of the replicas has them.
    xs *= np.linspace(1, 2, STEPS * BATCH).reshape([STEPS, BATCH] + [1] * (xs.ndim - 2))
    every = tf.function(
        lambda x, y: strategy.run(step.replica, args=(x, y)), autograph=False
    )
    numbers = {}
    for index in range(STEPS):
        x, y = (distributed(strategy, values[index]) for values in (xs, ys))
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
    return {
        **{key: np.asarray(value) for key, value in numbers.items()},
        "reports": [str(report) for report in step.reports],
        "misplaced": step.misplaced,
        "recomputed": step.recomputed,
    }


def work(index, ports, jobs):
    """Be one of two workers, in a process that has not used TensorFlow before."""
    signal.alarm(LIMIT)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": cluster, "task": {"type": "worker", "index": index}}
    )
    experimental = tf.distribute.experimental
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=experimental.CommunicationOptions(
            implementation=experimental.CommunicationImplementation.RING
        )
    )
    return [run(strategy, net, edits.split(",")) for _, net, edits in jobs]


def main(*arguments):
    jobs = [argument.split() for argument in arguments]
    shared = [job for job in jobs if job[0] == "workers"]
    with (
        held_ports(2) as ports,
        ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool,
    ):
        parts = [pool.submit(work, i, ports, shared) for i in range(2) if shared]
        strategies = mirrored()
        alone = [
            run(strategies[kind], net, edits.split(","))
            for kind, net, edits in jobs
            if kind != "workers"
        ]
        of_workers = zip(*(part.result() for part in parts), strict=True)
        return [next(of_workers) if job in shared else alone.pop(0) for job in jobs]


if __name__ == "__main__":
    start(main)
