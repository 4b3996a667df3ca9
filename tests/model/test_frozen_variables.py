"""Freezing: variables become constants, wherever they are read; and thawing."""

import logging
import re
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from geutil import errors, model
from geutil.graph import creation
from geutil.model import frozen_variables
from geutil.model.frozen_variables import replace_handles
from geutil.model.variable_nodes import HandleValue
from tests.model.body_samples import gradients
from tests.model.frozen_samples import (
    FLOATS,
    SAMPLES,
    floats,
    of_function,
    optimizer_off,
    variable,
    version_1_loop,
)
from tests.model.refusal_tables import not_refused
from tests.model.small_models import save_two_signatures
from tests.thorough import crossed, length

VARIABLE_OPS = {
    "VarHandleOp",
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VariableShape",
    "VarIsInitializedOp",
}


@pytest.fixture(autouse=True)
def exactly():
    with optimizer_off():
        yield


def run(m, value):
    results = m.run(**{next(iter(m.inputs)): value})
    return [results[name] for name in sorted(results)]


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if a.dtype == object:
            assert a.tolist() == b.tolist()
        else:
            assert a.tobytes() == b.tobytes()


def all_nodes(m):
    graph_def = m.graph.as_graph_def()
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def serialized(m):
    return m.program().graph_def.SerializeToString(deterministic=True)


def gradient(m, sample):
    def loss(x):
        return tf.add_n([tf.reduce_sum(t**2) for t in m.to_function()(x).values()])

    return gradients(loss, sample.value, [])[0].numpy()


@pytest.mark.parametrize(
    ("name", "inline"), crossed(SAMPLES, [True, False], together=1)
)
def test_values_stay_bit_for_bit_and_nothing_reads_a_variable(name, inline):
    sample = SAMPLES[name]()
    opened = model.open(sample.source, inline=inline)
    before, variables = serialized(opened), dict(opened.variables)
    frozen = opened.freeze()
    expected = sample.expected()
    assert_same(run(frozen, sample.value), expected)
    assert_same(run(frozen.freeze(), sample.value), expected)
    assert not frozen.variables
    assert not frozen.to_function().variables
    assert not frozen.concrete_function().captured_inputs
    assert not {node.op for node in all_nodes(frozen)} & VARIABLE_OPS
    for function in frozen.graph.as_graph_def().library.function:
        arguments = function.signature.input_arg
        assert tf.resource.as_datatype_enum not in [a.type for a in arguments]
    # The model itself is unchanged.
    assert serialized(opened) == before
    assert {n: id(v) for n, v in opened.variables.items()} == {
        n: id(v) for n, v in variables.items()
    }
    assert_same(run(opened, sample.value), expected)
    # Constants have the names and values of variables.
    read = {id(v) for v in opened.to_function().variables}
    for variable_name, v in opened.variables.items():
        if id(v) in read:
            op = frozen.graph.get_operation_by_name(variable_name)
            assert op.type == "Const"
            assert_same([tf.make_ndarray(op.get_attr("value"))], [v.numpy()])
    if name in ("cnn", "lstm", "conditional", "calls", "nested"):
        slope = gradient(frozen, sample)
        assert_same([slope], [gradient(opened, sample)])
        assert np.abs(slope).max() > 0


def test_edits_captured_values_and_names_that_are_taken(monkeypatch):
    monkeypatch.setattr("geutil.model.sources.objects.CONSTANT_LIMIT", 4)
    captured = tf.constant([1.0, 2.0, 3.0])
    sample = of_function(lambda x: {"y": tf.multiply(x, captured, name="y")}, floats())
    opened = model.open(sample.source)
    assert opened.concrete_function().captured_inputs
    extra = tf.Variable([2.0, 3.0, 4.0], name="y")
    with opened.graph.as_default():
        opened.outputs["y"] = opened.outputs["y"] * extra
    frozen = opened.freeze()
    assert not frozen.concrete_function().captured_inputs
    assert frozen.graph.get_operation_by_name("y").type == "Mul"
    assert frozen.graph.get_operation_by_name("y_1").type == "Const"
    expected = floats() * captured.numpy() * extra.numpy()
    # Later assignments do not reach a frozen model.
    extra.assign(tf.zeros(3))
    assert_same(run(frozen, floats()), [expected])


