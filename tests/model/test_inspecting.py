import json
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format
from tensorflow.core.protobuf import tensor_bundle_pb2

from benchmarks.inspecting import in_a_child
from geutil.errors import ModelError
from geutil.graph.protos import DATA_TYPES, SavedModel
from geutil.model import inspect
from geutil.model import open as open_model
from geutil.model.files import proto_files, wire
from geutil.model.files.proto_files import read_graph_def, read_saved_model
from tests.model.refusal_tables import not_refused
from tests.processes import forked

tf1 = tf.compat.v1


def counts(nodes):
    return dict(Counter(node.op for node in nodes))


@pytest.mark.parametrize("name", ["frozen.pb", "frozen.pbtxt"])
def test_a_graph_def(models, name, monkeypatch):
    # Nodes are read so many bytes at a time.
    monkeypatch.setattr(wire, "_BATCH", 500)
    graph_def = read_graph_def(models / name)
    found = inspect(models / name)
    assert found.kind == "GraphDef"
    assert found.bytes_total == (models / name).stat().st_size
    assert found.ops == counts(graph_def.node)
    library = graph_def.library.function
    assert found.function_ops == counts(n for f in library for n in f.node_def)
    assert [(f.name, f.ops, f.inputs, f.outputs) for f in found.functions] == [
        (
            f.signature.name,
            len(f.node_def),
            len(f.signature.input_arg),
            len(f.signature.output_arg),
        )
        for f in library
    ]
    assert found.bytes_constants == sum(
        n.attr["value"].tensor.ByteSize()
        for nodes in (graph_def.node, *(f.node_def for f in library))
        for n in nodes
        if n.op == "Const"
    )
    assert list(found.ops.values()) == sorted(found.ops.values(), reverse=True)


@pytest.mark.parametrize("form", ["binary", "text"])
def test_a_saved_model(models, tmp_path, form):
    folder = shutil.copytree(models / "lookup", tmp_path / "lookup")
    if form == "text":
        text = text_format.MessageToString(read_saved_model(folder))
        (folder / "saved_model.pb").unlink()
        (folder / "saved_model.pbtxt").write_text(text)
    found = inspect(folder)
    loaded = tf.saved_model.load(str(models / "lookup"))
    assert (found.kind, found.tags) == ("SavedModel", ("serve",))
    assert found.version == tf.__version__
    assert found.assets == ("vocabulary.txt",)
    assert set(found.signatures) == set(loaded.signatures) == {"look_up", "project"}
    for name, signature in loaded.signatures.items():
        specs = signature.structured_input_signature[1]
        inputs = found.signatures[name].inputs
        assert {k: (i.dtype, i.shape) for k, i in inputs.items()} == {
            k: (s.dtype, tuple(s.shape)) for k, s in specs.items()
        }
        outputs = found.signatures[name].outputs
        assert {k: (i.dtype, i.shape) for k, i in outputs.items()} == {
            k: (t.dtype, tuple(t.shape))
            for k, t in signature.structured_outputs.items()
        }
    assert {
        (v.name, v.tensor.dtype, v.tensor.shape, v.trainable) for v in found.variables
    } == {("weight", "float32", (4, 3), True), ("bias", "float32", (3,), False)}
    lines = (
        "tags: serve",
        "signature project",
        "  in  x: float32 [n,4]",
        "  out y: float32 [n,3]",
        "  bias: float32 [3] (frozen)",
        "assets: vocabulary.txt",
    )
    assert set(lines) <= set(str(found).splitlines())
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert found.bytes_total == sum(p.stat().st_size for p in files)
    assert found.bytes_variables == sum(
        p.stat().st_size for p in files if p.parent.name == "variables"
    )


