"""What models can do, against TensorFlow's registry and against what they did."""

import contextlib
import json
import re
import shutil
import zipfile
from types import SimpleNamespace

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import op_def_pb2
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.client import pywrap_tf_session

from geutil import model, tflite
from geutil.capabilities import capability_kinds, scan
from geutil.errors import ModelError
from geutil.model import opener, powers
from testdata.powers import FILES, HIDDEN, NOT_RUN, PREPARED, SAMPLES, save
from tests.cli.test_guard import deadly
from tests.processes import run_python
from tests.settings import needs_eager
from tests.tflite_files import flex
from tests.thorough import chosen

pytestmark = needs_eager
tf1 = tf.compat.v1
layers = keras.layers


def registry():
    buffer = pywrap_tf_session.TF_GetAllOpList()
    data = pywrap_tf_session.TF_GetBuffer(buffer)
    return op_def_pb2.OpList.FromString(data).op


def test_every_op_of_tensorflow_is_in_the_table():
    table = capability_kinds.table()
    missing = [op.name for op in registry() if op.name not in table]
    assert missing == []
    assert {entry.power for entry in table.values()} < {
        *capability_kinds.POWERS,
        *capability_kinds.HARMLESS,
    }
    assert all(entry.evidence for entry in table.values())


def test_what_calls_functions_is_known():
    table = capability_kinds.table()
    for op in registry():
        called = {a.name for a in op.attr if a.type in ("func", "list(func)")}
        assert set(table[op.name].functions) == called, op.name


NAMES_A_FILE = re.compile(
    r"(.*_)?(file|files|filename|filenames|logdir|log_dir|dir|path|paths|prefix|uri|"
    r"url|urls|address|patterns?)"
)
NO_FILE = {
    # Regular expressions, and a prefix of names of counters.
    *("RegexFullMatch", "RegexReplace", "StaticRegexFullMatch", "StaticRegexReplace"),
    *("SetStatsAggregatorDataset", "ExperimentalSetStatsAggregatorDataset"),
    # They make a name and open nothing.
    *("ShardedFilename", "ShardedFilespec"),
    # How many paths of its search it gives.
    "CTCBeamSearchDecoder",
}


def test_what_takes_the_name_of_a_file_or_an_address_is_not_harmless():
    table = capability_kinds.table()
    for op in registry():
        named = {a.name for a in (*op.attr, *op.input_arg)} - {"is_files"}
        if any(map(NAMES_A_FILE.fullmatch, named)) and op.name not in NO_FILE:
            assert table[op.name].power not in capability_kinds.HARMLESS, op.name


def test_what_has_state_says_why_it_only_computes():
    table = capability_kinds.table()
    for op in registry():
        if op.is_stateful:
            assert table[op.name].evidence != "stateless", op.name


@pytest.fixture
def marker(tmp_path):
    folder = tmp_path / "marked"
    folder.mkdir()
    return folder / "marker"


def test_what_only_prints_or_draws_is_told_as_that(tmp_path, marker):
    folder = tmp_path / "net"

    def chatty(_, x):
        tf.print("x")
        return x + tf.random.normal([])

    save(chatty, folder, marker)
    found = powers(folder)
    assert found.kinds == ("print", "draw random numbers")
    assert {entry.kind for entry in found.dangers} == {"print"}


def test_assets_of_a_model_are_its_own(models):
    assert powers(models / "lookup").entries == ()


