"""Bodies of functions as models: what is edited in them reaches all callers."""

from functools import partial

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
    close,
    everything,
    gradients,
    key_of,
    loop_model,
    op_of,
    swap_op,
)
from tests.model.round_trips import loaded_function


@pytest.fixture
def nested():
    return Nested()


def slope(function, x):
    return gradients(function, x)[0]


def scale_result(body, name, factor):
    with body.graph.as_default():
        scaled = body.outputs[name] * factor
    body.outputs[name] = scaled


def test_functions_are_listed_callers_first_and_are_models(nested):
    before = nested.model.graph.as_graph_def()
    assert all(body.graph is not None for body in nested.model.functions.values())
    assert nested.model.graph.as_graph_def() == before
    keys = list(nested.model.functions)
    assert len(keys) == len(set(keys)) == len(nested.model.functions) == 6
    inner, outer = key_of(nested.model, "inner"), key_of(nested.model, "outer")
    assert keys.index(outer) < keys.index(inner)
    assert list(nested.model.functions) == keys
    graph_def = nested.function.get_concrete_function().graph.as_graph_def()
    assert set(keys) == {f.signature.name for f in graph_def.library.function}
    body = body_of(nested.model, "outer")
    assert isinstance(body, model.Model)
    # What several call is shared.
    (key,) = body.functions
    assert body.functions[key] is nested.model.functions[key]
    assert len({op.name for op in body_of(nested.model, "inner").callers}) == 3
    assert {op.type for op in body_of(nested.model, "while_body").callers} == {"While"}
    with pytest.raises(KeyError):
        nested.model.functions["no such function"]


def test_a_body_runs_and_is_saved_alone(nested, tmp_path):
    body = body_of(nested.model, "inner")
    close(body.run(x=X)["identity"], np.sin(X) * 2)
    close(slope(lambda x: body.to_function()(x)["identity"], X), 2 * np.cos(X))
    loaded = loaded_function(body.save(tmp_path / "inner"), body.signature)
    close(loaded(x=X)["identity"], np.sin(X) * 2)


def test_a_body_that_reads_a_resource_does_not_run_alone(nested):
    body = body_of(nested.model, "outer")
    with pytest.raises(ModelError, match=r"resource.*run the model that calls"):
        body.run(x=X)
    with pytest.raises(ModelError, match="resource"):
        body.to_function()


def test_an_edit_reaches_all_callers_and_gradients(nested):
    m, keys = nested.model, sorted(nested.model.functions)
    for new, reference in [
        (None, lambda x: tf.sin(x) * 2.0),
        (("Sin", tf.cos), lambda x: tf.cos(x) * 2.0),
        (("Cos", tf.tanh), lambda x: tf.tanh(x) * 2.0),
    ]:
        if new is not None:
            swap_op(body_of(m, "inner"), *new)
        expected = partial(nested.reference, inner=reference)
        for x in (X, -X):
            close(m.run(x=x)["y"], expected(x))
        assert sorted(m.functions) == keys
        function = m.to_function()
        got = gradients(lambda x: function(x)["y"], X, [nested.v])  # noqa: B023
        for g, e in zip(got, gradients(expected, X, [nested.v]), strict=True):
            close(g, e)


def test_an_edit_of_a_caller_and_its_callee(nested):
    m = nested.model
    before = {f.signature.name for f in m.graph.as_graph_def().library.function}
    swap_op(body_of(m, "outer"), "AddV2", tf.subtract)
    # Functions that did not change keep their names.
    called = {
        op.get_attr("f").name
        for op in m.graph.get_operations()
        if op.type.endswith("PartitionedCall")
    }
    assert called.isdisjoint(before)
    (loop,) = (op for op in m.graph.get_operations() if op.type == "While")
    assert loop.get_attr("body").name in before
    swap_op(body_of(m, "inner"), "Sin", tf.cos)
    inner = lambda x: tf.cos(x) * 2.0  # noqa: E731
    y = inner(X) - nested.v
    for _ in range(3):
        y = inner(y) + nested.v
    close(m.run(x=X)["y"], inner(y) if tf.reduce_sum(y) > 0 else y)


