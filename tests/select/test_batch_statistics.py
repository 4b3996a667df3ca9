"""Which reductions are statistics of a batch, by the axes that they reduce."""

from __future__ import annotations

import tensorflow as tf

from geutil.select.networks.batch_norms import reduces_batch

v1 = tf.compat.v1
CASES = {
    "the batch": ([4, 8], [0], True),
    "the batch of images": ([4, 8, 8, 3], [0, 1, 2], True),
    "counted from the end": ([4, 8], [-2], True),
    "a row": ([4, 8], [1], False),
    "images one by one": ([4, 8, 8, 3], [1, 2], False),
    "everything": ([4, 8], [0, 1], False),
    "everything, counted from the end": ([4, 8], [-1, -2], False),
    "a vector": ([4], [0], False),
    "a batch of unknown rank": (None, [0], True),
    "a row of unknown rank": (None, [1], False),
}


def test_reductions_over_the_batch():
    found = {}
    for case, (shape, axes, _) in CASES.items():
        with tf.Graph().as_default():
            x = v1.placeholder(tf.float32, shape)
            reduced = [tf.reduce_mean(x, axes), tf.reduce_sum(x, axes)]
            found[case] = [reduces_batch(t.op) for t in reduced]
    assert found == {case: [wanted] * 2 for case, (*_, wanted) in CASES.items()}


def test_other_ops_and_axes_that_are_computed_are_none():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [4, 8])
        axes = v1.placeholder(tf.int32, [1])
        assert not reduces_batch(tf.reduce_max(x, [0]).op)
        assert not reduces_batch(tf.reduce_mean(x, axes).op)