def test_all_signatures_are_frozen_and_tables_stay(tmp_path):
    root = tf.Module()
    root.v = variable(3)
    initializer = tf.lookup.KeyValueTensorInitializer(["a", "b"], [0, 1])
    root.table = tf.lookup.StaticHashTable(initializer, 1)
    first = tf.function(lambda x: {"y": x * root.v}, input_signature=[FLOATS])
    second = tf.function(
        lambda x: {"z": tf.gather(root.v, root.table[x])},
        input_signature=[tf.TensorSpec([None], tf.string, name="x")],
    )
    signatures = {"serving_default": first, "other": second}
    tf.saved_model.save(root, str(tmp_path / "m"), signatures)
    frozen = model.open(tmp_path / "m").freeze()
    assert sorted(frozen.signatures) == ["other", "serving_default"]
    other = frozen.signatures["other"]
    assert not frozen.variables
    assert not other.variables
    words, expected = ["a", "b", "?"], root.v.numpy()[[0, 1, 1]]
    assert_same([other.run(x=words)["z"]], [expected])
    frozen.save(tmp_path / "frozen")
    loaded = tf.saved_model.load(str(tmp_path / "frozen"))
    assert not loaded.signatures["other"].variables
    found = loaded.signatures["other"](x=tf.constant(words))["z"]
    assert_same([found.numpy()], [expected])
    result = loaded.signatures["serving_default"](x=tf.constant(floats()))["y"]
    np.testing.assert_allclose(result, floats() * root.v.numpy(), rtol=1e-6)


def test_a_loop_of_version_1():
    graph, v = version_1_loop()
    session = tf.compat.v1.Session(graph=graph)
    session.run(v.initializer)
    with graph.as_default():
        session.run(v.assign_add(floats(4)))
    (expected,) = session.run(["y:0"], {"x:0": floats()})
    opened = model.open(graph, session=session, outputs=["y"])
    session.close()
    frozen = opened.freeze()
    assert_same(run(frozen, floats()), [expected])
    assert not {node.op for node in all_nodes(frozen)} & VARIABLE_OPS
    assert "Enter" in {node.op for node in all_nodes(frozen)}


def test_two_models_with_functions_of_the_same_names():
    # TensorFlow refuses two functions of one name in a process.
    samples = [SAMPLES["nested"]() for _ in range(2)]
    opened = [model.open(s.source, inline=False) for s in samples]
    opened[1].variables["w"].assign_add([1.0, 1.0, 1.0])
    for m, sample in zip(opened, samples, strict=True):
        assert_same(run(m.freeze(), sample.value), sample.expected())
        assert_same(run(m.freeze(), sample.value), sample.expected())


def refused(opened, *words, method="freeze", given=(), error=None):
    every = "(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in words)
    cases = [(words, partial(getattr(opened, method), *given), every)]
    assert not_refused(error or model.ModelError, cases, unchanged=opened) == {}


def test_ops_that_write_are_refused():
    v, table = variable(3, name="counter"), variable(4, 3, name="counter")
    train = tf.raw_ops.ResourceApplyGradientDescent
    writes = {
        "AssignVariableOp": lambda x: v.assign(x[0]),
        "AssignAddVariableOp": lambda x: v.assign_add(x[0]),
        "ResourceScatterAdd": lambda x: table.scatter_add(
            tf.IndexedSlices(x[0], tf.constant(1))
        ),
        "ResourceApplyGradientDescent": lambda x: train(
            var=v.handle, alpha=1.0, delta=x[0], use_locking=False
        ),
    }
    for kind, write in writes.items():

        @tf.function(input_signature=[FLOATS], autograph=False)
        def function(x, write=write):
            write(x)
            return {"y": x + v + table[0]}

        refused(model.open(function), kind, "'counter'", "strip_training()")
    outer = tf.function(
        lambda x: {"y": function(x)["y"]}, input_signature=[FLOATS], autograph=False
    )
    refused(model.open(outer, inline=False), kind, "in function", "'counter'")


