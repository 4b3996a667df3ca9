"""What is refused, and what is warned of; a refusal leaves the graph as it was."""

import logging

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.gradients import by_type, explain, gradients, gradients_speed, last_report
from tests.gradients.checking import deep
from tests.settings import edges, needs_eager

v1 = tf.compat.v1


class Sample:
    """A graph with a chain; `kept` cuts it in two places."""

    def __init__(self):
        self.x = tf.ones([64], name="x")
        self.a = deep(self.x)
        self.b = deep(self.a)
        self.y = deep(self.b)
        self.aside = tf.exp(tf.zeros([64]), name="aside")


@pytest.fixture
def sample():
    with tf.Graph().as_default():
        yield Sample()


def other_tensor():
    with tf.Graph().as_default():
        return tf.zeros([64], name="elsewhere")


SELECTION, TYPE = ge.SelectionError, ge.ArgumentTypeError
BUILTIN = {SELECTION: ValueError, TYPE: TypeError}
"""Which callers catch as well."""
UNKNOWN_MODE = (
    "'fastest' is no mode of checkpoints; pass one of collection, memory, speed"
)
UNKNOWN_NAME = "no tensor, op, layer or scope 'Sinn'; similar are ['Sin'"
OFFLOAD = "offload is True, False or a policy, got builtins.str"
ELSEWHERE = "'elsewhere:0' belongs to another graph"
SIZE, PREFETCH = "min_checkpoint_size", "prefetch"
# The error, what it says, the argument, and its value or how a sample makes it.
REFUSALS = [
    (SELECTION, UNKNOWN_MODE, "checkpoints", "fastest"),
    (SELECTION, "add_to_collection", "checkpoints", "collection"),
    (SELECTION, ELSEWHERE, "checkpoints", lambda s: [s.a, other_tensor()]),
    (SELECTION, UNKNOWN_NAME, "checkpoints", ["Sinn"]),
    (TYPE, "Operation", "checkpoints", lambda s: [s.a.op]),
    (TYPE, "builtins.int", "checkpoints", 3),
    (TYPE, "numpy.float64", "checkpoints", np.zeros(2)),
    (TYPE, "builtins.dict", "checkpoints", lambda s: {"a": s.a}),
    (TYPE, f"{SIZE} is a number from 0 up, got -1", SIZE, -1),
    (TYPE, SIZE, SIZE, "1 MB"),
    (TYPE, f"{PREFETCH} is a number from 0 up, got -2", PREFETCH, -2),
    (TYPE, OFFLOAD, "offload", "CPU"),
    (TYPE, "1 ys and 2 grad_ys", "grad_ys", [None, None]),
    (TYPE, "ys is empty", "ys", []),
    (TYPE, "builtins.dict", "ys", lambda s: {"y": s.y}),
    (TYPE, "Operation", "ys", lambda s: s.y.op),
    (TYPE, "NoneType", "ys", None),
]


@pytest.mark.parametrize("function", [gradients, explain])
def test_refusals(sample, function):
    said = []
    for error, words, name, value in REFUSALS:
        value = value(sample) if callable(value) else value
        arguments = {"ys": sample.y, "xs": sample.x, "checkpoints": [sample.a]}
        before = edges(sample.y.graph)
        with pytest.raises(Exception) as refusal:
            function(**arguments | {name: value})
        kinds = error, BUILTIN[error]
        is_one = all(isinstance(refusal.value, kind) for kind in kinds)
        if not is_one or words not in str(refusal.value):
            said.append((name, value, refusal.value))
        assert edges(sample.y.graph) == before, (name, value)
    assert said == []


@needs_eager
def test_eager_tensors():
    x = tf.constant([1.0])
    with pytest.raises(TYPE, match=r"inside tf\.function"):
        gradients(x * x, x, checkpoints=[x])
    with tf.Graph().as_default():
        y = tf.constant([1.0])
        with pytest.raises(TYPE, match="a tensor of the graph"):
            gradients(y * y, y, checkpoints=[x])


def test_what_tensorflow_refuses(sample):
    def error(function):
        with pytest.raises((ValueError, TypeError)) as refusal:
            function([sample.y, sample.b], sample.x, **arguments)
        return type(refusal.value)

    for arguments in (
        {"unconnected_gradients": "nil"},
        {"aggregation_method": 77},
        {"no_such": 1},
    ):
        assert error(gradients_speed) is error(tf.gradients), arguments


def warnings_of(caplog, *arguments, **options):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "geutil"):
        gradients(*arguments, **options)
    logged = [r.getMessage() for r in caplog.records if r.name == "geutil"]
    assert logged == list(last_report().warnings)
    assert all(f"warning: {message}" in str(last_report()) for message in logged)
    return logged


def test_a_checkpoint_that_is_not_between(sample, caplog):
    kept = [sample.a, sample.b]
    assert not warnings_of(caplog, sample.y, sample.x, checkpoints=kept)
    kept.append(sample.aside)
    (said,) = warnings_of(caplog, sample.y, sample.x, checkpoints=kept)
    assert "'aside:0' is not between xs and ys" in said
    assert last_report().recomputed


NOTHING_KEPT = {
    "policy": (lambda s: by_type("NoSuchType"), "the policy keeps no tensor"),
    "too small": (lambda s: by_type("Sin"), "the policy keeps no tensor"),
    "speed": (lambda s: "speed", "no convolution, matmul, einsum"),
    "list": (lambda s: [], "no checkpoint is left"),
    "aside": (lambda s: [s.aside], "no checkpoint is left"),
}


def test_keeping_nothing_gives_plain_gradients(sample, caplog):
    for name, (checkpoints, says) in NOTHING_KEPT.items():
        said = warnings_of(caplog, sample.y, sample.x, checkpoints=checkpoints(sample))
        assert says in said[-1], name
        assert "plain gradients" in said[-1]
        assert not last_report().recomputed
    # Also where tensors that are always kept cut the graph.
    drawn = deep(tf.nn.dropout(sample.y, 0.5))
    y = deep(tf.nn.dropout(drawn, 0.5))
    gradients(y, sample.x, checkpoints=by_type("NoSuchType"))
    assert not last_report().recomputed
    assert not any("recomputed" in op.name for op in y.graph.get_operations())


def test_the_collection_of_a_graph_around(caplog, graph):
    x = tf.ones([64])
    v1.add_to_collection("checkpoints", tf.sin(x))

    def body(i, h):
        said = warnings_of(caplog, tf.sin(tf.exp(h)), h)
        assert "no checkpoint is left" in said[-1]
        return i + 1, h

    tf.while_loop(lambda i, h: i < 2, body, (0, x))
