"""What the command does, command by command."""

import json
import zipfile

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.version import __version__
from tests.settings import needs_eager

pytestmark = [needs_eager]

COMMANDS = """
inspect ops cut split expose splice rename batch-size strip unroll fold bits quantize
calibrate memory convert run batch diff check view
"""


def test_without_arguments_there_is_help_and_each_command_has_some(geutil):
    said = geutil.done()
    assert [name for name in COMMANDS.split() if name not in said] == []
    helps = {name: geutil(name, "--help") for name in COMMANDS.split()}
    assert {s.code for s in helps.values()} == {0}
    assert [name for name, s in helps.items() if "--help" not in s.out] == []


def test_the_version(geutil):
    assert geutil("--version").out.strip() == __version__


def test_inspect(geutil, folder):
    said = geutil.done("inspect", folder / "net")
    assert "image: float32 [n,8,8,3]" in said
    assert "ops by scope" not in said
    assert "ops by scope" in geutil("inspect", folder / "net", "--scopes").out
    found = geutil.json("inspect", folder / "net", "--scopes")
    assert found["kind"] == "SavedModel"
    assert len(found["variables"]) == 7
    (first, count), *others = found["scopes"].items()
    assert others
    assert first.rpartition("/")[2].startswith("norm")
    (rows,) = geutil.tables("ops", folder / "net", "--scope", first)
    assert len(rows) == count
    assert all(row["name"].startswith(f"{first}/") for row in rows)


def test_a_format_may_be_named(geutil, folder, tmp_path):
    named = tmp_path / "odd.name"
    said = geutil.done("convert", folder / "net", "-o", named, "--format", "pbtxt")
    assert named.read_text().startswith("node {")
    assert "not run beside what was read: '.name' does not say" in said


def test_ops_in_a_pipe_are_lines_with_tabs_and_heads(geutil, folder):
    said = geutil("ops", folder / "net", "--type", "Conv2D")
    heads, line = said.out.splitlines()
    assert heads == "name\ttype\tshapes"
    name, kind, _ = line.split("\t")
    assert kind == "Conv2D"
    (row,) = geutil.json("ops", folder / "net", "--regex", f"{name}$")
    assert row["name"] == name


def test_fold_check_and_diff(geutil, folder, tmp_path):
    said = geutil.done(
        "fold", folder / "net", "--scope", "norm", "-o", tmp_path / "folded"
    )
    assert "1 of 1 batch norm(s) folded" in said
    assert f"wrote '{tmp_path / 'folded'}' (saved_model): " in said
    assert "on 2 drawn input(s)" in said
    geutil.done("check", folder / "net", tmp_path / "folded", "--samples", "2")
    data = ["--data", folder / "data.npz", "--atol", 1e-5]
    geutil.done("check", folder / "net", tmp_path / "folded", *data)
    differs = geutil("diff", folder / "net", tmp_path / "folded")
    assert differs.code == 1
    assert "added" in differs.out
    geutil.done("diff", folder / "net", folder / "net")


def test_cut_rename_and_batch_size(geutil, folder, tmp_path):
    relu = geutil.json("ops", folder / "net", "--type", "Relu")[0]["name"]
    for call, target, inputs, outputs in (
        ("cut {net} --input image --to half={relu}", "cut", {"image": None}, ["half"]),
        (
            "rename {cut} --input image=pixels --result half=features",
            "named.pb",
            {"pixels": None},
            ["features"],
        ),
        ("rename {cut} --to-signature other", "other", {"image": None}, ["half"]),
        ("batch-size {cut} 3", "three", {"image": 3}, ["half"]),
    ):
        places = {"net": folder / "net", "cut": tmp_path / "cut", "relu": relu}
        path = tmp_path / target
        told = geutil.json(*call.format(**places).split(), "-o", path)
        m = model.open(str(path))
        assert {name: t.shape[0] for name, t in m.inputs.items()} == inputs
        assert list(m.outputs) == outputs
        assert told["path"] == str(path)
        assert told["signature"] == m.signature
        assert told["inputs"].keys() == inputs.keys()
        for name, end in told["inputs"].items():
            assert end["shape"] == m.inputs[name].shape.as_list()
            assert end["dtype"] == "float32"
    said = geutil.done("batch-size", tmp_path / "cut", "3", "-o", tmp_path / "again")
    assert f", {told['ops']} ops) -> " in said


def test_splice(geutil, folder, tmp_path):
    m = model.open(str(folder / "net"))
    relu = geutil.json("ops", folder / "net", "--type", "Relu")[0]["name"]
    m.cut(outputs={"half": relu}).save(tmp_path / "half")
    both = [folder / "net", tmp_path / "half", "-o", tmp_path / "spliced"]
    ends = ["--replace", f"{relu}=half", "--feed", "image=image"]
    geutil.done("splice", *both, *ends)
    # The half that was put in is the one that it took the place of.
    geutil.done("check", folder / "net", tmp_path / "spliced", "--samples", "1")


def test_reports_as_json(geutil, folder, tmp_path):
    told = {}
    for command in ("strip", "fold", "quantize"):
        page = tmp_path / f"{command}.html"
        target = ["-o", tmp_path / command, "--json"]
        target += [] if command == "strip" else ["--html", page]
        said = geutil.done(command, folder / "net", *target)
        told[command] = json.loads(said)
        assert page.exists() == (command != "strip")
    assert [entry["layer_type"] for entry in told["fold"]["folded"]] == ["Conv2D"]
    assert told["quantize"]["quantized"]["coverage"] == 1.0
    page = tmp_path / "diff.html"
    assert geutil("diff", folder / "net", tmp_path / "fold", "--html", page).code == 1
    assert '"status":[' in page.read_text()


