from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model
from tests.model.refusal_tables import not_refused

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
    before = chain.graph.as_graph_def()
    head = chain.cut(inputs=["x"], outputs=["b"])
    tail = chain.cut(inputs=["b"], outputs=["b", "y"])
    ge.verify(tail.graph)
    assert chain.graph.as_graph_def() == before
    whole = chain.run(x=X, other=X)
    b = head.run(x=X)["b"]
    np.testing.assert_array_equal(b, X * 2 + 3)
    results = tail.run(b=b)
    # An output may be an input.
    assert list(results) == ["b", "y"]
    np.testing.assert_array_equal(results["b"], b)
    np.testing.assert_array_equal(results["y"], whole["y"])
    # An input keeps shape and dtype, and takes the name of the op that is cut off.
    spec = tail.inputs["b"]
    assert (spec.op.name, spec.op.type) == ("b", "Placeholder")
    assert (spec.shape.as_list(), spec.dtype) == ([None], tf.float32)


def test_a_part_has_the_variables_that_it_needs(chain):
    chain.run(x=X, other=X)
    assert set(chain.variables) == {"v", "w", "u", "counter"}
    assert set(chain.cut(inputs=["x"], outputs=["b"]).variables) == {"v", "w"}
    assert set(chain.cut(inputs=["b"], outputs=["y"]).variables) == set()
    part = chain.cut(inputs=["x"], outputs=["z"])
    assert set(part.variables) == {"v", "u"}
    part.variables["v"].assign(10.0)
    assert chain.run(x=X, other=X)["z"][0] == 15.0


def test_a_part_is_alone_and_has_the_inputs_that_it_needs(chain):
    part = chain.cut(outputs=["y"])
    assert list(part.signatures) == ["serving_default"]
    assert (list(part.inputs), list(part.outputs)) == (["x"], ["y"])


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


def test_a_stray_placeholder_can_be_cut_off(chain):
    with chain.graph.as_default():
        stray = tf.compat.v1.placeholder(tf.float32, [], "stray")
        chain.outputs["y"] = chain.outputs["y"] + stray
    part = chain.cut(inputs=["x", "stray"], outputs=["y"])
    np.testing.assert_allclose(part.run(x=X, stray=1.0)["y"], np.exp(X * 2 + 3) + 1)


def test_refusals(chain):
    cases = [
        (message, partial(chain.cut, *ends), message)
        for *ends, message in (
            (["b"], ["y", "z"], r"still depend on its input 'x'.*inputs="),
            ({"same": "x"}, {"y": 3}, r"expected a tensor"),
            (["a", "a:0"], ["y"], r"two tensors would be called 'a'"),
            (["x"], ["EXP"], r"'EXP'; similar are \['exp'\]"),
            (["x"], ["smu"], r"'smu'; similar are \['sum_1'"),
        )
    ]
    assert not_refused(model.ModelError, cases, unchanged=chain) == {}


def test_tensors_of_another_model_and_ops_with_several_outputs_are_refused(chain):
    other = chain.cut(outputs=["y"])
    with pytest.raises(model.ModelError, match=r"another graph"):
        chain.cut(inputs=[other.inputs["x"]])
    with chain.graph.as_default():
        op = tf.raw_ops.Split(axis=0, value=chain.inputs["x"], num_split=2)[0].op
    with pytest.raises(model.ModelError, match=r"2 outputs; pass a tensor such as"):
        chain.cut(outputs=[op])
