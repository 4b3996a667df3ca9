"""What is refused, and what is warned of; a refusal leaves the graph as it was."""

import logging

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.gradients import by_type, explain, gradients, gradients_speed, last_report
from tests.settings import edges, needs_eager

v1 = tf.compat.v1


class Sample:
    """A graph with a chain; `kept` cuts it in two places."""

    def __init__(self):
        self.x = tf.ones([64], name="x")
        self.a = self.deep(self.x)
        self.b = self.deep(self.a)
        self.y = self.deep(self.b)
        self.aside = tf.exp(tf.zeros([64]), name="aside")

    def deep(self, x):
        return tf.sin(tf.exp(tf.sin(x)))


@pytest.fixture
def sample():
    with tf.Graph().as_default():
        yield Sample()


def other_tensor():
    with tf.Graph().as_default():
        return tf.zeros([64], name="elsewhere")


# What is passed, the error (also as the builtin that callers catch), what it says.
REFUSALS = {
    "unknown mode": (
        lambda s: {"checkpoints": "fastest"},
        (ge.SelectionError, ValueError),
        "'fastest' is no mode of checkpoints; pass one of collection, memory, speed",
    ),
    "empty collection": (
        lambda s: {"checkpoints": "collection"},
        (ge.SelectionError, ValueError),
        "add_to_collection",
    ),
    "another graph": (
        lambda s: {"checkpoints": [s.a, other_tensor()]},
        (ge.SelectionError, ValueError),
        "'elsewhere:0' belongs to another graph",
    ),
    "an op": (
        lambda s: {"checkpoints": [s.a.op]},
        (ge.ArgumentTypeError, TypeError),
        "Operation",
    ),
    "an unknown name": (
        lambda s: {"checkpoints": ["Sinn"]},
        (ge.SelectionError, ValueError),
        "no tensor, op, layer or scope 'Sinn'; similar are ['Sin'",
    ),
    "a number": (
        lambda s: {"checkpoints": 3},
        (ge.ArgumentTypeError, TypeError),
        "builtins.int",
    ),
    "an array": (
        lambda s: {"checkpoints": np.zeros(2)},
        (ge.ArgumentTypeError, TypeError),
        "numpy.float64",
    ),
    "a dict": (
        lambda s: {"checkpoints": {"a": s.a}},
        (ge.ArgumentTypeError, TypeError),
        "builtins.dict",
    ),
    "negative size": (
        lambda s: {"checkpoints": [s.a], "min_checkpoint_size": -1},
        (ge.ArgumentTypeError, TypeError),
        "min_checkpoint_size is a number from 0 up, got -1",
    ),
    "a size that is none": (
        lambda s: {"checkpoints": [s.a], "min_checkpoint_size": "1 MB"},
        (ge.ArgumentTypeError, TypeError),
        "min_checkpoint_size",
    ),
    "negative prefetch": (
        lambda s: {"checkpoints": [s.a], "prefetch": -2},
        (ge.ArgumentTypeError, TypeError),
        "prefetch is a number from 0 up, got -2",
    ),
    "offload": (
        lambda s: {"checkpoints": [s.a], "offload": "CPU"},
        (ge.ArgumentTypeError, TypeError),
        "offload is True, False or a policy, got builtins.str",
    ),
    "too few gradients": (
        lambda s: {"checkpoints": [s.a], "grad_ys": [None, None]},
        (ge.ArgumentTypeError, TypeError),
        "1 ys and 2 grad_ys",
    ),
    "no ys": (
        lambda s: {"checkpoints": [s.a], "ys": []},
        (ge.ArgumentTypeError, TypeError),
        "ys is empty",
    ),
    "a dict of ys": (
        lambda s: {"checkpoints": [s.a], "ys": {"y": s.y}},
        (ge.ArgumentTypeError, TypeError),
        "builtins.dict",
    ),
    "an op as y": (
        lambda s: {"checkpoints": [s.a], "ys": s.y.op},
        (ge.ArgumentTypeError, TypeError),
        "Operation",
    ),
    "no ys at all": (
        lambda s: {"checkpoints": [s.a], "ys": None},
        (ge.ArgumentTypeError, TypeError),
        "NoneType",
    ),
}


