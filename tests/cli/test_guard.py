"""The command goes on in a child, whose death is told in one line."""

import os
import signal
import subprocess

import tensorflow as tf

from geutil.cli import child
from tests.cli.processes import COMMAND
from tests.processes import run_python


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
    command = [*COMMAND, "ops", str(deadly(tmp_path / "a.pb"))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        # What it said is shown on request: here by a process that is such a child.
        variables = {**os.environ, child._VARIABLE: str(tmp_path / "noted")}
        dead = run_python(*command[1:], "--verbose", environment=variables)
        out, said = process.communicate()
    assert dead.returncode == -signal.SIGABRT
    assert b"Check failed" in dead.stderr
    assert (tmp_path / "noted").read_text() == "opening a.pb"
    assert (process.returncode, out) == (1, "")
    last = said.splitlines()[-1]
    assert last.startswith("geutil: TensorFlow ended the process (SIGABRT) while ")
    assert "opening a.pb" in last
    # What TensorFlow says at its start is held back, too.
    assert all(line.startswith("geutil: ") for line in said.splitlines())


def test_a_call_in_python_stays_in_its_process():
    assert not child.PARENT.get()
    child.go_on_in_a_child()
