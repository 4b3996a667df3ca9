"""Recomputation survives what TensorFlow does to a graph before it runs it.

Run a second time, in another process, with oneDNN off.
"""

import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import Budget, gradients, last_report
from tests.gradients.checking import assert_close, unlike
from tests.memory.tracing import peak_of, run_traced, trace
from tests.thorough import crossed

v1 = tf.compat.v1


# What a session lets TensorFlow do to its graph.
SETTINGS = {
    "default": {},
    "Grappler off": {"rewrite_options": {"disable_meta_optimizer": True}},
    "remapping off": {"rewrite_options": {"remapping": 2}},
    "aggressive": {
        "rewrite_options": {"dependency_optimization": 3, "arithmetic_optimization": 3},
        "optimizer_options": {
            "opt_level": 0,
            "do_common_subexpression_elimination": True,
        },
    },
}


def executed(graph, x, fetches, config):
    """Return values, and what kernels the executed graph has."""
    feed = {x: np.full(x.shape, 0.1, np.float32)}
    values, metadata = run_traced(graph, fetches, feed, config=config)
    parts = metadata.partition_graphs
    return values, [name for part in parts for node in part.node for name in of(node)]


def of(node):
    """Return the names of a kernel; Grappler composes some of several."""
    if node.op == "_UnaryOpsComposition":
        return [name.decode() for name in node.attr["op_names"].list.s]
    return [node.op]


def count(kernels, op_type):
    """Count forward kernels of a type, also those fused with others.

    There are `_FusedConv2D`, `NativeFusedConv2D` and `NativeConv2DWithBias`.
    """
    return sum(op_type in name and "Backprop" not in name for name in kernels)


def dense(x):
    """Return tensors to keep, and y."""
    w = tf.constant(np.cos(np.arange(256.0)).reshape(16, 16) * 0.1, tf.float32)
    kept, h = [], x
    for _ in range(5):
        h = tf.matmul(tf.exp(tf.sin(h)), w)
        kept.append(h)
    return kept, tf.reduce_sum(tf.exp(tf.sin(h)))


def convolutional(x):
    w = tf.constant(np.cos(np.arange(576.0)).reshape(3, 3, 8, 8) * 0.1, tf.float32)
    bias = tf.constant(np.linspace(-0.1, 0.1, 8), tf.float32)
    kept, h = [], x
    for _ in range(5):
        for _ in range(2):
            h = tf.nn.bias_add(tf.nn.conv2d(h, w, 1, "SAME"), bias)
            h = tf.exp(tf.nn.relu(h))
        kept.append(h)
        h = h * 0.1
    return kept, tf.reduce_sum(h)


NETWORKS = {
    "dense": (dense, [256, 16], "Exp"),
    "convolutional": (convolutional, [4, 16, 16, 8], "Conv2D"),
}


@pytest.mark.parametrize(("name", "setting"), crossed(NETWORKS, SETTINGS, together=1))
def test_copies_are_executed(name, setting):
    network, shape, op_type = NETWORKS[name]
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, shape)
        kept, y = network(x)
        plain = tf.gradients(y, x)
        ours = gradients(y, x, checkpoints=kept, min_checkpoint_size=0)
    again = [op.op_type for op in last_report().recomputed].count(op_type)
    assert again >= 3
    config = v1.ConfigProto(graph_options=SETTINGS[setting])
    expected, before = executed(graph, x, plain, config)
    actual, after = executed(graph, x, ours, config)
    assert_close(actual, expected)
    assert count(after, op_type) == count(before, op_type) + again


LAYERS = 6


@pytest.mark.parametrize("checkpoints", [None, "memory", Budget(0.85)], ids=str)
def test_a_step_holds_what_its_report_says(checkpoints, graph):
    """Also what convolutions work in: without oneDNN that is most of a step."""
    x = v1.placeholder(tf.float32, [16, 64, 64, 16])
    rng = np.random.default_rng(0)
    starts = rng.normal(0, 0.1, [LAYERS, 3, 3, 16, 16]).astype("f")
    y, filters = x, []
    for i, start in enumerate(starts):
        filters.append(v1.get_variable(f"filter{i}", initializer=start))
        y = tf.nn.sigmoid(tf.nn.conv2d(y, filters[-1], 1, "SAME"))
    loss = tf.reduce_mean(tf.square(y))
    slopes = gradients(loss, filters, checkpoints=checkpoints, holds_gradients=True)
    report = last_report(graph)
    held = peak_of(trace(graph, [loss, *slopes], {x: rng.normal(size=x.shape)}))
    # Of the scratch memory of oneDNN's kernels nothing is known.
    assert 0.93 <= held / report.peak <= 1.02


def constant(start, *shape):
    values = np.cos(np.arange(float(np.prod(shape))) + start)
    return tf.constant(values.reshape(shape) / shape[0] ** 2 / 2, tf.float32)


def layers_of_biases(x):
    """Return the weights, the tensors of all three layers, and the end."""
    weights, tensors, h = [], {}, x
    for layer in "012":
        weights += [constant(0, 1, 1, 8, 8), constant(0, 8)]
        product = tf.nn.conv2d(h, weights[-2], 1, "SAME")
        biased = tf.nn.bias_add(product, weights[-1])
        h = tf.nn.relu(biased)
        tensors |= {f"conv{layer}": product, f"bias{layer}": biased, f"relu{layer}": h}
    return weights, tensors, tf.reduce_sum(h * h)


def branches(x):
    """Return the weights, and the end of a network that sums branches.

    OneDNN may merge a bias of one branch with the filter of another.
    """
    weights, h = [], x
    for block in range(4):
        parts = [h]
        for branch in range(2):
            part = h
            for layer in range(branch + 1):
                phase = 100.0 * block + 10.0 * branch + layer
                weights += [constant(phase, 3, 3, 8, 8), constant(0, 8)]
                part = tf.nn.conv2d(tf.nn.relu(part), weights[-2], 1, "SAME")
                part = tf.nn.bias_add(part, weights[-1])
            parts.append(part)
        h = parts[1] + parts[2] + parts[0]
    return weights, {}, tf.reduce_sum(h * h)


# Each with its convolution in another segment than what its filter's gradient reads:
# no segment may come between gradients of a filter and a bias, which oneDNN merges.
# `tests/test_tensorflow_facts.py` shows what happens otherwise.
@pytest.mark.parametrize(
    ("network", "reverse"),
    crossed([layers_of_biases, branches], [False, True], together=1),
)
def test_gradients_of_biases(network, reverse, graph):
    x = v1.placeholder(tf.float32, [2, 8, 8, 8])
    weights, tensors, y = network(x)
    weights = weights[::-1] if reverse else weights
    ours = {"plain": tf.gradients(y, weights)}
    for kept in ("conv1", "bias1", "relu1", "conv2", "bias2") if tensors else ():
        ours[kept] = gradients(
            y, weights, checkpoints=[tensors[kept]], min_checkpoint_size=0
        )
        assert last_report().recomputed, kept
    for mode in ("memory", "speed", None):
        ours[str(mode)] = gradients(y, weights, checkpoints=mode)
    feed = {x: np.sin(np.arange(1024.0)).reshape(x.shape)}
    with v1.Session(graph=graph) as session:
        values = {kept: session.run(slopes, feed) for kept, slopes in ours.items()}
    assert unlike(values, dict.fromkeys(values, values["plain"])) == {}