def test_variables_are_not_read(models, tmp_path):
    folder = shutil.copytree(models / "lookup", tmp_path / "lookup")
    next(folder.glob("variables/*data*")).write_bytes(b"")
    assert len(inspect(folder).variables) == 2
    module = tf.Module()
    spec = [tf.TensorSpec([2], name="x")]
    module.f = tf.function(lambda x: {"y": 2 * x}, input_signature=spec)
    tf.saved_model.save(module, str(tmp_path / "net"))
    assert inspect(tmp_path / "net").variables == ()


def test_a_version_1_model(tmp_path):
    folder = tmp_path / "model"
    builder = tf1.saved_model.Builder(str(folder))
    for tags in (["serve"], ["train", "gpu"]):
        with tf.Graph().as_default(), tf1.Session() as session:
            x = tf1.placeholder(tf.float32, [None, 2], "x")
            w = tf1.get_variable("w", [2, 3], use_resource=False)
            info = tf1.saved_model.build_tensor_info
            signature = tf1.saved_model.signature_def_utils.build_signature_def(
                {"x": info(x)}, {"y": info(x @ w)}
            )
            session.run(tf1.global_variables_initializer())
            if tags == ["serve"]:
                builder.add_meta_graph_and_variables(
                    session, tags, signature_def_map={"main": signature}
                )
            else:
                builder.add_meta_graph(tags)
    builder.save()
    # Variables come from the index.
    found = inspect(folder)
    assert found.tags == ("serve",)
    (variable,) = found.variables
    assert (variable.name, variable.tensor.shape, variable.trainable) == (
        "w",
        (2, 3),
        None,
    )
    assert found.signatures["main"].outputs["y"].shape == (None, 3)
    # Tags choose the MetaGraph.
    train = inspect(folder, tags=["gpu", "train"])
    assert train.tags == ("train", "gpu")
    assert train.signatures == {}
    with pytest.raises(ModelError, match="no MetaGraph with the tags"):
        inspect(folder, tags=["tpu"])
    index = next(folder.glob("variables/*.index"))
    index.write_bytes(index.read_bytes()[:20])
    with pytest.raises(ModelError, match="truncated"):
        inspect(folder)


def test_an_index_is_read_as_tensorflow_does(tmp_path):
    random = np.random.default_rng(0)
    dtypes = [tf.float32, tf.int64, tf.bool, tf.bfloat16, tf.string, tf.complex64]
    with tf.Graph().as_default(), tf1.Session() as session:
        for i in range(150):
            shape = random.integers(0, 4, random.integers(0, 4))
            name = f"{'scope/' * random.integers(0, 4)}v{i}"
            zeros = tf.cast(tf.zeros(shape), dtypes[i % 4]) if i % 6 < 4 else None
            if zeros is None:
                zeros = tf.fill(shape, "text") if i % 6 == 4 else tf.complex(0.0, 0.0)
            tf1.get_variable(name, initializer=zeros, use_resource=bool(i % 2))
        tf1.get_variable(
            "parted",
            [6, 3],
            partitioner=tf1.fixed_size_partitioner(3),
            use_resource=False,
        )
        session.run(tf1.global_variables_initializer())
        prefix = tf1.train.Saver().save(session, str(tmp_path / "it"))
    reader = tf.train.load_checkpoint(prefix)
    shapes = reader.get_variable_to_shape_map()
    dtypes = reader.get_variable_to_dtype_map()
    found = proto_files.entries(Path(prefix))
    assert [(e.name, e.dtype, list(e.shape)) for e in found] == [
        (name, dtypes[name].name, shapes[name]) for name in sorted(shapes)
    ]
    assert len(found) == 151


def test_signatures_that_are_one_are_listed_once(tmp_path):
    module = tf.Module()
    module.v = [tf.Variable(1.0), tf.Variable(2.0)]
    spec = [tf.TensorSpec([2], name="x")]

    def times(which, sign=1.0):
        return tf.function(lambda x: {"y": sign * module.v[which] * x}, spec)

    first = times(0)
    signatures = {"a": first, "b": first, "c": times(1), "d": times(0, -1.0)}
    tf.saved_model.save(
        module,
        str(tmp_path / "net"),
        {name: f.get_concrete_function() for name, f in signatures.items()},
    )
    found = inspect(tmp_path / "net")
    assert set(found.signatures) == set(signatures)
    assert dict(found.aliases) == {"b": "a"}
    text = str(found)
    assert text.count("  in  ") == 3
    assert "signature a, also called b" in text


