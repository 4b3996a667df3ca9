"""What the command says when something is wrong: one line, and how to go on."""

from __future__ import annotations

import subprocess
import sys

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
    _refused(geutil("nonsense"), "nonsense")


def test_nothing_there(geutil, tmp_path):
    _refused(geutil("ops", tmp_path / "nowhere"), "there is nothing at")


def test_what_is_there_is_not_replaced(geutil, folder, tmp_path):
    place = tmp_path / "taken"
    place.mkdir()
    _refused(geutil("fold", folder / "net", "-o", place), "--force")
    assert list(place.iterdir()) == []
    assert geutil("fold", folder / "net", "-o", place, "--force").code == 0


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
