"""What may stand between a layer and its batch norm, and what may come behind."""

import numpy as np
import pytest
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from tests.batchnorm.checking import (
    PARAMETERS,
    TURNED,
    additions,
    built,
    check_bare,
    check_together,
    folded,
    multiplications,
    needed,
    run,
)


def conv(b, channels=4):
    x = b.data(2, 6, 6, 3, known=(0,))
    return tf.nn.conv2d(x, b.weights(3, 3, 3, channels), 1, "SAME")


def reshaped_for_dense(b):
    x = tf.reshape(b.data(2, 5, 3), [-1, 3])
    y = tf.reshape(tf.matmul(x, b.weights(3, 4)) + b.weights(4), [2, 5, 4])
    return b.norm(y)


def expanded(b):
    y = tf.expand_dims(tf.matmul(b.data(5, 3), b.weights(3, 4)), 1)
    return b.norm(tf.squeeze(y, [1]))


BETWEEN = {
    "nothing": lambda b: b.norm(conv(b)),
    "bias": lambda b: b.norm(tf.nn.bias_add(conv(b), b.weights(4))),
    "addition": lambda b: b.norm(conv(b) + b.weights(4)),
    "addition of rank 4": lambda b: b.norm(b.weights(1, 1, 1, 4) + conv(b)),
    "addition of a scalar": lambda b: b.norm(conv(b) + b.weights()),
    "old addition": lambda b: b.norm(tf.raw_ops.Add(x=conv(b), y=b.weights(4))),
    "subtraction": lambda b: b.norm(conv(b) - b.weights(4)),
    "scale": lambda b: b.norm(conv(b) * 0.5),
    "identities": lambda b: b.norm(tf.identity(tf.stop_gradient(conv(b)))),
    "reshape": lambda b: b.norm(tf.reshape(conv(b), [-1, 4])),
    "reshape and bias": reshaped_for_dense,
    "transpose": lambda b: b.norm_of_first(tf.transpose(conv(b), [0, 3, 1, 2])),
    "expand and squeeze": expanded,
    "one channel": lambda b: b.norm(conv(b, 1) + b.weights(1)),
    "a norm": lambda b: b.norm(tf.identity(b.norm(conv(b), 4, "first")), 4, "second"),
    "average pooling": lambda b: b.norm(tf.nn.avg_pool2d(conv(b), 3, 2, "SAME")),
    "pooling of channels first": lambda b: b.norm_of_first(
        tf.nn.avg_pool2d(
            tf.transpose(conv(b), [0, 3, 1, 2]), 2, 2, "VALID", data_format="NCHW"
        )
    ),
    "pooling of volumes": lambda b: b.norm(
        tf.nn.avg_pool3d(tf.expand_dims(conv(b), 1), [1, 2, 2], 2, "SAME")
    ),
    "mean": lambda b: b.norm(tf.reduce_mean(conv(b), [1, 2])),
    "mean of channels first": lambda b: b.norm(
        tf.reduce_mean(tf.transpose(conv(b), [0, 3, 1, 2]), [2, 3])
    ),
    "mean that keeps axes": lambda b: b.norm(
        tf.reduce_mean(conv(b) + b.weights(4), [1, 2], keepdims=True)
    ),
    "reflection": lambda b: b.norm(
        tf.pad(conv(b), [[0, 0], [1, 2], [1, 1], [0, 0]], "REFLECT")
    ),
    "resized": lambda b: b.norm(tf.image.resize(conv(b), [9, 7])),
    "repeated": lambda b: b.norm(tf.image.resize(conv(b), [12, 12], "nearest")),
    "cropped": lambda b: b.norm(conv(b)[:, 1:-1, ::2, :]),
    "one row": lambda b: b.norm(conv(b)[:, 2, ..., tf.newaxis, :]),
    # All sizes but that of the channels are unknown.
    "unknown sizes": lambda b: b.norm(
        tf.nn.conv2d(
            b.data(2, 6, 5, 3, known=(0, 1, 2)), b.weights(3, 3, 3, 4), 1, "SAME"
        )
    ),
}


