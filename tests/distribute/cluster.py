"""A cluster of version 1 on loopback, and networks that are split over its tasks.

Servers are processes of their own; they end with the pipe to the one that started them.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from tests.distribute.ports import free_ports
from tests.processes import ROOT

v1 = tf.compat.v1
TASKS = ("/job:worker/task:0", "/job:worker/task:1")
SERVER = """
import json, os, sys
import tensorflow as tf
address = json.loads(sys.argv[1])
tf.distribute.Server(
    {"worker": address}, job_name="worker", task_index=int(sys.argv[2]), protocol="grpc"
)
print("serves", flush=True)
sys.stdin.read()
os._exit(0)
"""


class Cluster:
    """Two servers; `restart` takes the place of one that was killed."""

    def __init__(self) -> None:
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        self.servers = [self._started(i) for i in range(2)]
        for server in self.servers:
            self._wait(server)
        self.target = f"grpc://{self.addresses[0]}"

    def _started(self, task: int) -> subprocess.Popen[str]:
        addresses = str(self.addresses).replace("'", '"')
        return subprocess.Popen(
            [sys.executable, "-c", SERVER, addresses, str(task)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _wait(self, server: subprocess.Popen[str]) -> None:
        assert server.stdout is not None
        assert any(line.startswith("serves") for line in server.stdout)

    def kill(self, task: int) -> None:
        self.servers[task].kill()
        self.servers[task].wait(60)

    def restart(self, task: int) -> None:
        self.servers[task] = self._started(task)
        self._wait(self.servers[task])

    def close(self) -> None:
        for server in self.servers:
            with contextlib.suppress(BrokenPipeError):
                server.stdin.close()
            server.kill()
            server.wait(60)
            server.stdout.close()


class Net:
    """Convolutions with norms in a graph of version 1, half of them on each task.

    The statistics of the norms are random ones.
    """

    def __init__(
        self, layers: int = 4, pixels: int = 8, width: int = 4, batch: int = 4
    ) -> None:
        rng = np.random.default_rng(0)
        self.graph = tf.Graph()
        self.weights: list[Any] = []
        with self.graph.as_default():
            with tf.device(TASKS[0]):
                self.x = v1.placeholder(
                    tf.float32, [batch, pixels, pixels, 3], name="x"
                )
            x = self.x
            for i in range(layers):
                with tf.device(TASKS[2 * i // layers]), v1.variable_scope(f"layer{i}"):
                    x = self._layer(rng, x, width)
            with tf.device(TASKS[1]):
                self.y = tf.reduce_mean(x, [1, 2], name="y")
                self.loss = tf.reduce_sum(tf.square(self.y), name="loss")
        self.value = rng.normal(size=self.x.shape).astype(np.float32)

    def _layer(self, rng: np.random.Generator, x: Any, width: int) -> Any:
        def variable(name: str, value: Any, trainable: bool = True) -> Any:
            initial = np.asarray(value, np.float32)
            return v1.get_variable(
                name, initializer=initial, trainable=trainable, use_resource=True
            )

        fan_in = 9 * int(x.shape[-1])
        kernel = rng.normal(size=(3, 3, x.shape[-1], width)) * (2 / fan_in) ** 0.5
        weight = variable("kernel", kernel)
        gamma = variable("gamma", rng.uniform(0.5, 1.5, width))
        beta = variable("beta", rng.normal(size=width) * 0.3)
        mean = variable("mean", rng.normal(size=width) * 0.3, trainable=False)
        variance = variable("variance", rng.uniform(0.5, 1.5, width), trainable=False)
        self.weights += [weight, gamma, beta]
        x = tf.nn.conv2d(x, weight, 1, "SAME", name="conv")
        x, _, _ = v1.nn.fused_batch_norm(
            x, gamma, beta, mean, variance, is_training=False, name="norm"
        )
        return tf.nn.relu(x, name="relu")

    def session(self, target: str) -> Any:
        """Return a Session in which all variables have their initial values."""
        session = v1.Session(target, graph=self.graph)
        with self.graph.as_default():
            session.run(v1.global_variables_initializer())
        return session

    def run(self, target: str, fetches: Any) -> Any:
        """Return what a new Session computes."""
        with self.session(target) as session:
            return session.run(fetches, {self.x: self.value})
