"""The command, with its extra and without."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import geutil

# What they show, other tests show as well, where geutil is not installed.
pytestmark = [pytest.mark.smoke, pytest.mark.thorough]
has_extra = importlib.util.find_spec("typer") is not None
COMMAND = Path(sys.executable).parent / "geutil"


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not has_extra, reason="needs the extra")
def test_the_version():
    done = run(COMMAND, "--version")
    assert (done.returncode, done.stdout.strip()) == (0, geutil.__version__)


@pytest.mark.skipif(not has_extra, reason="needs the extra")
def test_inspect(tmp_path):
    file = tmp_path / "net.pbtxt"
    file.write_text('node { name: "scope/x" op: "NoOp" }')
    done = run(COMMAND, "inspect", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 NoOp" in done.stdout


# With the extra there, it is hidden.
@pytest.mark.parametrize("argument", ["--version", "inspect"])
def test_without_the_extra_it_is_named(argument):
    hide = "import sys; sys.modules['typer'] = None; "
    code = f"sys.argv = ['geutil', '{argument}']; "
    code += "from geutil.cli.main import main; main()"
    isolated = ["-I"] if "GEUTIL_INSTALLED_IN" in os.environ else []
    done = run(sys.executable, *isolated, "-c", hide + code)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "pip install 'geutil[cli]'" in line


@pytest.mark.skipif(has_extra, reason="the extra is there")
def test_the_installed_command_names_it():
    done = run(COMMAND, "--version")
    assert done.returncode == 1
    assert "pip install 'geutil[cli]'" in done.stderr
