"""Where the gradient of an output may be None, zeros give the same."""

import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import gradients
from geutil.gradients.tape import engine
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
def test_none_is_as_good_as_zeros(training, monkeypatch):
    def take(build):
        with tf.Graph().as_default() as graph:
            xs, made = build(training)
            first = made[0]
            weights = tf.reshape(
                tf.sin(tf.range(float(first.shape.num_elements()))), first.shape
            )
            plain = tf.gradients(first, xs, weights)
            before = len(graph.get_operations())
            ours = gradients(first, xs, weights, checkpoints=None, engine="tape")
            new = len(graph.get_operations()) - before
            values = run(graph, [plain, ours])
        return *values, new, first.op

    with_none = {name: take(build) for name, build in OPS.items()}
    accepted = engine.ACCEPTS_NONE
    monkeypatch.setattr(engine, "ACCEPTS_NONE", frozenset())
    assert set(OPS) == accepted
    for name, (expected, ours, fewer, op) in with_none.items():
        _, with_zeros, more, _ = take(OPS[name])
        assert op.type == name
        assert_same(ours, expected)
        assert_same(with_zeros, expected)
        assert fewer < more, name
        assert any(np.any(e) for e in expected), name
