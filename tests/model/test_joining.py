from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model
from tests.model.body_samples import gradients
from tests.model.refusal_tables import not_refused

X = np.array([1.0, 2.0], np.float32)
SPEC = tf.TensorSpec([None], name="x")


def opened(body, *specs):
    m = model.open(tf.function(body, list(specs or (SPEC,))))
    m.keep = body
    return m


@pytest.fixture
def first():
    w = tf.Variable(2.0, name="w")

    def body(x):
        hidden = tf.multiply(x, w, name="hidden")
        return {"y": tf.add(hidden, 1.0, name="sum")}

    m = opened(body)
    m.keep = w
    return m


@pytest.fixture
def second():
    w = tf.Variable(10.0, name="w")
    m = opened(lambda x: {"z": tf.multiply(x, w, name="hidden")})
    m.keep = w
    return m


def hidden_of(m):
    return m.graph.get_tensor_by_name("hidden:0")


def keeping_hidden(m):
    m.outputs["hidden"] = hidden_of(m)
    return m


# How two models are joined, and what comes of an x.
JOINS = {
    "append": (lambda a, b: a.append(b), {"z": (X * 2 + 1) * 10}),
    "append, what is not read is kept": (
        lambda a, b: keeping_hidden(a).append(b, {"x": "hidden"}),
        {"y": X * 2 + 1, "z": X * 20},
    ),
    "prepend": (lambda a, b: a.prepend(b), {"y": X * 20 + 1}),
    "a tensor in the middle is replaced": (
        lambda a, b: a.splice(b, {"hidden": "z"}, {"x": "x"}),
        {"y": X * 10 + 1},
    ),
    "behind a tensor the original is read": (
        lambda a, b: a.splice(b, {"hidden": "z"}, {"x": "hidden"}),
        {"y": X * 20 + 1},
    ),
    "tensors as such": (
        lambda a, b: a.splice(
            b, [(hidden_of(a), b.outputs["z"])], {"x": a.inputs["x"]}
        ),
        {"y": X * 10 + 1},
    ),
    "a reference to a tensor": (
        lambda a, b: a.splice(b, {hidden_of(a).ref(): "z"}, {"x": a.inputs["x"]}),
        {"y": X * 10 + 1},
    ),
    "inputs that nothing feeds": (
        lambda a, b: a.splice(b, {"hidden": "z"}),
        {"y": X * 10 + 1},
    ),
}


@pytest.mark.parametrize("name", JOINS)
def test_joins(name, first, second):
    join, expected = JOINS[name]
    both = join(first, second)
    ge.verify(both.graph)
    assert list(both.inputs) == ["x"]
    assert list(both.outputs) == list(expected)
    assert set(both.variables) == {"w", "w_1"}
    for end, value in both.run(x=X).items():
        np.testing.assert_array_equal(value, expected[end])


def test_an_input_that_nothing_feeds_becomes_another(first, second):
    both = keeping_hidden(first).splice(second, {"sum": "z"})
    assert list(both.inputs) == ["x", "x_1"]
    result = both.run(x=X, x_1=X * 2)
    np.testing.assert_array_equal(result["y"], X * 20)
    np.testing.assert_array_equal(result["hidden"], X * 2)


def test_names_are_kept_apart(first):
    def body(x):
        return {"z": tf.multiply(x, tf.exp(x, name="two"), name="hidden")}

    second = opened(body)
    # Names are in inputs, in control inputs and in colocations.
    z = second.outputs["z"].op
    ge.add_control_inputs(z, second.graph.get_operation_by_name("two"))
    z._set_attr("_class", tf.compat.v1.AttrValue(list={"s": [b"loc:@two"]}))
    both = first.splice(second, {"hidden": "z"}, {"x": "x"}, scope="mine")
    names = [op.name for op in both.graph.get_operations()]
    assert {"mine/hidden", "sum"} <= set(names)
    assert len(names) == len(set(names))
    joined = both.graph.get_operation_by_name("mine/hidden")
    assert [op.name for op in joined.control_inputs] == ["mine/two"]
    assert joined.colocation_groups() == [b"loc:@mine/two"]


def test_names_that_do_not_clash_stay(first):
    spec = tf.TensorSpec([None], name="v")
    other = opened(lambda v: {"z": tf.exp(v, name="two")}, spec)
    names = {op.name for op in first.append(other).graph.get_operations()}
    assert {"x", "hidden", "sum", "two"} <= names


