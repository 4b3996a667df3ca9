"""What models can do, against TensorFlow's registry and against what they did."""

from __future__ import annotations

import json
import random
import re
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session

from geutil import model
from geutil.errors import ModelError
from geutil.graph.tflite_reading import read
from geutil.model import powers
from geutil.model.scanning import graph_scan, op_table, saved_models
from testdata.powers import FILES, HIDDEN, SAMPLES, save
from tests.cli.test_child import deadly
from tests.model import scan_damage
from tests.model.mutations import mutate
from tests.settings import needs_eager
from tests.tflite_files import flex, floats
from tests.thorough import is_quick, thorough

pytestmark = needs_eager
tf1 = tf.compat.v1
layers = keras.layers


def registry():
    buffer = pywrap_tf_session.TF_GetAllOpList()
    data = pywrap_tf_session.TF_GetBuffer(buffer)
    return op_def_pb2.OpList.FromString(data).op


def test_every_op_of_tensorflow_is_in_the_table():
    table = op_table.table()
    missing = [op.name for op in registry() if op.name not in table]
    assert missing == []
    assert {entry.power for entry in table.values()} < {
        *op_table.POWERS,
        *op_table.HARMLESS,
    }
    assert all(entry.evidence for entry in table.values())


def test_what_calls_functions_is_known():
    table = op_table.table()
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
    table = op_table.table()
    for op in registry():
        named = {a.name for a in (*op.attr, *op.input_arg)} - {"is_files"}
        if any(map(NAMES_A_FILE.fullmatch, named)) and op.name not in NO_FILE:
            assert table[op.name].power not in op_table.HARMLESS, op.name


def test_what_has_state_says_why_it_only_computes():
    table = op_table.table()
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


def test_functions_of_objects_are_looked_at(tmp_path, marker):
    module = tf.Module()
    spec = [tf.TensorSpec([], name="x")]
    module.f = tf.function(lambda x: {"y": x}, input_signature=spec)
    sample = SAMPLES["WriteFile"][1]
    module.child = tf.Module()
    module.child.hidden = tf.function(
        lambda: sample(str(marker), tf.constant(1.0)), input_signature=[]
    )
    signature = module.f.get_concrete_function()
    tf.saved_model.save(module, str(tmp_path / "net"), {"f": signature})
    (entry,) = powers(tmp_path / "net").entries
    assert entry.by == ("function 'child.hidden'",)
    tf.saved_model.load(str(tmp_path / "net")).child.hidden()
    assert marker.exists()


@pytest.mark.parametrize("how", ["initializer", "restore"])
def test_what_runs_as_a_model_is_loaded_is_told(tmp_path, marker, how):
    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf1.placeholder(tf.float32, [])
        v = tf1.get_variable("v", initializer=1.0, use_resource=False)
        wrote = tf.io.write_file(str(marker), "x")
        saver = tf1.train.Saver()
        if how == "restore":
            restore = session.graph.get_operation_by_name("save/restore_all")
            restore._add_control_input(wrote)
        session.run(tf1.global_variables_initializer())
        builder = tf1.saved_model.Builder(str(tmp_path / "net"))
        builder.add_meta_graph_and_variables(
            session,
            ["serve"],
            {
                "serving_default": tf1.saved_model.predict_signature_def(
                    {"x": x}, {"y": x * v}
                )
            },
            main_op=wrote if how == "initializer" else None,
            saver=saver,
        )
        builder.save()
    (entry,) = powers(tmp_path / "net").dangers
    assert (entry.kind, entry.when) == ("write files", "loaded")
    assert not marker.exists()
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.saved_model.load(session, ["serve"], str(tmp_path / "net"))
    assert marker.exists()


def vocabulary(folder):
    file = folder / "words.txt"
    file.write_text("a\nb\n")
    return tf.lookup.StaticHashTable(
        tf.lookup.TextFileInitializer(
            str(file),
            tf.string,
            tf.lookup.TextFileIndex.WHOLE_LINE,
            tf.int64,
            tf.lookup.TextFileIndex.LINE_NUMBER,
        ),
        -1,
    )


def save_with_asset(folder, source):
    module = tf.Module()
    module.table = vocabulary(source)
    module.f = tf.function(
        lambda x: {"y": module.table.lookup(x)},
        input_signature=[tf.TensorSpec([None], tf.string, name="x")],
    )
    signature = module.f.get_concrete_function()
    tf.saved_model.save(module, str(folder), {"serving_default": signature})