def test_second_gradients_in_a_graph_with_several_calls():
    m = call_model()
    swap_op(body_of(m, "f"), "Exp", tf.sin)
    function = tf.function(m.to_function())

    def edited(x):
        return function(x)["y"]

    def reference(x):
        return 3.0 * tf.sin(x) - 4.0 * tf.sin(2.0 * x)

    close(slope(edited, X), slope(reference, X))
    close(slope(lambda x: slope(edited, x), X), slope(lambda x: slope(reference, x), X))


def test_the_graph_is_never_behind_its_bodies(nested):
    body = body_of(nested.model, "outer")
    swap_op(body_of(nested.model, "inner"), "Sin", tf.tan)
    graph_def = body.graph.as_graph_def()
    (name,) = (n.attr["f"].func.name for n in graph_def.node if "f" in n.attr)
    (definition,) = (f for f in graph_def.library.function if f.signature.name == name)
    assert "Tan" in {n.op for n in definition.node_def}


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
    again = model.open(m.save(tmp_path / "unedited"), inline=False)
    np.testing.assert_array_equal(again.run(x=X)["y"], m.run(x=X)["y"])
    swap_op(body_of(m, "inner"), "Sin", tf.cos)
    expected = nested.reference(X, lambda x: tf.cos(x) * 2.0)
    path = m.save(tmp_path / "saved")
    close(loaded_function(path)(x=X)["y"], expected)
    again = model.open(path, inline=False)
    close(again.run(x=X)["y"], expected)
    swap_op(body_of(again, "inner"), "Cos", tf.sin)
    close(again.run(x=X)["y"], nested.reference(X))
    function = again.to_function()
    close(slope(lambda x: function(x)["y"], X), slope(nested.reference, X))
    assert len(m.derived(m.program()).functions) == len(m.functions)


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


def test_a_variable_that_a_body_reads_becomes_an_argument(nested):
    m = nested.model
    w = tf.Variable(0.5, name="w")
    scale_result(body_of(m, "inner"), "identity", w)
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


def test_an_output_can_be_set_to_one_of_its_dtype():
    m = call_model()
    body = body_of(m, "f")
    with body.graph.as_default():
        new = body.inputs["x"] * 10.0
        other = tf.cast(body.inputs["x"], tf.int32)
    with pytest.raises(ModelError, match="add_output"):
        body.outputs["new"] = body.inputs["x"]
    with pytest.raises(ModelError, match=r"int32.*cast"):
        body.outputs["identity"] = other
    with pytest.raises(ModelError, match="remove_output"):
        del body.outputs["identity"]
    with pytest.raises(KeyError):
        del body.outputs["no such output"]
    body.outputs["identity"] = new
    close(m.run(x=X)["y"], 10 * X - 20 * X)


def test_lstm(tmp_path):
    keras = tf.keras
    keras.utils.set_random_seed(1)
    layers = [keras.Input([4, 3], name="x"), keras.layers.LSTM(5)]
    network = keras.Sequential(layers)
    x = np.random.default_rng(0).normal(size=[2, 4, 3]).astype(np.float32)
    m = model.open(network, inline=False)
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
    again = model.open(m.save(tmp_path / "saved"))
    close(again.run(x=x)[output], softsign(x))


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


# -- arguments and results, added and removed with all callers updated -----------------


