import collections
import logging

import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import geutil as ge
from tests.graph.building import chain
from tests.random_graphs import drawn_graphs
from tests.settings import default_graph, edges, evaluate, in_each_setting, names
from tests.thorough import examples, length

Point = collections.namedtuple("Point", ["left", "right"])


def sine_of_product():
    x = tf.constant([1.0, 2.0], name="x")
    y = tf.constant([3.0, 4.0], name="y")
    return x, y, tf.sin(tf.multiply(x, y, name="product"), name="sine")


def test_copy_within_a_graph_puts_placeholders_for_the_inputs(setting):
    def body():
        x, y, sine = sine_of_product()
        view, info = ge.copy([sine.op.inputs[0].op, sine.op], dst_scope="copy")
        assert names(view.ops) == ["copy/product", "copy/sine"]
        assert names(view.inputs) == ["copy/geph__x_0:0", "copy/geph__y_0:0"]
        assert names(view.outputs) == ["copy/sine:0"]
        assert [t.op.type for t in view.inputs] == ["Placeholder"] * 2
        assert info.transformed(sine).name == "copy/sine:0"
        assert info.original(view.outputs[0]) is sine
        assert sine.op.inputs[0].name == "product:0"
        ge.verify(default_graph())
        return [sine]

    (value,) = setting.run(body)
    np.testing.assert_allclose(value, np.sin([3.0, 8.0]), rtol=1e-6)


def test_replacements_by_tensor_ref_or_pairs(setting, caplog):
    def body():
        x, y, sine = sine_of_product()
        z = tf.constant([5.0, 6.0])
        # A key that is no input is left out with a warning.
        with caplog.at_level(logging.WARNING, "geutil"):
            _, info = ge.copy_with_input_replacements(sine.op, [(x, z)])
        assert "'x:0' is no input" in caplog.text
        assert info.transformed(sine).op.inputs[0] is sine.op.inputs[0]
        kinds = [{x.ref(): z}, [(x, z)]]
        if setting.name != "func_graph":
            kinds.append({x: z})  # TensorFlow itself refuses such a dict in the other.
        found = []
        for pairs in kinds:
            _, info = ge.copy_with_input_replacements(sine.op.inputs[0].op, pairs)
            found.append(info.transformed(sine.op.inputs[0]))
            found.append(ge.graph_replace(sine, pairs))
        return found

    values = setting.run(body)
    for product, sine in zip(values[::2], values[1::2], strict=True):
        np.testing.assert_allclose(product, [15.0, 24.0])
        np.testing.assert_allclose(sine, np.sin([15.0, 24.0]), rtol=1e-6)


@in_each_setting
def test_graph_replace_into_another_graph_takes_all_that_is_needed():
    x, y, sine = sine_of_product()
    graph = tf.Graph()
    with graph.as_default():
        z = tf.constant([5.0, 6.0])
    replaced, same = ge.graph_replace([sine, y], [(x, z)], dst_graph=graph)
    assert replaced.graph is graph
    ge.verify(graph)
    with graph.as_default():
        # A copy within a function reads a tensor from outside.
        replace = lambda x: ge.graph_replace(tf.square(x), [(x, z)])  # noqa: E731
        traced = tf.function(replace, autograph=False)
        square = traced(tf.constant([1.0, 1.0]))
    values = evaluate(graph, [replaced, same, square])
    np.testing.assert_allclose(values[0], np.sin([15.0, 24.0]), rtol=1e-6)
    np.testing.assert_allclose(values[1], [3.0, 4.0])
    np.testing.assert_allclose(values[2], [25.0, 36.0])


@in_each_setting
def test_graph_replace_mirrors_the_structure_of_its_targets():
    x, y, sine = sine_of_product()
    z = tf.constant([5.0, 6.0])
    before = len(default_graph().get_operations())
    ordered = collections.OrderedDict([("b", sine), ("a", y)])
    result = ge.graph_replace({"o": ordered, "p": Point(sine, [y, (sine,)])}, [(x, z)])
    assert type(result) is dict
    assert type(result["o"]) is collections.OrderedDict
    assert list(result["o"]) == ["b", "a"]
    assert type(result["p"]) is Point
    assert type(result["p"].right) is list
    assert type(result["p"].right[1]) is tuple
    assert result["o"]["a"] is y
    assert result["p"].left is result["o"]["b"]
    assert result["p"].right[1][0] is result["o"]["b"]
    # What does not depend on the replaced is shared.
    assert len(default_graph().get_operations()) == before + 2
    product = result["p"].left.op.inputs[0].op
    assert product.inputs[0] is z
    assert product.inputs[1] is y
    assert ge.graph_replace([sine, x], [(x, z)])[1] is z


