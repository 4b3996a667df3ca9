"""What copies refuse: the error, its words, and a graph left as it was."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

import geutil as ge
from tests.select import tables


@pytest.fixture
def sample():
    with tf.Graph().as_default() as graph:
        x = tf.constant([1.0, 2.0], name="a/x")
        y = tf.matmul([x], tf.ones([2, 3]), name="b/y")
        whole = tf.constant([1, 2], name="whole")
        unrelated = tf.constant(1.0, name="unrelated")
    with tf.Graph().as_default():
        foreign = tf.constant([1.0, 2.0], name="foreign")
    tensors = {"x": x, "y": y, "whole": whole, "unrelated": unrelated}
    return SimpleNamespace(graph=graph, foreign=foreign, new=tf.Graph, **tensors)


def finalized():
    graph = tf.Graph()
    graph.finalize()
    return graph


def transform_without_an_input(op, graph):
    transformer = ge.Transformer()
    transformer.transform_external_input_handler = lambda info, t: None
    transformer(op, graph, "")


def transform_in_place(op, graph):
    transformer = ge.Transformer()
    transformer.transform_op_handler = lambda info, op, inputs: (op, op.outputs)
    transformer(op, graph, "")


REFUSED = """
ge.copy(x.op, 'graph') => ArgumentTypeError: expected a tf.Graph; str
ge.copy([]) => TransformError: empty; select ops
ge.copy(3) => ArgumentTypeError: expected a regex, a tf.Operation; int
ge.copy([x.op, y.op], src_scope='a') => TransformError: 'b/y'; 'a/'; src_scope=''
ge.copy(x.op, finalized()) => FinalizedGraphError: finalized; another graph
ge.graph_replace(y, [(x, whole)])
    => TransformError: 'whole:0' (int32); 'a/x:0' (float32); tf.cast
ge.graph_replace(y, [(x, foreign)])
    => TransformError: 'foreign:0'; another graph; dst_graph
# A shape that an op cannot take.
ge.graph_replace(y, [(y.op.inputs[0], unrelated)])
    => TransformError: TensorFlow refuses; rank
ge.graph_replace(y, [(x, np.ones(2))])
    => ArgumentTypeError: expected a tf.Tensor of a graph; ndarray
ge.graph_replace(y, [x]) => ArgumentTypeError: pairs of tensors
# Targets that do not depend on what is replaced.
ge.graph_replace(unrelated, [(x, x)])
    => TransformError: unrelated:0; a/x:0; direction
ge.graph_replace([y, foreign], [(x, x)])
    => SelectionError: 'foreign:0'; different graphs
ge.graph_replace([], []) => TransformError: no targets
ge.graph_replace(y.op, [(x, x)])
    => ArgumentTypeError: expected a tf.Tensor of a graph; Operation
transform_without_an_input(y.op, graph)
    => TransformError: NoneType; cannot stand in for
transform_in_place(x.op, graph) => TransformError: 'a/x' itself; new op
ge.copy(x.op, new())[1].transformed([1.5])
    => ArgumentTypeError: tf.Operation, a tf.Tensor or a name; float
"""


def test_refused_with_a_message_and_an_untouched_graph(sample):
    more = [finalized, transform_without_an_input, transform_in_place]
    tables.check_refusals(REFUSED, sample, **{f.__name__: f for f in more})


def test_a_shape_refused_in_another_graph_leaves_no_placeholder_there(sample):
    destination = tf.Graph()
    with destination.as_default():
        narrow = tf.constant([1.0, 2.0, 3.0])
    product = sample.y.op
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
    assert info.transformed(sample.y).shape.as_list() == [2, 3]
    assert [op.type for op in destination.get_operations()].count("Placeholder") == 1
    assert view.inputs[0] is wide
