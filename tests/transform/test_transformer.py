"""Views are copied as they are, with inputs replaced, or as handlers decide."""

import collections
import functools
import logging

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import geutil as ge
from tests.graph.building import chain
from tests.random_graphs import drawn_graphs
from tests.settings import default_graph, edges, evaluate, in_each_setting, names
from tests.thorough import examples, length


def disguised(handler):
    """Return a handler that does the same, but that geutil cannot know for a copy."""

    def transform_op(info, op, new_inputs):
        return handler(info, op, new_inputs)

    return transform_op


MODES = ("bulk", "one by one")


def transformer_of(handler, mode):
    """Return a transformer with a handler in one of the modes."""
    result = ge.Transformer()
    result.transform_op_handler = handler if mode == "bulk" else disguised(handler)
    return result


@pytest.fixture(params=MODES)
def transformer(request):
    """A transformer that copies in bulk, and one that goes op by op."""
    return transformer_of(ge.copy_op_handler, request.param)


def three_sums():
    inputs = [tf.constant(1.0, shape=[10], name="Const") for _ in range(3)]
    total = tf.constant(1.0, shape=[10], name="Input")
    for constant in inputs:
        total = tf.add(constant, total, name="Add")
    return total


@in_each_setting
def test_both_ways_of_copying_make_the_same_graph():
    three_sums()
    definitions = []
    for mode in MODES:
        transformer = transformer_of(ge.copy_op_handler, mode)
        graph = tf.Graph()
        transformer(default_graph(), graph, "scope")
        ge.verify(graph)
        definitions.append(graph.as_graph_def())
    assert definitions[0] == definitions[1]


@in_each_setting
def test_a_handler_may_add_ops_behind_each_copy():
    def noisy(info, op, new_inputs):
        op_, outputs_ = ge.transform.copy_op_handler(info, op, new_inputs)
        if not op.name.startswith("Add"):
            return op_, outputs_
        with info.graph_.as_default():
            noise = tf.constant(1.0, shape=[10], name="Noise")
            return op_, [tf.add(noise, outputs_[0], name="AddNoise")]

    total = three_sums()
    transformer = ge.Transformer()
    transformer.transform_op_handler = noisy
    graph = tf.Graph()
    _, info = transformer(default_graph(), graph, "")
    inner = ge.OpMatcher("Add").input_ops("Const", "Input")
    match = ge.OpMatcher("AddNoise").input_ops("Noise", inner)
    for i in (1, 2):
        inner = ge.OpMatcher(f"Add_{i}").input_ops(f"Const_{i}", match)
        match = ge.OpMatcher(f"AddNoise_{i}").input_ops(f"Noise_{i}", inner)
    assert match(graph.get_operation_by_name("AddNoise_2"))
    (value,) = evaluate(graph, [info.transformed(total)])
    np.testing.assert_allclose(value, np.full(10, 7.0))


@pytest.mark.parametrize("mode", MODES)
@in_each_setting
def test_nodedef_fn_changes_each_definition(mode):
    def change(node_def):
        if "_foo" in node_def.attr:
            del node_def.attr["_foo"]
        node_def.attr["_bar"].s = b"bar"
        node_def.device = "/device:CPU:0"
        return node_def

    total = three_sums()
    total.op._set_attr("_foo", tf.compat.v1.AttrValue(s=b"foo"))
    handler = functools.partial(ge.copy_op_handler, nodedef_fn=change)
    transformer = transformer_of(handler, mode)
    view, info = transformer(default_graph(), tf.Graph(), "")
    assert [op.get_attr("_bar") for op in view.ops] == [b"bar"] * 7
    assert {op.device for op in view.ops} == {"/device:CPU:0"}
    with pytest.raises(ValueError):
        info.transformed(total.op).get_attr("_foo")
    assert total.op.get_attr("_foo") == b"foo"
    assert total.op.device == ""


@pytest.mark.parametrize("mode", MODES)
def test_copy_shape_overrules_inference_and_a_changed_definition_is_inferred(mode):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [8, 3], name="x")
        y = tf.exp(x)
        wide = tf.compat.v1.placeholder(tf.float32, [None, 3])
        handler = functools.partial(ge.copy_op_handler, copy_shape=True)
        transformer = transformer_of(handler, mode)
        transformer.transform_external_input_handler = lambda info, t: wide
        _, info = transformer(y.op, graph, "c")
    assert info.transformed(y).shape.as_list() == [8, 3]

    def any_batch(node_def):
        if node_def.op == "Placeholder":
            node_def.attr["shape"].shape.dim[0].size = -1
        return node_def

    handler = functools.partial(ge.copy_op_handler, nodedef_fn=any_batch)
    _, info = transformer_of(handler, mode)(graph, tf.Graph(), "")
    assert info.transformed(x).shape.as_list() == [None, 3]
    assert info.transformed(y).shape.as_list() == [None, 3]


def test_shapes_behind_a_handlers_tensor_are_inferred_anew():
    def widened(info, op, new_inputs):
        op_, outputs_ = ge.copy_op_handler(info, op, new_inputs)
        if op.type != "Const":
            return op_, outputs_
        with info.graph_.as_default():
            return op_, [tf.concat([outputs_[0]] * 2, axis=0)]

    with tf.Graph().as_default() as graph:
        y = tf.exp(tf.constant([1.0, 2.0]))
    transformer = ge.Transformer()
    transformer.transform_op_handler = widened
    _, info = transformer(graph, tf.Graph(), "")
    assert info.transformed(y).shape.as_list() == [4]


