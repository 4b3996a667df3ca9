import tensorflow as tf

from geutil.graph.types import collections_of_elements, known_collection_names


def test_collections_of_ops_and_tensors():
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0, name="x")
        y = tf.constant(2.0, name="y")
        graph.add_to_collection("first", x)
        graph.add_to_collection("second", x.op)
        graph.add_to_collections(["first", "third"], y)
    found = collections_of_elements(graph)
    assert {e.name: sorted(names) for e, names in found.items()} == {
        "x:0": ["first"],
        "x": ["second"],
        "y:0": ["first", "third"],
    }


def test_other_objects_are_left_out():
    with tf.Graph().as_default() as graph:
        variable = tf.compat.v1.Variable(1.0)
        graph.add_to_collection("things", "text")
        graph.add_to_collection("things", 1)
    assert variable in graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
    assert not collections_of_elements(graph)


def test_a_graph_without_collections():
    assert len(collections_of_elements(tf.Graph())) == 0


def test_tensors_of_a_func_graph_add_no_ops():
    @tf.function(autograph=False)
    def traced(x):
        y = x + 1.0
        y.graph.add_to_collection("things", y)
        count = len(y.graph.get_operations())
        assert collections_of_elements(y.graph)[y] == ["things"]
        assert len(y.graph.get_operations()) == count
        return y

    traced.get_concrete_function(tf.TensorSpec([], tf.float32))


def test_known_collection_names():
    known = known_collection_names()
    keys = tf.compat.v1.GraphKeys
    assert {keys.GLOBAL_VARIABLES, keys.UPDATE_OPS, keys.LOSSES} <= known
    assert "mine" not in known
    assert all(isinstance(name, str) for name in known)
