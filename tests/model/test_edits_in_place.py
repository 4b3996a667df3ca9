"""Models whose graphs are edited in place with geutil."""

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model as geutil_model
from tests.model.body_samples import gradients
from tests.model.round_trips import assert_round_trip, assert_same

FLOATS = tf.TensorSpec([None, 3], name="x")
X = np.float32([[1, -2, 3], [0, 1, -1]])


@pytest.fixture
def module():
    module = tf.Module()
    module.w = tf.Variable(np.float32([[1, 2], [3, 4], [5, 6]]), name="w")

    @tf.function(input_signature=[FLOATS])
    def f(x):
        hidden = tf.nn.relu(tf.matmul(x, module.w, name="product"), name="hidden")
        return {"y": tf.add(hidden, 1.0, name="sum"), "hidden": hidden}

    module.f = f
    return module


@pytest.fixture
def m(module, tmp_path):
    """Return a model that was opened from a file: its variables are others."""
    tf.saved_model.save(module, str(tmp_path / "m"), {"serving_default": module.f})
    return geutil_model.open(tmp_path / "m")


@pytest.fixture
def product(module):
    return X @ module.w.numpy()


def op(m, name):
    (found,) = ge.filter_ops_from_regex(m.graph, rf"(^|/){name}$")
    return found


def test_a_reroute_and_a_swap(m, product, tmp_path):
    hidden = m.outputs["hidden"]
    with m.graph.as_default():
        clipped = tf.clip_by_value(op(m, "product").outputs[0], -1.0, 1.0)
        other = tf.abs(op(m, "product").outputs[0])
        tf.identity(other, "reader")
    ge.reroute_ts(clipped, hidden)
    y = np.clip(product, -1, 1)
    assert_same(m.run(x=X), {"y": y + 1, "hidden": y})
    ge.swap_ts(clipped, other)
    ge.verify(m.graph)
    y = np.abs(product)
    assert_round_trip(m, tmp_path, {"x": X}, {"y": y + 1, "hidden": y})


def test_outputs_are_added_and_one_deleted(module, product, tmp_path):
    m = geutil_model.open(module.f)
    eager = tf.constant([7.0, 8.0])
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a", "b"], [1.0, 2.0]), -1.0
    )
    twice = tf.function(lambda v: v * 2)
    layer = tf.keras.layers.Dense(4, name="added")
    layer.build([None, 2])
    with m.graph.as_default():
        y, x = m.outputs["y"], m.inputs["x"]
        m.outputs["total"] = tf.reduce_sum(op(m, "product").outputs[0], 1)
        m.outputs["constant"] = y + eager
        m.outputs["found"] = table.lookup(tf.constant(["b", "z"]))
        m.outputs["called"] = twice(y)
        m.outputs["layer"] = layer(y)
        _, looped = tf.while_loop(
            lambda i, _: i < 3, lambda i, v: (i + 1, v * 2), [0, y]
        )
        m.outputs["branch"] = tf.cond(
            tf.reduce_sum(x) > 0, lambda: looped, lambda: -looped
        )
    del m.outputs["hidden"]
    y = np.maximum(product, 0) + 1
    expected = {
        "y": y,
        "total": product.sum(1),
        "constant": y + np.float32([7, 8]),
        "found": np.float32([2, -1]),
        "called": y * 2,
        "layer": tf.matmul(y, layer.kernel),
        "branch": y * 8,
    }
    assert_round_trip(m, tmp_path, {"x": X}, expected)
    assert m.run(x=-X)["branch"].max() < 0
    assert len(geutil_model.open(tmp_path / "round_trip").variables) == 3


def test_a_new_variable(m, product, tmp_path):
    m.run(x=X)
    with m.graph.as_default():
        scale = tf.Variable([10.0, 100.0], name="scale")
        m.outputs["y"] = m.outputs["y"] * scale
    y = (np.maximum(product, 0) + 1) * np.float32([10, 100])
    assert_round_trip(m, tmp_path, {"x": X}, {"y": y, "hidden": np.maximum(product, 0)})
    assert sorted(m.variables) == ["scale", "w"]
    f = m.to_function()
    _, slope = gradients(lambda x: f(x)["y"], X, [m.variables["scale"]])
    np.testing.assert_allclose(slope, (np.maximum(product, 0) + 1).sum(0))
    again = geutil_model.open(tmp_path / "round_trip")
    assert sorted(again.variables) == ["scale", "w"]


def test_variables_made_outside(m, product, tmp_path):
    shift = tf.Variable([1.0, 2.0], name="w", trainable=False)
    count = tf.Variable(0.0, name="count", trainable=False)
    with m.graph.as_default():
        m.outputs["y"] = m.outputs["y"] + shift
        # An assignment is the effect of an output.
        m.outputs["count"] = tf.convert_to_tensor(count.assign_add(1.0))
    hidden = np.maximum(product, 0)
    y = hidden + 1 + np.float32([1, 2])
    assert_same(m.run(x=X), {"y": y, "hidden": hidden, "count": np.float32(1)})
    m.save(tmp_path / "saved")
    for run in (m.run, geutil_model.open(tmp_path / "saved").run):
        assert_same(run(x=X), {"y": y, "hidden": hidden, "count": np.float32(2)})
    # Of the two variables of this name one gets a number.
    assert list(m.variables) == ["w", "w_1", "count"]
    assert not m.variables["w_1"].trainable
    shift.assign([5.0, 5.0])
    assert m.run(x=X)["y"][0, 0] == y[0, 0] + 4


def test_a_variable_takes_the_place_of_another(m, tmp_path):
    other = tf.Variable(np.eye(3, 2, dtype=np.float32), name="other")
    with m.graph.as_default():
        weights = tf.convert_to_tensor(other)
    (read,) = (t for t in op(m, "product").inputs if t is not m.inputs["x"])
    ge.reroute_ts(weights, read)
    expected = np.maximum(X @ other.numpy(), 0)
    assert_round_trip(m, tmp_path, {"x": X}, {"y": expected + 1, "hidden": expected})


def test_ops_are_made_with_names_in_use(m, product, tmp_path):
    with m.graph.as_default():
        m.outputs["y"] = tf.identity(m.outputs["y"], name="x")
        m.outputs["z"] = tf.identity(m.outputs["y"], name="side_effects")
        m.outputs["side_effects"] = tf.identity(m.outputs["y"], name="y")
    y = np.maximum(product, 0) + 1
    expected = {"y": y, "z": y, "side_effects": y, "hidden": y - 1}
    assert_round_trip(m, tmp_path, {"x": X}, expected)
