from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model
from tests.model.refusal_tables import not_refused

X = np.array([-1.0, 2.0, 9.0], np.float32)


@pytest.fixture
def opened():
    @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
    def function(x):
        first = tf.nn.relu6(x * 2, name="block/first")
        second = tf.nn.relu6(first - 1, name="block/second")
        largest, where = tf.math.top_k(second, 1, name="top")
        return {"y": second, "largest": largest, "where": where}

    return model.open(function)


def test_a_type_becomes_another(opened):
    before = opened.graph.as_graph_def()
    changed = opened.replace_op("Relu6", "Relu")
    assert opened.graph.as_graph_def() == before
    ge.verify(changed.graph)
    types = [op.type for op in changed.graph.get_operations()]
    assert types.count("Relu") == 2
    assert "Relu6" not in types
    expected = np.maximum(np.maximum(X * 2, 0) - 1, 0)
    np.testing.assert_array_equal(changed.run(x=X)["y"], expected)


def test_a_function_for_one_op(opened):
    calls = []

    def squared(x):
        calls.append(x.name)
        return tf.square(x, name="squared")

    for ops in ("block/second", [opened.graph.get_operation_by_name("block/second")]):
        changed = opened.replace_op(ops, squared)
        expected = (np.clip(X * 2, 0, 6) - 1) ** 2
        np.testing.assert_array_equal(changed.run(x=X)["y"], expected)
    assert "block/squared" in {op.name for op in changed.graph.get_operations()}
    assert len(calls) == 2


def test_a_traced_function(opened):
    double = tf.function(lambda x: x * 2)
    changed = opened.replace_op("Relu6", double)
    np.testing.assert_array_equal(changed.run(x=X)["y"], (X * 4 - 1) * 2)


def test_an_op_with_two_outputs(opened):
    def first(x, k):
        return x[:1], tf.zeros_like(k)[None]

    changed = opened.replace_op("TopKV2", first)
    result = changed.run(x=X)
    assert result["largest"].tolist() == [0.0]
    assert result["where"].tolist() == [0]


def test_control_edges_go_along():
    count = tf.Variable(0)

    @tf.function(input_signature=[tf.TensorSpec([], tf.int32, name="x")])
    def function(x):
        with tf.control_dependencies([count.assign_add(1)]):
            y = tf.negative(x, name="negative")
        with tf.control_dependencies([y]):
            return {"count": count.read_value(), "y": y}

    for replacement in ("Abs", tf.abs):
        changed = model.open(function).replace_op("negative", replacement)
        before = int(count)
        result = changed.run(x=-3)
        assert int(result["count"]) == before + 1
        assert int(result["y"]) == 3


def test_refusals(opened):
    table = (
        ("Nothing", "Relu", r"no op of type or name 'Nothing'.*Relu6"),
        ("Relu6", "NoSuchOp", r"no op of type 'NoSuchOp'.*load_op_library"),
        ("Sub", "Relu", r"'Relu' cannot stand in .* it takes fewer inputs than 2"),
        ("Relu6", "MatMul", r"'MatMul' cannot stand in for 'block/"),
        ("Relu6", lambda x: (x, x), r"returns 2 tensors.*has 1 outputs"),
        ("Relu6", lambda x: tf.cast(x, tf.int32), r"int32"),
        ("Relu6", lambda x: x[None], r"shape"),
        ("Placeholder", lambda: 3, r"'x' \(Placeholder\) stands for what comes"),
    )
    cases = [(row[2], partial(opened.replace_op, *row[:2]), row[2]) for row in table]
    assert not_refused(model.ModelError, cases, unchanged=opened) == {}


def test_what_no_output_needs_is_refused(opened):
    with opened.graph.as_default():
        unneeded = tf.exp(opened.inputs["x"], name="unneeded")
    with pytest.raises(model.ModelError, match=r"no output .* depends on.*unneeded"):
        opened.replace_op(unneeded.op, tf.square)


def test_an_op_of_another_graph_is_refused(opened):
    other = opened.cut(outputs=["y"])
    with pytest.raises(model.ModelError, match=r"another graph"):
        opened.replace_op(other.graph.get_operation_by_name("block/first"), tf.abs)
