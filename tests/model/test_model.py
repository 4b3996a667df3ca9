import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model
from tests.model import small_models
from tests.model.body_samples import gradients

X = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


@pytest.fixture
def opened():
    function, w, b = small_models.affine()
    return model.open(function), function, w, b


def test_run_sees_an_edit_that_was_taken_back(opened):
    m, function, *_ = opened
    with m.graph.as_default():
        other = m.inputs["x"] * 0.0
    with pytest.raises(KeyError), ge.transaction(m.graph):
        ge.reroute_ts(other, m.graph.get_tensor_by_name("hidden:0"))
        assert not (m.run(x=X)["y"] - [1, -1]).any()
        raise KeyError
    np.testing.assert_array_equal(m.run(x=X)["y"], function(X)["y"])


def test_outputs_follow_reroutes(opened):
    m, *_ = opened
    with m.graph.as_default():
        negated = tf.negative(m.outputs["y"])
    ge.reroute_ts(negated, m.outputs["y"], cannot_modify=[negated.op])
    assert m.outputs["y"] is negated
    np.testing.assert_array_equal(m.run(x=X)["y"], -(X * [2, 3] + [1, -1]))


def test_an_output_may_change_its_dtype(opened):
    m, *_ = opened
    with m.graph.as_default():
        m.outputs["y"] = tf.argmax(m.outputs["y"], axis=1)
    assert m.run(x=X)["y"].dtype == np.int64


def test_a_placeholder_that_nothing_feeds_is_named(opened):
    m, *_ = opened
    with m.graph.as_default():
        stray = tf.compat.v1.placeholder(tf.float32, [], "stray")
        m.outputs["y"] = m.outputs["y"] + stray
    with pytest.raises(model.ModelError, match=r"'stray' is no input.*'add"):
        m.run(x=X)


def test_ops_may_wait_for_inputs(opened):
    m, function, *_ = opened
    ge.add_control_inputs(m.graph.get_operation_by_name("sum"), m.inputs["x"].op)
    np.testing.assert_array_equal(m.run(x=X)["y"], function(X)["y"])
    ge.verify(m.graph)


def test_a_function_is_a_snapshot(opened):
    m, function, *_ = opened
    f = m.to_function()
    m.outputs["y"] = m.inputs["x"]
    np.testing.assert_array_equal(f(X)["y"], function(X)["y"])
    np.testing.assert_array_equal(m.to_function()(x=X)["y"], X)


def test_a_function_is_differentiable(opened):
    m, function, w, b = opened
    f = m.to_function()
    assert [id(v) for v in f.variables] == [id(w), id(b)]
    assert [id(v) for v in f.trainable_variables] == [id(w)]
    first, *others = (
        gradients(lambda x, f=callable_: f(x)["y"] ** 3, X, [w])
        for callable_ in (function, f, tf.function(f))
    )
    for found in others:
        for g, expected in zip(found, first, strict=True):
            np.testing.assert_array_equal(g, expected)


def test_repr_says_what_it_is(opened):
    m, *_ = opened
    assert repr(m) == "Model('serving_default', ['x'] -> ['y'], 7 ops)"
    assert repr(m.signatures) == "Signatures(['serving_default'])"
    assert m.signatures["serving_default"] is m
    with pytest.raises(KeyError):
        m.signatures["other"]


# -- opening ---------------------------------------------------------------------------


@pytest.fixture
def function():
    return small_models.affine()


def frozen_graph_def():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 2], "images/x")
        tf.nn.softmax(x * 3.0, name="scores")
    return graph


def test_a_function_with_a_signature(function):
    f, w, b = function
    m = model.open(f)
    assert list(m.inputs) == ["x"]
    assert list(m.outputs) == ["y"]
    assert m.signature == "serving_default"
    np.testing.assert_array_equal(m.run(x=X)["y"], f(X)["y"])
    assert m.variables["w"] is w
    assert m.variables["b"] is b
    assert not m.variables["b"].trainable
    ge.verify(m.graph)


def test_a_concrete_function_and_a_signature_name(function):
    f, *_ = function
    concrete = f.get_concrete_function()
    m = model.open(concrete, signature="predict")
    assert m.signature == "predict"
    assert list(m.signatures) == ["predict"]
    np.testing.assert_array_equal(m.run(x=X)["y"], f(X)["y"])


