"""Shells complete commands, options and their values, without TensorFlow."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.cli.processes import environment, run
from tests.settings import needs_eager
from tests.thorough import chosen

pytestmark = [needs_eager]

# typer looks for the shell among the processes above, where there may be none.
NAMED = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}


def complete_bash(line):
    words = line.split(" ")
    return run(
        _GEUTIL_COMPLETE="complete_bash",
        COMP_WORDS=line,
        COMP_CWORD=str(len(words) - 1),
    )


CASES = [
    ("geutil in", ["inspect"]),
    ("geutil s", ["splice", "strip"]),
    ("geutil quantize --meth", ["--method"]),
    (
        "geutil quantize --method m",
        ["moving_average", "min_max", "mse"],
    ),
    ("geutil cut net --format p", ["pbtxt"]),
    ("geutil batch-size net an", ["any"]),
    # Nothing: the shell goes on to complete the names of files.
    ("geutil fold ne", []),
    ("geutil diff net oth", []),
    ("geutil calibrate net --data d", []),
]


@pytest.mark.parametrize(("line", "expected"), CASES, ids=[line for line, _ in CASES])
def test_bash(line, expected):
    done = complete_bash(line)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell):
    done = run(
        _GEUTIL_COMPLETE=f"complete_{shell}",
        _TYPER_COMPLETE_ARGS="geutil in",
        _TYPER_COMPLETE_FISH_ACTION="get-args",
    )
    assert done.returncode == 0
    assert "inspect" in done.stdout
    assert "splice" not in done.stdout


def test_zsh_goes_on_to_files():
    done = run(
        _GEUTIL_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="geutil inspect ne"
    )
    assert done.stdout.strip() == "_files"


@pytest.mark.parametrize("shell", chosen(["bash", "zsh", "fish"], "bash"))
def test_the_script_is_shown(shell):
    done = run("--show-completion", shell, **NAMED)
    assert done.returncode == 0
    assert f"_GEUTIL_COMPLETE=complete_{shell}" in done.stdout


@pytest.mark.parametrize("shell", chosen(["bash", "zsh", "fish"], "bash"))
def test_the_script_is_installed(shell, tmp_path):
    done = run("--install-completion", shell, HOME=str(tmp_path), **NAMED)
    assert done.returncode == 0, done.stderr
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert any(f"complete_{shell}" in p.read_text() for p in files)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_itself_completes(tmp_path):
    command = tmp_path / "geutil"
    command.write_text(
        f"#!{sys.executable}\nfrom geutil.cli.main import main\nmain()\n"
    )
    command.chmod(0o755)
    script = f"""
source <({command} --show-completion bash)
COMP_WORDS=({command} quantize --method e); COMP_CWORD=3
_geutil_completion {command}
echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=environment(**NAMED),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["entropy"]


WITHOUT_TENSORFLOW = [
    ["--help"],
    ["--version"],
    ["quantize", "--help"],
    ["--show-completion", "bash"],
    # What is wrong with the arguments is said at once.
    ["inspect", "/nowhere"],
    ["fold", "/nowhere", "-o", "x"],
    ["cut", "/nowhere", "-o", "x"],
    ["check", "/", "/nowhere"],
]


@pytest.mark.parametrize("arguments", WITHOUT_TENSORFLOW, ids=" ".join)
def test_tensorflow_is_not_imported(arguments):
    code = f"""
import sys
from geutil.cli.main import main
sys.argv = ["geutil", *{arguments!r}]
try:
    main()
finally:
    print("imported:", *sorted({{"tensorflow", "numpy"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(**NAMED),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "imported:"
    assert "Traceback" not in done.stderr