def test_inputs_and_hidden_inputs_have_a_handler_each(setting, transformer):
    def body():
        x, y = tf.constant(1.0, name="x"), tf.constant(2.0, name="y")
        z = tf.add(tf.add(x, y, name="sum"), y, name="z")
        asked = []

        def external(info, t):
            asked.append(("input", t.name))
            return t

        def hidden(info, t):
            asked.append(("hidden", t.name))
            return t

        transformer.transform_external_input_handler = external
        transformer.transform_external_hidden_input_handler = hidden
        view = ge.sgv(z.op.inputs[0].op, z.op).remap_inputs([0])
        copied, info = transformer(view, default_graph(), "c")
        assert asked == [("input", "x:0"), ("hidden", "y:0")]
        assert names(copied.inputs) == ["x:0"]
        return [info.transformed(z)]

    assert setting.run(body) == [5.0]


def test_control_inputs_collections_and_original_ops_have_a_handler(
    setting, transformer
):
    def body():
        guard = tf.constant(0.0, name="guard")
        with tf.control_dependencies([guard]):
            x = tf.constant(1.0, name="x")
        with tf.control_dependencies([x, guard]):
            y = tf.constant(2.0, name="y")
        _, info = transformer([x.op, y.op], default_graph(), "kept")
        assert names(info.transformed(x.op).control_inputs) == ["guard"]
        assert sorted(names(info.transformed(y.op).control_inputs)) == [
            "guard",
            "kept/x",
        ]
        transformer.transform_control_input_handler = lambda info, op: None
        _, info = transformer([x.op, y.op], default_graph(), "dropped")
        assert info.transformed(y.op).control_inputs == []
        # So have collections, and the original op.
        pairs = []
        transformer.assign_collections_handler = lambda info, *elements: pairs.append(
            tuple(names(elements))
        )
        with default_graph()._original_op(x.op):
            z = tf.negative(guard, name="z")
        transformer.transform_original_op_handler = lambda info, op: None
        _, info = transformer([x.op, z.op], default_graph(), "c")
        of_each = [(name, f"c/{name}") for name in ("x", "x:0", "z", "z:0")]
        assert sorted(pairs) == of_each
        assert info.transformed(z.op)._original_op is None

    setting.run(body)


def test_ready_made_handlers_can_be_combined(setting, transformer):
    def body():
        x = tf.constant(1.0, name="x")
        y = tf.negative(x, name="y")
        transformer.transform_external_input_handler = ge.keep_t_if_possible_handler
        _, info = transformer(y.op, default_graph(), "same")
        assert info.transformed(y).op.inputs[0] is x
        _, info = transformer(y.op, tf.Graph(), "other")
        assert info.transformed(y).op.inputs[0].name == "other/geph__x_0:0"
        transformer.transform_control_input_handler = functools.partial(
            ge.transform_op_if_inside_handler, keep_if_possible=False
        )
        ge.add_control_inputs(y.op, x.op)
        _, info = transformer(y.op, default_graph(), "third")
        assert info.transformed(y.op).control_inputs == []

    setting.run(body)


def test_the_view_of_the_copies_mirrors_the_original(setting, transformer):
    def body():
        x, y = tf.constant([1.0, 2.0], name="x"), tf.constant([3.0, 4.0], name="y")
        a, b = tf.split(tf.subtract(x, y, name="d"), 2, name="s")
        ops = [b.op.inputs[1].op, b.op]
        view = ge.sgv(ops).remap([1, 0, 2][: len(ge.sgv(ops).inputs)], [1, 0, 1])
        copied, info = transformer(view, default_graph(), "c")
        expected = [info.transformed(t).name for t in view.outputs]
        assert names(copied.outputs) == expected == ["c/s:1", "c/s:0", "c/s:1"]
        assert names(copied.inputs) == [info.transformed(t).name for t in view.inputs]
        del a

    setting.run(body)


def test_info_maps_names_structures_and_back():
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0, name="x")
        y = tf.negative(x, name="y")
    _, info = ge.copy(graph, dst_scope="c")
    x_, y_ = info.transformed([x, y])
    assert info.transformed("y:0") is y_
    assert info.transformed("y") is y_.op
    assert info.original("c/x:0") is x
    assert info.original({"k": (x_, [y_.op])}) == {"k": (x, [y.op])}
    with graph.as_default():
        other = tf.constant(3.0)
    assert info.transformed(other) is None
    assert info.transformed("nowhere:0") is None
    assert info.transformed([x, other], lambda t: t)[1] is other
    assert info.original(other, lambda t: "missing") == "missing"
    text = str(info)
    assert "  x => c/x" in text
    assert "Scope destination: c/" in text
    # Private names that clients read.
    assert names(info._transformed_ops.values()) == ["c/x", "c/y"]
    assert info._transformed_ts[x] is x_
    for private, element in ((info._transformed_ops, x.op), (info._transformed_ts, x)):
        with pytest.raises(TypeError):
            private[element] = None


def test_what_does_not_fit_into_one_protobuf_is_copied_op_by_op(monkeypatch):
    monkeypatch.setattr("geutil.transform.op_copies.BULK_LIMIT", 10)
    with tf.Graph().as_default() as graph:
        total = three_sums()
    copied = tf.Graph()
    _, info = ge.copy(graph, copied, dst_scope="c")
    (value,) = evaluate(copied, [info.transformed(total)])
    np.testing.assert_allclose(value, np.full(10, 4.0))
    assert info.transformed(total).name == "c/Add_2:0"


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
