"""What segments wait for."""

import numpy as np
import tensorflow as tf

from geutil.gradients import gradients
from tests.gradients.checking import SCOPE, assert_close, run


def gates(graph):
    return [
        op
        for op in graph.get_operations()
        if op.name.startswith(f"{SCOPE}gate") and op.type == "NoOp"
    ]


def test_the_first_segment_waits_for_weight_gradients_before_it():
    """What the backward pass starts with holds the largest gradient of many models."""
    with tf.Graph().as_default() as graph:
        random = np.random.default_rng(0)
        weights = [
            tf.constant(random.normal(size=[32, 32]).astype("float32") / 6)
            for _ in range(5)
        ]
        h = tf.ones([64, 32])
        kept = []
        for w in weights:
            h = tf.tanh(tf.matmul(tf.sin(h), w))
            kept.append(h)
        loss = tf.reduce_sum(h)
        ours = gradients(loss, weights, checkpoints=kept, min_checkpoint_size=0)
        first = gates(graph)[0]
        # Of the last layer nothing is recomputed first: its input is kept.
        started = [op.name for op in first.control_inputs]
        assert any("TanhGrad" in name or "MatMul" in name for name in started)
        assert not any(op.type in ("Identity", "Fill") for op in first.control_inputs)
        assert_close(*run(graph, [ours, tf.gradients(loss, weights)]))