@TURNED
def test_between(parameters):
    def check(name, outcome):
        check_bare(outcome, norms=2 if name == "a norm" else 1)

    check_together(BETWEEN, check, parameters)


def bare(y, b):
    return y * b.weights(4) + b.weights(4)


def turned(x):
    return tf.transpose(x, [0, 3, 1, 2])


def of_halves(b):
    return b.norm_of_first(tf.concat([turned(conv(b)), turned(conv(b, 2))], 1))


def stacked_behind(b):
    y = tf.stack([conv(b), conv(b)], -1)
    return b.norm(tf.transpose(y, [0, 1, 2, 4, 3]))


def nested(b):
    total = (conv(b) + (conv(b) + b.weights(4))) * b.weights(4)
    return b.norm(tf.concat([total, conv(b, 2)], -1))


# Of each: the norm, and how many additions are left.
BRANCHES = {
    "sum": (lambda b: b.norm(conv(b) + tf.nn.bias_add(conv(b), b.weights(4))), 3),
    "sum of three": (lambda b: b.norm(tf.add_n([conv(b) for _ in range(3)])), 1),
    "old sum": (lambda b: b.norm(tf.raw_ops.Add(x=conv(b), y=conv(b))), 2),
    "sum that broadcasts": (
        lambda b: b.norm(conv(b) + tf.reduce_mean(conv(b), [1, 2], keepdims=True)),
        2,
    ),
    "concat": (lambda b: b.norm(tf.concat([conv(b), conv(b, 2)], -1)), 2),
    "concat of channels first": (of_halves, 2),
    "concat along rows": (lambda b: b.norm(tf.concat([conv(b), conv(b)], 1)), 2),
    "stack": (lambda b: b.norm(tf.stack([conv(b), conv(b)], 1)), 2),
    "stack behind the channels": (stacked_behind, 2),
    "sum in a concat": (nested, 4),
    "fused": (lambda b: b.fused(tf.nn.avg_pool2d(conv(b) + conv(b), 2, 2, "SAME")), 2),
    "two norms": (lambda b: b.norm(b.norm(conv(b) + conv(b), 4, "first"), 4), 2),
    "without shift": (lambda b: b.norm(conv(b) + conv(b), center=False), 2),
    "item of a stack": (lambda b: b.norm(tf.stack([conv(b), conv(b)])[1]), 1),
    "item of a stack that was turned": (
        lambda b: b.norm(
            tf.transpose(
                tf.transpose(tf.stack([conv(b), conv(b)]), [1, 0, 2, 3, 4]),
                [1, 0, 2, 3, 4],
            )[-1]
        ),
        1,
    ),
}


@TURNED
def test_norms_of_branches(parameters):
    def check(name, outcome):
        assert not outcome.report.refused, outcome.report
        assert outcome.report.folded
        assert not multiplications(outcome.types), outcome.types
        assert additions(outcome.types) == BRANCHES[name][1], outcome.types
        into = {entry.into for entry in outcome.report.folded}
        assert len(into) == 1, into

    check_together({n: build for n, (build, _) in BRANCHES.items()}, check, parameters)
    outcome = folded(BRANCHES["two norms"][0])
    assert str(outcome.report).startswith("2 of 2 batch norm(s) folded, 0 refused")


def test_a_norm_of_branches_that_is_held():
    def build(b):
        b.norm(conv(b) + conv(b))
        return conv(b)

    before, feeds = built(build, "resource variables")
    graph, _ = built(build, "resource variables")
    (norm,) = {entry.norm for entry in fold_batch_norms(before).folded}
    held = f"{norm}/add_1:0"
    refused = fold_batch_norms(graph, keep=[held]).refused
    assert [entry.op for entry in refused] == [f"{norm}/add_1"]
    assert "is in keep" in refused[0].reason
    into = fold_batch_norms(graph).folded[0].into
    expected, found = run(graph, feeds, [held, f"{into}:0"])
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected))
    used = needed(graph.get_operation_by_name(into))
    assert not [op for op in used if "norm/mul_1" in op.name]


