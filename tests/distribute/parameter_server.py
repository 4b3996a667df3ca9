"""Steps that a coordinator hands to workers, against those of one device.

A cluster of two workers and a parameter server, all in this process, on loopback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from geutil.gradients import gradients
from geutil.quantize import quantize
from tests.distribute.ports import free_ports

STEPS, DEPTH = 4, 3


def parameters() -> list[Any]:
    """Return the weights of layers and norms, moving averages last."""
    rng = np.random.default_rng(0)
    values: list[Any] = [rng.normal(size=(4, 2))]
    for i in range(DEPTH):
        values.append(rng.normal(size=(3, 3, 4 if i else 3, 4)))
        values += [rng.uniform(0.5, 1.5, 4), rng.normal(size=4)]
    averages = [f(4) for _ in range(DEPTH) for f in (np.zeros, np.ones)]
    return [
        tf.Variable(np.float32(v), trainable=i < len(values))
        for i, v in enumerate([*values, *averages])
    ]


def forward(x: Any, weights: list[Any], averages: list[Any]) -> Any:
    """Return the result of a net whose norms take the statistics of the batch."""
    for i in range(DEPTH):
        kernel, scale, offset = weights[3 * i + 1 : 3 * i + 4]
        x = tf.nn.conv2d(x, kernel, 1, "SAME")
        moments = tf.nn.moments(x, [0, 1, 2])
        for average, moment in zip(averages[2 * i : 2 * i + 2], moments, strict=True):
            average.assign(0.9 * average + 0.1 * moment)
        x = tf.nn.batch_normalization(x, *moments, offset, scale, 0.1)
        x = tf.nn.swish(x) if i else tf.nn.relu(x)
    return tf.matmul(tf.reduce_mean(x, [1, 2]), weights[0])


def replica_of(
    variables: list[Any], reports: list[Any], edits: Sequence[str]
) -> Callable[..., Any]:
    weights = [v for v in variables if v.trainable]
    averages = [v for v in variables if not v.trainable]

    def replica(x: Any, y: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        read = [tf.identity(w) for w in weights]
        result = forward(x, read, averages)
        for edit in edits:
            if edit in ("exact", "one_pass"):
                fold_batch_norms(graph, is_training=True, statistics=edit)
            if edit == "quantize":
                reports.append(quantize(graph, ema_decay=0.9, quant_delay=2))
                result = reports[-1].tensor(result)
        loss = tf.reduce_sum(tf.square(result - y))
        if "memory" in edits:
            found = gradients(loss, read, checkpoints="memory")
        else:
            found = tf.gradients(loss, read)
        for weight, gradient in zip(weights, found, strict=True):
            weight.assign_sub(0.001 * gradient)
        return loss

    return replica


def numbers_of(
    losses: list[Any], reports: list[Any], weights: list[Any]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for report in reports[:1]:
        values |= {f"range/{k}": v for k, v in report.variables.items()}
        values["step"] = report.step
    values |= {f"loss/{i}": loss for i, loss in enumerate(losses)}
    values |= {f"variable/{i}": w for i, w in enumerate(weights)}
    return {key: np.asarray(value) for key, value in values.items()}


def on_a_cluster(
    xs: Any, ys: Any, edits: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    ports = [f"127.0.0.1:{port}" for port in free_ports(3)]
    cluster = tf.train.ClusterSpec({"worker": ports[:2], "ps": ports[2:]})
    servers = [
        tf.distribute.Server(cluster, job_name=job, task_index=task, protocol="grpc")
        for job, task in (("worker", 0), ("worker", 1), ("ps", 0))
    ]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights = parameters()
    reports: list[Any] = []
    replica = replica_of(weights, reports, edits)
    step = tf.function(lambda x, y: strategy.run(replica, args=(x, y)))
    losses = []
    for x, y in zip(xs, ys, strict=True):
        losses.append(coordinator.schedule(step, args=(x, y)).fetch())
        coordinator.join()
    variables = [v for report in reports[:1] for v in report.variables.values()]
    assert len(servers) == 3
    return numbers_of(losses, reports, weights), [v.device for v in variables]


def on_one_device(xs: Any, ys: Any, edits: Sequence[str]) -> dict[str, Any]:
    weights, reports = parameters(), []
    step = tf.function(replica_of(weights, reports, edits))
    losses = [step(x, y) for x, y in zip(xs, ys, strict=True)]
    return numbers_of(losses, reports, weights)


if __name__ == "__main__":
    rng = np.random.default_rng(2)
    xs = rng.normal(size=(STEPS, 8, 8, 8, 3)).astype(np.float32)
    xs *= np.arange(1, STEPS + 1, dtype=np.float32).reshape(-1, 1, 1, 1, 1)
    ys = rng.normal(size=(STEPS, 8, 2)).astype(np.float32)
    batches = [tf.constant(x) for x in xs], [tf.constant(y) for y in ys]
    edits = sys.argv[3].split(",")
    found, places = on_a_cluster(*batches, edits)
    np.savez(sys.argv[1], **found, places=np.array(places))
    np.savez(sys.argv[2], **on_one_device(*batches, edits))
