import functools

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from tests.settings import default_graph, evaluate, in_each_setting, names


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
    monkeypatch.setattr("geutil.transform.op_copying.BULK_LIMIT", 10)
    with tf.Graph().as_default() as graph:
        total = three_sums()
    copied = tf.Graph()
    _, info = ge.copy(graph, copied, dst_scope="c")
    (value,) = evaluate(copied, [info.transformed(total)])
    np.testing.assert_allclose(value, np.full(10, 4.0))
    assert info.transformed(total).name == "c/Add_2:0"