def test_an_input_for_every_caller(nested, tmp_path):
    m, body = nested.model, body_of(nested.model, "inner")
    factor = body.add_input("factor", tf.float32, [], value=5.0)
    assert list(body.inputs) == ["x", "factor"]
    assert body.inputs["factor"] is factor
    close(m.run(x=X)["y"], nested.reference(X))
    scale_result(body, "identity", factor)
    for graph in (m.graph, *(body.graph for body in m.functions.values())):
        ge.verify(graph)
    reference = lambda x: nested.reference(x, lambda x: tf.sin(x) * 10.0)  # noqa: E731
    close(m.run(x=X)["y"], reference(X))
    close(slope(lambda x: m.to_function()(x)["y"], X), slope(reference, X))
    close(m.derived(m.program()).run(x=X)["y"], reference(X))
    path = m.save(tmp_path / "saved")
    close(loaded_function(path)(x=X)["y"], reference(X))
    close(model.open(path).run(x=X)["y"], reference(X))


def test_values_of_an_input():
    values = [
        np.float32(5),
        tf.constant(5.0),
        tf.Variable(5.0),
        lambda op: tf.constant(5.0, name="five"),
        lambda op: 5.0,
        lambda op: op.graph.get_tensor_by_name("Const:0") + 2.0,
    ]
    m = call_model()
    body = body_of(m, "f")
    for number, value in enumerate(values):
        factor = body.add_input(f"k{number}", tf.float32, [], value=value)
        scale_result(body, "identity", factor)
    close(m.run(x=X)["y"], 5**6 * (3 * np.exp(X) - 4 * np.exp(2 * X)))


def test_an_input_from_each_caller():
    m = call_model()
    body = body_of(m, "f")
    first, second = body.callers
    value = {first: 10.0, second: lambda op: op.inputs[0] * 2.0}
    added = body.add_input("added", tf.float32, None, value=value)
    assert [t.consumers() for op in (first, second) for t in op.outputs] == [[]] * 4
    by_name = dict(zip([op.name for op in body.callers], (1.0, 2.0), strict=True))
    named = body.add_input("named", tf.float32, [], value=by_name)
    with body.graph.as_default():
        total = body.outputs["identity"] + added + named
    body.outputs["identity"] = total
    close(m.run(x=X)["y"], np.exp(X) * 3 + 11 - (np.exp(2 * X) * 4 + 4 * X + 2))
    assert [len(op.inputs) for op in body.callers] == [4, 4]


def test_callers_keep_devices_control_edges_and_effects():
    v = tf.Variable(1.0)

    @tf.function
    def count(x):
        v.assign_add(1.0)
        return x * 2.0

    @tf.function(input_signature=[X_SPEC])
    def function(x):
        with tf.device("/cpu:0"):
            y = count(x)
        return {"y": y + v}

    m = model.open(function, inline=False)
    (old,) = body_of(m, "count").callers
    before = [op.name for op in old.graph.get_operations() if old in op.control_inputs]
    assert before and old.device
    body_of(m, "count").add_input("k", tf.float32, [], value=1.0)
    (new,) = body_of(m, "count").callers
    after = [op.name for op in new.graph.get_operations() if new in op.control_inputs]
    assert (after, new.device) == (before, old.device)
    assert new.name.startswith(old.name)
    close(m.run(x=X)["y"], X * 2 + 2)
    assert v.numpy() == 2


def test_inputs_are_removed():
    m = call_model()
    body = body_of(m, "f")
    with body.graph.as_default():
        body.outputs["identity"] = tf.exp(body.inputs["x"])
    body.remove_input("k")
    assert list(body.inputs) == ["x"]
    assert all(len(op.inputs) == 1 for op in body.callers)
    close(m.run(x=X)["y"], np.exp(X) - np.exp(2 * X))
    close(m.run(x=X)["z"], -X)
    # Also the only one.
    with body.graph.as_default():
        for name in ("identity", "identity_1"):
            body.outputs[name] = tf.constant([1.0, 2.0])
    body.remove_input("x")
    close(m.run(x=X)["y"], [0, 0])
    close(m.run(x=X)["z"], [1, 2])