def test_assets_of_a_model_are_its_own(tmp_path):
    save_with_asset(tmp_path / "net", tmp_path)
    assert powers(tmp_path / "net").entries == ()


def harmless():
    made = {}
    image = layers.Input([8, 8, 3], name="image")
    x = layers.Conv2D(4, 3)(image)
    x = layers.Dropout(0.5)(layers.BatchNormalization()(x))
    made["conv"] = keras.Model(image, layers.Dense(2)(layers.Flatten()(x)))
    text = layers.Input([6], name="text")
    x = layers.LSTM(4)(layers.Embedding(10, 4)(text))
    made["lstm"] = keras.Model(text, layers.Dense(2)(x))
    tokens = layers.Input([5, 8])
    made["mha"] = keras.Model(tokens, layers.MultiHeadAttention(2, 4)(tokens, tokens))
    return made


@pytest.mark.parametrize("name", harmless())
@pytest.mark.parametrize("suffix", ["", ".keras", ".h5"])
def test_keras_models_do_no_more_than_compute(tmp_path, name, suffix):
    network = harmless()[name]
    path = tmp_path / f"net{suffix}"
    network.compile("adam", "mse")
    if suffix:
        network.save(path)
    else:
        network.export(path, verbose=False)
    found = powers(path)
    assert found.computes_only
    assert found.ops > 3


def wrapped(layer):
    image = layers.Input([4, 3])
    return keras.Model(image, layer(image))


def test_code_in_files_of_keras_is_told(tmp_path):
    hidden = layers.TimeDistributed(layers.Lambda(lambda x: 2 * x, name="doubled"))
    for suffix in ("keras", "h5"):
        file = tmp_path / f"a.{suffix}"
        wrapped(hidden).save(file)
        found = powers(file)
        assert found.kinds == ("run code",)
        assert "Lambda" in {entry.type for entry in found.entries}
        assert all(entry.when == "loaded" for entry in found.entries)


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


def test_classes_from_elsewhere_are_told(tmp_path):
    def elsewhere(config):
        config["config"]["layers"][1]["module"] = "subprocess"

    def compiled(config):
        config["compile_config"]["loss"] = {
            "module": "builtins",
            "class_name": "__lambda__",
            "config": {"value": "no code"},
        }

    for change, text in ((elsewhere, "module 'subprocess'"), (compiled, "__lambda__")):
        found = powers(edited(tmp_path / "a.keras", change))
        assert found.kinds == ("run code",)
        assert text in str(found)


def test_classes_that_are_no_names_are_passed_over(tmp_path):
    def nameless(config):
        config["config"]["layers"][1]["class_name"] = ["Dense"]

    file = edited(tmp_path / "a.keras", nameless)
    assert powers(file).computes_only
    assert len(model.inspect(file).layers) == 2


@pytest.mark.parametrize(
    ("op", "attribute", "kind"),
    [
        ("PrintV2", "output_stream", "write files"),
        ("FixedUnigramCandidateSampler", "vocab_file", "read files"),
        ("DebugIdentityV2", "debug_urls", "write files"),
    ],
)
def test_a_path_too_long_to_be_looked_at_is_told(tmp_path, op, attribute, kind):
    graph_def = tf1.GraphDef()
    value = graph_def.node.add(name="a", op=op).attr[attribute]
    for size in (0, 20_000):
        path = b"file://" + size * b"/" if size or op == "DebugIdentityV2" else b""
        if op == "DebugIdentityV2":
            value.list.s[:] = [path] * bool(size)
        else:
            value.s = path
        (tmp_path / "a.pb").write_bytes(graph_def.SerializeToString())
        assert (kind in powers(tmp_path / "a.pb").kinds) == bool(size)


def test_a_long_string_is_no_piece_of_a_path():
    graph_def = tf1.GraphDef()
    for name, text in (("short", "part"), ("long", "/../" + 20_000 * "x")):
        value = graph_def.node.add(name=name, op="Const").attr["value"].tensor
        value.CopyFrom(tf.make_tensor_proto(text))
    data = graph_def.SerializeToString()
    body, _ = graph_scan.bodies_of(data, (0, len(data)))
    pieces = {
        n: all(map(saved_models._is_piece, b.strings)) for n, b in body.nodes.items()
    }
    assert pieces == {"short": True, "long": False}
    assert body.value("long").text is None


