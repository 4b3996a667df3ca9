"""Steps that a coordinator hands to workers, against those of one device.

A cluster of two workers and a parameter server, all in this process, on loopback.
Called with edits on the cluster and on one device. The results are the numbers of both.
"""

import numpy as np
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from geutil.gradients import gradients
from geutil.quantize import quantize
from tests.distribute.networks import CHANNELS, forward, values, weights_of
from tests.distribute.programs import held_ports, start

STEPS = 4


def replica_of(variables, reports, edits):
    weights = weights_of(variables)

    def replica(x, y):
        graph = tf.compat.v1.get_default_graph()
        read = [tf.identity(w) for w in weights]
        result = forward(x, read, variables, is_training=True)
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


def numbers_of(losses, reports, variables):
    found = {}
    for report in reports[:1]:
        found |= {f"range/{k}": v for k, v in report.variables.items()}
        found["step"] = report.step
    found |= {f"loss/{i}": loss for i, loss in enumerate(losses)}
    found |= {f"variable/{i}": v for i, v in enumerate(variables)}
    return {key: np.asarray(value) for key, value in found.items()}


def cluster_of(ports):
    """Return a strategy of a cluster on some ports, and the servers of the cluster."""
    addresses = [f"127.0.0.1:{port}" for port in ports]
    cluster = tf.train.ClusterSpec({"worker": addresses[:2], "ps": addresses[2:]})
    servers = [
        tf.distribute.Server(cluster, job_name=job, task_index=task, protocol="grpc")
        for job, task in (("worker", 0), ("worker", 1), ("ps", 0))
    ]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, rpc_layer="grpc"
    )
    return tf.distribute.ParameterServerStrategy(resolver), servers


def on_a_cluster(coordinator, start, batches, edits):
    strategy = coordinator.strategy
    with strategy.scope():
        variables = [tf.Variable(value) for value in start]
    reports = []
    replica = replica_of(variables, reports, edits)
    step = tf.function(lambda x, y: strategy.run(replica, args=(x, y)), autograph=False)
    losses = []
    for batch in batches:
        losses.append(coordinator.schedule(step, args=batch).fetch())
        coordinator.join()
    ranges = [v for report in reports[:1] for v in report.variables.values()]
    places = {v.device for v in ranges}
    return {**numbers_of(losses, reports, variables), "places": places}


def on_one_device(start, batches, edits):
    variables, reports = [tf.Variable(value) for value in start], []
    step = tf.function(replica_of(variables, reports, edits), autograph=False)
    return numbers_of([step(x, y) for x, y in batches], reports, variables)


def main(*jobs):
    rng = np.random.default_rng(2)
    first = values(rng)
    # Each step has other extremes.
    xs = [(i + 1) * rng.normal(size=(8, 8, 8, CHANNELS)) for i in range(STEPS)]
    ys = rng.normal(size=(STEPS, 8, CHANNELS))
    with held_ports(3) as ports:
        strategy, servers = cluster_of(ports)
        assert len(servers) == 3
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        batches = [
            tuple(tf.constant(part, tf.float32) for part in batch)
            for batch in zip(xs, ys, strict=True)
        ]
        return [
            (
                on_a_cluster(coordinator, first, batches, cluster.split(",")),
                on_one_device(first, batches, one.split(",")),
            )
            for cluster, one in (job.split() for job in jobs)
        ]


if __name__ == "__main__":
    start(main)
