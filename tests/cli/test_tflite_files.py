"""The command on TFLite files: inspected, drawn, compared with their graph."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from geutil import model, tflite
from geutil.quantize import calibrate, compare_int8, quantize, to_int8
from tests import tflite_files
from tests.interpreter import new_interpreter
from tests.settings import needs_eager
from tests.tflite.declared import buffer_of
from tests.tflite_files import IMAGE

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
    said = geutil.done("inspect", file)
    assert "ops in float32: 1 (1 SIN)" in said
    found = geutil.json("inspect", file)
    assert found["kind"] == "TFLite"
    assert found["precisions"]["int8"] == {"CONV_2D": 2}
    signature = found["signatures"]["serving_default"]
    assert signature["inputs"]["x"]["quantization"]["zero_points"] == [-128]


def test_ops(geutil, file):
    (rows,) = geutil.tables("ops", file)
    # So many the interpreter runs, too.
    counts = geutil.json("inspect", file)["ops"]
    assert collections.Counter(row["type"] for row in rows) == counts
    assert ["between/sine", "SIN", "float32 [1, 16, 16, 3]"] in [
        list(row.values()) for row in rows
    ]
    ((row,),) = geutil.tables("ops", file, "--scope", "between", "--regex", "^b.*sin")
    assert row["name"] == "between/sine"
    said = geutil("ops", file, "--type", "SINE")
    assert said.code == 1
    assert "there is no op of type 'SINE'; did you mean SIN?" in said.err
    for option, why in (("--regex", "no regular expression"), ("--signature", "no")):
        said = geutil("ops", file, option, "[")
        assert said.code == 1
        assert why in said.err


def test_view_and_diff_with_the_model(geutil, file, source, tmp_path):
    page = tmp_path / "page.html"
    geutil.done("view", file, "-o", page)
    assert "between/sine" in page.read_text()
    said = geutil.done("diff", source, file, "--html", page, "--force")
    assert "! between/sine (SIN) computes in float32" in said
    assert "partners" in page.read_text()
    found = geutil.json("diff", file, source)
    assert [op["op_type"] for op in found["ops"]].count("CONV_2D") == 2
    assert found["missing"] == []
    other = tmp_path / "other.tflite"
    other.write_bytes(tflite_files.floats().blob)
    geutil.done("diff", file, file)
    geutil.done("diff", file, other, code=1)


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
    geutil.done("view", *stages, "-o", page, "--data", pair / "data.npz")
    text = page.read_text()
    for name in ("float", "model", "net.tflite"):
        assert f'"label":"{name}"' in text
    assert text.count('"noises":') == 2
    plain = tmp_path / "plain.html"
    geutil.done("view", *stages, "-o", plain)
    assert '"noises":' not in plain.read_text()


def test_stages_of_one_name_are_told_apart(geutil, pair, tmp_path):
    copy = tmp_path / "net.tflite"
    copy.write_bytes((pair / "net.tflite").read_bytes())
    page = tmp_path / "page.html"
    geutil.done("view", pair / "net.tflite", copy, "-o", page)
    assert f'"label":"{tmp_path.name}/net.tflite"' in page.read_text()
    geutil.done("view", copy, copy, "-o", page, "--force")
    assert f'"label":"2: {tmp_path.name}/net.tflite"' in page.read_text()


def test_check_of_a_file(geutil, pair, tmp_path):
    arguments = ["check", pair / "net.tflite", "--against", pair / "model"]
    arguments += ["--data", pair / "data.npz"]
    said = geutil.done(*arguments)
    assert said.startswith("10 sample(s)")
    assert "adds most noise" not in said
    page = tmp_path / "noise.html"
    with_layers = geutil.done(*arguments, "--layers", "--batch", "4", "--html", page)
    assert "accumulated" in page.read_text()
    assert geutil(*arguments, "--html", page).code == 1
    assert "4 layer(s)" in with_layers
    assert "dense (MatMul)" in with_layers
    found = geutil.json(*arguments, "--layers")
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
    found = geutil.json(*arguments, "--against", pair / "narrow", code=1)
    assert found["close"] is False
    assert found["most"] > 1
    most = ("--steps", str(found["most"]))
    geutil.done(*arguments, "--against", pair / "narrow", *most)


REFUSED = """
check net.tflite | --against
check net.tflite --against model | --data
check net.tflite model --data data.npz | --against
check net.tflite --against model --data data.npz --rtol 0.1 | --rtol
check float float --against model | --against
check float float --layers | --layers
check float | another model
check net.tflite --against other --data data.npz | of another model
check net.tflite --against float --data data.npz --layers | FakeQuant
check net.tflite --against model --data none | no data
view model -o page.html --data data.npz | the file last
view net.tflite model -o page.html --data data.npz | the file last
view net.tflite -o page.html --data data.npz | the file last
view float net.tflite -o page.html --data data.npz | simulates quantization
"""


def test_files_and_models_that_do_not_go_together(geutil, pair, monkeypatch):
    monkeypatch.chdir(pair)
    for row in REFUSED.strip().splitlines():
        call, _, word = row.partition(" | ")
        said = geutil(*call.split())
        assert said.code == 1, call
        (line,) = said.err.splitlines()
        assert word in line, call
    assert not (pair / "page.html").exists()


def opened(path):
    file = tflite.open(path)
    file.verify()
    return file


def test_a_file_is_cut_and_split(geutil, file, tmp_path):
    part = tmp_path / "part.tflite"
    said = geutil.done("cut", file, "--to", "sine=between/sine", "-o", part)
    assert f"-> {part}" in said
    assert "not run beside what was read" in said
    assert [*opened(part).signatures["serving_default"].outputs] == ["sine"]
    told = geutil.json("cut", file, "--ops", "1:3", "-o", part, "--force")
    assert told["ops"] == len(opened(part).graphs[0].ops) == 2
    assert told["written"]["bytes"] == part.stat().st_size
    second = tmp_path / "second.tflite"
    said = geutil.done(
        "split", file, "--at", "between/sine", "-o", part, "--second", second, "--force"
    )
    assert len(said.splitlines()) == 6
    kinds = [op.kind for half in (part, second) for op in opened(half).ops]
    assert kinds == [op.kind for op in opened(file).ops]


def test_parts_keep_the_name_of_their_signature(geutil, file, tmp_path):
    two, m = tmp_path / "two.tflite", opened(file)
    (x,), (y,) = m.graphs[0].inputs, m.graphs[0].outputs
    m.add_signature("second", inputs={"angle": x}, outputs={"result": y})
    m.save(two)
    parts = [tmp_path / "a.tflite", tmp_path / "b.tflite"]
    asked = ["--signature", "second"]
    geutil.done("cut", two, "--input", "between/sine", *asked, "-o", parts[0])
    (one,) = opened(parts[0]).signatures.values()
    assert (one.key, [*one.outputs]) == ("second", ["result"])
    places = ["-o", parts[0], "--second", parts[1], "--force"]
    geutil.done("split", two, "--at", "between/sine", *asked, *places)
    assert [[*opened(part).signatures] for part in parts] == [["second"], ["second"]]


def test_a_cut_of_a_model_names_its_signature_in_every_format(geutil, tmp_path):
    class Two(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 4], name="x")])
        def half(self, x):
            return {"y": tf.sin(x / 2)}

        @tf.function(input_signature=[tf.TensorSpec([None, 4], name="x")])
        def twice(self, x):
            return {"y": tf.sin(2 * x)}

    both = Two()
    signatures = {"half": both.half, "twice": both.twice}
    tf.saved_model.save(both, str(tmp_path / "two"), signatures=signatures)
    for place in (tmp_path / "part", tmp_path / "part.tflite"):
        asked = ["--signature", "twice", "--to", "z=y", "-o", place]
        geutil.done("cut", tmp_path / "two", *asked)
        assert [*geutil.json("inspect", place)["signatures"]] == ["twice"]


def test_a_file_is_edited(geutil, file, tmp_path):
    new = tmp_path / "new.tflite"
    names = ["--input", "x=image", "--tensor", "between/sine=sine"]
    geutil.done("rename", file, *names, "--to-signature", "predict", "-o", new)
    renamed = opened(new)
    assert renamed.signatures["predict"].inputs["image"].name == "image"
    assert renamed.tensor("sine").producer.kind == "SIN"
    geutil.done("rename", file, "--from-signature", "-o", new, "--force")
    assert opened(new).graphs[0].inputs[0].name == "x"
    geutil.done("expose", file, "--to", "between/sine", "-o", new, "--force")
    assert [*opened(new).signatures["serving_default"].outputs][1:] == ["between/sine"]
    noted, m = tmp_path / "noted.tflite", opened(file)
    m.metadata["notes"] = buffer_of(bytes(range(99)))
    m.save(noted)
    geutil.done("strip", noted, "--names", "--metadata", "-o", new, "--force")
    assert new.stat().st_size < file.stat().st_size
    assert [*opened(new).metadata] == ["min_runtime_version"]
    geutil.done("batch-size", file, "3", "-o", new, "--force")
    assert opened(new).graphs[0].inputs[0].shape[0] == 3


@pytest.fixture
def network(tmp_path):
    path = tmp_path / "network.tflite"
    path.write_bytes(tflite_files.unfolded().blob)
    return path


def _interpreted(blob):
    interpreter = new_interpreter(blob)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], IMAGE)
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


@pytest.mark.parametrize("command", ["fold", "convert", "strip"])
def test_commands_that_need_a_graph_take_files(geutil, network, tmp_path, command):
    path = tmp_path / "net"
    if command == "strip":
        path = path.with_suffix(".tflite")
    geutil.done(command, network, "-o", path)
    wanted = _interpreted(network.read_bytes())
    if command == "strip":
        made = _interpreted(path.read_bytes())
    else:
        m = model.open(str(path))
        ((name, made),) = m.run(**dict.fromkeys(m.inputs, IMAGE)).items()
    np.testing.assert_allclose(made, wanted, rtol=0, atol=1e-6)


def test_files_are_quantized_and_told_of_memory(geutil, network, tmp_path):
    path = tmp_path / "small.tflite"
    geutil.done("quantize", network, "-o", path, "--scheme", "weight_only_int8")
    assert tflite.open(path).find_tensors(dtype="int8", where=lambda t: t.buffer.size)
    made, wanted = (_interpreted(one.read_bytes()) for one in (path, network))
    np.testing.assert_allclose(made, wanted, rtol=0, atol=0.02)
    found = geutil.json("memory", network, "--batch", "1")
    assert 0 < found["plain_peak"] <= found["plain_worst"]
    assert "equal on" in geutil.done("check", network, path, "--atol", "0.02")
    geutil.done("check", network, path, "--atol", "1e-9", code=1)


def test_files_without_a_graph_are_refused_with_the_remedy(geutil, tmp_path):
    path = tmp_path / "custom.tflite"
    m = tflite.LiteFile()
    x = m.add_input("x", "float32", [2])
    m.set_outputs(m.add("Mine", [x], shape=[2], custom_options=b""))
    m.save(path)
    for command in ("fold", "convert", "quantize"):
        said = geutil(command, path, "-o", tmp_path / "out")
        assert said.code == 1
        assert "cannot become the graph that this command needs" in said.err
        assert "pass the model that it was made from" in said.err


def test_what_is_no_model_is_told_all_kinds(geutil, tmp_path):
    (tmp_path / "notes.txt").write_text("none")
    said = geutil("fold", tmp_path / "notes.txt", "-o", tmp_path / "out")
    assert ".keras, .h5 or .tflite file" in said.err
