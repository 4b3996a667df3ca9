from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from tests.model.training.helpers import by_name, is_deterministic, types_of
from tests.settings import control_flow

v1 = tf.compat.v1
X = np.array([[1.0, -2.0, 3.0]], np.float32)


def graph_of(version, choose, name="is_training", default=None):
    """Return a graph in which a placeholder decides between dropout and x * 2."""
    with tf.Graph().as_default() as graph, control_flow(version):
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        if default is None:
            training = v1.placeholder(tf.bool, [], name=name)
        else:
            training = v1.placeholder_with_default(default, [], name=name)
        tf.identity(choose(training, x), name="y")
    return graph


def by_cond(training, x):
    return v1.cond(training, lambda: tf.nn.dropout(x, rate=0.5), lambda: x * 2.0)


def by_nested_cond(training, x):
    def otherwise():
        return v1.cond(tf.logical_not(training), lambda: x * 2.0, lambda: x - 1.0)

    return v1.cond(training, lambda: tf.nn.dropout(x, rate=0.5), otherwise)


def by_where(training, x):
    return tf.where(training, tf.nn.dropout(x, rate=0.5), x * 2.0)


def by_case(training, x):
    index = tf.cast(training, tf.int32)
    branches = [lambda: x * 2.0, lambda: tf.nn.dropout(x, rate=0.5)]
    return tf.switch_case(index, branches)


def by_expression(training, x):
    return by_cond(tf.logical_and(training, tf.constant(True)), x)


CHOICES = [by_cond, by_nested_cond, by_where, by_case, by_expression]


def in_every_way(training, x):
    return tf.stack([choose(training, x) for choose in CHOICES])


@pytest.mark.parametrize("version", [1, 2])
def test_the_branch_of_inference_is_left(version):
    m = model.open(graph_of(version, in_every_way))
    assert list(m.inputs) == ["x", "is_training"]
    stripped = m.strip_training()
    assert list(stripped.inputs) == ["x"]
    found = stripped.run(x=X)["y"]
    np.testing.assert_array_equal(found, [X * 2] * len(CHOICES))
    np.testing.assert_array_equal(found, m.run(x=X, is_training=False)["y"])
    assert is_deterministic(stripped)
    assert not {"If", "StatelessIf", "Case", "Merge", "Switch"} & types_of(stripped)
    assert by_name(stripped)["is_training"].action == "removed"


def test_a_placeholder_with_a_default_is_a_switch():
    graph = graph_of(1, by_cond, "keras_learning_phase", True)
    for inputs in (None, ["x", "keras_learning_phase"]):
        m = model.open(graph, inputs=inputs)
        assert list(m.inputs) == (inputs or ["x"])
        stripped = m.strip_training()
        assert list(stripped.inputs) == ["x"]
        np.testing.assert_array_equal(stripped.run(x=X)["y"], X * 2)
        assert is_deterministic(stripped)
    found = m.run(x=X, keras_learning_phase=False)["y"]
    np.testing.assert_array_equal(found, X * 2)


def test_a_placeholder_that_is_no_input_is_a_switch():
    m = model.open(graph_of(2, by_cond), inputs=["x"])
    with pytest.raises(model.ModelError, match="'is_training' is no input"):
        m.run(x=X)
    np.testing.assert_array_equal(m.strip_training().run(x=X)["y"], X * 2)


def test_another_name_is_reported_and_can_be_given():
    m = model.open(graph_of(2, by_cond, "noisy"))
    left = m.strip_training()
    assert list(left.inputs) == ["x", "noisy"]
    assert "switches={'noisy': False}" in by_name(left)["noisy"].reason
    stripped = m.strip_training(switches={"noisy": False})
    assert list(stripped.inputs) == ["x"]
    np.testing.assert_array_equal(stripped.run(x=X)["y"], X * 2)


def test_a_switch_is_true_a_number_or_kept():
    def choose(training, x):
        return v1.cond(training, lambda: x * 3.0, lambda: x)

    m = model.open(graph_of(2, choose))
    stripped = m.strip_training(switches={"is_training": True})
    np.testing.assert_array_equal(stripped.run(x=X)["y"], X * 3)
    kept = m.strip_training(keep=["is_training"])
    assert list(kept.inputs) == ["x", "is_training"]
    assert by_name(kept)["is_training"].reason == "it is in keep"
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        factor = v1.placeholder(tf.float32, [], name="factor")
        tf.multiply(x, factor, name="y")
    stripped = model.open(graph).strip_training(switches={"factor": 4.0})
    np.testing.assert_array_equal(stripped.run(x=X)["y"], X * 4)


def test_a_choice_that_broadcasts_keeps_its_shape():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        row = v1.placeholder(tf.float32, [None, 3], name="row")
        training = v1.placeholder(tf.bool, [], name="is_training")
        tf.where(training, x, row, name="y")
    stripped = model.open(graph).strip_training()
    result = stripped.run(x=np.ones([4, 3]), row=X)["y"]
    np.testing.assert_array_equal(result, np.broadcast_to(X, [4, 3]))


def test_calls_that_were_kept_are_not_inlined():
    @tf.function(autograph=False)
    def double(x):
        return x * 2.0

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 3], name="x"),
            tf.TensorSpec([], tf.bool),
        ],
        autograph=False,
    )
    def f(x, is_training):
        chosen = tf.cond(is_training, lambda: tf.nn.dropout(x, rate=0.5), lambda: x)
        return {"y": double(chosen)}

    m = model.open(f, inline=False)
    stripped = m.strip_training()
    assert types_of(stripped) & {"PartitionedCall", "StatefulPartitionedCall"}
    assert "If" not in types_of(stripped)
    np.testing.assert_array_equal(stripped.run(x=X)["y"], X * 2)


@pytest.mark.parametrize("version", [1, 2])
def test_loops_of_version_1(version):
    def looped(training, x):
        def body(i, y):
            with tf.control_dependencies([v1.assert_less(tf.reduce_sum(y), 1e9)]):
                y = tf.identity(y)
            y = v1.cond(training, lambda: y * 5.0, lambda: y + tf.constant(0.0))
            return i + 1, tf.nn.dropout(y, rate=0.5) * 2.0

        return tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]

    m = model.open(graph_of(version, looped), outputs=["y"])
    if version == 2:
        entry = by_name(m.strip_training())["while"]
        assert entry.kind == "body" and "RandomUniform" in entry.reason
        return
    stripped = m.strip_training()
    assert is_deterministic(stripped) and "Assert" not in types_of(stripped)
    np.testing.assert_array_equal(stripped.run(x=X)["y"], X * 8)