def chained(depth, *, is_asset, again):
    """Return a SavedModel whose file's name goes through functions, one in another."""
    proto = saved_model_pb2.SavedModel(saved_model_schema_version=1)
    meta = proto.meta_graphs.add()
    meta.meta_info_def.tags.append("serve")
    graph = meta.graph_def
    name = graph.node.add(name="name", op="Const")
    string = name.attr["dtype"].type = tf.string.as_datatype_enum
    name.attr["value"].tensor.CopyFrom(tf.make_tensor_proto("words.txt"))

    def call(node, called, passed):
        node.input.append(passed)
        node.attr["f"].func.name = called
        for key in ("Tin", "Tout"):
            node.attr[key].list.type.append(string)

    call(graph.node.add(name="main", op="PartitionedCall"), "f0", "name")
    for i in range(depth):
        body = graph.library.function.add()
        body.signature.name = f"f{i}"
        body.signature.input_arg.add(name="path", type=string)
        body.signature.output_arg.add(name="text", type=string)
        body.ret["text"] = "node:output:0"
        if i < depth - 1:
            call(
                body.node_def.add(name="node", op="PartitionedCall"),
                f"f{i + 1}",
                "path",
            )
            continue
        body.ret["text"] = "path"
        body.node_def.add(name="table", op="HashTableV2")
        inputs = ["table:table_handle:0", "path"]
        body.node_def.add(name="node", op="InitializeTableFromTextFileV2", input=inputs)
        if again:
            call(body.node_def.add(name="loop", op="PartitionedCall"), "f0", "path")
    signature = meta.signature_def["serving_default"]
    signature.outputs["text"].name = "main:0"
    if is_asset:
        asset = meta.asset_file_def.add(filename="words.txt")
        asset.tensor_info.name = "name:0"
    return proto


@pytest.mark.parametrize("again", [False, True])
def test_names_of_assets_are_followed_through_any_number_of_functions(tmp_path, again):
    # More than Python's calls in each other, and functions that call each other.
    for is_asset in (True, False):
        folder = tmp_path / str(is_asset)
        folder.mkdir()
        proto = chained(2000, is_asset=is_asset, again=again)
        (folder / "saved_model.pb").write_bytes(proto.SerializeToString())
        found = powers(folder)
        assert found.computes_only == is_asset, str(found)
        assert {entry.kind for entry in found.dangers} <= {"read files"}


def harmless():
    """Return a network of layers of many kinds."""
    image, tokens = layers.Input([8, 8, 3]), layers.Input([6])
    x = layers.BatchNormalization()(layers.Conv2D(4, 3)(image))
    y = layers.Embedding(10, 4)(tokens)
    y = layers.LSTM(4)(layers.MultiHeadAttention(2, 4)(y, y))
    x = layers.Concatenate()([layers.Flatten()(layers.Dropout(0.5)(x)), y])
    return keras.Model([image, tokens], layers.Dense(2)(x))


def test_keras_models_do_no_more_than_compute(tmp_path):
    network = harmless()
    network.compile("adam", "mse")
    network.export(tmp_path / "net", verbose=False)
    for suffix in ("", ".keras", ".h5"):
        path = tmp_path / f"net{suffix}"
        if suffix:
            network.save(path)
        found = powers(path)
        assert found.computes_only, (suffix, str(found))
        assert found.ops > 3


def wrapped(layer):
    image = layers.Input([4, 3])
    return keras.Model(image, layer(image))


def edited(file, change):
    """Save a small network, and change its configuration."""
    wrapped(layers.Dense(2)).save(file)
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    config = json.loads(entries["config.json"])
    change(config)
    entries["config.json"] = json.dumps(config).encode()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return file


def test_classes_that_are_no_names_are_passed_over(tmp_path):
    def nameless(config):
        config["config"]["layers"][1]["class_name"] = ["Dense"]

    file = edited(tmp_path / "a.keras", nameless)
    assert powers(file).computes_only
    assert len(model.inspect(file).layers) == 2


def test_a_path_too_long_to_be_looked_at_is_told(tmp_path):
    for op, attribute, kind in (
        ("PrintV2", "output_stream", "write files"),
        ("FixedUnigramCandidateSampler", "vocab_file", "read files"),
        ("DebugIdentityV2", "debug_urls", "write files"),
    ):
        graph_def = tf1.GraphDef()
        value = graph_def.node.add(name="a", op=op).attr[attribute]
        for size in (0, 20_000):
            path = b"file://" + size * b"/" if size else b""
            if op == "DebugIdentityV2":
                value.list.s[:] = [path] * bool(size)
            else:
                value.s = path
            (tmp_path / "a.pb").write_bytes(graph_def.SerializeToString())
            found = powers(tmp_path / "a.pb").kinds
            assert (kind in found) == bool(size), (op, size)


