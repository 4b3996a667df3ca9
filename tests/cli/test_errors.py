"""What the command says when something is wrong: one line, and how to go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.settings import needs_eager

pytestmark = [needs_eager]


def _refused(said, *words):
    assert said.code != 0
    (line,) = said.err.splitlines()
    assert line.startswith("geutil: ")
    for word in words:
        assert word in line


def test_an_unknown_command(geutil):
    _refused(geutil("nonsense"), "nonsense", "see `geutil --help`")


WRONG_USE = [
    ["fold"],
    ["fold", "net", "-o", "x", "--format", "png"],
    ["fold", "net", "-o", "x", "--nonsense"],
]


@pytest.mark.parametrize("arguments", WRONG_USE, ids=" ".join)
def test_wrong_use_points_to_the_help_of_the_command(geutil, arguments):
    said = geutil(*arguments)
    _refused(said, "see `geutil fold --help`")
    assert said.code == 2


def test_other_formats_are_not_read(geutil, tmp_path):
    (tmp_path / "net.tflite").touch()
    _refused(geutil("ops", tmp_path / "net.tflite"), "SavedModel directory")
    (tmp_path / "net.onnx").touch()
    said = geutil("inspect", tmp_path / "net.onnx")
    _refused(said, "SavedModel directory", ".tflite")
    (tmp_path / "whole.tflite").write_bytes(b"\0\0\0\0TFL3")
    said = geutil("ops", tmp_path / "whole.tflite")
    _refused(said, "is a TensorFlow Lite model", "`geutil run`", "inspect")


@pytest.mark.parametrize("command", ["inspect", "view"])
def test_broken_tflite_files_are_refused(geutil, tmp_path, command):
    for blob in (b"", b"\0\0\0\0TFL3", b"\x20\0\0\0TFL3" + bytes(range(200))):
        (tmp_path / "net.tflite").write_bytes(blob)
        _refused(geutil(command, tmp_path / "net.tflite"), "net.tflite", "convert")


def test_nothing_there(geutil, tmp_path):
    _refused(geutil("ops", tmp_path / "nowhere"), "there is nothing at")


def test_what_is_there_is_not_replaced(geutil, folder, tmp_path):
    place = tmp_path / "taken"
    place.mkdir()
    _refused(geutil("fold", folder / "net", "-o", place), "--force")
    assert list(place.iterdir()) == []
    assert geutil("fold", folder / "net", "-o", place, "--force").code == 0


@pytest.mark.parametrize("name", ["small.keras", "small.h5", "small.onnx"])
def test_a_file_is_not_replaced_by_a_directory(geutil, folder, tmp_path, name):
    (tmp_path / name).write_text("somebody's work")
    # A source that cannot be opened: the name is refused before.
    (tmp_path / "net.pb").write_text("no model")
    said = geutil("fold", tmp_path / "net.pb", "-o", tmp_path / name, "--force")
    _refused(said, "geutil does not write", ".pb, .pbtxt, .tflite")
    assert (tmp_path / name).read_text() == "somebody's work"


def test_a_page_does_not_replace_a_directory(geutil, folder, tmp_path):
    page = tmp_path / "page.html"
    page.mkdir()
    _refused(geutil("view", folder / "net", "-o", page, "--force"), "is a directory")


def test_no_directory_to_write_to(geutil, folder, tmp_path):
    target = tmp_path / "no" / "where"
    _refused(geutil("fold", folder / "net", "-o", target), "no directory")


def test_no_such_tensor(geutil, folder, tmp_path):
    said = geutil("cut", folder / "net", "-o", tmp_path / "x", "--to", "nothing")
    _refused(said, "nothing", "its ends are")


def test_nothing_to_cut(geutil, folder, tmp_path):
    _refused(geutil("cut", folder / "net", "-o", tmp_path / "x"), "--input or --to")


@pytest.mark.parametrize("pair", ["half", "=b", "a="])
def test_no_pair(geutil, folder, tmp_path, pair):
    said = geutil("rename", folder / "net", "-o", tmp_path / "x", "--input", pair)
    _refused(said, "old=new")


def test_an_int8_file_needs_data(geutil, folder, tmp_path):
    said = geutil("quantize", folder / "net", "-o", tmp_path / "x.tflite")
    _refused(said, "--data")


def test_data_that_is_none(geutil, folder, tmp_path):
    (tmp_path / "data.npz").write_text("nothing")
    said = geutil(
        "quantize",
        folder / "net",
        "-o",
        tmp_path / "x.tflite",
        "--data",
        tmp_path / "data.npz",
    )
    _refused(said, "numpy.savez")


DATA = {
    "an array without a name": lambda file: np.save(file, np.zeros(3)),
    "no whole archive": lambda file: file.write_bytes(b"PK\3\4 and no more"),
}


@pytest.mark.parametrize("write", DATA.values(), ids=DATA)
def test_files_that_are_no_archives(geutil, folder, tmp_path, write):
    (tmp_path / "data.npy").touch()
    write(tmp_path / "data.npy")
    said = geutil(
        "check", folder / "net", folder / "net", "--data", tmp_path / "data.npy"
    )
    _refused(said, "numpy.savez")


def test_data_that_do_not_fit_together(geutil, folder, tmp_path):
    np.savez(tmp_path / "data.npz", image=np.zeros([2, 8, 8, 3]), other=np.zeros(3))
    said = geutil(
        "check", folder / "net", folder / "net", "--data", tmp_path / "data.npz"
    )
    _refused(said, "different numbers of samples")


def test_no_data(geutil, folder, tmp_path):
    pair = [folder / "net", folder / "net"]
    _refused(geutil("check", *pair, "--data", tmp_path / "none"), "there is no data")
    said = geutil("check", *pair, "--data", tmp_path)
    _refused(said, "no .npz file", "numpy.savez")


def test_an_empty_archive(geutil, folder, tmp_path):
    np.savez(tmp_path / "data.npz")
    arguments = [folder / "net", "-o", tmp_path / "x", "--data", tmp_path / "data.npz"]
    _refused(geutil("quantize", *arguments), "empty")


@pytest.mark.parametrize("size", ["0", "-3", "many"])
def test_no_batch_size(geutil, folder, tmp_path, size):
    said = geutil("batch-size", folder / "net", "-o", tmp_path / "x", "--", size)
    _refused(said, "'any'")


def test_nothing_to_rename(geutil, folder, tmp_path):
    said = geutil("rename", folder / "net", "-o", tmp_path / "x")
    _refused(said, "--to-signature")


@pytest.mark.parametrize("size", ["8,8,3", "image=", "image=8,x"])
def test_no_shape(geutil, folder, size):
    _refused(geutil("memory", folder / "net", "--size", size), "input=8,8,3")


def test_a_shape_for_no_input(geutil, folder):
    _refused(geutil("memory", folder / "net", "--size", "x=8,8,3"), "['image']")


def test_a_frozen_model_has_nothing_to_train(geutil, folder, tmp_path):
    assert geutil("strip", folder / "net", "-o", tmp_path / "net.pb").code == 0
    _refused(geutil("memory", tmp_path / "net.pb"), "frozen from")


def test_a_wrong_regex(geutil, folder):
    _refused(geutil("ops", folder / "net", "--regex", "("), "re.escape")


@pytest.mark.parametrize("name", ["net", "net.pb", "net.pbtxt", "net.keras"])
@pytest.mark.parametrize("command", ["inspect", "ops"])
def test_damaged_files(geutil, tmp_path, command, name):
    place = tmp_path / name
    file = place / "saved_model.pb" if name == "net" else place
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"\xff\xfe nothing that anybody reads")
    _refused(geutil(command, place))


def test_outputs_that_do_not_match(geutil, folder, tmp_path):
    cut = ["cut", folder / "net", "-o", tmp_path / "cut", "--to", "a=image"]
    assert geutil(*cut, "--to", "b=image").code == 0
    _refused(geutil("check", folder / "net", tmp_path / "cut"), "do not match")


def test_a_failed_write_leaves_what_was_there(geutil, folder, tmp_path, monkeypatch):
    target = tmp_path / "net.tflite"
    target.write_bytes(b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    data = ["--data", folder / "data.npz", "--force"]
    said = geutil("quantize", folder / "net", "-o", target, *data)
    _refused(said, "No space left")
    assert [p.name for p in tmp_path.iterdir()] == ["net.tflite"]
    assert target.read_bytes() == b"old"


def test_what_nobody_expected_names_the_way_to_find_out(geutil, folder, monkeypatch):
    def fail(*_, **__):
        raise KeyError("first\nsecond")

    monkeypatch.setattr("geutil.model.open", fail)
    _refused(geutil("ops", folder / "net"), "KeyError", "--debug")


def test_a_stop_is_no_error_to_trace(geutil, folder, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("geutil.model.open", stop)
    said = geutil("ops", folder / "net")
    assert said.code == 130
    assert "Traceback" not in said.err


def test_tracebacks_are_for_those_who_ask(geutil, tmp_path):
    said = geutil("ops", tmp_path / "nowhere", "--debug")
    assert said.code == 1
    assert "Traceback" in said.err


def test_without_typer_the_extra_is_named():
    code = (
        "import sys; sys.modules['typer'] = None; "
        "from geutil.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "geutil[cli]" in done.stderr