def test_large_values_count_and_are_left_out(tmp_path):
    value = np.arange(50_000, dtype=np.float32)
    names = [f"{i:0100d}".encode() for i in range(2_000)]
    with tf.Graph().as_default() as graph:
        tf.constant(value, name="numbers")
        tf.constant(names, name="strings")
        tf.constant(1.0, name="one")
        tf1.placeholder(tf.float32, name="last")
    graph_def = graph.as_graph_def()
    (tmp_path / "a.pb").write_bytes(graph_def.SerializeToString())
    found = inspect(tmp_path / "a.pb")
    assert found.ops == {"Const": 3, "Placeholder": 1}
    stored = sum(
        n.attr["value"].tensor.ByteSize() for n in graph_def.node if n.op == "Const"
    )
    # The tags and lengths of what is left out are some bytes each.
    assert found.bytes_constants == pytest.approx(stored, rel=0.03)
    assert found.bytes_constants <= stored


@pytest.fixture(scope="module")
def keras_file(tmp_path_factory):
    layers = tf.keras.layers
    inner = tf.keras.Sequential([layers.Dense(2, name="c")], name="inner")
    model = tf.keras.Sequential(
        [layers.Input((3,), name="a"), layers.Dense(4, name="b"), inner]
    )
    file = tmp_path_factory.mktemp("keras") / "model.keras"
    model.save(file)
    return file


def keras_model():
    """Return a network with ends of several ranks and types, one of them mixed."""
    layers = tf.keras.layers
    a, b = layers.Input([4], name="p"), layers.Input([4], name="q")
    x = layers.Concatenate()([a, b])
    image = layers.Input([8, 8, 3], 2, dtype="uint8", name="image")
    pooled = layers.GlobalAveragePooling2D(keepdims=True)(
        layers.Conv2D(4, 3, name="c")(layers.Rescaling(1 / 255)(image))
    )
    ends = {
        "u": layers.Dense(3, name="y")(x),
        "v": layers.Softmax(name="z")(x),
        "m": layers.Dense(4, dtype="mixed_bfloat16")(x),
        "f": layers.Flatten(name="f")(pooled),
        "r": layers.Reshape([2, 2])(a),
    }
    return {"p": a, "q": b, "image": image}, ends


KERAS_MODELS = {
    "list": lambda ins, outs: tf.keras.Model(list(ins.values()), list(outs.values())),
    "dictionary": tf.keras.Model,
    "sequential": lambda ins, outs: tf.keras.Sequential(
        [tf.keras.layers.Input([6], name="a"), tf.keras.layers.Dense(4)]
    ),
}


@pytest.mark.parametrize("name", KERAS_MODELS)
def test_the_ends_of_a_keras_file(tmp_path, name):
    model = KERAS_MODELS[name](*keras_model())
    for suffix in ("keras", "h5"):
        model.save(tmp_path / f"model.{suffix}")
    opened = open_model(tmp_path / "model.keras")
    for suffix in ("keras", "h5"):
        file = tmp_path / f"model.{suffix}"
        ends = inspect(file).signatures["serving_default"]
        for found, expected in (
            (ends.inputs, opened.inputs),
            (ends.outputs, opened.outputs),
        ):
            assert list(found) == sorted(expected)
            for key, info in found.items():
                assert info.dtype == expected[key].dtype
                if info.shape is not None or suffix == "keras":
                    assert info.shape == tuple(expected[key].shape)
        assert all(info.shape is not None for info in ends.inputs.values())