def test_a_long_string_is_no_piece_of_a_path():
    graph_def = tf1.GraphDef()
    for name, text in (("short", "part"), ("long", "/../" + 20_000 * "x")):
        value = graph_def.node.add(name=name, op="Const").attr["value"].tensor
        value.CopyFrom(tf.make_tensor_proto(text))
    data = graph_def.SerializeToString()
    body, _ = capability_kinds.bodies_of(data, (0, len(data)))
    pieces = {n: all(map(scan._is_piece, b.strings)) for n, b in body.nodes.items()}
    assert pieces == {"short": True, "long": False}
    assert body.value("long").text is None


def test_odd_entries_of_archives_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "_FLOOR", 100_000)
    file = edited(tmp_path / "a.keras", lambda config: None)
    with zipfile.ZipFile(file, "a") as archive:
        for name in ("../outside", "C:/outside", "..\\outside"):
            archive.writestr(name, "x")
        archive.writestr("assets/zeros", bytes(1_000_000), zipfile.ZIP_DEFLATED)
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("config.json", "{}")
    details = " ".join(entry.detail for entry in powers(file).dangers)
    assert details.count("outside of the archive") == 3
    assert "more than once" in details
    assert "which expands to 1,000,000 bytes" in details


def test_a_configuration_that_expands_without_end_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", b"[" + b" " * (65 << 20))
    with pytest.raises(ModelError, match="longer than 64 MiB"):
        powers(tmp_path / "a.keras")


@pytest.fixture(scope="module")
def writing(tmp_path_factory):
    """Return a SavedModel that writes a marker, and the marker."""
    folder = tmp_path_factory.mktemp("writing")
    save(SAMPLES["WriteFile"][1], folder / "net", folder / "marker")
    return folder / "net", folder / "marker"


def test_opening_warns_or_refuses(writing, caplog):
    folder, marker = writing
    model.open(folder)
    assert "can do more than compute: write files" in caplog.text
    with pytest.raises(ModelError, match=r"write files.*WriteFile"):
        model.open(folder, powers="compute")
    with pytest.raises(ModelError, match="is none of"):
        model.open(folder, powers="all")
    caplog.clear()
    model.open("testdata/two_signatures", powers="compute", signature="encode")
    assert not caplog.text
    assert not marker.exists()


def test_reports_can_be_read(writing):
    folder, marker = writing
    lines = str(powers(folder)).splitlines()
    assert lines[0] == "it can do more than compute: write files (2)"
    assert f"write files '{marker}': WriteFile 'WriteFile' in function" in lines[1]
    with pytest.raises(ModelError, match="does not exist"):
        powers(folder / "nothing")


def test_what_a_result_of_a_body_needs_stays(tmp_path, marker):
    text, nested = tf.Variable(""), tf.Variable("")
    marker.write_text("3.0")

    def read_nested():
        nested.assign(tf.io.read_file(str(marker)))
        return 0

    @tf.function(input_signature=[tf.TensorSpec([], name="x")])
    def function(x):
        def read():
            value = tf.io.read_file(str(marker))
            text.assign(tf.io.read_file(f"{marker}"))
            tf.cond(x > 1, read_nested, lambda: 0)
            tf.print("read", value)
            return x * tf.strings.to_number(value)

        return {"y": tf.cond(x > 0, read, lambda: x)}

    less = model.open(function).without_powers()
    assert less.run(x=2.0)["y"] == 6.0
    assert text.numpy() == nested.numpy() == b"3.0"
    report = less.strip_report
    assert [entry.reason for entry in report.removed] == [
        "can print, and no result of its function needs it"
    ]
    (kept,) = report.kept
    assert kept.reason == "can read files, and an output needs it"


def test_a_model_without_powers_computes_the_same(tmp_path, marker):
    variable = tf.Variable(2.0)

    @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
    def function(x):
        tf.io.write_file(str(marker), "x")
        variable.assign_add(1.0)
        return {"y": variable * x}

    less = model.open(function).without_powers()
    assert less.run(x=[1.0, 2.0])["y"].tolist() == [3.0, 6.0]
    # What the model keeps to itself still happens.
    assert less.run(x=[1.0])["y"].tolist() == [4.0]
    assert not marker.exists()
    less.save(tmp_path / "less")
    assert powers(tmp_path / "less").computes_only
    assert model.open(function).without_powers().strip_report.removed


def test_a_model_that_only_computes_stays_as_it_is():
    opened = model.open("testdata/two_signatures", signature="encode")
    same = opened.without_powers()
    assert same.strip_report.entries == ()
    assert same.graph.as_graph_def() == opened.graph.as_graph_def()


def test_what_sets_a_variable_stays(tmp_path, marker):
    text = tf.Variable("")
    marker.write_text("read")

    @tf.function(input_signature=[tf.TensorSpec([], name="x")])
    def function(x):
        text.assign(tf.io.read_file(str(marker)))
        return {"y": x}

    (entry,) = model.open(function).without_powers().strip_report.entries
    assert entry.action == "kept"
    assert "sets a variable" in entry.reason


def test_a_file_that_ends_the_process_is_refused(tmp_path, monkeypatch):
    forking = SimpleNamespace(run=lambda command, **_: run_python(*command[1:]))
    monkeypatch.setattr(opener, "subprocess", forking)
    with pytest.raises(ModelError, match=r"ends the process that opens it \(SIGABRT\)"):
        model.open(deadly(tmp_path / "a.pb"), isolated=True)
    whole = model.open("testdata/two_signatures", signature="encode", isolated=True)
    assert list(whole.outputs) == ["code"]


@pytest.mark.parametrize("name", ["net.pb", "net.meta"])
def test_a_damaged_file_is_named(tmp_path, name):
    # A node whose name would be longer than the file.
    node = b"\x0a\x03\x0a\x7fa"
    with tf.Graph().as_default() as graph:
        tf.constant(1.0)
        meta = tf1.train.export_meta_graph().SerializeToString()
    data = meta + bytes([0x12, len(node)]) + node
    if name == "net.pb":
        data = graph.as_graph_def().SerializeToString() + node
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ModelError, match=rf"/{name}': truncated or damaged protobuf"):
        powers(tmp_path / name)


