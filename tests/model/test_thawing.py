"""Thawing: constants become variables that can be trained."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
import tensorflow as tf

from geutil import errors, model
from tests.model import test_freezing
from tests.model.body_samples import gradients
from tests.model.frozen_samples import (
    SAMPLES,
    floats,
    optimizer_off,
    variable,
    version_1_loop,
)
from tests.model.test_freezing import FLOATS, assert_same, run


@pytest.fixture(autouse=True)
def exactly():
    with optimizer_off():
        yield


def frozen_graph() -> tf.Graph:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 3], "x")
        w = tf.constant(floats(3, 2), name="layer/weights")
        b = tf.constant([1.0, -1.0], name="layer/bias")
        hidden = tf.nn.bias_add(tf.matmul(x, w), b)
        tf.identity(tf.reshape(hidden, tf.constant([-1, 1, 2], name="shape")), name="y")
    return graph


def trained(function, x, goal, steps, rate) -> list[float]:
    losses = []
    for _ in range(steps):
        with tf.GradientTape() as tape:
            (y,) = function(x).values()
            loss = tf.reduce_mean((y - goal) ** 2)
        slopes = tape.gradient(loss, function.trainable_variables)
        for v, slope in zip(function.trainable_variables, slopes, strict=True):
            v.assign_sub(rate * slope)
        losses.append(float(loss))
    return losses


def test_values_names_and_results_stay():
    opened = model.open(frozen_graph())
    thawed = opened.thaw("weights|bias")
    assert list(thawed.variables) == ["layer/weights", "layer/bias"]
    assert all(v.trainable for v in thawed.variables.values())
    assert_same([thawed.variables["layer/weights"].numpy()], [floats(3, 2)])
    assert_same(run(thawed, floats()), run(opened, floats()))
    assert not opened.variables
    kinds = [op.type for op in thawed.graph.get_operations()]
    assert kinds.count("ReadVariableOp") == 2


def test_gradients_are_those_of_the_formula():
    thawed = model.open(frozen_graph()).thaw(re.compile("WEIGHTS", re.IGNORECASE))
    x, weights = floats(), thawed.variables["layer/weights"]
    _, slope = gradients(lambda x: thawed.to_function()(x)["y"], x, [weights])
    expected = np.repeat(x.sum(axis=0)[:, None], 2, axis=1)
    np.testing.assert_allclose(slope, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "rate", "format"), [("cnn", 1e-7, "pbtxt"), ("lstm", 0.1, "graph_def")]
)
def test_open_thaw_train_freeze_save(tmp_path, name, rate, format):
    sample = SAMPLES[name]()
    suffix = "pb" if format == "graph_def" else "pbtxt"
    first, second = tmp_path / f"first.{suffix}", tmp_path / f"second.{suffix}"
    model.open(sample.source).save(first, format)
    names = [v.path for v in sample.source.trainable_variables]
    regex = "|".join(f"^{re.escape(n)}$" for n in names)
    thawed = model.open(first).thaw(regex)
    assert sorted(thawed.variables) == sorted(names)
    assert_same(run(thawed, sample.value), sample.expected())
    losses = trained(thawed.to_function(), sample.value, 0.5, steps=5, rate=rate)
    assert losses[-1] < losses[0]
    # What was trained is in the file: TensorFlow alone computes the same from it.
    expected = run(thawed, sample.value)
    thawed.freeze().save(second, format)
    assert_same(run(model.open(second), sample.value), expected)
    assert not np.array_equal(expected[0], sample.expected()[0])


def test_freeze_gives_constants_their_names_back():
    opened = model.open(frozen_graph())
    again = opened.thaw("weights").freeze()
    before = opened.graph.get_operation_by_name("layer/weights")
    after = again.graph.get_operation_by_name("layer/weights")
    assert after.type == "Const"
    assert after.get_attr("value").tensor_shape == before.get_attr("value").tensor_shape
    assert_same(run(again, floats()), run(opened, floats()))


def test_signatures_share_the_variable_again(tmp_path):
    root = tf.Module()
    root.v = variable(3)
    first = tf.function(lambda x: {"y": x * root.v}, input_signature=[FLOATS])
    second = tf.function(lambda x: {"z": x + root.v}, input_signature=[FLOATS])
    tf.saved_model.save(
        root, str(tmp_path / "m"), {"serving_default": first, "other": second}
    )
    frozen = model.open(tmp_path / "m").freeze()
    (name,) = [op.name for op in frozen.graph.get_operations() if op.type == "Const"]
    thawed = frozen.thaw(f"^{re.escape(name)}$")
    (v,) = thawed.variables.values()
    v.assign([1.0, 2.0, 3.0])
    assert_same([thawed.run(x=floats())["y"]], [floats() * v.numpy()])
    other = thawed.signatures["other"]
    assert_same([other.run(x=floats())["z"]], [floats() + v.numpy()])


def test_an_output_that_is_a_constant_follows():
    with tf.Graph().as_default() as graph:
        tf.constant(2.0, name="c")
    thawed = model.open(graph, outputs=["c"]).thaw("c")
    thawed.variables["c"].assign(3.0)
    assert thawed.run()["c"] == 3


def test_control_inputs_of_and_on_a_constant_stay_in_order():
    graph_def = tf.compat.v1.GraphDef()
    x = graph_def.node.add(name="x", op="Placeholder")
    x.attr["dtype"].type = tf.float32.as_datatype_enum
    before = graph_def.node.add(name="before", op="Identity", input=["x"])
    before.attr["T"].type = tf.float32.as_datatype_enum
    for name, waits in (("a", ["^before"]), ("b", ["^a"])):
        node = graph_def.node.add(name=name, op="Const", input=waits)
        node.attr["dtype"].type = tf.float32.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(4.0))
    total = graph_def.node.add(name="y", op="AddV2", input=["a", "b", "^b"])
    total.attr["T"].type = tf.float32.as_datatype_enum
    thawed = model.open(graph_def, outputs=["y"]).thaw("^[ab]$")
    assert list(thawed.variables) == ["a", "b"]
    assert thawed.run(x=1.0)["y"] == 8
    read = thawed.graph.get_operation_by_name("b/ReadVariableOp")
    assert [op.name for op in read.control_inputs] == ["a/ReadVariableOp"]


def test_floating_and_complex_dtypes():
    dtypes = tf.half, tf.bfloat16, tf.float64, tf.complex64, tf.complex128
    values = {d.name: tf.constant([1.5, -2.0], d).numpy() for d in dtypes}
    with tf.Graph().as_default() as graph:
        for name, value in values.items():
            tf.identity(tf.constant(value, name=f"c_{name}"), name=name)
    thawed = model.open(graph).thaw("^c_")
    found = thawed.run()
    assert list(thawed.variables) == [f"c_{name}" for name in values]
    for name, value in values.items():
        assert thawed.variables[f"c_{name}"].dtype == name
        assert_same([found[name]], [value])


def test_what_stays_a_constant_is_logged(caplog):
    with caplog.at_level(logging.INFO, "geutil"):
        thawed = model.open(frozen_graph()).thaw("")
    assert list(thawed.variables) == ["layer/weights", "layer/bias"]
    assert "'shape' (int32" in caplog.text


def refused(opened, regex, *words: str, error=None) -> None:
    test_freezing.refused(opened, *words, method="thaw", given=[regex], error=error)


def test_no_match_is_refused_with_candidates():
    opened = model.open(frozen_graph())
    refused(opened, "kernel", "'layer/weights'", "2 could")
    refused(opened, "^shape$", "'shape' (int32", "as_default()")
    for regex in ("(", 3, None):
        refused(opened, regex, error=errors.SelectionError)
    with tf.Graph().as_default() as graph:
        tf.identity(tf.compat.v1.placeholder(tf.float32, [], "x"), name="y")
    refused(model.open(graph), "", "0 could")


def test_a_constant_that_nothing_needs_is_no_candidate():
    opened = model.open(frozen_graph())
    with opened.graph.as_default():
        tf.constant(1.0, name="loose")
    refused(opened, "loose", "no constant")


def test_constants_in_a_loop_of_version_1_stay():
    graph, _ = version_1_loop()
    with graph.as_default():
        inside = next(
            op
            for op in graph.get_operations()
            if op.type == "Const" and op.control_inputs
        )
    graph_def = graph.as_graph_def()
    node = next(n for n in graph_def.node if n.name == inside.name)
    assert node.attr["dtype"].type == tf.int32.as_datatype_enum
    node.name = "kept"
    for other in graph_def.node:
        for i, text in enumerate(other.input):
            if text == inside.name:
                other.input[i] = "kept_as_int"
    node.attr["dtype"].type = tf.float32.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(1.0))
    cast = graph_def.node.add(name="kept_as_int", op="Cast", input=["kept"])
    cast.attr["SrcT"].type = tf.float32.as_datatype_enum
    cast.attr["DstT"].type = tf.int32.as_datatype_enum
    refused(model.open(graph_def, outputs=["y"]), "^kept$", "'kept' (in a loop")
