"""Inlining what Keras and SavedModels make, against TensorFlow running the original."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from geutil.graph.inlining import inline_calls
from tests.graph.calling import calls_left, in_topological_order, node_names

keras = tf.keras


def grouped_cnn():
    """A grouped convolution is a call that XLA compiles."""
    image = keras.Input((8, 8, 4), name="image")
    x = keras.layers.Conv2D(8, 3, groups=2, name="grouped")(image)
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.Activation("silu", name="silu")(x)
    x = keras.layers.GlobalAveragePooling2D(name="mean")(x)
    return keras.Model(image, keras.layers.Dense(3, name="dense")(x), name="cnn")


def lstm():
    words = keras.Input((5, 3), name="words")
    x = keras.layers.LSTM(4, name="lstm")(words)
    return keras.Model(words, keras.layers.Dense(2, name="dense")(x), name="rnn")


class Layers(tf.Module):
    """A model of nested functions, three deep, with a count of its calls."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        # By themselves, Keras variables are saved under names that no Session finds.
        self.values = [variable.value for variable in model.variables]
        self.count = tf.Variable(0, name="count")
        self.spec = tf.TensorSpec((None, *model.input_shape[1:]), tf.float32, "x")

    @tf.function(autograph=False)
    def inner(self, x):
        self.count.assign_add(1)
        return self.model(x, training=False)

    @tf.function(autograph=False)
    def middle(self, x):
        return self.inner(x) + self.inner(-x)

    def serve(self, x):
        return {"y": self.middle(x), "count": self.count.read_value()}


@pytest.fixture(scope="module", params=[grouped_cnn, lstm], ids=lambda f: f.__name__)
def saved(request, tmp_path_factory):
    """Return the model, the folder of its SavedModel, and the MetaGraph in it."""
    keras.utils.set_random_seed(0)
    module = Layers(request.param())
    folder = tmp_path_factory.mktemp("saved")
    serve = tf.function(module.serve, autograph=False, input_signature=[module.spec])
    tf.saved_model.save(module, str(folder), signatures=serve)
    model = saved_model_pb2.SavedModel()
    model.ParseFromString((folder / "saved_model.pb").read_bytes())
    return module, folder, model.meta_graphs[0]


def values(graph_def, folder: Path, saver, steps, feed):
    """Restore the variables by the graph's own ops, then run the steps."""
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
        with tf.compat.v1.Session(graph=graph) as session:
            variables = str(folder / "variables" / "variables")
            session.run(saver.restore_op_name, {saver.filename_tensor_name: variables})
            return [session.run(step, feed) for step in steps]


def test_the_graph_of_a_saved_model(saved):
    module, folder, meta = saved
    saver = meta.saver_def
    signature = meta.signature_def["serving_default"]
    outputs = {name: info.name for name, info in signature.outputs.items()}
    protected = [*outputs.values(), saver.restore_op_name, saver.save_tensor_name]
    inlined = inline_calls(meta.graph_def, protected_names=protected)
    assert in_topological_order(inlined.graph_def)
    assert sorted(calls_left(inlined.graph_def)) == sorted(k.node for k in inlined.kept)
    shape = (2, *module.model.input_shape[1:])
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    feed = {signature.inputs["x"].name: x}
    # The count alone, too: reading y counts twice as well.
    steps = [outputs, outputs["count"], outputs["y"], outputs]
    translated = {name: inlined.tensors[tensor] for name, tensor in outputs.items()}
    own = [translated, translated["count"], translated["y"], translated]
    expected = values(meta.graph_def, folder, saver, steps, feed)
    found = values(inlined.graph_def, folder, saver, own, feed)
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)
    assert expected[3]["count"] > expected[0]["count"]


def test_saving_works_still(saved, tmp_path):
    _, folder, meta = saved
    saver = meta.saver_def
    inlined = inline_calls(
        meta.graph_def,
        protected_names=[saver.restore_op_name, saver.save_tensor_name],
    )
    name = inlined.tensors.get(saver.save_tensor_name, saver.save_tensor_name)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(inlined.graph_def, name="")
        with tf.compat.v1.Session(graph=graph) as session:
            variables = str(folder / "variables" / "variables")
            session.run(saver.restore_op_name, {saver.filename_tensor_name: variables})
            session.run(name, {saver.filename_tensor_name: str(tmp_path / "again")})
    before, after = (
        tf.train.load_checkpoint(str(path))
        for path in (folder / "variables" / "variables", tmp_path / "again")
    )
    shapes = before.get_variable_to_shape_map()
    assert after.get_variable_to_shape_map() == shapes
    for key in shapes.keys() - {"_CHECKPOINTABLE_OBJECT_GRAPH"}:
        np.testing.assert_array_equal(before.get_tensor(key), after.get_tensor(key))


def test_names_are_readable(saved):
    module, _, meta = saved
    signature = meta.signature_def["serving_default"]
    protected = [info.name for info in signature.outputs.values()]
    names = node_names(inline_calls(meta.graph_def, protected_names=protected))
    layer = module.model.name
    bodies = [name for name in names if f"{layer}_1/" in name or f"{layer}/" in name]
    scopes = {name.partition(layer)[0] for name in bodies}
    assert {"inner/", "inner_1/"} <= scopes <= {"", "inner/", "inner_1/"}
    assert not any("__inference" in name for name in names)


def test_loops_and_calls_that_xla_compiles_stay_whole(saved):
    module, _, meta = saved
    inlined = inline_calls(meta.graph_def)
    loops = [n for n in inlined.graph_def.node if n.op in {"While", "StatelessWhile"}]
    assert (len(loops), len(inlined.kept)) == {"rnn": (2, 0), "cnn": (0, 2)}[
        module.model.name
    ]
    assert all("XLA" in kept.reason for kept in inlined.kept)
    left = {f.signature.name: f for f in inlined.graph_def.library.function}
    before = {f.signature.name: f for f in meta.graph_def.library.function}
    assert left.items() <= before.items()
    for loop in loops:
        assert {loop.attr["body"].func.name, loop.attr["cond"].func.name} <= set(left)