def test_a_saver_writes_below_the_path_that_it_is_passed():
    constants = {"part": b"_temp/part", "above": b"/../elsewhere"}
    for pieces, is_within in (
        (("prefix", "part"), True),
        (("part", "prefix"), False),
        (("prefix", "above"), False),
        (("part",), False),
    ):
        nodes = {
            n: capability_kinds.ScannedNode("Const", (), (v,))
            for n, v in constants.items()
        }
        nodes["joined"] = capability_kinds.ScannedNode("StringJoin", pieces, ())
        body = SimpleNamespace(arguments=("prefix",), nodes=nodes)
        assert scan._is_within(body, "joined") == is_within, pieces


V1 = tf1.train.SaverDef.V1
SAVERS = {
    # Options of one Saver for each, and the kinds that are told.
    "no saver of its own": ([], ()),
    "whole": ([{}], ()),
    "sharded": ([{"sharded": True}], ()),
    "version 1": ([{"write_version": V1}], ()),
    "several": ([{}, {"name": "mine"}, {"sharded": True}], ()),
    "passed": ([{"write_version": V1, "sharded": True}], ()),
    "signature": ([{}], ("write files",)),
    "file": ([{}], ("write files",)),
    "fixed path": ([{}], ("read files", "write files")),
    "default elsewhere": ([{"filename": "/etc/a"}], ("read files", "write files")),
    "default above": ([{"filename": "../a"}], ("read files", "write files")),
}


def test_savers_of_a_graph_are_state_and_nothing_else_that_writes(tmp_path):
    wrong = {}
    for name, (savers, kinds) in SAVERS.items():
        with tf.Graph().as_default(), tf1.Session() as session:
            x = tf1.placeholder(tf.float32, [None, 2], "x")
            v = tf1.get_variable("v", [2], use_resource=len(savers) % 2 == 0)
            made = [tf1.train.Saver(**options) for options in savers]
            ends = {"y": x * v}
            if name == "signature":
                ends["saved"] = made[0].saver_def.save_tensor_name
                ends["saved"] = session.graph.get_tensor_by_name(ends["saved"])
            if name == "file":
                tf.io.write_file(x.graph.get_tensor_by_name("save/Const:0"), "a")
            if name == "fixed path":
                tf.raw_ops.SaveV2(
                    prefix="/tmp/a",
                    tensor_names=["v"],
                    shape_and_slices=[""],
                    tensors=[x],
                )
                tf.raw_ops.RestoreV2(
                    prefix="/tmp/a",
                    tensor_names=["v"],
                    shape_and_slices=[""],
                    dtypes=[tf.float32],
                )
            session.run(tf1.global_variables_initializer())
            builder = tf1.saved_model.Builder(str(tmp_path / name))
            signature = tf1.saved_model.predict_signature_def({"x": x}, ends)
            builder.add_meta_graph_and_variables(
                session,
                ["serve"],
                {"serving_default": signature},
                saver=made[0] if name == "passed" else None,
            )
            builder.save()
        found = tuple(sorted({e.kind for e in powers(tmp_path / name).dangers}))
        if found != kinds:
            wrong[name] = found
    assert wrong == {}