def test_an_op_that_writes_and_is_cut_off_does_not_matter():
    v = variable(3)

    def body(x):
        y = tf.add(tf.add(x, x, name="twice"), v, name="sum")
        v.assign_add(x[0])
        return {"y": y}

    opened = model.open(of_function(body, floats()).source)
    refused(opened, "AssignAddVariableOp", "cut off")
    frozen = opened.cut(inputs={"h": "twice"}, outputs={"y": "sum"}).freeze()
    assert_same(run(frozen, floats()), [floats() + v.numpy()])


def test_a_signature_that_writes_is_named(tmp_path):
    root = tf.Module()
    root.v = variable(3)
    first = tf.function(lambda x: {"y": x * root.v}, input_signature=[FLOATS])
    second = tf.function(
        lambda x: {"z": root.v.assign_add(x[0])}, input_signature=[FLOATS]
    )
    tf.saved_model.save(
        root, str(tmp_path / "m"), {"serving_default": first, "train": second}
    )
    refused(model.open(tmp_path / "m"), "'train'", "AssignAddVariableOp")


def test_a_function_that_hands_a_handle_on_is_refused():
    v = variable(3)

    @tf.function(autograph=False)
    def inner(x, handle):
        return x + 1.0, tf.raw_ops.Identity(input=handle)

    inner = inner.get_concrete_function(FLOATS, tf.TensorSpec([], tf.resource))

    def body(x):
        y, handle = inner(x, v.handle)
        return {"y": y * tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)}

    sample = of_function(body, floats())
    refused(model.open(sample.source, inline=False), "as its result", "inline=True")
    frozen = model.open(sample.source).freeze()
    assert_same(run(frozen, floats()), sample.expected())


def test_a_variable_without_a_value_is_refused():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [3], "x")
        v = tf.compat.v1.get_variable("empty", [3], use_resource=True)
        tf.multiply(x, v, name="y")
    refused(model.open(graph, outputs=["y"]), "'empty'", "no value", "restore")


def test_too_many_bytes_are_refused_before_a_variable_is_read(monkeypatch):
    monkeypatch.setattr(creation, "BULK_LIMIT", 100_000)
    big = tf.Variable(tf.zeros([250, 100]))
    opened = model.open(
        tf.function(lambda x: {"y": x @ big[:3]}, input_signature=[FLOATS])
    )

    def read(_):
        raise AssertionError("a variable was read")

    monkeypatch.setattr(frozen_variables.Captured, "value", read)
    refused(opened, "SavedModel", "100,000")


def test_a_mixture_of_handles_in_a_merge_is_refused():
    graph, v = version_1_loop()
    graph_def = graph.as_graph_def()
    merge = graph_def.node.add(name="mixed", op="Merge", input=["v", "other"])
    merge.attr["T"].type = tf.resource.as_datatype_enum
    merge.attr["N"].i = 2
    table = graph_def.node.add(name="other", op="MutableHashTableV2")
    table.attr["key_dtype"].type = tf.string.as_datatype_enum
    table.attr["value_dtype"].type = tf.int64.as_datatype_enum
    read = graph_def.node.add(name="z", op="ReadVariableOp", input=["mixed"])
    read.attr["dtype"].type = tf.float32.as_datatype_enum
    opened = model.open(graph_def, outputs=["z"])
    opened.variables["v"].assign(tf.ones([4, 3]))
    refused(opened, "'mixed' (Merge)")


