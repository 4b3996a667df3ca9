"""Bodies of functions as models: what is edited in them reaches all callers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model
from geutil.model import ModelError
from tests.model.body_samples import (
    X_SPEC,
    Nested,
    X,
    body_of,
    branch_model,
    call_model,
    case_model,
    key_of,
    loop_model,
    op_of,
    swap_op,
)


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def gradients(function, x, variables):
    with tf.GradientTape() as tape:
        x = tf.constant(x)
        tape.watch(x)
        y = function(x)
    return tape.gradient(y, [x, *variables])


@pytest.fixture
def nested():
    return Nested()


def test_functions_are_listed_callers_first(nested):
    keys = list(nested.model.functions)
    assert len(keys) == len(set(keys)) == 6
    assert len(nested.model.functions) == 6
    inner, outer = key_of(nested.model, "inner"), key_of(nested.model, "outer")
    assert keys.index(outer) < keys.index(inner)
    assert list(nested.model.functions) == keys
    held = {
        f.signature.name
        for f in nested.function.get_concrete_function()
        .graph.as_graph_def()
        .library.function
    }
    assert set(keys) == held


def test_bodies_are_models_and_are_shared(nested):
    body = body_of(nested.model, "outer")
    assert isinstance(body, model.Model)
    (key,) = body.functions
    assert body.functions[key] is nested.model.functions[key]
    with pytest.raises(KeyError):
        nested.model.functions["no such function"]


def test_callers(nested):
    names = [op.name for op in body_of(nested.model, "inner").callers]
    assert len(names) == 3
    assert {op.type for op in body_of(nested.model, "while_body").callers} == {"While"}


def test_a_body_runs_alone(nested):
    body = body_of(nested.model, "inner")
    close(body.run(x=X)["identity"], np.sin(X) * 2)
    grads = gradients(lambda x: body.to_function()(x)["identity"], X, [])
    close(grads[0], 2 * np.cos(X))


def test_a_body_that_reads_a_resource_does_not_run_alone(nested):
    body = body_of(nested.model, "outer")
    with pytest.raises(ModelError, match=r"resource.*run the model that calls"):
        body.run(x=X)
    with pytest.raises(ModelError, match="resource"):
        body.to_function()


def test_a_body_is_saved_alone(nested, tmp_path):
    body = body_of(nested.model, "inner")
    path = body.save(tmp_path / "inner")
    loaded = tf.saved_model.load(str(path)).signatures[body.signature]
    close(loaded(x=tf.constant(X))["identity"], np.sin(X) * 2)


def test_nothing_edited_changes_nothing(nested):
    m = nested.model
    before = m.graph.as_graph_def()
    for body in m.functions.values():
        assert body.graph is not None
    assert m.graph.as_graph_def() == before
    close(m.run(x=X)["y"], nested.reference(X))


@pytest.mark.parametrize("x", [X, -X])
def test_an_edit_reaches_all_callers(nested, x):
    m = nested.model
    keys = list(m.functions)
    close(m.run(x=x)["y"], nested.reference(x))
    swap_op(body_of(m, "inner"), "Sin", tf.cos)
    close(m.run(x=x)["y"], nested.reference(x, lambda x: tf.cos(x) * 2.0))
    assert sorted(m.functions) == sorted(keys)
    swap_op(body_of(m, "inner"), "Cos", tf.tanh)
    close(m.run(x=x)["y"], nested.reference(x, lambda x: tf.tanh(x) * 2.0))
    assert sorted(m.functions) == sorted(keys)


def test_unchanged_functions_keep_their_names(nested):
    m = nested.model
    before = {f.signature.name for f in m.graph.as_graph_def().library.function}
    swap_op(body_of(m, "outer"), "AddV2", tf.subtract)
    called = {
        op.get_attr("f").name
        for op in m.graph.get_operations()
        if op.type.endswith("PartitionedCall")
    }
    assert called.isdisjoint(before)
    (loop,) = (op for op in m.graph.get_operations() if op.type == "While")
    assert loop.get_attr("body").name in before


def test_gradients_follow_an_edit(nested):
    m, v = nested.model, nested.v
    function = m.to_function()
    for new, reference in [
        (None, lambda x: tf.sin(x) * 2.0),
        (("Sin", tf.cos), lambda x: tf.cos(x) * 2.0),
        (("Cos", tf.tanh), lambda x: tf.tanh(x) * 2.0),
    ]:
        if new is not None:
            swap_op(body_of(m, "inner"), *new)
        function = m.to_function()
        got = gradients(lambda x: function(x)["y"], X, [v])  # noqa: B023
        expected = gradients(lambda x: nested.reference(x, reference), X, [v])  # noqa: B023
        for g, e in zip(got, expected, strict=True):
            close(g, e)


def test_second_gradients(nested):
    swap_op(body_of(nested.model, "inner"), "Sin", tf.tanh)
    function = nested.model.to_function()

    def second(f):
        x = tf.constant(X)
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(f(x))
            slope = inner.gradient(y, x)
        return outer.gradient(slope, x)

    got = second(tf.function(lambda x: function(x)["y"], autograph=False))
    close(got, second(lambda x: nested.reference(x, lambda x: tf.tanh(x) * 2.0)))


def test_gradients_in_a_graph_with_several_calls():
    m = call_model()
    swap_op(body_of(m, "f"), "Exp", tf.sin)
    function = tf.function(m.to_function())
    got = gradients(lambda x: function(x)["y"], X, [])
    expected = gradients(lambda x: 3.0 * tf.sin(x) - 4.0 * tf.sin(2.0 * x), X, [])
    close(got[0], expected[0])


def test_an_edit_of_a_caller_and_its_callee(nested):
    m = nested.model
    swap_op(body_of(m, "outer"), "AddV2", tf.subtract)
    swap_op(body_of(m, "inner"), "Sin", tf.cos)

    def reference(x):
        inner = lambda x: tf.cos(x) * 2.0  # noqa: E731
        y = inner(x) - nested.v
        for _ in range(3):
            y = inner(y) + nested.v
        return inner(y) if tf.reduce_sum(y) > 0 else y

    close(m.run(x=X)["y"], reference(X))


def test_the_graph_is_never_behind_its_bodies(nested):
    m = nested.model
    swap_op(body_of(m, "inner"), "Sin", tf.cos)
    library = m.graph.as_graph_def().library.function
    called = {c for f in library for c in ge_called(f)}
    assert any(
        n.op == "Cos" for f in library if f.signature.name in called for n in f.node_def
    )
    body = body_of(m, "outer")
    swap_op(body_of(m, "inner"), "Cos", tf.tan)
    graph_def = body.graph.as_graph_def()
    (name,) = (n.attr["f"].func.name for n in graph_def.node if "f" in n.attr)
    (definition,) = (f for f in graph_def.library.function if f.signature.name == name)
    assert "Tan" in {n.op for n in definition.node_def}


def ge_called(definition):
    return [a.func.name for n in definition.node_def for a in n.attr.values()]


def test_an_edit_may_take_several_steps(nested):
    """While a body is edited, its graph and its ends can be looked at."""
    m, body = nested.model, body_of(nested.model, "inner")
    with body.graph.as_default():
        hole = tf.compat.v1.placeholder(tf.float32, [2], "hole")
    ge.reroute_ts(hole, op_of(body, "Sin").outputs[0])
    with body.graph.as_default():
        cos = tf.cos(body.inputs["x"])
    assert list(body.functions) == []
    ge.reroute_ts(cos, hole)
    close(m.run(x=X)["y"], nested.reference(X, lambda x: tf.cos(x) * 2.0))


def test_program_save_and_load(nested, tmp_path):
    m = nested.model
    swap_op(body_of(m, "inner"), "Sin", tf.cos)
    expected = nested.reference(X, lambda x: tf.cos(x) * 2.0)
    path = m.save(tmp_path / "saved")
    loaded = tf.saved_model.load(str(path)).signatures["serving_default"]
    close(loaded(x=tf.constant(X))["y"], expected)
    again = model.open(path, inline=False)
    close(again.run(x=X)["y"], expected)
    swap_op(body_of(again, "inner"), "Cos", tf.sin)
    close(again.run(x=X)["y"], nested.reference(X))
    got = gradients(lambda x: again.to_function()(x)["y"], X, [])
    close(got[0], gradients(nested.reference, X, [])[0])
    assert len(m.derived(m.program()).functions) == len(m.functions)


def test_a_round_trip_without_edits(nested, tmp_path):
    expected = nested.reference(X)
    path = nested.model.save(tmp_path / "saved")
    again = model.open(path, inline=False)
    np.testing.assert_array_equal(again.run(x=X)["y"], nested.model.run(x=X)["y"])
    close(again.run(x=X)["y"], expected)


def test_inlined_calls_leave_loops_and_branches(nested):
    m = model.open(nested.function)
    assert not any("outer" in key for key in m.functions)
    swap_op(body_of(m, "while_cond"), "Less", lambda i, n: tf.less(i, n - 1))
    y = nested.reference(X)
    with_two = tf.sin(X) * 2.0 + nested.v
    for _ in range(2):
        with_two = tf.sin(with_two) * 2.0 + nested.v
    assert not np.allclose(y, with_two)
    y = tf.sin(with_two) * 2 if tf.reduce_sum(with_two) > 0 else with_two
    close(m.run(x=X)["y"], y)


def test_a_loop_body():
    m = loop_model()
    swap_op(body_of(m, "body"), "Cos", lambda y: tf.sin(y) + 1.0)
    y = X
    for _ in range(3):
        y = np.sin(y) + 1
    close(m.run(x=X)["y"], y)
    function = m.to_function()

    def reference(x):
        for _ in range(3):
            x = tf.sin(x) + 1.0
        return x

    got = gradients(lambda x: function(x)["y"], X, [])
    close(got[0], gradients(reference, X, [])[0])


@pytest.mark.parametrize("x", [X, -X])
def test_branches(x):
    m = branch_model()
    swap_op(body_of(m, "true"), "Sin", tf.cos)
    swap_op(body_of(m, "false"), "Neg", tf.square)
    close(m.run(x=x)["y"], np.cos(x) if x.sum() > 0 else x**2)
    function = m.to_function()
    got = gradients(lambda x: function(x)["y"], x, [])
    close(got[0], -np.sin(x) if x.sum() > 0 else 2 * x)


def test_branches_of_a_case():
    m = case_model()
    body = m.functions[next(k for k in m.functions if "branch1" in k)]
    swap_op(body, "Cos", tf.square)
    for i, f in enumerate([np.sin, np.square, np.tan]):
        close(m.run(i=i, x=X)["y"], f(X))


def test_an_output_can_be_set():
    m = call_model()
    body = body_of(m, "f")
    with body.graph.as_default():
        new = body.inputs["x"] * 10.0
    body.outputs["identity"] = new
    close(m.run(x=X)["y"], 10 * X - 20 * X)


def test_a_variable_that_a_body_reads_becomes_an_argument(nested):
    m = nested.model
    w = tf.Variable(0.5, name="w")
    body = body_of(m, "inner")
    with body.graph.as_default():
        scaled = body.outputs["identity"] * w
    body.outputs["identity"] = scaled
    reference = lambda x: nested.reference(x, lambda x: tf.sin(x) * 2.0 * w)  # noqa: E731
    close(m.run(x=X)["y"], reference(X))
    assert any(v is w for v in m.variables.values())
    w.assign(0.25)
    close(m.run(x=X)["y"], reference(X))
    function = m.to_function()
    got = gradients(lambda x: function(x)["y"], X, [nested.v, w])
    for g, e in zip(got, gradients(reference, X, [nested.v, w]), strict=True):
        close(g, e)


def test_a_body_may_call_a_new_function(nested):
    @tf.function
    def helper(x):
        return tf.tanh(x)

    m = nested.model
    swap_op(body_of(m, "inner"), "Sin", helper)
    close(m.run(x=X)["y"], nested.reference(X, lambda x: tf.tanh(x) * 2.0))
    swap_op(body_of(m, "helper"), "Tanh", tf.cos)
    close(m.run(x=X)["y"], nested.reference(X, lambda x: tf.cos(x) * 2.0))


def test_models_of_one_function_are_apart(nested):
    other = model.open(nested.function, inline=False)
    swap_op(body_of(nested.model, "inner"), "Sin", tf.cos)
    close(other.run(x=X)["y"], nested.reference(X))
    swap_op(body_of(other, "inner"), "Sin", tf.tanh)
    close(nested.model.run(x=X)["y"], nested.reference(X, lambda x: tf.cos(x) * 2))
    close(other.run(x=X)["y"], nested.reference(X, lambda x: tf.tanh(x) * 2))


def graph_def_calling_f(function):
    """Return a GraphDef that calls a function named `f`, whatever it computes."""
    concrete = tf.function(function).get_concrete_function(X_SPEC)
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], "x")
        tf.identity(concrete(x), name="y")
    graph_def = graph.as_graph_def()
    (definition,) = graph_def.library.function
    definition.signature.name = "f"
    for node in graph_def.node:
        if "f" in node.attr:
            node.attr["f"].func.name = "f"
    return graph_def


def test_two_files_with_functions_of_one_name():
    models = [
        model.open(graph_def_calling_f(f), inline=False, inputs=["x"], outputs=["y"])
        for f in (tf.sin, tf.cos, tf.sin)
    ]
    assert [list(m.functions) for m in models] == [["f"]] * 3
    for m, f in zip(models, (np.sin, np.cos, np.sin), strict=True):
        close(m.run(x=X)["y"], f(X))
        got = gradients(lambda x: m.to_function()(x)["y"], X, [])  # noqa: B023
        close(got[0], np.cos(X) if f is np.sin else -np.sin(X))


def test_a_result_of_another_shape_is_refused():
    @tf.function
    def tile(x):
        return tf.tile(x, [1])

    @tf.function(input_signature=[X_SPEC])
    def function(x):
        return {"y": tile(x) + 1.0}

    m = model.open(function, inline=False)
    graph, body = m.graph, body_of(m, "tile")
    before = graph.as_graph_def()
    with body.graph.as_default():
        wide = tf.concat([body.outputs["identity"]] * 2, 0)
        twice = tf.constant([2])
    with pytest.raises(ModelError, match=r"'identity'.*\(2,\).*\(4,\)"):
        body.outputs["identity"] = wide
    multiples = op_of(body, "Tile").inputs[1]
    # TensorFlow does not infer the shape anew in the graph that is edited.
    ge.reroute_ts(twice, multiples)
    with pytest.raises(ModelError, match=r"'identity'.*\(2,\).*\(4,\)"):
        m.run(x=X)
    assert graph.as_graph_def() == before
    ge.reroute_ts(multiples, twice)
    close(m.run(x=X)["y"], X + 1)


def test_a_placeholder_without_a_value_is_refused(nested):
    m = nested.model
    graph, body = m.graph, body_of(m, "inner")
    before = graph.as_graph_def()
    with body.graph.as_default():
        hole = tf.compat.v1.placeholder(tf.float32, [2], "hole")
        new = body.outputs["identity"] + hole
    old = body.outputs["identity"]
    body.outputs["identity"] = new
    with pytest.raises(ModelError, match="'hole' is no input"):
        m.run(x=X)
    assert graph.as_graph_def() == before
    body.outputs["identity"] = old
    close(m.run(x=X)["y"], nested.reference(X))


def test_outputs_of_a_body_keep_their_number_and_dtype():
    m = call_model()
    body = body_of(m, "f")
    with body.graph.as_default():
        other = tf.cast(body.inputs["x"], tf.int32)
    with pytest.raises(ModelError, match="add_output"):
        body.outputs["new"] = body.inputs["x"]
    with pytest.raises(ModelError, match=r"int32.*cast"):
        body.outputs["identity"] = other
    with pytest.raises(ModelError, match="remove_output"):
        del body.outputs["identity"]
    with pytest.raises(KeyError):
        del body.outputs["no such output"]


@pytest.mark.parametrize("inline", [False, True])
def test_lstm(inline, tmp_path):
    keras = tf.keras
    keras.utils.set_random_seed(1)
    layers = [keras.Input([4, 3], name="x"), keras.layers.LSTM(5)]
    network = keras.Sequential(layers)
    x = np.random.default_rng(0).normal(size=[2, 4, 3]).astype(np.float32)
    m = model.open(network, inline=inline)
    (output,) = m.outputs
    close(m.run(x=x)[output], network(x))
    body = body_of(m, "while_body")
    tanh = [op for op in body.needed_ops() if op.type == "Tanh"]
    assert len(tanh) == 2
    for op in tanh:
        with body.graph.as_default():
            new = tf.nn.softsign(op.inputs[0])
        ge.reroute_ts(new, op.outputs[0])
    cell = {"activation": "softsign", "units": 5}
    softsign = keras.Sequential([layers[0], keras.layers.LSTM(**cell)])
    softsign.set_weights(network.get_weights())
    close(m.run(x=x)[output], softsign(x))
    again = model.open(m.save(tmp_path / "saved"), inline=inline)
    close(again.run(x=x)[output], softsign(x))
    function = m.to_function()
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(function(x)[output])
    weights = [v.value for v in network.trainable_variables]
    got = tape.gradient(y, weights)
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(softsign(x))
    expected = tape.gradient(y, [v.value for v in softsign.trainable_variables])
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-5)


def test_grouped_convolution():
    keras = tf.keras
    keras.utils.set_random_seed(1)
    network = keras.Sequential(
        [
            keras.Input([6, 6, 4], name="x"),
            keras.layers.Conv2D(4, 3, groups=2, use_bias=False),
        ]
    )
    x = np.random.default_rng(0).normal(size=[2, 6, 6, 4]).astype(np.float32)
    m = model.open(network, inline=False)
    (output,) = m.outputs
    close(m.run(x=x)[output], network(x))
    convs = [
        b
        for b in m.functions.values()
        if any(op.type == "Conv2D" for op in b.needed_ops())
    ]
    assert convs
    for body in convs:
        swap_op(body, "Conv2D", lambda x, k: tf.nn.relu(tf.nn.conv2d(x, k, 1, "VALID")))
    close(m.run(x=x)[output], tf.nn.relu(network(x)))


def test_an_op_whose_type_is_a_function():
    graph_def = graph_def_calling_f(tf.sin)
    definition = graph_def.library.function[0]
    definition.signature.name = "LegacyCall"
    for node in graph_def.node:
        if node.op.endswith("PartitionedCall"):
            node.op = "LegacyCall"
            node.attr.clear()
    m = model.open(graph_def, inline=False, inputs=["x"], outputs=["y"])
    assert list(m.functions) == ["LegacyCall"]
    body = m.functions["LegacyCall"]
    swap_op(body, "Sin", tf.cos)
    close(m.run(x=X)["y"], np.cos(X))
    factor = body.add_input("k", tf.float32, [], value=2.0)
    swap_op(body, "Cos", lambda x: tf.cos(x) * factor)
    close(m.run(x=X)["y"], 2 * np.cos(X))


def test_a_function_that_calls_itself_is_refused():
    """TensorFlow dies of such a graph; so nothing may try to import it."""
    graph_def = graph_def_calling_f(tf.sin)
    (definition,) = graph_def.library.function
    call = definition.node_def.add(name="again", op="PartitionedCall", input=["x"])
    (caller,) = (node for node in graph_def.node if "f" in node.attr)
    for name in ("f", "Tin", "Tout"):
        call.attr[name].CopyFrom(caller.attr[name])
    with pytest.raises(ModelError, match="wait for each other"):
        model.open(graph_def, inline=False, inputs=["x"], outputs=["y"])
