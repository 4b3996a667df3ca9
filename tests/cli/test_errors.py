"""What the command says when something is wrong that no argument is to blame for."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.settings import needs_eager

pytestmark = [needs_eager]


def _refused(said, *words):
    assert said.code != 0
    (line,) = said.err.splitlines()
    assert line.startswith("geutil: ")
    for word in words:
        assert word in line


def test_a_failed_write_leaves_what_was_there(geutil, folder, tmp_path, monkeypatch):
    target = tmp_path / "net.tflite"
    target.write_bytes(b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    said = geutil("strip", folder / "net", "-o", target, "--force")
    _refused(said, "No space left")
    assert [p.name for p in tmp_path.iterdir()] == ["net.tflite"]
    assert target.read_bytes() == b"old"


@pytest.mark.parametrize("error", [KeyError("first\nsecond"), KeyboardInterrupt()])
def test_what_nobody_expected_is_one_line(geutil, folder, monkeypatch, error):
    """It names the way to find out more; a stop is no error to trace."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr("geutil.model.open", fail)
    said = geutil("ops", folder / "net")
    assert "Traceback" not in said.err
    if isinstance(error, KeyError):
        _refused(said, "KeyError", "--debug")
    else:
        assert said.code == 130


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
