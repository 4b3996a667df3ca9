from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model

X = np.array([1.0, 2.0], np.float32)


@pytest.fixture
def chain():
    """Return a model: a = x * v, b = a + w, y = exp(b), z = a + u."""
    v, w, u = (
        tf.Variable(n, name=name)
        for n, name in zip((2.0, 3.0, 5.0), "vwu", strict=True)
    )
    counter = tf.Variable(0.0, name="counter")

    @tf.function(
        input_signature=[
            tf.TensorSpec([None], name="x"),
            tf.TensorSpec([None], name="other"),
        ]
    )
    def function(x, other):
        a = tf.multiply(x, v, name="a")
        counter.assign_add(tf.reduce_sum(other))
        b = tf.add(a, w, name="b")
        return {"y": tf.exp(b, name="exp"), "z": tf.add(a, u, name="sum")}

    m = model.open(function)
    m.kept_alive = (v, w, u, counter)
    return m


def test_head_and_tail_make_the_whole(chain):
    head = chain.cut(inputs=["x"], outputs=["b"])
    tail = chain.cut(inputs=["b"], outputs=["y"])
    whole = chain.run(x=X, other=X)
    b = head.run(x=X)["b"]
    np.testing.assert_array_equal(b, X * 2 + 3)
    np.testing.assert_array_equal(tail.run(b=b)["y"], whole["y"])


def test_a_part_has_the_variables_that_it_needs(chain):
    chain.run(x=X, other=X)
    assert set(chain.variables) == {"v", "w", "u", "counter"}
    assert set(chain.cut(inputs=["x"], outputs=["b"]).variables) == {"v", "w"}
    assert set(chain.cut(inputs=["b"], outputs=["y"]).variables) == set()
    part = chain.cut(inputs=["x"], outputs=["z"])
    assert set(part.variables) == {"v", "u"}
    part.variables["v"].assign(10.0)
    assert chain.run(x=X, other=X)["z"][0] == 15.0


def test_a_part_is_alone(chain):
    assert list(chain.cut(outputs=["y"]).signatures) == ["serving_default"]


def test_inputs_that_are_not_needed_are_left_out(chain):
    part = chain.cut(outputs=["y"])
    assert list(part.inputs) == ["x"]
    assert list(part.outputs) == ["y"]


def test_side_effects_of_the_part_are_kept(chain):
    before = float(chain.variables["counter"])
    chain.cut(inputs=["x", "other"], outputs=["y"]).run(x=X, other=X)
    assert float(chain.variables["counter"]) == before + 3.0
    part = chain.cut(inputs=["x"], outputs=["y"])
    part.run(x=X)
    assert "counter" not in part.variables
    assert float(chain.variables["counter"]) == before + 3.0


def test_ends_can_be_tensors_ops_and_mappings(chain):
    a = chain.graph.get_tensor_by_name("a:0")
    for selection, name in ((a, "a"), (a.op, "a"), ({"new": a}, "new"), (["a:0"], "a")):
        part = chain.cut(inputs=selection, outputs=["y"])
        assert list(part.inputs) == [name]
        np.testing.assert_allclose(part.run(**{name: X})["y"], np.exp(X + 3), 1e-6)


def test_an_input_keeps_its_shape_and_dtype(chain):
    spec = chain.cut(inputs=["b"], outputs=["y"]).inputs["b"]
    assert spec.shape.as_list() == [None]
    assert spec.dtype == tf.float32


def test_an_input_takes_the_name_of_the_op_that_is_cut_off(chain):
    part = chain.cut(inputs=["b"], outputs=["y"])
    assert part.inputs["b"].op.name == "b"
    assert part.inputs["b"].op.type == "Placeholder"


def test_an_output_that_is_an_input(chain):
    part = chain.cut(inputs=["b"], outputs=["b", "y"])
    assert list(part.run(b=X)) == ["b", "y"]
    np.testing.assert_array_equal(part.run(b=X)["b"], X)


def test_the_model_is_not_changed(chain):
    before = chain.graph.as_graph_def()
    chain.cut(inputs=["b"], outputs=["y"])
    assert chain.graph.as_graph_def() == before


def test_a_stray_placeholder_can_be_cut_off(chain):
    with chain.graph.as_default():
        stray = tf.compat.v1.placeholder(tf.float32, [], "stray")
        chain.outputs["y"] = chain.outputs["y"] + stray
    part = chain.cut(inputs=["x", "stray"], outputs=["y"])
    np.testing.assert_allclose(part.run(x=X, stray=1.0)["y"], np.exp(X * 2 + 3) + 1)


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (["nothing"], ["y"], r"no input, output, tensor, op, layer or scope 'nothing'"),
        (["b"], ["y", "z"], r"still depend on its input 'x'.*inputs="),
        (["b", "x"], ["y"], r"no output depends on 'x'"),
        ({"same": "x"}, {"y": 3}, r"expected a tensor"),
        (["a", "a:0"], ["y"], r"two tensors would be called 'a'"),
        (["x"], [], r"at least one output"),
        (["a/ReadVariableOp/resource"], ["y"], r"is a resource"),
    ],
)
def test_refusals(chain, inputs, outputs, message):
    before = chain.graph.as_graph_def()
    with pytest.raises(model.ModelError, match=message):
        chain.cut(inputs, outputs)
    assert chain.graph.as_graph_def() == before


def test_tensors_of_another_model_are_refused(chain):
    other = chain.cut(outputs=["y"])
    with pytest.raises(model.ModelError, match=r"another graph"):
        chain.cut(inputs=[other.inputs["x"]])


def test_similar_names_are_told(chain):
    with pytest.raises(model.ModelError, match=r"'EXP'; similar are \['exp'\]"):
        chain.cut(outputs=["EXP"])
    with pytest.raises(model.ModelError, match=r"'smu'; similar are \['sum_1'"):
        chain.cut(outputs=["smu"])


def test_an_op_with_several_outputs_is_refused(chain):
    with chain.graph.as_default():
        op = tf.raw_ops.Split(axis=0, value=chain.inputs["x"], num_split=2)[0].op
    with pytest.raises(model.ModelError, match=r"2 outputs; pass a tensor such as"):
        chain.cut(outputs=[op])


def test_a_tensor_in_the_middle_of_a_custom_gradient():
    @tf.custom_gradient
    def triple_gradient(x):
        y = tf.square(x, name="square")
        return y, lambda g: 3.0 * g * y

    @tf.function(input_signature=[tf.TensorSpec([], name="x")])
    def function(x):
        return {"y": triple_gradient(tf.negative(x, name="negative"))}

    part = model.open(function).cut(inputs={"n": "negative"})
    f = part.to_function()
    n = tf.constant(5.0)
    with tf.GradientTape() as tape:
        tape.watch(n)
        y = f(n)["y"]
    assert float(tape.gradient(y, n)) == 75.0


def test_parts_verify(chain):
    ge.verify(chain.cut(inputs=["b"], outputs=["y"]).graph)


def test_a_long_chain():
    with tf.Graph().as_default() as graph:
        t = tf.compat.v1.placeholder(tf.float32, [], "x")
        for _ in range(3000):
            t = tf.raw_ops.Neg(x=t)
    m = model.open(graph, outputs=[t.name])
    (result,) = m.cut(inputs={"h": "Neg_1499"}).run(h=2.0).values()
    assert float(result) == 2.0
