"""What is shown on a terminal, and that a pipe gets none of it."""

import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import tensorflow as tf

from geutil.progress import counted
from tests.cli.processes import COMMAND, environment
from tests.settings import needs_eager

pty = pytest.importorskip("pty", reason="needs a Unix terminal")
pytestmark = [needs_eager]


@contextmanager
def terminal():
    """Give a file that is a terminal, and a list with what was written to it."""
    main, other = pty.openpty()
    said = []

    def read():
        while True:
            try:
                said.append(os.read(main, 65536).decode())
            except OSError:  # all who could write have closed it
                return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with os.fdopen(other, "w") as file:
            yield file, said
    finally:
        reader.join(300)
        os.close(main)


def shown(said):
    return "".join(said)


def test_a_bar_counts(monkeypatch):
    with terminal() as (file, said), monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        assert list(counted("abc", 3, None, "calibrating")) == ["a", "b", "c"]
    assert "calibrating" in shown(said)
    assert "3/3" in shown(said)


def test_an_error_ends_the_bar(monkeypatch):
    def items():
        yield 1
        raise OSError

    with terminal() as (file, said), monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        with pytest.raises(OSError):
            list(counted(items(), 3, None, "calibrating"))
    hidden, shown_again = "\x1b[?25l", "\x1b[?25h"
    assert shown(said).rindex(shown_again) > shown(said).rindex(hidden)


SCOPES = ["network/stage_1/block_1/expand", "network/stage_1/block_2/expand"]


@pytest.fixture
def convolutions(tmp_path):
    """Return the file of a graph with a convolution in each scope."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 8, 8, 4], name="x")
        for scope in SCOPES:
            tf.nn.conv2d(x, tf.ones([1, 1, 4, 4]), 1, "SAME", name=f"{scope}/Conv2D")
    path = tmp_path / "net.pb"
    path.write_bytes(graph.as_graph_def().SerializeToString())
    return path


def test_tables_fit_into_a_terminal(geutil, convolutions, monkeypatch):
    with terminal() as (file, said), monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        patch.setenv("COLUMNS", "60")
        patch.setenv("TERM", "xterm")
        geutil.done("ops", convolutions, "--type", "Conv2D")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown(said)).splitlines()
    assert len(lines) == 1 + len(SCOPES)
    assert all(len(line) <= 60 for line in lines)
    for line, scope in zip(lines[1:], SCOPES, strict=True):
        start, end = line.split()[0].split("…")
        assert f"{scope}/Conv2D".startswith(start)
        assert f"{scope}/Conv2D".endswith(end)
        assert end.endswith(f"{scope[-8:]}/Conv2D")
        assert line.split()[1] == "Conv2D"


def test_without_a_terminal_nothing_is_shown(geutil, convolutions, capsys, monkeypatch):
    # Wishes for colours are for terminals.
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert list(counted("abc", 3, None, "calibrating")) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")
    said = geutil("ops", convolutions, "--type", "Conv2D")
    rows = [f"{scope}/Conv2D\tConv2D\t(None, 8, 8, 4)\n" for scope in SCOPES]
    assert (said.out, said.err) == ("".join(["name\ttype\tshapes\n", *rows]), "")


def test_steps_go_to_a_terminal_and_the_result_into_a_pipe(
    geutil, folder, tmp_path, monkeypatch
):
    arguments = ["quantize", folder / "net", "-o", tmp_path / "q"]
    arguments += ["--data", folder / "data.npz", "--batch", "2", "--rounding", "gptq"]
    with terminal() as (file, said), monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "100")
        done = geutil.done(*arguments)
    assert "coverage 1.000" in done
    assert "rounded by gptq, 0 not" in done
    assert "\x1b" not in done
    steps = ("opening net", "folding", "3/3", "rounding", "writing q")
    assert [step for step in steps if step not in shown(said)] == []
    # Of a step without a total the time is shown.
    assert re.search(r"opening net[^\r\n]*\d:\d\d:\d\d", shown(said))


def command_with(tensorflow, folder, stderr, *options):
    """Run the command where this is TensorFlow."""
    (folder / "tensorflow.py").write_text(f"import os, sys\n{tensorflow}\n")
    (folder / "net.pbtxt").touch()
    return subprocess.run(
        [*COMMAND, "ops", str(folder / "net.pbtxt"), *options],
        env={**environment(TERM="xterm", COLUMNS="100"), "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=False,
    )


def test_python_has_the_terminal_and_the_pipe_and_cpp_has_not(tmp_path):
    says = "os.write(1, b'chatter'); os.write(2, b'chatter'); os.system('echo chatter')"
    with terminal() as (file, said):
        done = command_with(f"{says}; raise ImportError('broken')", tmp_path, file)
    assert (done.returncode, done.stdout) == (1, "")
    assert "starting TensorFlow" in shown(said)
    assert "broken" in shown(said)
    assert "chatter" not in shown(said)


def test_who_reads_may_leave_after_the_first_lines(tmp_path):
    """More than a pipe holds was to be printed, and all work is done."""
    says = "print('line\\n' * 100_000); os._exit(3)"
    (tmp_path / "tensorflow.py").write_text(f"import os\n{says}\n")
    (tmp_path / "net.pbtxt").touch()
    pipe = subprocess.PIPE
    variables = environment(PYTHONPATH=f"{tmp_path}:{environment()['PYTHONPATH']}")
    command = [*COMMAND, "ops", str(tmp_path / "net.pbtxt")]
    with subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe) as process:
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (3, b"")


def test_tensorflow_does_not_start(tmp_path):
    broken = "os.write(2, b'no such instruction\\n'); raise ImportError('broken')"
    done = command_with(broken, tmp_path, subprocess.PIPE)
    assert done.returncode == 1
    (error,) = done.stderr.splitlines()
    assert error.startswith("geutil: TensorFlow does not start: broken; --verbose")
    done = command_with(broken, tmp_path, subprocess.PIPE, "--verbose")
    assert done.stderr.splitlines()[0] == "no such instruction"
