"""The command on TFLite files: inspected, drawn, compared with their graph."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.quantize import calibrate, compare_int8, quantize, to_int8
from tests import tflite_files
from tests.settings import needs_eager

pytestmark = needs_eager


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "net.tflite"
    path.write_bytes(tflite_files.mixed().blob)
    return path


@pytest.fixture
def source(tmp_path):
    return tflite_files.mixed().model.save(tmp_path / "net", "saved_model")


def test_inspect(geutil, file):
    said = geutil("inspect", file)
    assert said.code == 0
    assert "ops in float32: 1 (1 SIN)" in said.out
    found = json.loads(geutil("inspect", file, "--json").out)
    assert found["kind"] == "TFLite"
    assert found["precisions"]["int8"] == {"CONV_2D": 2}
    signature = found["signatures"]["serving_default"]
    assert signature["inputs"]["x"]["quantization"]["zero_points"] == [-128]


def test_inspect_starts_no_tensorflow(file):
    code = (
        "import sys\n"
        "from geutil.cli.main import main\n"
        f"sys.argv = ['geutil', 'inspect', {str(file)!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('tensorflow' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


def test_view(geutil, file, tmp_path):
    page = tmp_path / "page.html"
    assert geutil("view", file, "-o", page).code == 0
    assert "between/sine" in page.read_text()


def test_diff_with_the_model(geutil, file, source, tmp_path):
    page = tmp_path / "page.html"
    said = geutil("diff", source, file, "--html", page)
    assert said.code == 0
    assert "! between/sine (SIN) computes in float32" in said.out
    assert "partners" in page.read_text()
    found = json.loads(geutil("diff", file, source, "--json").out)
    assert [op["op_type"] for op in found["ops"]].count("CONV_2D") == 2
    assert found["missing"] == []


def test_diff_with_another_file(geutil, file, tmp_path):
    other = tmp_path / "other.tflite"
    other.write_bytes(tflite_files.floats().blob)
    assert geutil("diff", file, file).code == 0
    assert geutil("diff", file, other).code == 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A quantized model, its file, another float model, and data."""
    place = tmp_path_factory.mktemp("pair")
    kernel = tf.constant(np.random.default_rng(0).normal(size=(6, 4)), tf.float32)

    @tf.function(input_signature=[tf.TensorSpec([None, 6], name="x")])
    def network(x):
        return {"y": tf.nn.softmax(tf.matmul(x, kernel, name="dense"), name="soft")}

    m = model.open(network)
    other = model.open(network)
    other.outputs["z"] = other.outputs["y"]
    other.save(place / "other")
    data = np.random.default_rng(1).normal(size=(10, 6)).astype(np.float32)
    np.savez(place / "data.npz", x=data)
    m.save(place / "float")
    quantize(m, is_training=False)
    calibrate(m, {"x": data}, "min_max")
    m.save(place / "model")
    (place / "net.tflite").write_bytes(to_int8(m))
    ranges = next(n for n in m.variables if n.endswith("act_quant/max"))
    m.variables[ranges].assign(m.variables[ranges].numpy() * 0.2)
    m.save(place / "narrow")
    return place


def test_view_of_a_pipeline(geutil, pair, tmp_path):
    page = tmp_path / "page.html"
    stages = [pair / name for name in ("float", "model", "net.tflite")]
    said = geutil("view", *stages, "-o", page, "--data", pair / "data.npz")
    assert said.code == 0, said.err
    text = page.read_text()
    for name in ("float", "model", "net.tflite"):
        assert f'"label":"{name}"' in text
    assert text.count('"noises":') == 2
    plain = tmp_path / "plain.html"
    assert geutil("view", *stages, "-o", plain).code == 0
    assert '"noises":' not in plain.read_text()


