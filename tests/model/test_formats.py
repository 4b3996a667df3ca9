"""Saving as a GraphDef, as text and for TensorFlow Lite."""

import logging
import re
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format

from geutil import model
from tests.interpreter import new_interpreter
from tests.model.frozen_samples import FLOATS, SAMPLES, floats, optimizer_off, variable
from tests.model.refusal_tables import not_refused
from tests.model.test_frozen_variables import assert_same, run
from tests.thorough import crossed

SUFFIXES = {"graph_def": "pb", "pbtxt": "pbtxt"}


@pytest.fixture(autouse=True)
def exactly():
    with optimizer_off():
        yield


def read(path):
    graph_def = tf.compat.v1.GraphDef()
    if path.suffix == ".pb":
        graph_def.ParseFromString(path.read_bytes())
    else:
        text_format.Parse(path.read_text(), graph_def)
    return graph_def


def run_file(path, feeds, outputs):
    """Run a file with TensorFlow alone, as version 1 does."""
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(read(path), name="")
        with tf.compat.v1.Session(graph=graph, config=config) as session:
            fed = {f"{name}:0": value for name, value in feeds.items()}
            return session.run([f"{name}:0" for name in outputs], fed)


def save(opened, tmp_path, format="graph_def"):
    return opened.save(tmp_path / f"m.{SUFFIXES[format]}", format)


def opened_function(body, *specs):
    function = tf.function(body, input_signature=specs or [FLOATS], autograph=False)
    return model.open(function)


@pytest.mark.parametrize(("format", "name"), crossed(SUFFIXES, SAMPLES, together=1))
def test_tensorflow_runs_the_file_which_opens_with_the_same_ends(
    tmp_path, format, name
):
    sample = SAMPLES[name]()
    opened = model.open(sample.source, inline=format == "pbtxt")
    path = save(opened, tmp_path, format)
    (x,) = opened.inputs
    outputs = run_file(path, {x: sample.value}, sorted(opened.outputs))
    assert_same(outputs, sample.expected())
    # Some outputs of these depend on no input.
    asked = list(opened.outputs) if name in ("gathers", "dtypes") else None
    reopened = model.open(path, outputs=asked)
    assert list(reopened.inputs) == list(opened.inputs)
    assert list(reopened.outputs) == list(opened.outputs)
    for end, t in opened.inputs.items():
        assert reopened.inputs[end].dtype == t.dtype
        assert reopened.inputs[end].shape.as_list() == t.shape.as_list()
    assert_same(run(reopened, sample.value), sample.expected())
    # The same model gives the same file, of which functions all are called.
    (tmp_path / "again").mkdir()
    graph_def = read(path)
    assert read(save(opened, tmp_path / "again", format)) == graph_def
    library = graph_def.library.function
    called = {
        function.name
        for nodes in (graph_def.node, *(f.node_def for f in library))
        for node in nodes
        for attr in node.attr.values()
        for function in (attr.func, *attr.list.func)
    }
    assert {f.signature.name for f in library} == called - {""}


def test_an_output_that_is_named_already_gets_no_op(tmp_path):
    opened = opened_function(lambda x: {"y": tf.multiply(x, 2.0, name="y")})
    nodes = read(save(opened, tmp_path)).node
    found = [(n.name, n.op) for n in nodes if n.name.startswith("y")]
    assert found == [("y/y", "Const"), ("y", "Mul")]


def test_an_output_that_feeds_other_ops_is_an_end_all_the_same(tmp_path):
    def body(x, unused):
        y = tf.multiply(x, 2.0, name="y")
        return {"y": y, "z": tf.add(y, 1.0, name="z"), "same": y}

    spec = tf.TensorSpec([None], name="unused")
    opened = opened_function(body, FLOATS, spec)
    path = save(opened, tmp_path)
    reopened = model.open(path)
    # An input that nothing reads is there.
    assert list(reopened.inputs) == ["x", "unused"]
    assert list(reopened.outputs) == list(opened.outputs)
    expected = [floats() * np.float32(2), floats() * np.float32(2) + np.float32(1)]
    assert_same(run_file(path, {"x": floats()}, ["y", "z"]), expected)
    found = reopened.run(x=floats(), unused=[1.0])
    assert_same([found[n] for n in sorted(found)], [expected[0], *expected])


def test_ends_take_names_from_other_nodes(tmp_path):
    def body(data, x):
        y = tf.multiply(data, 2.0, name="out")
        z = tf.add(x, 1.0, name="y")
        return {"y": y, "out": z, "z": tf.split(x, 3, axis=1, name="z")[1]}

    spec = tf.TensorSpec([None, 3], name="data")
    opened = opened_function(body, spec, FLOATS)
    opened = opened.rename(inputs={"data": "x", "x": "data"})
    path = save(opened, tmp_path)
    a, b = floats(), floats() + 5
    y, out, z = run_file(path, {"x": a, "data": b}, ["y", "out", "z"])
    assert_same([y, out, z], [a * 2, b + np.float32(1), b[:, 1:2]])
    reopened = model.open(path)
    assert list(reopened.inputs) == list(opened.inputs)
    assert list(reopened.outputs) == list(opened.outputs)


def test_outputs_that_are_inputs_constants_and_variables(tmp_path, caplog):
    v = variable(3)

    def body(x):
        return {"copy": x, "c": tf.constant(3.0, name="c"), "w": v.read_value()}

    opened = opened_function(body)
    with caplog.at_level(logging.WARNING, "geutil"):
        path = save(opened, tmp_path)
    assert "['c', 'w']" in caplog.text
    assert list(model.open(path).outputs) == ["copy"]
    reopened = model.open(path, outputs=list(opened.outputs))
    assert list(reopened.outputs) == list(opened.outputs)
    expected = [np.float32(3), floats(), v.numpy()]
    assert_same(run_file(path, {"x": floats()}, ["c", "copy", "w"]), expected)