def test_a_model_takes_its_own_place(geutil, folder, tmp_path):
    target = tmp_path / "net.pb"
    geutil.done("strip", folder / "net", "-o", target)
    geutil.done("rename", target, "--input", "image=x", "-o", target, "--force")
    assert list(model.open(str(target)).inputs) == ["x"]


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    place = tmp_path_factory.mktemp("recurrent") / "net.keras"
    stack = [tf.keras.Input([3, 3], name="x"), tf.keras.layers.LSTM(4)]
    tf.keras.Sequential(stack).save(place)
    return place


def test_unroll(geutil, recurrent, tmp_path):
    geutil.done("unroll", recurrent, "-o", tmp_path / "unrolled")
    ops = geutil("ops", tmp_path / "unrolled", "--type", "Tanh").out
    assert ops.count("/step_") >= 6


def test_memory_of_a_loop_grows_with_the_batch(geutil, recurrent):
    said = geutil("memory", recurrent, "--batch", "64", "--json")
    assert said.code == 0
    assert "guess" not in said.err
    # Per sample, 3 steps keep some 11 tensors of 4 floats each at least.
    assert json.loads(said.out)["plain_peak"] > 64 * 3 * 11 * 4 * 4


def test_a_place_that_cannot_be_written_is_told_first(geutil, folder):
    said = geutil("fold", folder / "net", "-o", "/proc/self/net.pb")
    assert "'/proc/self/net.pb' cannot be written" in said.err
    assert said.code == 1


def test_view(geutil, folder, tmp_path):
    page = tmp_path / "net.html"
    said = geutil("view", folder / "net", "-o", page)
    assert (said.code, said.out) == (0, "")
    assert str(page) in said.err
    assert "GlobalAverage" in page.read_text() or "Mean" in page.read_text()
    for option in ("--memory", "--training"):
        made = ["-o", page, "--force", option, "--batch", "4"]
        geutil.done("view", folder / "net", *made)
        assert '"lives":' in page.read_text()


def test_what_was_written_is_told(geutil, folder, tmp_path):
    data = ["--data", folder / "data.npz"]
    told = geutil("quantize", folder / "net", "-o", tmp_path / "q", *data, "--json")
    written = json.loads(told.out)["written"]
    assert written["given"]
    assert written["ops_added"]["FakeQuantWithMinMaxVars"] >= 2
    size = sum(f.stat().st_size for f in (tmp_path / "q").rglob("*") if f.is_file())
    assert written["bytes"] == size
    ours, quantized = (model.open(str(p)) for p in (folder / "net", tmp_path / "q"))
    with np.load(folder / "data.npz") as archive:
        inputs = {name: archive[name][:8] for name in archive.files}
    found = ours.compare(quantized, inputs)
    largest = max(d.absolute for d in found.differences.values())
    assert written["difference"] == pytest.approx(largest, rel=1e-6)
    unset = geutil("quantize", folder / "net", "-o", tmp_path / "u")
    assert "`geutil calibrate --data` sets them" in unset.out


MISSING = [
    ("--type conv2d", "no op of type 'conv2d'; did you mean Conv2D"),
    ("--type Frobnicate", "there is no op of type 'Frobnicate'"),
    ("--scope nope", "there is no scope 'nope'"),
    ("--regex xyzzy", "no name of an op holds 'xyzzy'"),
    ("--type Conv2D --regex xyzzy", "leave one of the options out"),
]


def _of_layers(kind):
    """Return a network: of a stack, of a layer twice, of numbers that a file keeps."""
    layers = tf.keras.layers
    x = tf.keras.Input([6, 4], name="x")
    if kind == "adapted":
        normal = layers.Normalization()
        normal.adapt(np.random.default_rng(0).normal(3.0, 2.0, [8, 6, 4]))
        y = normal(x)
    elif kind == "shared":
        once = layers.Dense(4, kernel_regularizer="l2")
        twice = layers.TimeDistributed(once)
        y = layers.Add()([once(x), twice(x)])
    else:
        stack = tf.keras.Sequential([layers.Dropout(0.5), layers.Conv1D(3, 2)])
        y = layers.MultiHeadAttention(2, 3)(
            x, layers.Bidirectional(layers.GRU(2))(x)[:, None]
        )
        y = stack(y)
    network = tf.keras.Model(x, y)
    network.compile("adam", "mse")
    return network


@pytest.mark.parametrize("kind", ["plain", "shared", "adapted"])
def test_keras_files_are_listed_as_the_network_is_traced(geutil, tmp_path, kind):
    """Weights are read only where a layer needs its own, or is in two places."""
    network = _of_layers(kind)
    network.save(tmp_path / "net.keras")
    graph = model.open(network).graph
    types = [op.type for op in graph.get_operations()]
    (rows,) = geutil.tables("ops", tmp_path / "net.keras")
    assert [row["type"] for row in rows] == types
    shapes = [
        ", ".join(str(t.shape) for t in op.outputs) for op in graph.get_operations()
    ]
    assert [row["shapes"] for row in rows] == shapes
    with zipfile.ZipFile(tmp_path / "net.keras") as whole:
        config = {n: whole.read(n) for n in ("config.json", "metadata.json")}
    with zipfile.ZipFile(tmp_path / "cut.keras", "w") as archive:
        for name, text in config.items():
            archive.writestr(name, text)
        archive.writestr("model.weights.h5", b"damaged")
    said = geutil("ops", tmp_path / "cut.keras")
    assert said.code == (kind != "plain"), said


def test_ops_that_are_not_there(geutil, folder):
    for options, meant in MISSING:
        said = geutil("ops", folder / "net", *options.split())
        assert (said.code, said.out) == (1, "")
        assert meant in said.err
    assert geutil.json("ops", folder / "net", "--type", "Conv2dd", code=1) == []
