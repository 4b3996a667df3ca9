"""Steps that a coordinator hands to workers, against those of one device.

A cluster of two workers and a parameter server, all in this process, on loopback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.quantize import quantize
from tests.distribute.ports import free_ports

STEPS = 4


def parameters() -> list[Any]:
    rng = np.random.default_rng(0)
    shapes = [(3, 3, 3, 4), (4, 2)]
    return [tf.Variable(rng.normal(size=s).astype(np.float32)) for s in shapes]


def replica_of(weights: list[Any], reports: list[Any]) -> Callable[..., Any]:
    def replica(x: Any, y: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        conv, dense = (tf.identity(w) for w in weights)
        hidden = tf.nn.relu(tf.nn.conv2d(x, conv, 1, "SAME"))
        result = tf.matmul(tf.reduce_mean(hidden, [1, 2]), dense)
        report = quantize(graph, ema_decay=0.9, quant_delay=2)
        reports.append(report)
        loss = tf.reduce_sum(tf.square(report.tensor(result) - y))
        found = tf.gradients(loss, [conv, dense])
        for weight, gradient in zip(weights, found, strict=True):
            weight.assign_sub(0.001 * gradient)
        return loss

    return replica


def numbers_of(
    losses: list[Any], reports: list[Any], weights: list[Any]
) -> dict[str, Any]:
    values = {f"range/{k}": v for k, v in reports[0].variables.items()}
    values |= {f"loss/{i}": loss for i, loss in enumerate(losses)}
    values |= {f"variable/{i}": w for i, w in enumerate(weights)}
    values["step"] = reports[0].step
    return {key: np.asarray(value) for key, value in values.items()}


def on_a_cluster(xs: Any, ys: Any) -> tuple[dict[str, Any], list[str]]:
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
    replica = replica_of(weights, reports)
    step = tf.function(lambda x, y: strategy.run(replica, args=(x, y)))
    losses = []
    for x, y in zip(xs, ys, strict=True):
        losses.append(coordinator.schedule(step, args=(x, y)).fetch())
        coordinator.join()
    variables = reports[0].variables.values()
    assert len(servers) == 3
    return numbers_of(losses, reports, weights), [v.device for v in variables]


def on_one_device(xs: Any, ys: Any) -> dict[str, Any]:
    weights, reports = parameters(), []
    step = tf.function(replica_of(weights, reports))
    losses = [step(x, y) for x, y in zip(xs, ys, strict=True)]
    return numbers_of(losses, reports, weights)


if __name__ == "__main__":
    rng = np.random.default_rng(2)
    xs = rng.normal(size=(STEPS, 8, 8, 8, 3)).astype(np.float32)
    xs *= np.arange(1, STEPS + 1, dtype=np.float32).reshape(-1, 1, 1, 1, 1)
    ys = rng.normal(size=(STEPS, 8, 2)).astype(np.float32)
    batches = [tf.constant(x) for x in xs], [tf.constant(y) for y in ys]
    found, places = on_a_cluster(*batches)
    np.savez(sys.argv[1], **found, places=np.array(places))
    np.savez(sys.argv[2], **on_one_device(*batches))