def test_odd_entries_of_archives_are_told(tmp_path):
    file = edited(tmp_path / "a.keras", lambda config: None)
    with zipfile.ZipFile(file, "a") as archive:
        for name in ("../outside", "C:/outside", "..\\outside"):
            archive.writestr(name, "x")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("config.json", "{}")
    details = " ".join(entry.detail for entry in powers(file).dangers)
    assert details.count("outside of the archive") == 3
    assert "more than once" in details


def test_a_configuration_that_expands_without_end_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", b"[" + b" " * (65 << 20))
    with pytest.raises(ModelError, match="longer than 64 MiB"):
        powers(tmp_path / "a.keras")


@pytest.mark.parametrize(
    ("op", "kind"),
    [(tf.io.read_file, "read files"), (tf.io.matching_files, "unknown")],
)
def test_ops_of_tensorflow_in_tflite_files_are_told(tmp_path, op, kind):
    function = tf.function(
        lambda x: {"y": op(x)}, input_signature=[tf.TensorSpec([], tf.string, "x")]
    )
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [function.get_concrete_function()]
    )
    converter.target_spec.supported_ops = [tf.lite.OpsSet.SELECT_TF_OPS]
    # What TFLite may not take from TensorFlow is a custom op of that name.
    converter.allow_custom_ops = True
    (tmp_path / "a.tflite").write_bytes(converter.convert())
    assert powers(tmp_path / "a.tflite").kinds == (kind,)


def test_opening_warns_or_refuses(tmp_path, marker, caplog):
    folder = tmp_path / "net"
    save(SAMPLES["WriteFile"][1], folder, marker)
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


def test_reports_can_be_read(tmp_path, marker):
    folder = tmp_path / "net"
    save(SAMPLES["WriteFile"][1], folder, marker)
    lines = str(powers(folder)).splitlines()
    assert lines[0] == "it can do more than compute: write files (2)"
    assert f"write files '{marker}': WriteFile 'WriteFile' in function" in lines[1]
    shutil.rmtree(folder)
    with pytest.raises(ModelError, match="does not exist"):
        powers(Path(folder))


def test_what_no_output_needs_is_cut_off(tmp_path, marker):
    def sample(marker, x):
        for name in ("WriteFile", "PrintV2"):
            SAMPLES[name][1](marker, x)
        return HIDDEN["branch"](marker, 3 * x)

    save(sample, tmp_path / "net", marker)
    opened = model.open(tmp_path / "net")
    less = opened.without_powers()
    removed = {entry.name for entry in less.strip_report.removed}
    assert {"PrintV2", "WriteFile", "cond/WriteFile"} <= removed
    assert less.strip_report.kept == ()
    less.save(tmp_path / "less")
    assert powers(tmp_path / "less").computes_only


@pytest.mark.parametrize("name", HIDDEN)
def test_what_no_result_of_a_body_needs_is_cut_off(tmp_path, marker, name):
    save(HIDDEN[name], tmp_path / "net", marker)
    opened = model.open(tmp_path / "net")
    less = opened.without_powers()
    assert [e.action for e in less.strip_report.entries] == ["removed"]
    less.save(tmp_path / "less")
    assert powers(tmp_path / "less").computes_only
    loaded = tf.saved_model.load(tmp_path / "less").signatures["serving_default"]
    y = loaded(x=tf.constant(2.0))["y"].numpy()
    np.testing.assert_array_equal(less.run(x=2.0)["y"], y)
    assert not list(marker.parent.iterdir())
    # The original is as it was: it writes, and gives the same.
    np.testing.assert_array_equal(opened.run(x=2.0)["y"], y)
    assert list(marker.parent.iterdir())


def test_what_a_result_of_a_body_needs_stays(tmp_path, marker):
    text = tf.Variable("")
    marker.write_text("3.0")

    @tf.function(input_signature=[tf.TensorSpec([], name="x")])
    def function(x):
        def read():
            value = tf.io.read_file(str(marker))
            text.assign(tf.io.read_file(f"{marker}"))
            tf.print("read", value)
            return x * tf.strings.to_number(value)

        return {"y": tf.cond(x > 0, read, lambda: x)}

    less = model.open(function).without_powers()
    assert less.run(x=2.0)["y"] == 6.0
    assert text.numpy() == b"3.0"
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


