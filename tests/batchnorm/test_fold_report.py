"""What a report says."""

import pytest
import tensorflow as tf

from geutil.batchnorm import Folded, FoldReport, Refused, fold_batch_norms
from tests.batchnorm.checking import built


def stack(b):
    with tf.name_scope("first"):
        y = tf.nn.conv2d(b.data(2, 4, 4, 3), b.weights(1, 1, 3, 3), 1, "SAME")
        y = tf.nn.relu(b.norm(y, 3))
    with tf.name_scope("second"):
        y = tf.nn.relu(b.norm(y, 3))
    with tf.name_scope("third"):
        return tf.nn.conv2d(b.norm(y, 3), b.weights(1, 1, 3, 3), 1, "SAME")


def test_a_report_names_every_norm_once():
    graph, _ = built(stack)
    report = fold_batch_norms(graph)
    assert [entry.norm for entry in report.folded] == ["first/norm", "third/norm"]
    first, third = report.folded
    assert (first.layer, first.layer_type) == ("first/Conv2D", "Conv2D")
    assert (first.forward, third.forward) == (False, True)
    assert third.layer == "third/Conv2D"
    for entry in report.folded:
        assert graph.get_operation_by_name(entry.into).type == "BiasAdd"
    (second,) = report.refused
    assert (second.norm, second.op) == ("second/norm", "second/Relu")


def test_a_report_reads_as_a_table():
    report = fold_batch_norms(tf.Graph())
    assert report == FoldReport((), ())
    assert str(report) == "0 of 0 batch norm(s) folded, 0 refused"
    report = FoldReport(
        (
            Folded("a/norm", "a/conv", "Conv2D", "a/add_fold"),
            Folded("b", "c/dense", "MatMul", "c/add_fold", forward=True),
        ),
        (Refused("d/norm", "stands between", "d/Relu"),),
    )
    assert str(report).splitlines() == [
        "2 of 3 batch norm(s) folded, 1 refused",
        "folded:",
        "  a/norm  into Conv2D 'a/conv'",
        "  b       into MatMul 'c/dense' behind it",
        "refused:",
        "  d/norm: 'd/Relu' stands between",
    ]


@pytest.mark.parametrize("scoped", (False, True))
def test_norms_in_one_scope_are_told_apart(scoped):
    def build(b):
        y = b.data(2, 4, 4, 3)
        for name in "xy":
            y = tf.nn.conv2d(y, b.weights(1, 1, 3, 3), 1, "SAME")
            with tf.name_scope(name if scoped else "both/"):
                y = (y - b.weights(3)) * tf.math.rsqrt(b.positive(3) + 1e-3)
                y = tf.add(y, b.weights(3))
            y = tf.nn.relu(y)
        return y

    graph, _ = built(build)
    names = [entry.norm for entry in fold_batch_norms(graph).folded]
    assert names == (["x", "y"] if scoped else ["both/Add_1", "both/Add_3"])
