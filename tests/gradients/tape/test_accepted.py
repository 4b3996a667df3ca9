"""Where the gradient of an output may be None, zeros give the same."""

import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import gradients
from tests.gradients.checking import assert_same, run


def norm(op):
    def build(training):
        x = tf.reshape(tf.cos(tf.range(64.0)), [1, 4, 4, 4])
        scale, offset = tf.linspace(0.5, 1.0, 4), tf.zeros([4])
        mean, variance = ([], []) if training else (offset, scale)
        made = op(
            x=x,
            scale=scale,
            offset=offset,
            mean=tf.constant(mean, tf.float32) if training else mean,
            variance=tf.constant(variance, tf.float32) if training else variance,
            is_training=training,
        )
        return [x, scale, offset], made

    return build


def entropy(training):
    x = tf.reshape(tf.cos(tf.range(12.0)), [3, 4])
    made = tf.raw_ops.SoftmaxCrossEntropyWithLogits(
        features=x, labels=tf.nn.softmax(tf.sin(x))
    )
    return [x], made


def sparse_entropy(training):
    x = tf.reshape(tf.cos(tf.range(12.0)), [3, 4])
    made = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=[1, 0, 3])
    return [x], made


OPS = {
    "FusedBatchNorm": norm(tf.raw_ops.FusedBatchNorm),
    "FusedBatchNormV2": norm(tf.raw_ops.FusedBatchNormV2),
    "FusedBatchNormV3": norm(tf.raw_ops.FusedBatchNormV3),
    "SoftmaxCrossEntropyWithLogits": entropy,
    "SparseSoftmaxCrossEntropyWithLogits": sparse_entropy,
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", OPS)
def test_none_is_as_good_as_zeros(name, training):
    """No zeros are made for the outputs that nothing reads."""
    with tf.Graph().as_default() as graph:
        xs, made = OPS[name](training)
        first = made[0]
        weights = tf.reshape(
            tf.sin(tf.range(float(first.shape.num_elements()))), first.shape
        )
        plain = tf.gradients(first, xs, weights)
        before = len(graph.get_operations())
        ours = gradients(first, xs, weights, checkpoints=None, engine="tape")
        filled = [
            op.outputs[0]
            for op in graph.get_operations()[before:]
            if op.type in ("Const", "Fill", "ZerosLike")
            if op.outputs[0].dtype == tf.float32 and op.outputs[0].shape.rank
        ]
        expected, found, values = run(graph, [plain, ours, filled])
    assert first.op.type == name
    assert_same(found, expected)
    assert any(np.any(e) for e in expected)
    assert all(np.any(value) for value in values)