def test_a_file_that_ends_the_process_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"ends the process that opens it \(SIGABRT\)"):
        model.open(deadly(tmp_path / "a.pb"), isolated=True)
    whole = model.open("testdata/two_signatures", signature="encode", isolated=True)
    assert list(whole.outputs) == ["code"]


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    save(HIDDEN["branch"], folder / "net", folder / "marker")
    network = wrapped(layers.Dense(2))
    for suffix in ("keras", "h5"):
        network.save(folder / f"a.{suffix}")
    (folder / "a.tflite").write_bytes(floats().blob)
    files = ("net/saved_model.pb", "a.keras", "a.h5", "a.tflite")
    return {name: folder / name for name in files}


@pytest.mark.parametrize("name", ["net/saved_model.pb", "a.keras", "a.h5", "a.tflite"])
def test_damage_is_refused_or_survived(whole_files, tmp_path, name):
    data = whole_files[name].read_bytes()
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    # Each HDF5 file takes a process, that in an archive, too.
    for seed in range(20 if name in ("a.h5", "a.keras") else 120):
        path.write_bytes(mutate(data, random.Random(seed))[1])
        source = path if path.suffix != ".pb" else path.parent
        for told in (powers, model.inspect):
            try:
                assert str(told(source))
            except ModelError as error:
                assert str(source) in str(error)


@pytest.mark.parametrize(
    ("pieces", "is_within"),
    [
        (["prefix", "part"], True),
        (["part", "prefix"], False),
        (["prefix", "above"], False),
        (["part"], False),
    ],
)
def test_a_saver_writes_below_the_path_that_it_is_passed(pieces, is_within):
    constants = {"part": b"_temp/part", "above": b"/../elsewhere"}
    nodes = {n: graph_scan.Node("Const", (), (v,)) for n, v in constants.items()}
    nodes["joined"] = graph_scan.Node("StringJoin", tuple(pieces), ())
    body = SimpleNamespace(arguments=("prefix",), nodes=nodes)
    assert saved_models._is_within(body, "joined") == is_within


def test_gradients_and_collections_say_what_runs_them(tmp_path, marker):
    for name, by in (("gradient", "whoever differentiates it"), ("collection", None)):
        path = FILES[name].write(tmp_path / name, marker)
        told = {reason for entry in powers(path).dangers for reason in entry.by}
        assert (by or "collection 'hidden'") in told


def test_what_tflite_runs_of_tensorflow_only_computes(tmp_path):
    (tmp_path / "a.tflite").write_bytes(flex().blob)
    assert any(op.is_custom for g in read(flex().blob).graphs for op in g.ops)
    assert powers(tmp_path / "a.tflite").computes_only


def test_entries_that_are_packed_are_looked_through(tmp_path):
    file = FILES["external data in weights"].write(tmp_path, tmp_path / "marker")
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    (entry,) = powers(file).dangers
    assert (entry.kind, entry.name) == ("read files", "model.weights.h5/data")


def test_all_weights_of_an_archive_are_looked_through_at_once(tmp_path):
    file = FILES["external data in weights"].write(tmp_path, tmp_path / "marker")
    with zipfile.ZipFile(file) as archive:
        weights = archive.read("model.weights.h5")
    # Names are longer together than what a process may be called with.
    names = [f"assets/{i}{'x' * 50_000}.h5" for i in range(60)]
    with zipfile.ZipFile(file, "a") as archive:
        for name in names:
            archive.writestr(name, weights)
    found = powers(file).entries
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


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    scan_damage.write_all(folder)
    jobs = scan_damage.jobs_for(80 if is_quick() else 400)
    return list(scan_damage.run(folder, jobs))


@pytest.mark.parametrize("target", scan_damage.SHARES)
def test_damage_neither_ends_hangs_nor_swells_the_process(looked_at, target):
    mine = [outcome for outcome in looked_at if outcome.target == target]
    assert len(mine) >= 3
    assert [o for o in mine if o.result not in scan_damage.OK] == []


@thorough
def test_a_death_is_noticed(tmp_path):
    # A child that finds no file to damage ends, and the next job gets another one.
    outcomes = scan_damage.run(tmp_path, [("a.pb", 0), ("a.pb", 1)])
    assert [o.result.split()[0] for o in outcomes] == ["died", "died"]