def test_a_scale_and_a_shift_of_constants_behind_branches():
    def check(name, outcome):
        assert len(outcome.report.folded) == 2, outcome.report
        assert not multiplications(outcome.types), outcome.types

    builds = {
        "sum": lambda b: bare(conv(b) + conv(b), b),
        "concat": lambda b: bare(tf.concat([conv(b, 2), conv(b, 2)], -1), b),
    }
    check_together(builds, check, ["constants"])


def test_shared_weights_are_folded_for_each_layer():
    def build(b):
        weights = b.weights(1, 1, 3, 3)
        x = b.data(2, 4, 4, 3)
        y = tf.nn.relu(b.norm(tf.nn.conv2d(x, weights, 1, "SAME"), 3, "first"))
        y = b.norm(tf.nn.conv2d(y, weights, 1, "SAME"), 3, "second")
        return y + tf.nn.conv2d(y, weights, 1, "SAME")

    outcome = folded(build, "resource variables")
    assert len(outcome.report.folded) == 2
    assert outcome.types["Conv2D"] == 3


def test_a_layer_that_is_read_elsewhere_is_computed_twice_on_request():
    def build(b):
        y = conv(b)
        return b.norm(y, 4, "first") + b.norm(tf.nn.bias_add(y, b.weights(4)), 4) + y

    def check(name, outcome):
        assert len(outcome.report.folded) == 2
        assert outcome.types["Conv2D"] == 3, outcome.types
        assert not outcome.types["Mul"], outcome.types

    check_together(dict.fromkeys(PARAMETERS, build), check, clone_shared=True)


def test_norms_of_norms_that_are_read_elsewhere():
    def build(b):
        first = b.norm(conv(b), 4, "first")
        return b.norm(first, 4, "second") + b.norm(first, 4, "third")

    outcome = folded(build, clone_shared=True)
    assert len(outcome.report.folded) + len(outcome.report.refused) == 3
    assert not outcome.types["Mul"], outcome.report


def reshaped_by_its_own_shape(b):
    y = tf.nn.conv2d(b.data(2, 6, 6, 3, known=()), b.weights(3, 3, 3, 4), 1, "SAME")
    shape = tf.shape(y)
    y = tf.reshape(y, tf.stack([shape[0] * shape[1], shape[2], 4]))
    return b.norm(y, 4)


def normalized_before_a_dense_layer(b):
    x = b.data(2, 5, 3, known=(0, 1))
    return tf.tensordot(b.norm(x, 3), b.weights(3, 4), [[2], [0]]) + b.weights(4)


@pytest.mark.parametrize(
    "build", (reshaped_by_its_own_shape, normalized_before_a_dense_layer)
)
def test_nothing_is_computed_for_its_shape_alone(build):
    outcome = folded(build)
    check_bare(outcome)
    out = outcome.graph.get_operation_by_name("out")
    types = [op.type for op in needed(out, controls=True)]
    assert types.count("Conv2D") + types.count("MatMul") == 1
    assert types.count("Mul") == (build is reshaped_by_its_own_shape)


@pytest.mark.parametrize("forward", (False, True))
def test_what_the_norm_waited_for_still_comes_before(forward):
    def build(b):
        x = b.data(2, 6, 6, 3, known=(0,))
        x = x if forward else tf.nn.conv2d(x, b.weights(1, 1, 3, 3), 1, "SAME")
        with tf.control_dependencies([tf.no_op("awaited")]):
            x = b.norm(x, 3)
        return tf.nn.conv2d(x, b.weights(1, 1, 3, 3), 1, "SAME") if forward else x

    outcome = folded(build)
    check_bare(outcome)
    out = outcome.graph.get_operation_by_name("out")
    assert "awaited" in [op.name for op in needed(out, controls=True)]
