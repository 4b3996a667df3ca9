"""A cluster of version 1 on loopback, and networks that are split over its tasks.

As a program it starts the server of a task, which goes on when the program has ended.
"""

import contextlib
import json
import os
import select
import signal
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf

from tests.distribute.programs import held_ports, results_of, start

v1 = tf.compat.v1
TASKS = ("/job:worker/task:0", "/job:worker/task:1")


class Cluster:
    """Two servers, which end with this process at the latest."""

    def __init__(self):
        self._kept = contextlib.ExitStack()
        ports = self._kept.enter_context(held_ports(2))
        folder = self._kept.enter_context(tempfile.TemporaryDirectory())
        self._pipe = Path(folder) / "pipe"
        os.mkfifo(self._pipe)
        # Open for reading, too, it waits for no reader.
        self._kept.callback(os.close, os.open(self._pipe, os.O_RDWR))
        self._addresses = [f"127.0.0.1:{port}" for port in ports]
        self._numbers = {}
        for task in range(2):
            self.start(task)
        self.target = f"grpc://{self._addresses[0]}"

    def start(self, task):
        """Start the server of a task, or another one after `kill`."""
        addresses = json.dumps(self._addresses)
        self._numbers[task] = results_of("cluster", addresses, str(task), self._pipe)

    def kill(self, task):
        """Kill the server of a task, and wait for its end."""
        process = os.pidfd_open(self._numbers[task])
        signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [])
        os.close(process)

    def close(self):
        self._kept.close()


class Net:
    """Convolutions with norms in a graph of version 1, half of them on each task.

    Depthwise ones: others take 30 MB for themselves without oneDNN. The statistics of
    the norms are random ones.
    """

    def __init__(self, layers=4, pixels=8, width=4, batch=4, *, placed=True):
        rng = np.random.default_rng(0)
        self.graph = tf.Graph()
        self.weights = []
        self._layers, self._seen = layers, 0
        tasks = TASKS if placed else ("", "")
        with self.graph.as_default():
            with tf.device(tasks[0]):
                shape = [batch, pixels, pixels, 2]
                x = self.x = v1.placeholder(tf.float32, shape, name="x")
            for i in range(layers):
                task = tasks[self.task_of(i)]
                with tf.device(task), v1.variable_scope(f"layer{i}"):
                    x = self._layer(rng, x, width)
            with tf.device(tasks[1]):
                self.y = tf.reduce_mean(x, [1, 2], name="y")
                self.loss = tf.reduce_sum(tf.square(self.y), name="loss")
        self.value = rng.normal(size=self.x.shape).astype(np.float32)
        self.added()

    def task_of(self, layer):
        return 2 * layer // self._layers

    def added(self):
        """Return the ops that the graph has more than at the last call."""
        ops = self.graph.get_operations()[self._seen :]
        self._seen += len(ops)
        return ops

    def _layer(self, rng, x, width):
        def variable(name, value, trainable=True):
            initial = np.asarray(value, np.float32)
            return v1.get_variable(
                name, initializer=initial, trainable=trainable, use_resource=True
            )

        channels = x.shape[-1]
        kernel = rng.normal(size=(3, 3, channels, width // channels)) * (2 / 9) ** 0.5
        weight = variable("kernel", kernel)
        gamma = variable("gamma", rng.uniform(0.5, 1.5, width))
        beta = variable("beta", rng.normal(size=width) * 0.3)
        mean = variable("mean", rng.normal(size=width) * 0.3, trainable=False)
        variance = variable("variance", rng.uniform(0.5, 1.5, width), trainable=False)
        self.weights += [weight, gamma, beta]
        x = tf.nn.depthwise_conv2d(x, weight, 4 * [1], "SAME", name="conv")
        x, _, _ = v1.nn.fused_batch_norm(
            x, gamma, beta, mean, variance, is_training=False, name="norm"
        )
        return tf.nn.relu(x, name="relu")

    def session(self, target):
        """Return a Session in which all variables have their initial values."""
        session = v1.Session(target, graph=self.graph)
        with self.graph.as_default():
            session.run(v1.global_variables_initializer())
        return session

    def run(self, target, fetches):
        """Return what a new Session computes."""
        with self.session(target) as session:
            return session.run(fetches, {self.x: self.value})


def serve(addresses, task, started, pipe):
    """Be a server until nobody holds a pipe open for writing any more."""
    server = tf.distribute.Server(
        {"worker": json.loads(addresses)},
        job_name="worker",
        task_index=int(task),
        protocol="grpc",
        config=v1.ConfigProto(inter_op_parallelism_threads=1),
    )
    os.write(started, b".")
    os.close(started)
    Path(pipe).read_bytes()
    del server


def main(addresses, task, pipe):
    """Start a server, and return the number of its process."""
    read, started = os.pipe()
    number = os.fork()
    if number == 0:
        try:
            serve(addresses, task, started, pipe)
        finally:
            os._exit(1)
    os.close(started)
    assert os.read(read, 1), "no server started"
    return number


if __name__ == "__main__":
    start(main)