def test_what_runs_besides_runs_before_the_outputs(tmp_path):
    def body(x):
        tf.debugging.assert_positive(x, message="not positive")
        return {"y": tf.add(x, 1.0, name="y")}

    path = save(opened_function(body), tmp_path)
    (y,) = run_file(path, {"x": np.ones((1, 3), np.float32)}, ["y"])
    assert_same([y], [np.full((1, 3), 2, np.float32)])
    with pytest.raises(tf.errors.InvalidArgumentError, match="not positive"):
        run_file(path, {"x": -np.ones((1, 3), np.float32)}, ["y"])
    assert list(model.open(path).outputs) == ["y"]


def refused(opened, tmp_path, format, *words, **options):
    path = tmp_path / "m"
    save = partial(opened.save, path, format, **options)
    every = "(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in words)
    assert not_refused(model.ModelError, [((format, words), save, every)]) == {}
    assert not list(tmp_path.iterdir())


def test_names_that_no_node_can_have_are_refused(tmp_path):
    good = opened_function(lambda x: {"y": x + 1.0})
    bad_output = good.rename(outputs={"y": "a result"})
    refused(bad_output, tmp_path, "graph_def", "output 'a result'", "rename(outputs=")
    bad_input = good.rename(inputs={"x": "_x"})
    refused(bad_input, tmp_path, "graph_def", "input '_x'", "rename(inputs=")
    both = opened_function(lambda x: {"x": x + 1.0})
    refused(both, tmp_path, "graph_def", "'x'", "rename(outputs=")
    for wrong in ("graph_def", "saved_model"):
        refused(good, tmp_path, wrong, "select_tf_ops", select_tf_ops=True)


def test_an_input_that_is_an_output_of_its_name_must_be_asked_for(tmp_path, caplog):
    opened = opened_function(lambda x: {"x": x, "y": x + 1.0})
    with caplog.at_level(logging.WARNING, "geutil"):
        path = save(opened, tmp_path)
    assert "outputs=" in caplog.text
    reopened = model.open(path, outputs=["x", "y"])
    assert_same([reopened.run(x=floats())["x"]], [floats()])


def test_tables_and_ops_that_write_are_refused(tmp_path):
    initializer = tf.lookup.KeyValueTensorInitializer(["a"], [1])
    table = tf.lookup.StaticHashTable(initializer, -1)
    spec = tf.TensorSpec([None], tf.string, name="x")
    reading = opened_function(lambda x: {"y": table[x]}, spec)
    v = variable(3)
    writing = opened_function(lambda x: {"y": v.assign_add(x[0])})
    for format in ("graph_def", "pbtxt", "tflite"):
        refused(reading, tmp_path, format, "LookupTableFindV2", "saved_model")
        refused(writing, tmp_path, format, "AssignAddVariableOp", "strip_training")


def test_tensorflow_lite_computes_the_same(tmp_path):
    samples = {name: SAMPLES[name]() for name in ("cnn", "lstm", "embedding")}
    # The batch size is fixed, as TensorFlow Lite likes it.
    specs = [
        tf.TensorSpec(sample.value.shape, sample.value.dtype, name)
        for name, sample in samples.items()
    ]
    v = variable(3)
    specs.append(tf.TensorSpec([3], name="b"))

    def body(*inputs):
        pairs = zip(samples.items(), inputs, strict=False)
        results = {f"{n}_y": s.source(x, training=False) for (n, s), x in pairs}
        return {**results, "a": inputs[-1] * v}

    opened = opened_function(body, *specs)
    path = opened.save(tmp_path / "m.tflite", "tflite")
    saved = str(opened.save(tmp_path / "m"))
    # What is saved is converted without geutil, too.
    converted = tf.lite.TFLiteConverter.from_saved_model(saved).convert()
    b = floats(1)[0]
    values = {name: sample.value for name, sample in samples.items()}
    for blob in (path.read_bytes(), converted):
        interpreter = new_interpreter(blob, delegates=True)
        # As a signature of TensorFlow Lite is listed: by name.
        assert interpreter.get_signature_list()["serving_default"] == {
            "inputs": sorted(opened.inputs),
            "outputs": sorted(opened.outputs),
        }
        results = interpreter.get_signature_runner()(b=b, **values)
        assert_same([results["a"]], [b * v.numpy()])
        for name, sample in samples.items():
            # Other kernels, other order of sums: some units in the last place.
            (expected,) = sample.expected()
            np.testing.assert_allclose(
                results[f"{name}_y"], expected, rtol=1e-5, atol=1e-5, err_msg=name
            )


def test_ops_that_tensorflow_lite_lacks(tmp_path):
    def body(x):
        return {"y": tf.linalg.cholesky(x)}

    opened = opened_function(body, tf.TensorSpec([3, 3], name="x"))
    refused(opened, tmp_path, "tflite", "Cholesky", "select_tf_ops=True")
    path = opened.save(tmp_path / "m.tflite", "tflite", select_tf_ops=True)
    # No interpreter in a Python package runs it.
    assert b"FlexCholesky" in path.read_bytes()


def test_more_bytes_than_a_protobuf_holds_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("geutil.graph.creation.BULK_LIMIT", 1000)
    v = variable(100, 3)
    opened = opened_function(lambda x: {"y": tf.matmul(x, v, transpose_b=True)})
    refused(opened, tmp_path, "graph_def", "SavedModel")