def test_entries_say_what_runs_them(tmp_path, marker):
    for name, by in {
        "gradient": "whoever differentiates it",
        "collection": "collection 'hidden'",
        "function of an object": "function 'child.hidden'",
    }.items():
        path = FILES[name].write(tmp_path / name, marker)
        told = {reason for entry in powers(path).dangers for reason in entry.by}
        assert by in told, name
    for name in ("main op", "restore op", "Lambda in a wrapper", "Lambda in HDF5"):
        (tmp_path / name).mkdir()
        entries = powers(FILES[name].write(tmp_path / name, marker)).dangers
        assert {entry.when for entry in entries} == {"loaded"}, name
        is_layer = name.startswith("Lambda")
        assert ("Lambda" in {entry.type for entry in entries}) == is_layer, name


def test_what_tflite_runs_of_tensorflow_only_computes(tmp_path):
    (tmp_path / "a.tflite").write_bytes(flex().blob)
    assert any(op.is_custom for op in tflite.open(flex().blob).ops)
    assert powers(tmp_path / "a.tflite").computes_only


def test_all_packed_weights_of_an_archive_are_looked_through_at_once(tmp_path):
    file = FILES["external data in weights"].write(tmp_path, tmp_path / "marker")
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    weights = entries["model.weights.h5"]
    # Names are longer together than what a process may be called with.
    names = [f"assets/{i}{'x' * 50_000}.h5" for i in range(60)]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (entries | dict.fromkeys(names, weights)).items():
            archive.writestr(name, data)
    found = powers(file).dangers
    assert {entry.kind for entry in found} == {"read files"}
    assert {entry.name for entry in found} == {
        f"{name}/data" for name in ("model.weights.h5", *names)
    }


def test_training_in_hdf5_files_is_looked_at(tmp_path):
    file = tmp_path / "a.h5"
    wrapped(layers.Dense(2)).save(file)
    loss = {"class_name": "function", "module": "os", "config": "system"}
    with h5py.File(file, "a") as opened:
        opened.attrs["training_config"] = json.dumps({"loss": loss})
    (entry,) = powers(file).dangers
    assert entry.kind == "run code"
    assert "training" in entry.place


# -- samples of models that do more: told, and they do it ------------------------------

READ = "read files", "list folders"


def markers(folder, samples):
    """Return the path of a marker for each sample, in a folder of its own."""
    made = {name: folder / "marked" / name.replace(" ", "_") for name in samples}
    for path in made.values():
        path.mkdir(parents=True)
    return {name: path / "marker" for name, path in made.items()}


def marked(marker):
    return bool(list(marker.parent.iterdir()))


# Their paths come through a queue, a dataset, a graph or a resource.
NO_PATH = {
    *("ImportEvent", "DatasetFromGraph", "WholeFileReaderV2", "TextLineReaderV2"),
    *("TFRecordDataset", "TFRecordReaderV2", "FixedLengthRecordReaderV2"),
}