def test_positional_results_are_called_as_tensorflow_calls_them():
    f = tf.function(lambda a, b: (a + b, [a - b]))
    spec = tf.TensorSpec([2])
    m = model.open(f.get_concrete_function(spec, spec))
    assert list(m.inputs) == ["a", "b"]
    assert list(m.outputs) == ["output_0", "output_1"]
    result = m.run(a=[3.0, 4.0], b=[1.0, 2.0])
    np.testing.assert_array_equal(result["output_0"], [4.0, 6.0])
    np.testing.assert_array_equal(result["output_1"], [2.0, 2.0])


def test_outputs_keep_the_order_of_the_dictionary():
    f = tf.function(lambda x: {"z": x, "a": 2 * x}, [tf.TensorSpec([], name="x")])
    m = model.open(f)
    assert list(m.run(x=1.0).items()) == [("z", 1.0), ("a", 2.0)]


def test_names_in_a_file_of_version_1_are_counted(tmp_path):
    # The file holds maps, which each process reads in an order of its own.
    v1 = tf.compat.v1
    predict = v1.saved_model.signature_def_utils.predict_signature_def
    graph = tf.Graph()
    with graph.as_default(), v1.Session(graph=graph) as session:
        inputs = {f"input_{i}": v1.placeholder(tf.float32, []) for i in range(12)}
        outputs = {f"output_{i}": 2.0 * t for i, t in enumerate(inputs.values())}
        builder = v1.saved_model.Builder(str(tmp_path / "counted"))
        builder.add_meta_graph_and_variables(
            session, ["serve"], {"serving_default": predict(inputs, outputs)}
        )
        builder.save()
    m = model.open(tmp_path / "counted")
    assert list(m.inputs) == list(inputs)
    assert list(m.outputs) == list(outputs)


@pytest.mark.parametrize("is_set", [True, False])
def test_a_finalized_graph_has_the_values_of_its_session(is_set):
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [2], name="x")
        w, u = v1.get_variable("w", [2]), v1.get_variable("u", [2])
        y = tf.identity(w * x + u, name="y")
        session = v1.Session(graph=graph)
        session.run([w.initializer, *[u.initializer] * is_set])
        graph.finalize()
        expected = session.run([w, y][: 1 + is_set], {x: [1.0, 2.0]})
    m = model.open(graph, session=session, outputs=["y"])
    assert m.variables["u"].is_initialized().numpy() == is_set
    found = [m.variables["w"].numpy()]
    if is_set:
        found.append(m.run(x=[1.0, 2.0])["y"])
    np.testing.assert_array_equal(found, expected)


def test_eager_execution_is_needed():
    with tf.Graph().as_default(), pytest.raises(model.ModelError, match="eager"):
        model.open(frozen_graph_def())


def test_colocation_that_is_no_text_is_forgotten():
    graph_def = frozen_graph_def().as_graph_def()
    graph_def.node[-1].attr["_class"].list.s.append(b"loc:@\xff")
    m = model.open(graph_def)
    assert list(m.outputs) == ["scores"]


def test_signatures_that_are_none_are_refused(tmp_path, monkeypatch):
    """As a damaged file may have them."""
    small_models.save_two_signatures(tmp_path / "m")
    loaded = tf.Module()
    monkeypatch.setattr("geutil.model.opener.load_saved_model", lambda *_: loaded)
    for signatures in (object(), {"encode": object()}):
        loaded.signatures = signatures
        with pytest.raises(model.ModelError, match="the file is damaged"):
            model.open(tmp_path / "m", signature="encode")


KEEPING = {
    "cut": lambda m: m.cut(outputs=["y"]),
    "rename": lambda m: m.rename({"x": "z"}),
    "without_powers": lambda m: m.without_powers(),
    "strip_training": lambda m: m.strip_training(),
    "replace_op": lambda m: m.replace_op("Mul", tf.multiply),
    "set_batch_size": lambda m: m.set_batch_size(2),
    "append": lambda m: m.append(model.open(small_models.affine()[0])),
    "prepend": lambda m: m.prepend(model.open(small_models.affine()[0])),
}


@pytest.mark.parametrize("method", KEEPING)
def test_a_variable_that_an_edit_brought_in_is_kept(method, opened, tmp_path):
    m, *_ = opened
    brought = tf.Variable([5.0, 7.0])
    with m.graph.as_default():
        m.outputs["y"] = m.outputs["y"] * brought
    changed = KEEPING[method](m)
    assert any(v is brought for v in changed.to_function().trainable_variables)
    (expected,) = changed.run(X).values()
    (found,) = model.open(changed.save(tmp_path / "saved")).run(X).values()
    np.testing.assert_array_equal(found, expected)