def test_an_output_of_a_call():
    m = call_model()
    body = body_of(m, "f")
    with body.graph.as_default():
        square = tf.square(body.inputs["x"])
    added = body.add_output("square", square)
    assert [t.op for t in added] == list(body.callers)
    assert list(body.outputs) == ["identity", "identity_1", "square"]
    with m.graph.as_default():
        m.outputs["s"] = added[0] + added[1]
    close(m.run(x=X)["s"], 5 * X**2)
    close(m.run(x=X)["y"], np.exp(X) * 3 - np.exp(2 * X) * 4)
    close(slope(lambda x: m.to_function()(x)["s"], X), 10 * X)
    del m.outputs["z"]
    for op in body.callers:
        give_zeros_instead_of(op.outputs[1])
    body.remove_output("identity_1")
    assert list(body.outputs) == ["identity", "square"]
    close(m.run(x=X)["y"], np.exp(X) * 3 - np.exp(2 * X) * 4)
    close(m.run(x=X)["s"], 5 * X**2)


def give_zeros_instead_of(t):
    with t.graph.as_default():
        ge.reroute_ts(tf.constant(0.0, shape=[2]), t)


def test_a_loop_variable_is_added():
    m = loop_model()
    body, cond = body_of(m, "body"), body_of(m, "cond")
    factor = body.add_input("factor", tf.float32, [], value=2.0)
    assert list(cond.inputs)[-1] == list(body.inputs)[-1] == "factor"
    assert list(body.outputs.values())[-1] is factor
    (loop,) = body.callers
    assert len(loop.inputs) == len(loop.outputs) == len(body.inputs)
    swap_op(body, "Cos", lambda y: tf.cos(y) * factor)
    y = X
    for _ in range(3):
        y = np.cos(y) * 2
    close(m.run(x=X)["y"], y)

    def reference(x):
        for _ in range(3):
            x = tf.cos(x) * 2.0
        return x

    close(slope(lambda x: m.to_function()(x)["y"], X), slope(reference, X))
    # The new variable may change from round to round.
    with body.graph.as_default():
        body.outputs["factor"] = factor + 1.0
    y = X
    for k in (2, 3, 4):
        y = np.cos(y) * k
    close(m.run(x=X)["y"], y)


def test_a_loop_variable_for_the_condition_and_one_that_is_removed():
    m = loop_model()
    limit = body_of(m, "cond").add_input("limit", tf.int32, [], value=5)
    cond = body_of(m, "cond")
    with cond.graph.as_default():
        i = list(cond.inputs.values())[2]
        cond.outputs[next(iter(cond.outputs))] = tf.less(i, limit)
    y = X
    for _ in range(5):
        y = np.cos(y)
    close(m.run(x=X)["y"], y)
    body = body_of(m, "body")
    (loop,) = body.callers
    five = next(i for i, t in enumerate(loop.inputs) if t.op.name == "five")
    before = len(loop.inputs)
    body.remove_input(list(body.inputs)[five])
    (loop,) = body.callers
    assert len(loop.inputs) == len(loop.outputs) == before - 1
    assert len(body_of(m, "cond").inputs) == before - 1
    results = m.run(x=X)
    close(results["y"], y)
    close(results["unused"], [5, 6])


def test_ends_of_all_branches():
    m = branch_model()
    then, other = body_of(m, "true"), body_of(m, "false")
    factor = then.add_input("factor", tf.float32, [], value=3.0)
    assert list(other.inputs)[-1] == "factor"
    scale_result(then, next(iter(then.outputs)), factor)
    swap_op(other, "Neg", tf.square)
    with then.graph.as_default():
        a = next(iter(then.inputs.values())) + 1.0
    with other.graph.as_default():
        b = next(iter(other.inputs.values())) - 1.0
    keys = key_of(m, "true"), key_of(m, "false")
    (added,) = then.add_output("more", dict(zip(keys, (a, b), strict=True)))
    m.outputs["more"] = added
    run = m.to_function()
    for x, y, dy, more in (
        (-X, -3 * np.sin(X), 3 * np.cos(X), 1 - X),
        (X, X**2, 2 * X, X - 1),
    ):
        close(m.run(x=x)["y"], y)
        close(m.run(x=x)["more"], more)
        close(slope(lambda x: run(x)["y"], x), dy)
    del m.outputs["more"]
    give_zeros_instead_of(added)
    other.remove_output("more")
    assert len(then.outputs) == len(other.outputs) == 1
    close(m.run(x=X)["y"], X**2)