def test_ends_that_a_configuration_does_not_tell_are_unknown(tmp_path):
    layers = tf.keras.layers
    image = layers.Input([8, 8, 3], name="image")
    model = tf.keras.Model(image, layers.Conv2D(4, 3, name="c")(image))
    model.save(tmp_path / "a.keras")
    text = str(inspect(tmp_path / "a.keras"))
    assert "  out c: float32 of unknown rank" in text.splitlines()


def test_a_keras_file(keras_file):
    found = inspect(keras_file)
    assert (found.kind, found.version) == ("Keras", tf.keras.__version__)
    layers = [(x.name, x.type) for x in found.layers if x.type != "InputLayer"]
    assert layers == [("b", "Dense"), ("c", "Dense")]
    assert 0 < found.bytes_variables < found.bytes_total


def test_damaged_keras_files_are_refused(tmp_path):
    def found(**members):
        with zipfile.ZipFile(tmp_path / "a.keras", "w") as archive:
            for name, text in members.items():
                archive.writestr(f"{name}.json", text)
        return inspect(tmp_path / "a.keras")

    with pytest.raises(ModelError, match=r"holds no config\.json"):
        found(metadata="{}")
    for text in ("{", "[" * 100_000):
        with pytest.raises(ModelError, match=r"no whole \.keras file"):
            found(config=text)
    # Odd JSON is survived.
    odd = json.dumps([{"config": 3}, None])
    assert found(config=odd, metadata="7").version == ""


WITHOUT_TENSORFLOW = """
import json, sys
from geutil.errors import ModelError
from geutil.model import inspect
found = []
for path in sys.argv[1:]:
    try:
        found.append(str(inspect(path)))
    except ModelError as error:
        found.append(str(error))
assert "tensorflow" not in sys.modules
print(json.dumps(found))
"""


