from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil.graph import functions as fg
from geutil.graph.protos import new_trackable, owner_of
from tests.settings import V1

pytestmark = pytest.mark.skipif(V1, reason="functions need eager execution")


def doubling(variable):
    """Return a FuncGraph that computes y = x * variable, and its ends."""
    graph = fg.new_function_graph("test")
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None], "x")
        handle = fg.make_capture_placeholder(
            graph, "handle", tf.resource, [], variable.handle
        )
        read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
        return graph, x, x * read, handle


def test_a_bound_placeholder_knows_the_shape_behind_the_handle():
    variable = tf.Variable([2.0, 3.0])
    graph, _, y, handle = doubling(variable)
    assert y.op.inputs[1].shape.as_list() == [2]
    ((external, inside),) = fg.bindings(graph)
    assert external is variable.handle
    assert inside is handle


def test_reading_a_variable_uses_the_bound_placeholder():
    variable = tf.Variable(2.0)
    graph, _, _, handle = doubling(variable)
    with graph.as_default():
        value = variable.read_value()
    assert value.op.inputs[0].op.inputs[0] is handle
    assert len(fg.bindings(graph)) == 1


def test_seen_variables_are_in_the_order_of_capture():
    variables = [tf.Variable(float(i), trainable=i % 2 == 0) for i in range(20)]
    graph = fg.new_function_graph("test")
    with graph.as_default():
        for variable in variables:
            variable.read_value()
    found = fg.seen_variables(graph)
    assert [id(v) for v in found] == [id(v) for v in variables]


def test_a_built_function_computes_and_is_differentiable():
    variable = tf.Variable(3.0)
    graph, x, y, _ = doubling(variable)
    function = fg.build_function(graph, {"x": x}, {"z": y, "a": x}, [], [variable])
    value = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        result = fg.call_function(function, {"x": value})
        loss = tf.reduce_sum(result["z"])
    np.testing.assert_array_equal(result["z"], [3.0, 6.0])
    np.testing.assert_array_equal(result["a"], [1.0, 2.0])
    assert float(tape.gradient(loss, variable)) == 3.0


def test_arguments_and_results_are_found_by_name_in_any_order():
    graph = fg.new_function_graph("test")
    with graph.as_default():
        names = ["z", "b", "m", "a"]
        inputs = {n: tf.compat.v1.placeholder(tf.float32, [], n) for n in names}
        outputs = {f"{n}_": 10.0 * t for n, t in inputs.items()}
    function = fg.build_function(graph, inputs, outputs, [], [])
    given = {n: tf.constant(float(i)) for i, n in enumerate(names)}
    result = fg.call_function(function, given)
    assert {n: float(t) for n, t in result.items()} == {
        f"{n}_": 10.0 * i for i, n in enumerate(names)
    }


def test_control_outputs_run():
    variable = tf.Variable(0.0)
    graph = fg.new_function_graph("test")
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [], "x")
        update = tf.raw_ops.AssignAddVariableOp(resource=variable.handle, value=x)
        y = tf.identity(x)
    function = fg.build_function(graph, {"x": x}, {"y": y}, [update], [variable])
    fg.call_function(function, {"x": tf.constant(2.0)})
    assert float(variable) == 2.0


def test_a_built_function_can_be_saved(tmp_path):
    root = new_trackable()
    root.variable = tf.Variable(3.0)
    graph, x, y, _ = doubling(root.variable)
    function = fg.build_function(graph, {"x": x}, {"y": y}, [], [root.variable])
    tf.saved_model.save(root, str(tmp_path), {"serving_default": function})
    loaded = tf.saved_model.load(str(tmp_path))
    result = loaded.signatures["serving_default"](x=tf.constant([2.0]))
    assert result["y"].numpy().tolist() == [6.0]


@pytest.mark.parametrize("shape", [[], [2, 3], None])
def test_a_variable_is_stood_in_for_by_its_handle_op(shape):
    value = np.zeros([4] if shape is None else shape, np.float16)
    variable = tf.Variable(value, shape=tf.TensorShape(shape))
    node = tf.compat.v1.NodeDef(name="n", op="Anything", input=["a"])
    fg.write_stand_in(node, variable.handle)
    assert node.op == "VarHandleOp"
    assert not node.input
    assert node.attr["dtype"].type == tf.float16.as_datatype_enum
    assert tf.TensorShape(node.attr["shape"].shape).rank == (
        None if shape is None else len(shape)
    )


def test_other_tensors_are_stood_in_for_by_placeholders():
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a"], [1]), -1
    )
    for external in (table.resource_handle, tf.constant([1, 2], tf.int64)):
        node = tf.compat.v1.NodeDef(name="n")
        fg.write_stand_in(node, external)
        assert node.op == "Placeholder"
        assert node.attr["dtype"].type == external.dtype.as_datatype_enum


def test_the_owner_of_a_table_is_found():
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a"], [1]), -1
    )
    assert owner_of(table.resource_handle) is table
    assert owner_of(tf.Variable(1.0).handle) is None