@pytest.mark.parametrize("function", [gradients, explain])
@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(sample, name, function):
    passed, errors, says = REFUSALS[name]
    arguments = {"ys": sample.y, "xs": sample.x, **passed(sample)}
    graph = sample.y.graph
    before = edges(graph)
    for error in errors:
        with pytest.raises(error) as refusal:
            function(**arguments)
        assert says in str(refusal.value)
    assert edges(graph) == before


@needs_eager
def test_eager_tensors():
    x = tf.constant([1.0])
    with pytest.raises(ge.ArgumentTypeError, match=r"inside tf\.function"):
        gradients(x * x, x, checkpoints=[x])


@needs_eager
def test_eager_checkpoints():
    outside = tf.constant([1.0])

    @tf.function
    def take(x):
        with pytest.raises(ge.ArgumentTypeError, match="a tensor of the graph"):
            gradients(x * x, x, checkpoints=[outside])

    take(tf.constant([1.0]))


@pytest.mark.parametrize(
    "arguments",
    [{"unconnected_gradients": "nil"}, {"aggregation_method": 77}, {"no_such": 1}],
)
def test_what_tensorflow_refuses(sample, arguments):
    def error(function):
        with pytest.raises((ValueError, TypeError)) as refusal:
            function([sample.y, sample.b], sample.x, **arguments)
        return type(refusal.value)

    assert error(gradients_speed) is error(tf.gradients)


def warnings_of(caplog, *arguments, **options):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "geutil"):
        gradients(*arguments, **options)
    logged = [r.getMessage() for r in caplog.records if r.name == "geutil"]
    assert logged == list(last_report().warnings)
    assert all(f"warning: {message}" in str(last_report()) for message in logged)
    return logged


def test_a_checkpoint_that_is_not_between(sample, caplog):
    kept = [sample.a, sample.b, sample.aside]
    (said,) = warnings_of(caplog, sample.y, sample.x, checkpoints=kept)
    assert "'aside:0' is not between xs and ys" in said
    assert last_report().recomputed


def test_nothing_is_said_when_all_is_well(sample, caplog):
    kept = [sample.a, sample.b]
    assert not warnings_of(caplog, sample.y, sample.x, checkpoints=kept)


NOTHING_KEPT = {
    "policy": (lambda s: by_type("NoSuchType"), "the policy keeps no tensor"),
    "too small": (lambda s: by_type("Sin"), "the policy keeps no tensor"),
    "speed": (lambda s: "speed", "no convolution, matmul, einsum"),
    "list": (lambda s: [], "no checkpoint is left"),
    "aside": (lambda s: [s.aside], "no checkpoint is left"),
}


@pytest.mark.parametrize("name", NOTHING_KEPT)
def test_keeping_nothing_gives_plain_gradients(sample, caplog, name):
    checkpoints, says = NOTHING_KEPT[name]
    said = warnings_of(caplog, sample.y, sample.x, checkpoints=checkpoints(sample))
    assert says in said[-1]
    assert "plain gradients" in said[-1]
    assert not last_report().recomputed
    assert not any("recomputed" in op.name for op in sample.y.graph.get_operations())


def test_keeping_nothing_is_plain_where_always_kept_tensors_cut_the_graph(sample):
    drawn = sample.deep(tf.nn.dropout(sample.y, 0.5))
    y = sample.deep(tf.nn.dropout(drawn, 0.5))
    gradients(y, sample.x, checkpoints=by_type("NoSuchType"))
    assert not last_report().recomputed


def test_the_collection_of_a_graph_around(caplog):
    with tf.Graph().as_default():
        x = tf.ones([64])
        v1.add_to_collection("checkpoints", tf.sin(x))

        def body(i, h):
            said = warnings_of(caplog, tf.sin(tf.exp(h)), h)
            assert "no checkpoint is left" in said[-1]
            return i + 1, h

        tf.while_loop(lambda i, h: i < 2, body, (0, x))


def test_the_last_report_is_that_of_the_thread(sample):
    import threading

    gradients(sample.y, sample.x, checkpoints=[sample.a])
    report = last_report()
    assert report is not None
    seen = []
    thread = threading.Thread(target=lambda: seen.append(last_report()))
    thread.start()
    thread.join()
    # It may be that of a thread that has ended; not that of one that goes on.
    assert seen[0] is not report
