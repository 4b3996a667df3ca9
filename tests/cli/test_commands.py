"""What the command does, command by command."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.cli.app import app
from geutil.cli.main import run
from geutil.graph.tflite_runtime import new_interpreter
from geutil.quantize import BitPlan
from geutil.version import __version__
from tests.settings import needs_eager

pytestmark = [needs_eager]

COMMANDS = [
    "inspect",
    "ops",
    "cut",
    "splice",
    "rename",
    "batch-size",
    "strip",
    "unroll",
    "fold",
    "bits",
    "quantize",
    "calibrate",
    "memory",
    "convert",
    "run",
    "batch",
    "diff",
    "check",
    "view",
]


def test_without_arguments_there_is_help(geutil):
    said = geutil()
    assert said.code == 0
    assert all(command in said.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(geutil, command):
    said = geutil(command, "--help")
    assert said.code == 0
    assert "--help" in said.out


def test_the_version(geutil):
    assert geutil("--version").out.strip() == __version__


def test_inspect(geutil, folder):
    said = geutil("inspect", folder / "net")
    assert said.code == 0
    assert "image: float32 [n,8,8,3]" in said.out
    assert "ops by scope" not in said.out
    assert "ops by scope" in geutil("inspect", folder / "net", "--scopes").out
    found = json.loads(geutil("inspect", folder / "net", "--json", "--scopes").out)
    assert found["kind"] == "SavedModel"
    assert sum(found["scopes"].values()) > 0
    assert len(found["variables"]) == 7


def test_inspect_shows_scopes_where_there_are_several(geutil, folder):
    found = json.loads(geutil("inspect", folder / "net", "--json", "--scopes").out)
    scopes = [scope.rpartition("/")[2] for scope in found["scopes"]]
    assert len(scopes) > 1
    assert scopes[0].startswith("norm")
    rows = geutil("ops", folder / "net", "--scope", next(iter(found["scopes"]))).out
    assert len(rows.splitlines()) == next(iter(found["scopes"].values()))


def test_inspect_tells_of_what_cannot_be_opened(geutil, tmp_path):
    tf.saved_model.save(tf.Module(), str(tmp_path / "empty"))
    said = geutil("inspect", tmp_path / "empty", "--scopes")
    assert said.code == 0
    assert "ops by scope: not known" in said.out
    found = json.loads(geutil("inspect", tmp_path / "empty", "--json", "--scopes").out)
    assert found["scopes"] is None


@pytest.mark.parametrize("given", ["nope", "norm"])
def test_the_scope_of_a_fold(geutil, folder, tmp_path, given):
    said = geutil("fold", folder / "net", "--scope", given, "-o", tmp_path / "out")
    if given == "nope":
        assert said.code == 1
        assert "there is no layer or scope 'nope'" in said.err
        assert not (tmp_path / "out").exists()
    else:
        assert said.code == 0
        assert "1 of 1 batch norm(s) folded" in said.out


def test_a_signature_of_inspect_goes_with_scopes(geutil, folder):
    said = geutil("inspect", folder / "net", "--signature", "serving_default")
    assert said.code != 0
    assert "--signature goes with --scopes" in said.err


@pytest.mark.parametrize("name", ["net", "net.pb", "net.pbtxt", "net.keras"])
def test_every_format_is_read(geutil, formats, name):
    assert geutil("ops", formats / name, "--type", "Conv2D").out.count("\n") == 1
    found = json.loads(geutil("inspect", formats / name, "--json", "--scopes").out)
    assert len(found["scopes"]) > 1
    assert found["bytes_total"] > 1000
    assert geutil("diff", formats / name, formats / name).code == 0
    said = geutil("check", formats / "net", formats / name, "--samples", "1")
    assert said.code == 0, said


@pytest.fixture(scope="module")
def formats(folder, tmp_path_factory):
    """Return a directory with the model in every format that can be opened."""
    place = tmp_path_factory.mktemp("formats")
    network = tf.keras.Sequential(
        [
            tf.keras.Input([8, 8, 3], name="image"),
            tf.keras.layers.Conv2D(4, 3, name="first"),
            tf.keras.layers.GlobalAveragePooling2D(),
            tf.keras.layers.Dense(5, name="last"),
        ]
    )
    network.save(place / "net.keras")
    model.open(network).save(place / "net")
    for name in ("net.pb", "net.pbtxt"):
        assert run(app, ["strip", str(place / "net"), "-o", str(place / name)]) == 0
    return place


def test_every_format_is_written(geutil, folder, tmp_path):
    file = tmp_path / "net.tflite"
    assert geutil("strip", folder / "net", "-o", file).code == 0
    assert file.read_bytes()[4:8] == b"TFL3"
    named = tmp_path / "odd.name"
    said = geutil("strip", folder / "net", "-o", named, "--format", "pbtxt")
    assert said.code == 0
    assert named.read_text().startswith("node {")


def test_ops_in_a_pipe_are_lines_with_tabs(geutil, folder):
    said = geutil("ops", folder / "net", "--type", "Conv2D")
    (line,) = said.out.splitlines()
    name, kind, _ = line.split("\t")
    assert kind == "Conv2D"
    (row,) = json.loads(
        geutil("ops", folder / "net", "--regex", f"{name}$", "--json").out
    )
    assert row["name"] == name
    scope = name.rpartition("/")[0]
    rows = geutil("ops", folder / "net", "--scope", scope).out.splitlines()
    assert all(row.startswith(f"{scope}/") for row in rows)


def test_fold_check_and_diff(geutil, folder, tmp_path):
    said = geutil("fold", folder / "net", "-o", tmp_path / "folded")
    assert said.code == 0
    assert "1 of 1 batch norm(s) folded" in said.out
    same = geutil("check", folder / "net", tmp_path / "folded", "--samples", "2")
    assert same.code == 0
    data = ["--data", folder / "data.npz", "--atol", 1e-5]
    assert geutil("check", folder / "net", tmp_path / "folded", *data).code == 0
    differs = geutil("diff", folder / "net", tmp_path / "folded")
    assert differs.code == 1
    assert "added" in differs.out
    assert geutil("diff", folder / "net", folder / "net").code == 0


def test_check_tells_different_models_apart(geutil, folder, tmp_path):
    m = model.open(str(folder / "net"))
    (output,) = m.outputs
    with m.graph.as_default():
        m.outputs[output] = m.outputs[output] + 1.0
    m.save(tmp_path / "other")
    said = geutil("check", folder / "net", tmp_path / "other", "--samples", "1")
    assert said.code == 1
    found = json.loads(
        geutil("check", folder / "net", tmp_path / "other", "--json").out
    )
    assert found["equal"] is False


def test_cut_rename_and_batch_size(geutil, folder, tmp_path):
    relu = geutil("ops", folder / "net", "--type", "Relu").out.split("\t")[0]
    cut = geutil("cut", folder / "net", "-o", tmp_path / "cut", "--to", f"half={relu}")
    assert cut.code == 0
    assert list(model.open(str(tmp_path / "cut")).outputs) == ["half"]
    renamed = geutil(
        "rename",
        tmp_path / "cut",
        "-o",
        tmp_path / "named.pb",
        "--input",
        "image=pixels",
        "--result",
        "half=features",
    )
    assert renamed.code == 0
    m = model.open(str(tmp_path / "named.pb"))
    assert list(m.inputs) == ["pixels"]
    fixed = geutil("batch-size", folder / "net", "3", "-o", tmp_path / "three")
    assert fixed.code == 0
    assert model.open(str(tmp_path / "three")).inputs["image"].shape[0] == 3


def test_splice(geutil, folder, tmp_path):
    m = model.open(str(folder / "net"))
    relu = geutil("ops", folder / "net", "--type", "Relu").out.split("\t")[0]
    m.cut(outputs={"half": relu}).save(tmp_path / "half")
    said = geutil(
        "splice",
        folder / "net",
        tmp_path / "half",
        "-o",
        tmp_path / "spliced",
        "--replace",
        f"{relu}=half",
        "--feed",
        "image=image",
    )
    assert said.code == 0, said
    # The half that was put in is the one that it took the place of.
    same = geutil("check", folder / "net", tmp_path / "spliced", "--samples", "1")
    assert same.code == 0


WRITING = [
    ("cut", ["--input", "image"]),
    ("rename", ["--to-signature", "other"]),
    ("batch-size", ["3"]),
]


@pytest.mark.parametrize(("command", "options"), WRITING, ids=str)
def test_what_was_written_as_json(geutil, folder, tmp_path, command, options):
    target = tmp_path / "new"
    said = geutil(command, folder / "net", *options, "-o", target, "--json")
    assert said.code == 0, said
    told = json.loads(said.out)
    assert told["path"] == str(target)
    m = model.open(str(target))
    assert told["signature"] == m.signature
    (name,) = told["inputs"]
    assert told["inputs"][name]["shape"] == m.inputs[name].shape.as_list()
    assert told["inputs"][name]["dtype"] == "float32"


REPORTING = ["strip", "fold", "quantize"]


@pytest.mark.parametrize("command", REPORTING)
def test_reports_as_json(geutil, folder, tmp_path, command):
    said = geutil(command, folder / "net", "-o", tmp_path / "new", "--json")
    assert said.code == 0, said
    told = json.loads(said.out)
    if command == "fold":
        assert [entry["layer_type"] for entry in told["folded"]] == ["Conv2D"]
    if command == "quantize":
        assert told["quantized"]["coverage"] == 1.0


def test_a_model_takes_its_own_place(geutil, folder, tmp_path):
    target = tmp_path / "net.pb"
    assert geutil("strip", folder / "net", "-o", target).code == 0
    assert geutil("rename", target, "--input", "image=x", "-o", target).code != 0
    said = geutil("rename", target, "--input", "image=x", "-o", target, "--force")
    assert said.code == 0
    assert list(model.open(str(target)).inputs) == ["x"]


def test_strip(geutil, folder, tmp_path):
    said = geutil("strip", folder / "net", "-o", tmp_path / "stripped")
    assert said.code == 0
    assert (tmp_path / "stripped").is_dir()


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    place = tmp_path_factory.mktemp("recurrent") / "net.keras"
    stack = [tf.keras.Input([6, 3], name="x"), tf.keras.layers.LSTM(4)]
    tf.keras.Sequential(stack).save(place)
    return place


def test_unroll(geutil, recurrent, tmp_path):
    said = geutil("unroll", recurrent, "-o", tmp_path / "unrolled")
    assert said.code == 0
    ops = geutil("ops", tmp_path / "unrolled", "--type", "Tanh").out
    assert ops.count("/step_") >= 12
    refused = geutil("unroll", recurrent, "-o", tmp_path / "new", "--max-ops", "50")
    assert refused.code == 1
    assert "pass --max-ops, or --loop" in refused.err
    none = geutil("unroll", recurrent, "-o", tmp_path / "new", "--loop", "gru")
    assert none.code == 1
    assert not (tmp_path / "new").exists()


def test_memory_of_a_loop_grows_with_the_batch(geutil, recurrent):
    peaks = []
    for batch in ("32", "64"):
        said = geutil("memory", recurrent, "--batch", batch, "--json")
        assert said.code == 0
        assert "guess" not in said.err
        peaks.append(json.loads(said.out)["plain_peak"])
    # Per sample, 6 steps keep some 11 tensors of 4 floats each at least.
    assert peaks[1] - peaks[0] > 32 * 6 * 11 * 4 * 4


def test_quantize_to_a_file_and_by_way_of_a_model(geutil, folder, tmp_path):
    data = ["--data", folder / "data.npz", "--batch", "3"]
    file = tmp_path / "net.tflite"
    said = geutil("quantize", folder / "net", "-o", file, *data)
    assert said.code == 0
    assert "coverage 1.000" in said.out
    interpreter = new_interpreter(file.read_bytes())
    assert interpreter.get_input_details()[0]["dtype"] == np.int8
    assert geutil("quantize", folder / "net", "-o", tmp_path / "q").code == 0
    again = tmp_path / "again.tflite"
    calibrated = geutil("calibrate", tmp_path / "q", "-o", again, *data, "--json")
    assert calibrated.code == 0
    assert json.loads(calibrated.out)["batches"] == 2
    assert again.read_bytes()[4:8] == b"TFL3"


def test_weights_in_blocks(geutil, tmp_path):
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(0)
    dense = [layers.Dense(40, name="wide"), layers.Dense(5, name="narrow")]
    network = tf.keras.Sequential([tf.keras.Input([64], name="x"), *dense])
    model.open(network).save(tmp_path / "net")
    file, simulated = tmp_path / "net.tflite", tmp_path / "q"
    scheme = ["--scheme", "dynamic_range_int4"]
    said = geutil("quantize", tmp_path / "net", "-o", file, *scheme)
    assert said.code == 0, said.err
    assert "weights 4 bits, symmetric, by blocks of 32" in said.out
    assert "not in blocks: its 40 inputs are no multiple of 32" in said.out
    said = geutil("inspect", file)
    assert "float32 with int4 weights (hybrid): 1" in said.out
    assert geutil("quantize", tmp_path / "net", "-o", simulated, *scheme).code == 0
    np.savez(tmp_path / "data.npz", x=np.eye(64, dtype=np.float32))
    data = ["--data", tmp_path / "data.npz", "--rounding", "gptq"]
    again = tmp_path / "again.tflite"
    said = geutil("calibrate", simulated, "-o", again, *data, "--json")
    assert said.code == 0, said.err
    assert len(json.loads(said.out)["in_blocks"]) == 1
    assert "int4 weights (hybrid): 1" in geutil("inspect", again).out


def test_a_file_in_the_order_of_least_memory(geutil, folder, tmp_path):
    target = ["-o", tmp_path / "net.tflite", "--scheme", "float16"]
    order = ["--order", "least_memory"]
    said = geutil("quantize", folder / "net", *target, *order)
    assert said.code == 0, said.err
    assert "arena " in said.out
    assert "alive at the peak" in said.out
    told = geutil("quantize", folder / "net", *target, *order, "--force", "--json")
    assert "blob" not in json.loads(told.out)["order"]
    refused = geutil("quantize", folder / "net", "-o", tmp_path / "q", *order)
    assert refused.code != 0
    assert "name the output so, or pass --format tflite" in refused.err


def test_weights_are_rounded_by_data(geutil, folder, tmp_path):
    data = ["--data", folder / "data.npz", "--batch", "3", "--rounding", "gptq"]
    scheme = ["--scheme", "int8x4"]
    file, model = tmp_path / "net.tflite", tmp_path / "q"
    said = geutil("quantize", folder / "net", "-o", file, *scheme, *data)
    assert said.code == 0, said.err
    assert "rounded by gptq, 0 not" in said.out
    assert geutil("quantize", folder / "net", "-o", model, *scheme).code == 0
    again = tmp_path / "again.tflite"
    said = geutil("calibrate", model, "-o", again, *data, "--json")
    assert said.code == 0, said.err
    told = json.loads(said.out)
    assert told["rounding"] == "gptq"
    assert all(layer["after"] <= layer["before"] for layer in told["layers"])
    files = [each.read_bytes() for each in (file, again)]
    assert len(files[0]) == len(files[1])
    refused = geutil(
        "quantize", folder / "net", "-o", tmp_path / "r", "--rounding", "adaround"
    )
    assert refused.code != 0
    assert "--rounding adaround needs data; pass --data" in refused.err


def test_bits_are_chosen_and_taken(geutil, folder, tmp_path):
    data = ["--data", folder / "data.npz", "--batch", "3"]
    plan, page = tmp_path / "plan.json", tmp_path / "bits.html"
    chosen = geutil("bits", folder / "net", *data, "--size", "90%", "-o", plan)
    assert chosen.code == 0, chosen.err
    # 108 and 20 weights: the few are what can be halved last.
    assert "bytes of weights" in chosen.out
    again = geutil(
        "bits", folder / "net", *data, "--noise", "10", "--html", page, "--json"
    )
    assert again.code == 0, again.err
    told = json.loads(again.out)
    assert {layer["bits"] for layer in told["layers"]} <= {4, 8}
    assert "<svg" in page.read_text()
    bits = {op: la.bits for la in BitPlan.load(plan).layers for op in la.ops}
    assert len(set(bits.values())) == 2
    said = geutil(
        "quantize", folder / "net", "-o", tmp_path / "q", "--bits", plan, "--json"
    )
    assert said.code == 0, said.err
    entries = json.loads(said.out)["quantized"]["quantized"]
    assert {e["op"]: e["weights"]["bits"] for e in entries if e["weights"]} == bits


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "pass --size or --noise"),
        (["--size", "1", "--noise", "1"], "pass --size or --noise"),
        (["--size", "half"], "--size half is no size"),
        (["--size", "1%"], "the smallest takes"),
        (["--size", "60%", "-o", "data.npz"], "data.npz' is there already"),
    ],
)
def test_bits_that_cannot_be_chosen(geutil, folder, monkeypatch, arguments, said):
    monkeypatch.chdir(folder)
    found = geutil("bits", "net", "--data", "data.npz", *arguments)
    assert found.code == 1
    assert said in found.err


def test_plans_that_quantize_cannot_take(geutil, folder, tmp_path):
    plan = tmp_path / "plan.json"
    target = ["-o", tmp_path / "q", "--bits", plan]
    assert "no plan of bits at" in geutil("quantize", folder / "net", *target).err
    plan.write_text("{}")
    assert "holds no plan of bits" in geutil("quantize", folder / "net", *target).err
    data = ["--data", folder / "data.npz", "--noise", "10", "--force", "-o", plan]
    assert geutil("bits", folder / "net", *data).code == 0
    said = geutil("quantize", folder / "net", *target, "--scheme", "int16x8")
    assert "is a plan for the scheme int8" in said.err
    assert not (tmp_path / "q").exists()


def _mega(line):
    """Return the size in the second cell of a row, which has its unit."""
    number, unit = line.split("\t")[1].split()
    assert unit == "MB"
    return float(number)


def test_memory(geutil, folder):
    (plain, ours) = geutil("memory", folder / "net", "--batch", "4").out.splitlines()
    assert _mega(plain) >= _mega(ours) > 0
    report = json.loads(geutil("memory", folder / "net", "--batch", "64", "--json").out)
    assert report["plain_peak"] >= report["peak"] > 64 * 8 * 8 * 3 * 4


def test_memory_tells_what_checkpoints_save(geutil, tmp_path):
    """A chain: of 16 layers some four have to be held, in the model as in its page."""
    layers = [tf.keras.layers.Dense(64, "tanh") for _ in range(16)]
    network = tf.keras.Sequential([tf.keras.Input([64], name="x"), *layers])
    model.open(network).save(tmp_path / "chain")
    page = tmp_path / "chain.html"
    said = geutil("memory", tmp_path / "chain", "--batch", "4096", "--html", page)
    assert said.code == 0, said.err
    peaks = [_mega(line) for line in said.out.splitlines()]
    assert peaks[1] < 0.7 * peaks[0]
    text = page.read_text()
    start = text.index('id="payload">') + len('id="payload">')
    drawn = json.loads(text[start : text.index("</script>", start)])["memory"]
    held = [max(line["bytes"]) / 1e6 for line in drawn["timelines"]]
    assert held == pytest.approx(peaks, rel=1e-3)
    again = geutil("memory", tmp_path / "chain", "--html", page)
    assert again.code == 1
    assert "--force" in again.err
    within = geutil("memory", tmp_path / "chain", "--batch", "4096", "--budget", "80%")
    held = [_mega(line) for line in within.out.splitlines()]
    assert peaks[1] < held[1] <= 0.8 * held[0]
    refused = geutil("memory", tmp_path / "chain", "--batch", "4096", "--budget", "1MB")
    assert refused.code == 1
    assert "the least that was found is" in refused.err
    timed = ("--batch", "4096", "--extra-time", "5%")
    quick = geutil("memory", tmp_path / "chain", *timed, "--json")
    told = json.loads(quick.out)
    assert told["extra_time"] <= 0.05
    assert told["peak"] < told["plain_peak"]
    wrong = geutil("memory", tmp_path / "chain", "--budget", "much")
    assert wrong.code == 1
    assert "1.5GB" in wrong.err
    wrong = geutil("memory", tmp_path / "chain", "--extra-time", "5")
    assert wrong.code == 1
    assert "'20%'" in wrong.err
    unused = geutil("memory", tmp_path / "chain", *LARGEST, "--extra-time", "5%")
    assert unused.code == 1
    assert "leave out others" in unused.err
    both = geutil("memory", tmp_path / "chain", "--budget", "50%", *timed)
    assert both.code == 1
    assert "ask one" in both.err


def test_memory_tells_how_large_a_batch_fits(geutil, tmp_path):
    layers = [tf.keras.layers.Dense(64, "tanh") for _ in range(8)]
    network = tf.keras.Sequential([tf.keras.Input([64], name="x"), *layers])
    model.open(network).save(tmp_path / "chain")
    said = geutil("memory", tmp_path / "chain", *LARGEST)
    assert said.code == 0, said.err
    rows = [line.split("\t") for line in said.out.splitlines()]
    assert [row[0] for row in rows] == [
        "plain",
        "order alone",
        "checkpoints",
        "a plan, 10% more time",
        "a plan, 20% more time",
        "a plan, 40% more time",
    ]
    plain, ordered, saving, *planned = (int(row[1]) for row in rows)
    assert 0 < plain <= ordered < saving
    # Any op as often as pays: more time fits at least as much.
    assert ordered <= planned[0] <= planned[1] <= planned[2]
    assert plain < planned[0] and saving <= planned[2]
    assert all(_mega("\t".join(row[1:])) <= 4 for row in rows)
    # What is said of that batch, and of one more: of the step, without the variables.
    variables = 8 * (64 * 64 + 64) * 4
    for batch, fits in ((saving, True), (saving + 1, False)):
        report = geutil("memory", tmp_path / "chain", "--batch", str(batch), "--json")
        peak = json.loads(report.out)["peak"]
        assert (peak + variables <= 4_000_000) is fits
    alone = geutil("memory", tmp_path / "chain", "--largest-batch")
    assert alone.code == 1
    assert "--memory" in alone.err


def test_memory_tells_what_less_memory_costs(geutil, tmp_path):
    layers = [tf.keras.layers.Dense(64, "tanh") for _ in range(8)]
    network = tf.keras.Sequential([tf.keras.Input([64], name="x"), *layers])
    model.open(network).save(tmp_path / "chain")
    page = tmp_path / "chain.html"
    options = ("--batch", "512", "--budget", "70%", "--curve", "--html", page)
    said = geutil("memory", tmp_path / "chain", *options, "--json")
    assert said.code == 0, said.err
    told = json.loads(said.out)
    plans = told["curve"]["plans"]
    assert [p["peak"] <= p["budget"] for p in plans] == [True] * len(plans)
    assert told["budget"] in [p["budget"] for p in plans]
    times = [p["extra_time"] for p in plans]
    assert times == sorted(times) and times[-1] > 0
    assert '"curve":' in page.read_text()
    rows = geutil("memory", tmp_path / "chain", *options[:2], "--curve").out
    assert len(rows.splitlines()) >= 2 + 4
    both = geutil("memory", tmp_path / "chain", "--curve", *LARGEST)
    assert both.code == 1 and "ask one" in both.err


LARGEST = ("--memory", "4MB", "--largest-batch")


def test_view(geutil, folder, tmp_path):
    page = tmp_path / "net.html"
    said = geutil("view", folder / "net", "-o", page)
    assert (said.code, said.out) == (0, "")
    assert str(page) in said.err
    assert "GlobalAverage" in page.read_text() or "Mean" in page.read_text()
    assert geutil("view", folder / "net", "-o", page).code == 1
    assert geutil("view", folder / "net", "-o", page, "--force").code == 0
    assert geutil("view", folder / "net", "-o", tmp_path / "net.png").code == 1


def test_view_with_memory(geutil, folder, tmp_path):
    for option in ("--memory", "--training"):
        page = tmp_path / f"page{option}.html"
        said = geutil("view", folder / "net", "-o", page, option, "--batch", "4")
        assert said.code == 0, said.err
        assert '"lives":' in page.read_text()
    both = geutil("view", folder / "net", "-o", tmp_path / "new.html", *MEMORY)
    assert both.code == 1 and "one of the two" in both.err
    size = geutil("view", folder / "net", "-o", tmp_path / "new.html", "--size", "x=1")
    assert size.code == 1 and "--size goes with" in size.err


MEMORY = ("--memory", "--training")


def test_pages_beside_results(geutil, folder, tmp_path):
    for command, *more in (("fold",), ("quantize",)):
        page, result = tmp_path / f"{command}.html", tmp_path / command
        said = geutil(
            command, folder / "net", "-o", result, "--html", page, "--json", *more
        )
        assert said.code == 0, said.err
        json.loads(said.out)
        assert page.exists()
    page = tmp_path / "diff.html"
    assert geutil("diff", folder / "net", tmp_path / "fold", "--html", page).code == 1
    assert '"status":[' in page.read_text()


def test_memory_of_open_sizes(geutil, tmp_path):
    network = tf.keras.Sequential(
        [tf.keras.Input([None, None, 3], name="image"), tf.keras.layers.Conv2D(4, 3)]
    )
    model.open(network).save(tmp_path / "open")
    refused = geutil("memory", tmp_path / "open")
    assert refused.code == 1
    assert "--size image=" in refused.err
    said = geutil("memory", tmp_path / "open", "--size", "image=8,8,3")
    assert said.code == 0, said


def test_what_was_written_is_told(geutil, folder, tmp_path):
    said = geutil("fold", folder / "net", "-o", tmp_path / "folded")
    assert f"wrote '{tmp_path / 'folded'}' (saved_model): " in said.out
    assert "on 2 drawn input(s)" in said.out
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


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        (["--type", "conv2d"], "no op of type 'conv2d'; did you mean Conv2D"),
        (["--type", "Frobnicate"], "there is no op of type 'Frobnicate'"),
        (["--scope", "nope"], "there is no scope 'nope'"),
        (["--regex", "xyzzy"], "no name of an op holds 'xyzzy'"),
        (["--type", "Conv2D", "--regex", "xyzzy"], "leave one of the options out"),
    ],
)
def test_ops_that_are_not_there(geutil, folder, options, meant):
    said = geutil("ops", folder / "net", *options)
    assert (said.code, said.out) == (0, "")
    assert meant in said.err


def test_an_empty_path_is_none(geutil):
    said = geutil("inspect", "")
    assert said.code != 0
    assert "the path is empty" in said.err
