"""What copies refuse: the error, its words, and a graph left as it was."""

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge


@pytest.fixture
def sample():
    with tf.Graph().as_default() as graph:
        x = tf.constant([1.0, 2.0], name="a/x")
        y = tf.matmul([x], tf.ones([2, 3]), name="b/y")
        whole = tf.constant([1, 2], name="whole")
        unrelated = tf.constant(1.0, name="unrelated")
    with tf.Graph().as_default():
        foreign = tf.constant([1.0, 2.0], name="foreign")
    return {
        "graph": graph,
        "x": x,
        "y": y,
        "whole": whole,
        "unrelated": unrelated,
        "foreign": foreign,
    }


def _finalized():
    graph = tf.Graph()
    graph.finalize()
    return graph


def _with_handler(handler):
    transformer = ge.Transformer()
    transformer.transform_external_input_handler = handler
    return transformer


def _in_place(info, op, new_inputs):
    return op, op.outputs


def _transform_in_place(s):
    transformer = ge.Transformer()
    transformer.transform_op_handler = _in_place
    return transformer(s["x"].op, s["graph"], "")


REFUSALS = {
    "copy to no graph": (
        lambda s: ge.copy(s["x"].op, "graph"),
        ge.ArgumentTypeError,
        TypeError,
        ["expected a tf.Graph", "str"],
    ),
    "copy of nothing": (
        lambda s: ge.copy([]),
        ge.TransformError,
        ValueError,
        ["empty", "select ops"],
    ),
    "copy of a number": (
        lambda s: ge.copy(3),
        ge.ArgumentTypeError,
        TypeError,
        ["expected a regex, a tf.Operation", "int"],
    ),
    "op outside the source scope": (
        lambda s: ge.copy([s["x"].op, s["y"].op], src_scope="a"),
        ge.TransformError,
        ValueError,
        ["'b/y'", "'a/'", "src_scope=''"],
    ),
    "finalized destination": (
        lambda s: ge.copy(s["x"].op, _finalized()),
        ge.FinalizedGraphError,
        RuntimeError,
        ["finalized", "another graph"],
    ),
    "replacement of another dtype": (
        lambda s: ge.graph_replace(s["y"], [(s["x"], s["whole"])]),
        ge.TransformError,
        ValueError,
        ["'whole:0' (int32)", "'a/x:0' (float32)", "tf.cast"],
    ),
    "replacement of another graph": (
        lambda s: ge.graph_replace(s["y"], [(s["x"], s["foreign"])]),
        ge.TransformError,
        ValueError,
        ["'foreign:0'", "another graph", "dst_graph"],
    ),
    "replacement of a shape that an op cannot take": (
        lambda s: ge.graph_replace(s["y"], [(s["y"].op.inputs[0], s["unrelated"])]),
        ge.TransformError,
        ValueError,
        ["TensorFlow refuses", "rank"],
    ),
    "replacement that is no tensor": (
        lambda s: ge.graph_replace(s["y"], [(s["x"], np.ones(2))]),
        ge.ArgumentTypeError,
        TypeError,
        ["expected a tf.Tensor of a graph", "ndarray"],
    ),
    "replacements that are no pairs": (
        lambda s: ge.graph_replace(s["y"], [s["x"]]),
        ge.ArgumentTypeError,
        TypeError,
        ["pairs of tensors"],
    ),
    "targets that do not depend on the replaced": (
        lambda s: ge.graph_replace(s["unrelated"], [(s["x"], s["x"])]),
        ge.TransformError,
        ValueError,
        ["unrelated:0", "a/x:0", "direction"],
    ),
    "targets of two graphs": (
        lambda s: ge.graph_replace([s["y"], s["foreign"]], [(s["x"], s["x"])]),
        ge.SelectionError,
        ValueError,
        ["'foreign:0'", "different graphs"],
    ),
    "no targets": (
        lambda s: ge.graph_replace([], []),
        ge.TransformError,
        ValueError,
        ["no targets"],
    ),
    "a target that is no tensor": (
        lambda s: ge.graph_replace(s["y"].op, [(s["x"], s["x"])]),
        ge.ArgumentTypeError,
        TypeError,
        ["expected a tf.Tensor of a graph", "Operation"],
    ),
    "a handler that returns no tensor": (
        lambda s: _with_handler(lambda info, t: None)(s["y"].op, s["graph"], ""),
        ge.TransformError,
        ValueError,
        ["NoneType", "cannot stand in for"],
    ),
    "a handler that transforms in place": (
        _transform_in_place,
        ge.TransformError,
        ValueError,
        ["'a/x' itself", "new op"],
    ),
    "a variable asked of the result": (
        lambda s: ge.copy(s["x"].op, tf.Graph())[1].transformed([1.5]),
        ge.ArgumentTypeError,
        TypeError,
        ["tf.Operation, a tf.Tensor or a name", "float"],
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_a_message_and_an_untouched_graph(sample, name):
    call, error, builtin, words = REFUSALS[name]
    before = sample["graph"].as_graph_def()
    with pytest.raises(error) as caught:
        call(sample)
    assert isinstance(caught.value, builtin)
    assert isinstance(caught.value, ge.GeutilError)
    for word in words:
        assert word in str(caught.value)
    assert sample["graph"].as_graph_def() == before


def test_a_shape_refused_in_another_graph_leaves_no_placeholder_there(sample):
    destination = tf.Graph()
    with destination.as_default():
        narrow = tf.constant([1.0, 2.0, 3.0])
    product = sample["y"].op
    with pytest.raises(ge.TransformError, match="TensorFlow refuses"):
        ge.copy_with_input_replacements(
            product, [(product.inputs[0], narrow)], destination
        )
    assert [op.type for op in destination.get_operations()] == ["Const"]
    with destination.as_default():
        wide = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    view, info = ge.copy_with_input_replacements(
        product, [(product.inputs[0], wide)], destination
    )
    assert info.transformed(sample["y"]).shape.as_list() == [2, 3]
    assert [op.type for op in destination.get_operations()].count("Placeholder") == 1
    assert view.inputs[0] is wide
