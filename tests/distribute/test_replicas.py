"""Edits in the replicas of tf.distribute, against one device on the whole batch."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from geutil.graph import replicas
from tests.distribute.ports import free_ports
from tests.processes import ROOT, run_python
from tests.settings import needs_eager

pytestmark = needs_eager
PROGRAM = "tests.distribute.steps"


def checked(done):
    assert done.returncode == 0, (done.stdout + done.stderr).decode()[-3000:]


@functools.cache
def stepped(kind, net, edits):
    """Return the numbers of some steps on one or two devices of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "numbers.npz"
        checked(run_python("-m", PROGRAM, kind, net, edits, file))
        return dict(np.load(file))


@functools.cache
def stepped_by_workers(net, edits):
    """Return the numbers of two processes that work in step."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.npz" for i in range(2)]
        started = []
        for i, file in enumerate(files):
            task = {"type": "worker", "index": i}
            environment = {
                **os.environ,
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
                "TF_CPP_MIN_LOG_LEVEL": "3",
            }
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", PROGRAM, "workers", net, edits, str(file)],
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
        try:
            printed = [process.communicate(timeout=300)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        for process, text in zip(started, printed, strict=True):
            assert process.returncode == 0, text.decode()[-3000:]
        return [dict(np.load(file)) for file in files]


def close(one, two, start, tolerance):
    keys = [key for key in one if key.startswith(start)]
    assert keys
    for key in keys:
        size = max(np.abs(one[key]).max(), 1e-3)
        np.testing.assert_allclose(
            two[key], one[key], rtol=0, atol=tolerance * size, err_msg=key
        )


EDITS = [
    ("conv", "fold,quantize"),
    ("conv", "fold,quantize,memory"),
    ("token", "quantize"),
    ("token", "delayed"),
]


@pytest.mark.parametrize(("net", "edits"), EDITS)
def test_replicas_equal_one_device_on_the_whole_batch(net, edits):
    one, two = stepped("one", net, edits), stepped("two", net, edits)
    close(one, two, "loss/", 1e-6)
    close(one, two, "range/0/", 1e-6)
    close(one, two, "variable/", 1e-6)
    # A rounded value may fall on the other side of a step.
    close(one, two, "gradient/", 1e-5)


@pytest.mark.parametrize(("net", "edits"), EDITS)
def test_copies_of_a_range_stay_equal(net, edits):
    two = stepped("two", net, edits)
    first = {k.removeprefix("range/0/"): v for k, v in two.items() if "range/0/" in k}
    other = {k.removeprefix("range/1/"): v for k, v in two.items() if "range/1/" in k}
    assert first.keys() == other.keys()
    assert all(np.array_equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize(("net", "edits"), EDITS)
def test_each_replica_is_looked_at_alone(net, edits):
    one, two = stepped("one", net, edits), stepped("two", net, edits)
    heads = [[str(r).splitlines()[0] for r in n["reports"]] for n in (one, two)]
    assert sorted(heads[0] * 2) == sorted(heads[1])
    assert not any("replica_1" in key for key in two)


@pytest.mark.parametrize(("net", "edits"), EDITS)
def test_new_ops_are_where_their_replica_is(net, edits):
    assert list(stepped("two", net, edits)["misplaced"]) == []


def test_steps_are_counted_once_for_all_replicas():
    assert stepped("two", "token", "delayed")["step"] == 4


TRAINED = ["train,exact", "train,one_pass"]


@pytest.mark.parametrize("edits", TRAINED)
def test_norms_folded_for_training_are_those_of_each_replica(edits):
    plain, folded = stepped("two", "conv", "train"), stepped("two", "conv", edits)
    assert [str(r)[:8] for r in folded["reports"]] == ["2 of 2 b"] * 2
    close(plain, folded, "loss/", 1e-6)
    close(plain, folded, "variable/", 2e-5)
    close(plain, folded, "gradient/", 2e-5)
    assert list(folded["misplaced"]) == []


SYNCHRONIZED = ["train,exact", "train,freeze", "train,exact,quantize"]


@pytest.mark.parametrize("edits", SYNCHRONIZED)
def test_folded_synchronized_norms_equal_one_device_on_the_whole_batch(edits):
    one, two = (stepped(kind, "synchronized", edits) for kind in ("one", "two"))
    for numbers, count in ((one, 1), (two, 2)):
        heads = [str(r)[:8] for r in numbers["reports"] if "norm" in str(r)[:30]]
        assert heads == ["2 of 2 b"] * count
    close(one, two, "loss/", 1e-6)
    close(one, two, "variable/", 1e-5)
    # Keras takes variances here as a difference of squares.
    close(one, two, "gradient/", 5e-5)
    assert list(two["misplaced"]) == []


def test_folds_of_synchronized_norms_change_no_step():
    plain = stepped("two", "synchronized", "train")
    folded = stepped("two", "synchronized", "train,exact")
    close(plain, folded, "loss/", 1e-6)
    close(plain, folded, "variable/", 1e-5)
    close(plain, folded, "gradient/", 2e-5)


def test_synchronized_norms_are_not_folded_in_one_pass():
    numbers = stepped("two", "synchronized", "train,one_pass")
    for report in map(str, numbers["reports"]):
        assert report.startswith("0 of 2 batch norm(s) folded, 2 refused")
        assert report.count("pass statistics='exact'") == 2


@pytest.mark.parametrize("kind", ["one", "two"])
def test_norms_freeze_at_the_same_step(kind):
    numbers = stepped(kind, "conv", "train,freeze,delayed")
    assert numbers["step"] == 4
    assert list(numbers["misplaced"]) == []


@pytest.mark.parametrize(
    ("net", "edits", "more", "tolerances"),
    [
        ("conv", "fold,quantize", "", (1e-6, 1e-6, 1e-5)),
        # As in replicas of one process: variances are differences of squares.
        ("synchronized", "train,exact,quantize", ",memory", (1e-5, 1e-5, 5e-5)),
    ],
)
def test_workers_equal_one_device_on_the_whole_batch(net, edits, more, tolerances):
    one = stepped("one", net, edits)
    starts = ("range/0/", "variable/", "gradient/")
    for numbers in stepped_by_workers(net, edits + more):
        close(one, numbers, "loss/", 1e-6)
        for start, tolerance in zip(starts, tolerances, strict=True):
            close(one, numbers, start, tolerance)
        assert list(numbers["misplaced"]) == []


@functools.cache
def stepped_by_a_coordinator(edits):
    """Return the numbers of a cluster with a parameter server, and of one device."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "cluster.npz", Path(folder) / "one.npz"]
        checked(run_python("-m", "tests.distribute.parameter_server", *files, edits))
        return tuple(dict(np.load(file)) for file in files)