def test_ends_of_a_case():
    m = case_model()
    keys = [key for key in m.functions if "branch" in key]
    bodies = [m.functions[key] for key in keys]
    k = bodies[1].add_input("k", tf.float32, [], value=lambda op: op.inputs[1][0])
    scale_result(bodies[1], next(iter(bodies[1].outputs)), k)
    swap_op(bodies[1], "Cos", tf.square)
    tensors = {}
    for key, body in zip(keys, bodies, strict=True):
        tensors[key] = next(iter(body.inputs.values()))
    (added,) = bodies[0].add_output("x", tensors)
    m.outputs["same"] = added
    for i, f in enumerate([np.sin, lambda x: x**2 * x[0], np.tan]):
        result = m.run(i=i, x=X)
        close(result["y"], f(X))
        close(result["same"], X)


def test_an_input_that_passes_a_loop_to_a_function_within(nested):
    m = nested.model
    loop = body_of(m, "while_body")
    outer = loop.add_input("outer_factor", tf.float32, [], value=7.0)
    inner = body_of(m, "inner")
    value = lambda op: outer if op.graph is outer.graph else tf.constant(1.0)  # noqa: E731
    factor = inner.add_input("factor", tf.float32, [], value=value)
    scale_result(inner, "identity", factor)

    def reference(x):
        y = tf.sin(x) * 2.0 + nested.v
        for _ in range(3):
            y = tf.sin(y) * 14.0 + nested.v
        return tf.sin(y) * 2.0 if tf.reduce_sum(y) > 0 else y

    close(m.run(x=X)["y"], reference(X))
    close(slope(lambda x: m.to_function()(x)["y"], X), slope(reference, X))


def refused(m, message, change):
    """Check that a change is refused and leaves everything as it was."""
    for key in m.functions:
        assert m.functions[key].graph is not None
    before = everything(m)
    with pytest.raises(ModelError, match=message):
        change()
    assert everything(m) == before


OTHER = tf.Graph()
with OTHER.as_default():
    FOREIGN = tf.compat.v1.placeholder(tf.float32, [])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", 1.0, "has an input 'x' already"),
        ("new", "text", "str cannot be passed as input 'new' \\(float32\\)"),
        ("new", [1.0, 2.0], r"shape \(2,\) cannot be passed.*\(\)"),
        ("new", {"no caller": 1.0}, "no value for the caller 'PartitionedCall'"),
        ("new", FOREIGN, "another graph"),
        ("new", lambda op: FOREIGN, "another graph"),
        ("new", lambda op: op.inputs[0], r"shape \(2,\)"),
    ],
)
def test_refused_inputs(name, value, message):
    m = call_model()
    body = body_of(m, "f")
    refused(m, message, lambda: body.add_input(name, tf.float32, [], value=value))


def test_an_input_that_is_read_or_returned_stays_and_no_call_reads_itself():
    m = call_model()
    body = body_of(m, "f")
    mul = op_of(body, "Mul").name
    message = rf"'k' of function '.*f.*' is still read by \['{mul}'\]"
    refused(m, message, lambda: body.remove_input("k"))
    refused(m, "has no input 'nothing'", lambda: body.remove_input("nothing"))
    add_own_result = partial(body.add_input, value=lambda op: op.outputs[0])
    message = "depends on what 'PartitionedCall"
    refused(m, message, lambda: add_own_result("new", tf.float32, [2]))
    body.outputs["identity"] = body.inputs["x"]
    refused(m, r"'x'.* read by .*output 'identity'", lambda: body.remove_input("x"))


