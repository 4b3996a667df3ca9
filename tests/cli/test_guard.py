"""A command is stopped with all that it does, and leaves nothing half written."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import tensorflow as tf

from benchmarks import stopping
from tests.cli.processes import COMMAND, environment
from tests.processes import run_python

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="processes of others are listed by Linux alone"
)

BLOCKS = """
import ctypes, os, sys
os.write(2, b"a word of C++")
os.open(os.environ["TMPDIR"] + "/a temporary file", os.O_CREAT | os.O_WRONLY)
{more}
open({there!r}, "w").close()
# Python's lock is not given back meanwhile, as in C++.
ctypes.PyDLL(None).sleep(600)
"""


@contextmanager
def blocked(place, *before, more="", **options):
    """Give a command that has come to a TensorFlow that blocks it for good."""
    there = place / "there"
    (place / "tensorflow.py").write_text(BLOCKS.format(there=str(there), more=more))
    (place / "net.pbtxt").touch()
    (place / "tmp").mkdir()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*before, *COMMAND, "ops", str(place / "net.pbtxt")],
        env={
            **environment(TMPDIR=str(place / "tmp")),
            "PYTHONPATH": os.pathsep.join([str(place), environment()["PYTHONPATH"]]),
        },
        stdout=pipe,
        stderr=pipe,
        text=True,
        **options,
    ) as process:
        try:
            while not there.exists():
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


def parents_of(place):
    """Return the processes of a place by their numbers, each with its parent."""
    found = {}
    for folder in stopping.Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes()
            status = (folder / "stat").read_text()
        except OSError:
            continue
        if f"TMPDIR={place / 'tmp'}\0".encode() in variables:
            found[int(folder.name)] = int(status.rpartition(")")[2].split()[1])
    return found


def is_cleared(place):
    """Wait until no process of a place is there, and tell whether no file is."""
    end = time.monotonic() + stopping.LIMIT
    while parents_of(place):
        assert time.monotonic() < end
        time.sleep(0.01)
    return list((place / "tmp").iterdir()) == []


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_stops_what_does_not_hear_it(tmp_path, name):
    with blocked(tmp_path) as process:
        assert len(parents_of(tmp_path)) == 3
        process.send_signal(getattr(signal, name))
        out, err = process.communicate(timeout=stopping.LIMIT)
    assert err == f"geutil: stopped by {name}; nothing was written\n"
    assert (out, process.returncode) == ("", stopping.CODES[name])
    assert is_cleared(tmp_path)


def test_nobody_reads(tmp_path):
    with blocked(tmp_path) as process:
        process.stdout.close()
        process.wait(stopping.LIMIT)
        assert process.stderr.read().startswith("geutil: stopped, since nobody reads")
    assert process.returncode == 128 + signal.SIGPIPE
    assert is_cleared(tmp_path)


@pytest.mark.parametrize("at", [0, 1])
def test_the_death_of_a_process_before_it(tmp_path, at):
    """Of the first one, or of the one between that and the one that works."""
    with blocked(tmp_path) as process:
        parents = parents_of(tmp_path)
        (guard,) = (child for child, parent in parents.items() if parent == process.pid)
        os.kill((process.pid, guard)[at], signal.SIGKILL)
        _, err = process.communicate(timeout=stopping.LIMIT)
    (line,) = err.splitlines()
    assert line.startswith("geutil: stopped, since ")
    assert line.endswith("; nothing was written")
    assert process.returncode == (-signal.SIGKILL, 1)[at]
    assert is_cleared(tmp_path)


def test_what_is_started_ends_too(tmp_path):
    start = "subprocess.Popen(['sleep', '600.125'], start_new_session=True)"
    with blocked(tmp_path, more=f"import subprocess; {start}") as process:
        assert len(parents_of(tmp_path)) == 3
        process.terminate()
        process.communicate(timeout=stopping.LIMIT)
    names = subprocess.run(["ps", "-eo", "args"], capture_output=True, check=True)
    assert b"sleep 600.125" not in names.stdout
    assert is_cleared(tmp_path)


def test_nohup_goes_on(tmp_path):
    with blocked(tmp_path, "nohup") as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=stopping.LIMIT)
    assert process.returncode == stopping.CODES["SIGTERM"]


def test_a_pause_is_one_of_all(tmp_path):
    def states():
        listed = (stopping.Path(f"/proc/{pid}/stat") for pid in parents_of(tmp_path))
        return sorted(file.read_text().rpartition(")")[2].split()[0] for file in listed)

    def comes_to(expected):
        end = time.monotonic() + stopping.LIMIT
        while states() != expected and time.monotonic() < end:
            time.sleep(0.01)
        return states() == expected

    with blocked(tmp_path) as process:
        process.send_signal(signal.SIGTSTP)
        # The guard waits on.
        assert comes_to(["S", "T", "T"])
        process.send_signal(signal.SIGCONT)
        assert comes_to(["S", "S", "S"])


@pytest.mark.parametrize("command", ["split", "fold", "run"])
def test_files_are_written_whole_or_not_at_all(command):
    """At points before, while and after the command writes them."""
    chosen = ["--only", command, "--points", "5", "--in-turn"]
    done = run_python("-m", "benchmarks.stopping", *chosen)
    assert done.returncode == 0, (done.stdout, done.stderr)
    (row,) = (line.split(" | ") for line in done.stdout.decode().splitlines()[2:])
    assert row[0].strip("| ") == command
    assert int(row[2]) >= 4


def deadly(file):
    """Write a graph whose shapes TensorFlow cannot multiply: its check aborts."""
    graph_def = tf.compat.v1.GraphDef()
    for name in ("a", "b"):
        node = graph_def.node.add(name=name, op="Placeholder")
        node.attr["dtype"].type = tf.float32.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(tf.TensorShape([2**62]).as_proto())
    node = graph_def.node.add(name="c", op="TPUPartitionedInput", input=["a", "b"])
    node.attr["N"].i = 2
    node.attr["T"].type = tf.float32.as_datatype_enum
    node.attr["partition_dim"].i = 0
    file.write_bytes(graph_def.SerializeToString())
    return file


def test_the_death_of_the_process_is_one_line(tmp_path):
    command = [*COMMAND[1:], "ops", deadly(tmp_path / "a.pb")]
    done = run_python(*command)
    assert (done.returncode, done.stdout) == (1, b"")
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("geutil: TensorFlow ended the process (SIGABRT) while ")
    assert "opening a.pb" in line
    told = run_python(*command, "--verbose")
    assert b"Check failed" in told.stderr