def test_stages_of_one_name_are_told_apart(geutil, pair, tmp_path):
    copy = tmp_path / "net.tflite"
    copy.write_bytes((pair / "net.tflite").read_bytes())
    page = tmp_path / "page.html"
    assert geutil("view", pair / "net.tflite", copy, "-o", page).code == 0
    assert f'"label":"{tmp_path.name}/net.tflite"' in page.read_text()
    twice = geutil("view", copy, copy, "-o", page, "--force")
    assert twice.code == 0
    assert f'"label":"2: {tmp_path.name}/net.tflite"' in page.read_text()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("model",), "the file last"),
        (("net.tflite", "model"), "the file last"),
        (("net.tflite",), "the file last"),
        (("float", "net.tflite"), "simulates quantization"),
    ],
)
def test_noise_needs_a_quantized_model_and_its_file(
    geutil, pair, tmp_path, names, words
):
    page = tmp_path / "page.html"
    stages = [pair / name for name in names]
    said = geutil("view", *stages, "-o", page, "--data", pair / "data.npz")
    assert said.code == 1
    assert words in said.err
    assert not page.exists()


def test_check_of_a_file(geutil, pair):
    arguments = ["check", pair / "net.tflite", "--against", pair / "model"]
    arguments += ["--data", pair / "data.npz"]
    said = geutil(*arguments)
    assert said.code == 0
    assert said.out.startswith("10 sample(s)")
    assert "adds most noise" not in said.out
    with_layers = geutil(*arguments, "--layers", "--batch", "4")
    assert with_layers.code == 0
    assert "4 layer(s)" in with_layers.out
    assert "dense (MatMul)" in with_layers.out
    found = json.loads(geutil(*arguments, "--layers", "--json").out)
    m = model.open(str(pair / "model"))
    sample = dict(np.load(pair / "data.npz"))
    blob = (pair / "net.tflite").read_bytes()
    comparison = compare_int8(m, blob, sample, layers=True)
    assert found["close"] is True
    assert found["most"] == comparison.most
    assert [entry["op"] for entry in found["layers"]] == ["x", "dense", "soft", "y_0"]
    assert not any(entry["unmatched"] for entry in found["layers"])
    for entry, layer in zip(found["layers"], comparison.layers, strict=True):
        # JSON has no infinity, for an Identity without noise.
        own = None if layer.op == "y_0" else pytest.approx(layer.own)
        assert entry["own"] == own
        assert entry["file_ratio"] == pytest.approx(layer.file_ratio)


def test_check_fails_where_a_file_is_off(geutil, pair):
    arguments = ["check", pair / "net.tflite", "--data", pair / "data.npz"]
    off = geutil(*arguments, "--against", pair / "narrow")
    assert off.code == 1
    assert off.out.startswith("10 sample(s)")
    found = json.loads(geutil(*arguments, "--against", pair / "narrow", "--json").out)
    assert found["close"] is False
    assert found["most"] > 1
    most = ("--steps", str(found["most"]))
    assert geutil(*arguments, "--against", pair / "narrow", *most).code == 0


def test_check_of_a_file_refuses(geutil, pair):
    file, data = pair / "net.tflite", ("--data", pair / "data.npz")
    against = ("--against", pair / "model")
    for arguments, word in (
        (("check", file), "--against"),
        (("check", file, *against), "--data"),
        (("check", file, pair / "model", *data), "--against"),
        (("check", file, *against, *data, "--rtol", "0.1"), "--rtol"),
        (("check", pair / "float", pair / "float", *against), "--against"),
        (("check", pair / "float", pair / "float", "--layers"), "--layers"),
        (("check", pair / "float"), "another model"),
        (("check", file, "--against", pair / "other", *data), "of another model"),
        (("check", file, "--against", pair / "float", *data, "--layers"), "FakeQuant"),
        (("check", file, *against, "--data", pair / "none"), "no data"),
    ):
        said = geutil(*arguments)
        assert said.code == 1, arguments
        (line,) = said.err.splitlines()
        assert word in line


def test_check_of_a_file_draws_a_page(geutil, pair, tmp_path):
    arguments = ["check", pair / "net.tflite", "--against", pair / "model"]
    arguments += ["--data", pair / "data.npz", "--layers"]
    page = tmp_path / "noise.html"
    assert geutil(*arguments, "--html", page).code == 0
    assert "accumulated" in page.read_text()
    assert geutil(*arguments, "--html", page).code == 1
    assert geutil(*arguments, "--html", page, "--force").code == 0
