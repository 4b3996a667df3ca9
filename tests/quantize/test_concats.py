"""Concats: what they read and make has one range."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from geutil.quantize import quantize
from tests.quantize.converted import Together, is_simulated, opened, spec
from tests.settings import needs_eager

pytestmark = needs_eager

IMAGE = spec(1, 8, 8, 4)
random = np.random.default_rng(0)


def conv(x, features=4):
    kernel = random.normal(size=(3, 3, x.shape[-1], features)) * 0.3
    return tf.nn.conv2d(x, kernel.astype(np.float32), 1, "SAME")


def ranges_of(m, kinds, is_of=lambda name: True):
    """Return the ranges of the results of some types of ops, as tensors' names."""
    return {
        op.inputs[1].op.inputs[0].name
        for op in m.graph.get_operations()
        if is_simulated(op) and op.inputs[0].op.type in kinds and is_of(op.name)
    }


def dense_block(a):
    x = a
    for _ in range(3):
        x = tf.concat([x, tf.nn.relu(conv(x))], 3)
    return x


def pooled(pool):
    def function(a):
        y = tf.nn.relu(conv(a))
        return tf.concat([pool(y, 3, 1, "SAME"), tf.nn.relu(conv(y))], 3)

    return function


def moved(a):
    y, z = tf.nn.relu(conv(a)), tf.nn.relu(conv(a))
    return tf.concat([tf.transpose(y, [0, 2, 1, 3]), z], 3)


CONCATS = {
    "two": lambda a: tf.concat([tf.nn.relu(conv(a)), tf.nn.relu6(conv(a))], 3),
    "nested": dense_block,
    "max pooled": pooled(tf.nn.max_pool2d),
    "average pooled": pooled(tf.nn.avg_pool2d),
    "moved": moved,
    "with an input": lambda a: tf.concat([a, tf.nn.relu(conv(a))], 3),
    "the same twice": lambda a: tf.concat([a, a], 3),
    "stacked": lambda a: tf.stack([tf.nn.relu(conv(a)), a], 3),
}


def test_one_range_for_all():
    fixed = {"fixed": lambda a: tf.concat([tf.nn.softmax(a), conv(a)], 3)}
    made = Together({n: (f, (IMAGE,)) for n, f in (CONCATS | fixed).items()})
    wrong = {}
    for kind, part in made.parts().items():
        if kind == "fixed":
            # It is converted where it is joined.
            right = "QUANTIZE" in part.kinds and part.most <= 1
        else:
            joined = {"ConcatV2", "Pack", "Relu", "Relu6", "AvgPool"}
            if kind in {"with an input", "the same twice", "stacked", "nested"}:
                joined.add("Placeholder")
            found = ranges_of(
                made.model, joined, lambda name, kind=kind: made.is_of(name, kind)
            )
            alone = kind in {"max pooled", "average pooled", "moved"}
            # An activation that nothing joins has a range of its own.
            right = len(found) == 1 or (alone and len(found) <= 2)
            right &= "QUANTIZE" not in part.kinds and part.most <= 2
        if not right or not part.is_int8:
            wrong[kind] = part
    assert wrong == {}


def test_what_is_skipped_is_joined_all_the_same():
    def function(a):
        left = tf.nn.conv2d(a, np.ones((1, 1, 4, 4), np.float32), 1, "SAME", name="l")
        return tf.concat([left, tf.nn.relu(conv(a))], 3)

    m = opened(function, IMAGE)
    report = quantize(m, is_training=False, overrides={"^l$": "skip"})
    assert [entry.op for entry in report.skipped] == ["l"]
    (concat,) = [op for op in m.graph.get_operations() if op.type == "ConcatV2"]
    assert all(is_simulated(t.op) for t in concat.inputs[:2])
    assert len(ranges_of(m, {"Conv2D", "Relu", "ConcatV2"})) == 1