def test_a_model_can_be_joined_to_itself(first):
    twice = first.append(first)
    np.testing.assert_array_equal(twice.run(x=X)["y"], (X * 2 + 1) * 2 + 1)
    assert list(twice.variables) == ["w"]
    twice.variables["w"].assign(0.0)
    assert twice.run(x=X)["y"].tolist() == [1.0, 1.0]


def test_both_models_are_differentiable(first, second):
    f = first.append(second).to_function()
    variables = [first.variables["w"], second.variables["w"]]
    _, *found = gradients(lambda x: f(x)["z"], X, variables)
    np.testing.assert_allclose(found, [(X * 10).sum(), (X * 2 + 1).sum()])


def test_custom_gradients_of_both_survive():
    @tf.custom_gradient
    def odd(x):
        y = tf.square(x)
        return y, lambda g: g * y * 7.0

    m = opened(lambda x: {"y": odd(x)})
    f = m.append(m).to_function()
    (slope,) = gradients(lambda x: f(x)["y"], [2.0], [])
    # odd'(v) = 7 v^2, at v = 4 and v = 2.
    assert slope.numpy().tolist() == [7 * 16 * 7 * 4]


def test_shapes_are_inferred_anew():
    fixed = opened(lambda x: {"y": tf.negative(x)}, tf.TensorSpec([None, 2], name="x"))
    narrow = opened(lambda x: {"y": tf.exp(x)}, tf.TensorSpec([3, 2], name="x"))
    both = fixed.prepend(narrow)
    assert both.outputs["y"].shape.as_list() == [3, 2]
    other = narrow.prepend(fixed)
    assert other.outputs["y"].shape.as_list() == [None, 2]
    assert other.run(x=np.ones((5, 2), np.float32))["y"].shape == (5, 2)


def test_functions_of_the_same_name_are_kept_apart(tmp_path):
    files = []
    for number, factor in enumerate((2.0, 3.0)):
        with tf.Graph().as_default() as graph:
            x = tf.compat.v1.placeholder(tf.float32, [], "x")
            (end,) = tf.while_loop(lambda v: v < 100.0, lambda v, f=factor: v * f, [x])
            tf.identity(end, name="y")
        graph_def = graph.as_graph_def()
        for function in graph_def.library.function:
            kind = "body" if "body" in function.signature.name else "cond"
            _rename(graph_def, function.signature.name, kind)
        files.append(tmp_path / f"{number}.pb")
        files[-1].write_bytes(graph_def.SerializeToString())
    one, two = (model.open(file, outputs=["y"]) for file in files)
    assert float(one.run(x=3.0)["y"]) == 192.0
    assert float(two.run(x=3.0)["y"]) == 243.0
    both = one.splice(two, {}, {"x": "x"})
    result = both.run(x=3.0)
    assert [float(v) for v in result.values()] == [192.0, 243.0]


def _rename(graph_def, old, new):
    for function in graph_def.library.function:
        if function.signature.name == old:
            function.signature.name = new
    for node in graph_def.node:
        for value in node.attr.values():
            if value.func.name == old:
                value.func.name = new


def test_cycles_dtypes_shapes_and_unknown_ends_are_refused(first, second):
    ints = opened(lambda x: {"z": tf.cast(x, tf.int32)})
    wide = opened(lambda x: {"z": tf.expand_dims(x, 0)})
    table = (
        (second, {"hidden": "z"}, {"x": "y"}, r"depend on each other.*hidden"),
        (ints, {"hidden": "z"}, {"x": "x"}, r"int32.*float32.*tf.cast"),
        (wide, {"hidden": "z"}, {"x": "x"}, r"of shape \(1, None\).*\(None,\)"),
        (second, {"hidden": "nothing"}, {}, r"no output 'nothing'.*\['z'\]"),
        (second, {"nothing": "z"}, {}, r"no .*tensor, op, layer or scope 'nothing'"),
        (second, {"hidden": "z"}, {"nothing": "x"}, r"no input 'nothing'.*\['x'\]"),
    )
    cases = [(said, partial(first.splice, *ends), said) for *ends, said in table]
    assert not_refused(model.ModelError, cases, unchanged=first) == {}


def test_ends_that_cannot_be_paired_are_refused():
    two = opened(lambda x: {"a": x, "b": x})
    other = opened(
        lambda c, d: {"e": c + d},
        tf.TensorSpec([None], name="c"),
        tf.TensorSpec([None], name="d"),
    )
    with pytest.raises(model.ModelError, match=r"no name in common; pass inputs="):
        two.append(other)
    assert two.append(other, {"c": "a", "d": "b"}).run(x=X)["e"].tolist() == [2.0, 4.0]
