import json
import shutil
import zipfile
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format

from benchmarks.inspecting import in_a_child
from geutil.errors import ModelError
from geutil.graph.protos import SavedModel
from geutil.model import inspect
from geutil.model.files.reading import read_graph_def, read_saved_model
from tests.model import fuzzing
from tests.processes import forked

tf1 = tf.compat.v1


def counts(nodes):
    return dict(Counter(node.op for node in nodes))


@pytest.mark.parametrize("name", ["frozen.pb", "frozen.pbtxt"])
def test_a_graph_def(models, name):
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
    } == {
        ("weight", tf.float32, (4, 3), True),
        ("bias", tf.float32, (3,), False),
    }
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert found.bytes_total == sum(p.stat().st_size for p in files)
    assert found.bytes_variables == sum(
        p.stat().st_size for p in files if p.parent.name == "variables"
    )


def test_variables_are_not_read(models, tmp_path):
    folder = shutil.copytree(models / "lookup", tmp_path / "lookup")
    next(folder.glob("variables/*data*")).write_bytes(b"")
    assert len(inspect(folder).variables) == 2


@pytest.fixture(scope="module")
def v1_saved_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v1") / "model"
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
    return folder


def test_variables_of_a_version_1_model_come_from_the_index(v1_saved_model):
    found = inspect(v1_saved_model)
    (variable,) = found.variables
    assert (variable.name, variable.tensor.shape, variable.trainable) == (
        "w",
        (2, 3),
        None,
    )
    assert found.signatures["main"].outputs["y"].shape == (None, 3)
    index = next(v1_saved_model.glob("variables/*.index"))
    data = index.read_bytes()
    index.write_bytes(data[:20])
    try:
        with pytest.raises(ModelError, match="truncated"):
            inspect(v1_saved_model)
    finally:
        index.write_bytes(data)


def test_tags_choose_the_meta_graph(v1_saved_model):
    assert inspect(v1_saved_model).tags == ("serve",)
    train = inspect(v1_saved_model, tags=["gpu", "train"])
    assert train.tags == ("train", "gpu")
    assert train.signatures == {}
    with pytest.raises(ModelError, match="no MetaGraph with the tags"):
        inspect(v1_saved_model, tags=["tpu"])


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


def test_a_keras_file(keras_file):
    found = inspect(keras_file)
    assert (found.kind, found.version) == ("Keras", tf.keras.__version__)
    layers = [(x.name, x.type) for x in found.layers if x.type != "InputLayer"]
    assert layers == [("b", "Dense"), ("c", "Dense")]
    assert 0 < found.bytes_variables < found.bytes_total


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"metadata.json": "{}"}, r"holds no config\.json"),
        ({"config.json": "{"}, "no whole .keras file"),
        ({"config.json": "[" * 100_000}, "no whole .keras file"),
    ],
)
def test_damaged_keras_files_are_refused(tmp_path, members, message):
    with zipfile.ZipFile(tmp_path / "a.keras", "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    with pytest.raises(ModelError, match=message):
        inspect(tmp_path / "a.keras")


def test_a_keras_file_of_odd_json_is_survived(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.keras", "w") as archive:
        archive.writestr("config.json", json.dumps([{"config": 3}, None]))
        archive.writestr("metadata.json", "7")
    assert inspect(tmp_path / "a.keras").version == ""


def test_what_is_no_model_is_refused(tmp_path, keras_file):
    with pytest.raises(ModelError, match="does not exist"):
        inspect(tmp_path / "missing")
    with pytest.raises(ModelError, match=r"holds no saved_model\.pb"):
        inspect(tmp_path)
    (tmp_path / "a.keras").write_bytes(keras_file.read_bytes()[:200])
    with pytest.raises(ModelError, match=r"no whole \.keras file"):
        inspect(tmp_path / "a.keras")
    (tmp_path / "a.pb").write_bytes(b"")
    with pytest.raises(ModelError, match="is empty"):
        inspect(tmp_path / "a.pb")
    (tmp_path / "a.pb").write_bytes(keras_file.read_bytes())
    with pytest.raises(ModelError, match="zip archive"):
        inspect(tmp_path / "a.pb")


@pytest.mark.parametrize("target", ["pb", "pb fields", "saved_model", "index"])
def test_damage_is_refused_or_survived(models, tmp_path, target):
    for seed in range(150):
        scratch = tmp_path / str(seed)
        scratch.mkdir()
        path = fuzzing.damaged(models, target, seed, scratch)
        try:
            assert str(inspect(path))
        except ModelError as error:
            assert str(path) in str(error)


def test_it_can_be_read(models):
    text = str(inspect(models / "lookup"))
    for line in (
        "tags: serve",
        "signature project",
        "  in  x: float32 [n,4]",
        "  out y: float32 [n,3]",
        "  bias: float32 [3] (frozen)",
        "assets: vocabulary.txt",
    ):
        assert line in text.splitlines()


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
        seconds, peak = in_a_child(tmp_path)
    assert peak < 1.5 * len(data)
    assert seconds < 5