@pytest.mark.parametrize(
    "edits", ["plain", "memory", "exact,memory", "one_pass", "exact,quantize,memory"]
)
def test_steps_of_a_coordinator_equal_those_of_one_device(edits):
    cluster, one = stepped_by_a_coordinator(edits)
    for start in ("loss/", "variable/"):
        close(one, cluster, start, 1e-6)


def test_ranges_of_a_coordinator_are_on_the_parameter_server():
    cluster, one = stepped_by_a_coordinator("exact,quantize,memory")
    close(one, cluster, "range/", 1e-6)
    assert cluster["step"] == one["step"] == 4
    assert {str(place) for place in cluster["places"]} == {
        "/job:ps/replica:0/task:0/device:CPU:0"
    }


@pytest.mark.parametrize("edits", ["memory", "exact,memory", "one_pass"])
def test_a_coordinators_edited_steps_equal_plain_ones(edits):
    plain, edited = (stepped_by_a_coordinator(e)[0] for e in ("plain", edits))
    close(plain, edited, "loss/", 1e-5)
    close(plain, edited, "variable/", 1e-4)


def test_outside_of_strategies_there_is_no_replica():
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0, name="replica_1/x")
        assert replicas.current() is None
        assert replicas.index() == 0
        assert not replicas.in_several()
        assert replicas.own_operations(graph) == [x.op]
        with replicas.device():
            assert tf.constant(1.0).device == ""