def test_a_loop_variable_that_is_read_or_changes_stays():
    m = loop_model()
    body, cond = body_of(m, "body"), body_of(m, "cond")
    names, output = list(body.inputs), list(body.outputs)[4]
    for index in (2, 3):
        refused(m, "is still read by", lambda i=index: body.remove_input(names[i]))
    with body.graph.as_default():
        body.outputs[output] = tf.constant([0.0, 0.0], name="reset")
    refused(m, "reset.*another value", lambda: body.remove_input(names[4]))
    body.outputs[output] = body.inputs[names[4]]
    name = next(iter(cond.outputs))
    with cond.graph.as_default():
        positive = tf.reduce_all(list(cond.inputs.values())[4] > 0, name="all_positive")
        cond.outputs[name] = tf.logical_and(cond.outputs[name], positive)
    refused(m, "Greater|all_positive", lambda: body.remove_input(names[4]))


def test_an_input_that_another_branch_reads_and_the_only_output_stay():
    m = branch_model()
    then, other = body_of(m, "true"), body_of(m, "false")
    (result,) = then.outputs
    refused(m, "only output", lambda: then.remove_output(result))
    neg = op_of(other, "Neg").name
    with then.graph.as_default():
        then.outputs[result] = tf.ones([2])
    message = rf"function '.*false.*' is still read by \['{neg}'\]"
    refused(m, message, lambda: then.remove_input(next(iter(then.inputs))))


def test_refused_outputs():
    m = call_model()
    body = body_of(m, "f")
    with m.graph.as_default():
        outside = tf.constant(1.0)
    x = body.inputs["x"]
    for name, value, message in (
        ("identity", x, "output 'identity' already"),
        ("new", outside, "no tensor of Body"),
        ("new", {body.signature: x, "other": x}, "none of the branches"),
    ):
        refused(m, message, lambda n=name, v=value: body.add_output(n, v))
    message = r"returns output 'identity_1'.*read it"
    refused(m, message, lambda: body.remove_output("identity_1"))
    refused(m, "has no output 'new'", lambda: body.remove_output("new"))


def test_an_output_is_given_for_all_branches():
    m = branch_model()
    then, other = body_of(m, "true"), body_of(m, "false")
    x, y = next(iter(then.inputs.values())), next(iter(other.inputs.values()))
    with other.graph.as_default():
        whole = tf.cast(y, tf.int32)
    refused(m, rf"\['{other.signature}'\] lack it", lambda: then.add_output("new", x))
    refused(
        m,
        "branches return the same dtypes",
        lambda: then.add_output("new", {then.signature: x, other.signature: whole}),
    )


def test_outputs_of_a_loop_follow_its_inputs():
    m = loop_model()
    for body in (body_of(m, "body"), body_of(m, "cond")):
        x = next(iter(body.inputs.values()))
        refused(m, "use add_input", lambda b=body, x=x: b.add_output("new", x))
    body = body_of(m, "body")
    refused(m, "use remove_input", lambda: body.remove_output(list(body.outputs)[3]))


def test_other_ops_that_call_are_refused():
    @tf.function
    def f(x):
        return x * 2.0

    f.get_concrete_function(tf.TensorSpec([]))

    @tf.function(input_signature=[X_SPEC])
    def function(x):
        return {
            "y": tf.map_fn(f, x),
            "n": tf.raw_ops.RemoteCall(
                target="/cpu:0",
                args=[x],
                Tout=[tf.float32],
                f=tf.function(tf.exp).get_concrete_function(X_SPEC),
            )[0],
        }

    m = model.open(function, inline=False)
    body = body_of(m, "exp")
    refused(m, "RemoteCall", lambda: body.add_input("k", tf.float32, [], value=1.0))
    swap_op(body, "Exp", tf.cos)
    close(m.run(x=X)["n"], np.cos(X))
