"""What the command does, command by command."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
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
    "fold",
    "quantize",
    "calibrate",
    "memory",
    "diff",
    "check",
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
    assert "ops by scope" in said.out
    found = json.loads(geutil("inspect", folder / "net", "--json").out)
    assert found["kind"] == "SavedModel"
    assert sum(found["scopes"].values()) > 0
    assert len(found["variables"]) == 7


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


def test_strip(geutil, folder, tmp_path):
    said = geutil("strip", folder / "net", "-o", tmp_path / "stripped")
    assert said.code == 0
    assert (tmp_path / "stripped").is_dir()


def test_quantize_to_a_file_and_by_way_of_a_model(geutil, folder, tmp_path):
    data = ["--data", folder / "data.npz", "--batch", "3"]
    file = tmp_path / "net.tflite"
    said = geutil("quantize", folder / "net", "-o", file, *data)
    assert said.code == 0
    assert "coverage 1.000" in said.out
    interpreter = tf.lite.Interpreter(model_content=file.read_bytes())
    assert interpreter.get_input_details()[0]["dtype"] == np.int8
    assert geutil("quantize", folder / "net", "-o", tmp_path / "q").code == 0
    again = tmp_path / "again.tflite"
    calibrated = geutil("calibrate", tmp_path / "q", "-o", again, *data, "--json")
    assert calibrated.code == 0
    assert json.loads(calibrated.out)["batches"] == 2
    assert again.read_bytes()[4:8] == b"TFL3"


def test_memory(geutil, folder):
    (plain, ours) = geutil("memory", folder / "net", "--batch", "4").out.splitlines()
    assert float(plain.split("\t")[1]) >= float(ours.split("\t")[1]) > 0