def test_hdf5_files_are_read_alike_before_tensorflow_starts(tmp_path):
    """There the reader is a copy of the process, and here a process of its own."""
    inputs = tf.keras.Input([3])
    whole = tf.keras.Model(inputs, tf.keras.layers.Dense(2)(inputs))
    whole.save(tmp_path / "whole.h5")
    data = (tmp_path / "whole.h5").read_bytes()
    (tmp_path / "cut off.h5").write_bytes(data[: len(data) // 2])
    (tmp_path / "foreign.h5").write_bytes(b"no file of this kind")
    paths = [str(tmp_path / name) for name in ("whole.h5", "cut off.h5", "foreign.h5")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TENSORFLOW, *paths],
        capture_output=True,
        check=True,
        text=True,
    )
    expected = [str(inspect(paths[0]))]
    for path in paths[1:]:
        with pytest.raises(ModelError, match="no whole HDF5 file") as refused:
            inspect(path)
        expected.append(str(refused.value))
    assert json.loads(done.stdout) == expected


IMPATIENT = """
import os, sys
from geutil.errors import ModelError
from geutil.model import inspect
from geutil.model.files import keras_files
keras_files._SECONDS = 0
try:
    inspect(sys.argv[1])
except ModelError as error:
    print(error)
try:
    print(os.waitpid(-1, 0))
except ChildProcessError:
    print("no child is left")
"""


# No copy is made of a process with threads: another one is started.
THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@pytest.mark.parametrize("start", ["", THREAD], ids=["forked", "started"])
def test_a_reader_of_hdf5_is_ended_at_the_limit(tmp_path, start):
    # It need not be damaged to take longer than no time.
    (tmp_path / "a.h5").write_bytes(b"no file of this kind")
    done = subprocess.run(
        [sys.executable, "-c", start + IMPATIENT, tmp_path / "a.h5"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout.splitlines() == [
        f"'{tmp_path / 'a.h5'}' is no whole HDF5 file: it is not read within 0 s",
        "no child is left",
    ]


def test_what_is_no_model_is_refused(tmp_path, keras_file):
    data = keras_file.read_bytes()
    (tmp_path / "a.keras").write_bytes(data[:200])
    (tmp_path / "empty.pb").write_bytes(b"")
    (tmp_path / "zip.pb").write_bytes(data)
    messages = {
        "missing": "does not exist",
        "": r"holds no saved_model\.pb",
        "a.keras": r"no whole \.keras file",
        "empty.pb": "is empty",
        "zip.pb": "zip archive",
    }
    cases = [(n, partial(inspect, tmp_path / n), said) for n, said in messages.items()]
    assert not_refused(ModelError, cases) == {}


def test_a_large_model_takes_little_memory(tmp_path):
    saved_model = SavedModel(saved_model_schema_version=1)
    meta_graph = saved_model.meta_graphs.add()
    meta_graph.meta_info_def.tags.append("serve")
    value = tf.make_tensor_proto(np.ones(4 << 20, np.float32))
    for i in range(6):
        node = meta_graph.graph_def.node.add(name=f"c{i}", op="Const")
        node.attr["dtype"].type = tf.float32.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(value)
    data = saved_model.SerializeToString()
    (tmp_path / "saved_model.pb").write_bytes(data)
    with forked():
        _, peak = in_a_child(tmp_path)
    assert peak < 1.5 * len(data)


PROTOS = {
    "SavedModel": SavedModel.DESCRIPTOR,
    "BundleEntryProto": tensor_bundle_pb2.BundleEntryProto.DESCRIPTOR,
}


def test_the_schema_is_that_of_tensorflow():
    """Walk the table along TensorFlow's definitions: numbers, types, labels."""
    pending, seen = dict(PROTOS), set()
    while pending:
        name, theirs = pending.popitem()
        seen.add(name)
        ours = wire.message_class(name).DESCRIPTOR
        for field in ours.fields:
            expected = theirs.fields_by_number[field.number]
            assert expected.name == field.name
            inner, wanted = field.message_type, expected.message_type
            assert (inner is None) == (wanted is None)
            # Both are numbers on the wire.
            same = field.type if field.type != field.TYPE_INT32 else expected.type
            assert expected.type == same
            if field.type == field.TYPE_INT32:
                assert expected.type in (field.TYPE_INT32, field.TYPE_ENUM)
            repeated = expected.label == expected.LABEL_REPEATED
            assert (field.label == field.LABEL_REPEATED) == repeated
            if inner is not None and inner.GetOptions().map_entry:
                inner, wanted = (d.fields_by_name["value"] for d in (inner, wanted))
                assert inner.type == wanted.type
                inner, wanted = inner.message_type, wanted.message_type
            if inner is not None and inner.name not in seen:
                pending[inner.name] = wanted
    assert seen == set(wire.MESSAGES)


def test_the_names_of_types_are_those_of_tensorflow():
    for number in sorted(DATA_TYPES - {0}):
        try:
            expected = tf.dtypes.as_dtype(number).name
        except TypeError:
            continue
        assert wire.type_name(number) == expected
    assert [wire.type_name(n) for n in (0, -1, 99, 100, 200, 201)] == [None] * 6


def test_no_tensorflow_is_imported(models, keras_file, tmp_path):
    tf.keras.models.load_model(keras_file).save(tmp_path / "a.h5")
    (tmp_path / "a.tflite").write_bytes(b"no such thing")
    paths = [models / "lookup", models / "frozen.pb", keras_file]
    paths += [tmp_path / "a.h5", tmp_path / "a.tflite"]
    code = (
        "import sys\n"
        "from geutil.cli.main import main\n"
        f"for path in {list(map(str, paths))!r}:\n"
        "    sys.argv = ['geutil', 'inspect', path]\n"
        "    try:\n        main()\n    except SystemExit: pass\n"
        "    print('tensorflow' in sys.modules, 'keras' in sys.modules)\n"
    )
    # The server of tests.processes has imported TensorFlow.
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert [line for line in lines if line[:4] in ("True", "Fals")] == (
        ["False False"] * len(paths)
    )