def test_ops_are_told_and_do_what_is_told(tmp_path):
    """One model has a signature for each of them."""
    places = markers(tmp_path, SAMPLES)

    def function(name):
        def call(x):
            # Resources have names of ops, and none is shared.
            with tf.name_scope(name):
                return {"y": SAMPLES[name][1](str(places[name]), x)}

        return tf.function(call, [tf.TensorSpec([], name="x")], autograph=False)

    module = tf.Module()
    module.functions = {name: function(name) for name in SAMPLES}
    tf.saved_model.save(module, str(tmp_path / "net"), module.functions)
    entries = powers(tmp_path / "net").dangers
    assert not any(map(marked, places.values()))
    wrong = []
    for name, (kind, _) in SAMPLES.items():
        # Of some ops TensorFlow writes the second version.
        told = [e for e in entries if f"signature '{name}'" in e.by]
        told = [e for e in told if e.kind == kind and e.type.startswith(name)]
        if not told or (name not in NO_PATH and not all(e.detail for e in told)):
            wrong.append(f"{name} is not told: {told}")
    read = [name for name, (kind, _) in SAMPLES.items() if kind in READ]
    read = [name for name in read if name not in NOT_RUN]
    loaded = tf.saved_model.load(str(tmp_path / "net")).signatures
    for name in read:
        with contextlib.suppress(tf.errors.OpError):
            loaded[name](x=tf.constant(1.0))
            wrong.append(f"{name} needs no marker")
        PREPARED.get(name, lambda marker: marker.write_text("a,1\n"))(places[name])
    # A kernel may have looked for its files as it was made.
    loaded = tf.saved_model.load(str(tmp_path / "net")).signatures
    for name in SAMPLES.keys() - NOT_RUN.keys():
        loaded[name](x=tf.constant(1.0))
        if not marked(places[name]):
            wrong.append(f"{name} wrote nothing")
    assert wrong == []


def test_hidden_ops_are_told_and_cut_off(tmp_path):
    """No result of a body needs them."""
    places = markers(tmp_path, HIDDEN)
    module = tf.Module()
    module.f = tf.function(
        lambda x: {name: HIDDEN[name](str(places[name]), x) for name in HIDDEN},
        input_signature=[tf.TensorSpec([], name="x")],
        autograph=False,
    )
    signature = module.f.get_concrete_function()
    tf.saved_model.save(module, str(tmp_path / "net"), {"serving_default": signature})
    found = powers(tmp_path / "net")
    assert found.kinds == ("write files",)
    assert {entry.type for entry in found.entries} == {"WriteFile"}
    assert all(entry.place.startswith("function '") for entry in found.entries)
    details = {f"'{places[name]}'" for name in HIDDEN if name != "computed path"}
    assert {entry.detail for entry in found.entries} == {*details, ""}
    opened = model.open(tmp_path / "net")
    less = opened.without_powers()
    assert [e.action for e in less.strip_report.entries] == ["removed"] * len(HIDDEN)
    less.save(tmp_path / "less")
    assert powers(tmp_path / "less").computes_only
    loaded = tf.saved_model.load(tmp_path / "less").signatures["serving_default"]
    expected = {n: y.numpy() for n, y in loaded(x=tf.constant(2.0)).items()}
    np.testing.assert_equal(less.run(x=2.0), expected)
    assert [name for name in HIDDEN if marked(places[name])] == []
    # The original is as it was: it writes, and gives the same.
    np.testing.assert_equal(opened.run(x=2.0), expected)
    assert [name for name in HIDDEN if not marked(places[name])] == []


# Of each way one; `test_powers.py` and `test_keras_configs.py` have some more.
QUICK = [
    *("Lambda", "Lambda in a Sequential", "lambda as activation", "build_config"),
    *("function from elsewhere", "class of one's own", "TFSMLayer", "two headers"),
    *("vocabulary of TextVectorization", "external link in HDF5", "raw op as a layer"),
    *("making of a resource", "save op", "GraphDef", "asset above the model"),
    *("op of a library", "op of a library in TFLite"),
]


@pytest.mark.parametrize("name", chosen(FILES, *QUICK))
def test_a_file_is_told_and_does_what_is_told(tmp_path, name):
    sample = FILES[name]
    (marker,) = markers(tmp_path, ["file"]).values()
    path = sample.write(tmp_path, marker)
    # Some run as they are made.
    shutil.rmtree(marker.parent)
    marker.parent.mkdir()
    found = powers(path)
    told = [entry for entry in found.dangers if entry.kind == sample.kind]
    assert told
    assert all(entry.name and entry.type and entry.place for entry in told)
    assert not marked(marker)
    if sample.run is None:
        return
    if sample.kind in READ:
        # Keras packs errors of files into those of types.
        with pytest.raises((tf.errors.OpError, ValueError, TypeError, OSError)):
            sample.run(path, marker)
        sample.prepare(marker)
    sample.run(path, marker)
    assert sample.kind in READ or marked(marker)
