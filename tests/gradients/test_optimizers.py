"""Recomputation survives what TensorFlow does to a graph before it runs it.

Run a second time, in another process, with oneDNN off.
"""

import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import gradients, last_report
from tests.gradients.checking import assert_close
from tests.thorough import crossed

v1 = tf.compat.v1


def off():
    config = v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config


def remapping_off():
    config = v1.ConfigProto()
    config.graph_options.rewrite_options.remapping = 2
    return config


def aggressive():
    config = v1.ConfigProto()
    rewrite = config.graph_options.rewrite_options
    rewrite.dependency_optimization = 3
    rewrite.arithmetic_optimization = 3
    config.graph_options.optimizer_options.opt_level = 0
    config.graph_options.optimizer_options.do_common_subexpression_elimination = True
    return config


SETTINGS = {
    "default": v1.ConfigProto,
    "Grappler off": off,
    "remapping off": remapping_off,
    "aggressive": aggressive,
}


def executed(graph, x, fetches, config):
    """Return values, and what kernels the executed graph has."""
    options = v1.RunOptions(output_partition_graphs=True)
    metadata = v1.RunMetadata()
    with v1.Session(graph=graph, config=config) as session:
        feed = {x: np.full(x.shape, 0.1, np.float32)}
        values = session.run(fetches, feed, options=options, run_metadata=metadata)
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
    expected, before = executed(graph, x, plain, SETTINGS[setting]())
    actual, after = executed(graph, x, ours, SETTINGS[setting]())
    assert_close(actual, expected)
    assert count(after, op_type) == count(before, op_type) + again


def test_copies_are_compiled_by_xla():
    def convolutions(take):
        @tf.function(jit_compile=True, autograph=False)
        def step(x):
            kept, y = convolutional(x)
            return take(y, x, kept)

        x = tf.fill([4, 16, 16, 8], 0.1)
        text = step.experimental_get_compiler_ir(x)(stage="optimized_hlo")
        return step(x), text.count(" convolution(")

    def ours(y, x, kept):
        return gradients(y, x, checkpoints=kept, min_checkpoint_size=0)

    expected, before = convolutions(lambda y, x, kept: tf.gradients(y, x))
    actual, after = convolutions(ours)
    assert_close(actual, expected)
    again = [op.op_type for op in last_report().recomputed].count("Conv2D")
    assert again >= 3
    assert after == before + again