def test_a_replaced_tensor_is_not_read_even_where_its_op_is_copied(setting):
    def body():
        x = tf.constant([1.0, 2.0, 3.0, 4.0])
        a, b = tf.split(x, 2)
        c = tf.add(b, 2.0 * a)
        z = tf.constant([10.0, 20.0])
        ones = tf.ones([4])
        return ge.graph_replace([c, b], [(x, ones), (b, z)])

    c, b = setting.run(body)
    np.testing.assert_allclose(c, [12.0, 22.0])
    np.testing.assert_allclose(b, [10.0, 20.0])


def test_destination_scope():
    for reuse, scopes in ((False, ["copy", "copy_1"]), (True, ["copy", "copy"])):
        with tf.Graph().as_default():
            x = tf.constant(1.0, name="x")
            for scope, name in zip(scopes, ("x", "x_1" if reuse else "x"), strict=True):
                _, info = ge.copy(x.op, dst_scope="copy", reuse_dst_scope=reuse)
                assert info.transformed(x.op).name == f"{scope}/{name}"
    with tf.Graph().as_default():
        x = tf.constant(1.0, name="a/b/x")
        _, info = ge.copy(x.op, dst_scope="c", src_scope="a")
        assert info.transformed(x).name == "c/b/x:0"
        # The importer takes "a" for taken when "a/b" exists, and renames the op.
        a = tf.constant(1.0, name="a")
    destination = tf.Graph()
    ge.copy(x.op, destination)
    _, info = ge.copy(a.op, destination)
    assert evaluate(destination, [info.transformed(a)]) == [1.0]


@in_each_setting
def test_the_surroundings_of_the_caller_leave_no_mark():
    graph = default_graph()
    x, y, sine = sine_of_product()
    guard = tf.constant(0.0)
    with (
        tf.name_scope("ambient"),
        tf.device("/device:CPU:0"),
        tf.control_dependencies([guard]),
        graph.colocate_with(y.op),
    ):
        _, info = ge.copy([x.op, y.op], dst_scope="copy")
    copied = info.transformed(x.op)
    assert copied.name == "copy/x"
    assert copied.device == ""
    assert copied.control_inputs == []
    assert copied.colocation_groups() == [b"loc:@copy/x"]


def test_attributes_control_inputs_devices_and_collections_are_kept():
    spellings = ["/job:worker/task:1/device:GPU:0", "/gpu:1", "/device:CPU:0", ""]
    with tf.Graph().as_default() as graph:
        placed = []
        for device in spellings:
            with tf.device(device or None):
                placed.append(tf.constant(1.0).op)
        x = tf.constant(1.0, name="x")
        x.op._set_attr("_mine", tf.compat.v1.AttrValue(s=b"yes"))
        with tf.control_dependencies([x]):
            y = tf.constant(2.0, name="y")
        tf.compat.v1.add_to_collection("mine", y)
        tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.LOSSES, y)
        tf.compat.v1.add_to_collection("ops", y.op)
        with graph._original_op(x.op):
            z = tf.negative(x, name="z")
    devices = [op.device for op in placed]
    assert devices[0] == spellings[0]
    for destination in (graph, tf.Graph()):
        copied = [y.op, x.op, z.op, *placed]
        _, info = ge.copy(copied, destination, dst_scope="c")
        x_, y_ = info.transformed([x, y])
        assert [info.transformed(op).device for op in placed] == devices
        assert info.transformed(z.op)._original_op is x_.op
        assert x_.op.get_attr("_mine") == b"yes"
        assert y_.op.control_inputs == [x_.op]
        assert destination.get_collection("c/mine")[0] is y_
        assert destination.get_collection("c/ops")[0] is y_.op
        losses = destination.get_collection(tf.compat.v1.GraphKeys.LOSSES)
        assert any(t is y_ for t in losses)
    _, info = ge.copy(z.op, dst_scope="d")
    assert info.transformed(z.op)._original_op is x.op