def test_a_very_long_chain_and_1_000_functions_are_no_deeper_than_any_other():
    count = length(100_000)
    resource, single = tf.resource.as_datatype_enum, tf.float32.as_datatype_enum
    graph_def = tf.compat.v1.GraphDef()
    graph_def.node.add(name="n0", op="Const")
    for i in range(1, count):
        node = graph_def.node.add(name=f"n{i}", op="Identity", input=[f"n{i - 1}"])
        node.attr["T"].type = resource
    call = graph_def.node.add(name="y", op="PartitionedCall", input=[f"n{count - 1}"])
    for i in range(1_000):
        call.attr["Tin"].list.type.append(resource)
        call.attr["f"].func.name = f"f{i}"
        function = graph_def.library.function.add()
        function.signature.name = f"f{i}"
        function.signature.input_arg.add(name="handle", type=resource)
        function.signature.output_arg.add(name="result", type=single)
        function.ret["result"] = "call:output:0"
        call = function.node_def.add(
            name="call", op="PartitionedCall", input=["handle"]
        )
    call.op = "ReadVariableOp"
    function.ret["result"] = "call:value:0"
    value = HandleValue("v", single, tf.TensorShape([3]).as_proto().SerializeToString())
    assert replace_handles(graph_def, {"n0": value}) == set()
    assert {n.attr["T"].type for n in graph_def.node if n.op == "Identity"} == {single}
    versions = [f for f in graph_def.library.function if "_frozen_" in f.signature.name]
    assert len(versions) == 1_000
    assert {f.signature.input_arg[0].type for f in versions} == {single}
    last = next(f for f in versions if f.signature.name.startswith("f999_"))
    assert [(n.op, *n.input) for n in last.node_def] == [("Identity", "handle")]
    assert dict(last.ret) == {"result": "call:output:0"}


# -- thawing: constants become variables that can be trained ---------------------------


def frozen_graph():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 3], "x")
        w = tf.constant(floats(3, 2), name="layer/weights")
        b = tf.constant([1.0, -1.0], name="layer/bias")
        hidden = tf.nn.bias_add(tf.matmul(x, w), b)
        tf.identity(tf.reshape(hidden, tf.constant([-1, 1, 2], name="shape")), name="y")
    return graph


def trained(function, x, goal, steps, rate):
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


def test_signatures_share_the_variable_again(tmp_path):
    module = save_two_signatures(tmp_path / "m")
    frozen = model.open(tmp_path / "m", signature="encode").freeze()
    thawed = frozen.thaw("^weight$")
    (v,) = thawed.variables.values()
    v.assign(floats(3, 2))
    module.w.assign(v)
    code = thawed.run(x=floats())["code"]
    assert_same([code], [module.encode(floats())["code"].numpy()])
    other = thawed.signatures["decode"]
    assert_same([other.run(code=code)["x"]], [module.decode(code)["x"].numpy()])


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


def refused_to_thaw(opened, regex, *words, error=None):
    refused(opened, *words, method="thaw", given=[regex], error=error)


def test_no_match_is_refused_with_candidates():
    opened = model.open(frozen_graph())
    refused_to_thaw(opened, "kernel", "'layer/weights'", "2 could")
    refused_to_thaw(opened, "^shape$", "'shape' (int32", "as_default()")
    for regex in ("(", 3, None):
        refused_to_thaw(opened, regex, error=errors.SelectionError)
    with tf.Graph().as_default() as graph:
        tf.identity(tf.compat.v1.placeholder(tf.float32, [], "x"), name="y")
    refused_to_thaw(model.open(graph), "", "0 could")


def test_a_constant_that_nothing_needs_is_no_candidate():
    opened = model.open(frozen_graph())
    with opened.graph.as_default():
        tf.constant(1.0, name="loose")
    refused_to_thaw(opened, "loose", "no constant")


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
    refused_to_thaw(model.open(graph_def, outputs=["y"]), "^kept$", "'kept' (in a loop")
