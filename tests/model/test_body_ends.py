"""Arguments and results of functions, added and removed with all callers updated."""

from __future__ import annotations

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


def slope(function, x):
    return gradients(function, x, [])[0]


def scale_result(body, name, factor):
    with body.graph.as_default():
        scaled = body.outputs[name] * factor
    body.outputs[name] = scaled


def test_an_input_for_every_caller(tmp_path):
    nested = Nested()
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
    loaded = tf.saved_model.load(str(path)).signatures["serving_default"]
    close(loaded(x=tf.constant(X))["y"], reference(X))
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
        (X, -X, -np.ones(2), X - 1),
    ):
        close(m.run(x=x)["y"], y)
        close(m.run(x=x)["more"], more)
        close(slope(lambda x: run(x)["y"], x), dy)
    del m.outputs["more"]
    give_zeros_instead_of(added)
    other.remove_output("more")
    assert len(then.outputs) == len(other.outputs) == 1
    close(m.run(x=X)["y"], -X)


def test_ends_of_a_case():
    m = case_model()
    keys = [key for key in m.functions if "branch" in key]
    bodies = [m.functions[key] for key in keys]
    k = bodies[1].add_input("k", tf.float32, [], value=lambda op: op.inputs[1][0])
    scale_result(bodies[1], next(iter(bodies[1].outputs)), k)
    tensors = {}
    for key, body in zip(keys, bodies, strict=True):
        tensors[key] = next(iter(body.inputs.values()))
    (added,) = bodies[0].add_output("x", tensors)
    m.outputs["same"] = added
    for i, f in enumerate([np.sin, lambda x: np.cos(x) * x[0], np.tan]):
        result = m.run(i=i, x=X)
        close(result["y"], f(X))
        close(result["same"], X)


def test_an_input_that_passes_a_loop_to_a_function_within():
    nested = Nested()
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