def test_colocation_points_to_copies_inside_and_to_originals_outside():
    with tf.Graph().as_default() as graph:
        outside = tf.constant(1.0, name="outside")
        with tf.device("/device:GPU:0"):
            x = tf.constant(1.0, name="x")
        with tf.compat.v1.colocate_with(x.op):
            y = tf.negative(x, name="y")
        with tf.compat.v1.colocate_with(outside.op):
            z = tf.negative(y, name="z")
    ops = [z.op, x.op, y.op]
    _, info = ge.copy(ops, dst_scope="c")
    assert info.transformed(y.op).colocation_groups() == [b"loc:@c/x"]
    assert info.transformed(z.op).colocation_groups() == [b"loc:@outside"]
    assert info.transformed(y.op).device == y.op.device
    elsewhere = tf.Graph()
    _, info = ge.copy(ops, elsewhere)
    assert info.transformed(y.op).colocation_groups() == [b"loc:@x"]
    assert info.transformed(z.op).colocation_groups() == [b"loc:@z"]
    ge.verify(graph)
    ge.verify(elsewhere)


def test_static_shapes_beyond_inference_are_kept_where_they_hold():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 3], name="x")
        y = tf.exp(x, name="y")
        y.set_shape([8, 3])
        z = tf.reduce_sum(y, axis=1)
    for destination in (graph, tf.Graph()):
        _, info = ge.copy(graph, destination)
        assert info.transformed(y).shape.as_list() == [8, 3]
        assert info.transformed(z).shape.as_list() == [8]
    # Behind another shape they are inferred anew, and behind an inner tensor.
    with graph.as_default():
        for new in ([5, 3], [None, None]):
            replacement = tf.compat.v1.placeholder(tf.float32, new)
            replaced = ge.graph_replace(y, {x.ref(): replacement})
            assert replaced.shape.as_list() == new
        x = tf.constant([1.0, 2.0, 3.0, 4.0])
        a, b = tf.split(x, 2)
        target = [tf.reduce_sum(a), tf.exp(b)]
        longer = tf.constant([1.0, 2.0, 3.0])
        _, replaced = ge.graph_replace(target, [(x, tf.ones([4])), (b, longer)])
    assert replaced.shape.as_list() == [3]


def test_a_very_long_chain_is_copied_without_recursion():
    destination = tf.Graph()
    ge.copy(chain(length(100_000)), destination)
    assert len(destination.get_operations()) == length(100_000)


@examples(30, derandomize=True)
@given(drawn_graphs(), st.randoms(use_true_random=False))
def test_a_copy_of_any_ops_computes_the_same_numbers(drawn, random):
    with tf.Graph().as_default() as graph:
        tensors = drawn.build()
    chosen = random.sample(tensors, random.randint(1, len(tensors)))
    before = edges(graph)
    view, info = ge.copy_with_input_replacements([t.op for t in chosen], [])
    assert {name: edges(graph)[name] for name in before} == before
    ge.verify(graph)
    originals = evaluate(graph, chosen)
    copies = evaluate(graph, [info.transformed(t) for t in chosen])
    np.testing.assert_array_equal(originals, copies)


@examples(30, derandomize=True)
@given(drawn_graphs(), st.randoms(use_true_random=False))
def test_graph_replace_agrees_with_feeding(drawn, random):
    with tf.Graph().as_default() as graph:
        tensors = drawn.build()
        replaced = random.sample(tensors[:-1], random.randint(1, len(tensors) - 1))
        # Of whole numbers, sums are the same in any order, and Grappler changes it.
        values = [[float(random.randint(-9, 9)), 3.0] for _ in replaced]
        new = [tf.constant(value) for value in values]
        before = len(graph.get_operations())
        try:
            targets = ge.graph_replace(tensors, list(zip(replaced, new, strict=True)))
        except ge.TransformError as error:
            assert "depends on" in str(error)
            assert len(graph.get_operations()) == before
            return
    feed = dict(zip(replaced, values, strict=True))
    np.testing.assert_array_equal(
        evaluate(graph, targets), evaluate(graph, tensors, feed)
    )
