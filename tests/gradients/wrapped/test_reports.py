"""What is told of the gradients of checkpointed functions: reports and warnings."""

import logging
import re
import threading

import numpy as np
import pytest
import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.gradients import by_name, by_type, checkpointed, last_report
from tests.gradients.wrapped.test_functions import PLACES

X = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)


def deep(x, name="deep"):
    with tf.name_scope(name):
        for _ in range(3):
            x = tf.sin(tf.exp(tf.sin(x)))
    return x


def slope(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(function(x))
    return tape.gradient(loss, x)


def train_step(size):
    """Return the graph of a step whose gradients keep what has so many elements."""
    function = tf.function(lambda x: slope(checkpointed(deep, "inputs"), x))
    return function.get_concrete_function(tf.TensorSpec([size])).graph


def bytes_of_largest(report):
    return max(t.bytes for t in report.kept)


def test_the_report_of_a_thread_is_its_own_until_it_ends():
    built, done = threading.Event(), threading.Event()

    def work():
        train_step(8192)
        built.set()
        done.wait(600)

    train_step(4096)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        assert built.wait(600)
        assert bytes_of_largest(last_report()) == 4 * 4096
    finally:
        done.set()
        thread.join()
    train_step(4096)
    ended = threading.Thread(target=lambda: train_step(8192))
    ended.start()
    ended.join()
    assert bytes_of_largest(last_report()) == 4 * 8192
    train_step(2048)
    assert bytes_of_largest(last_report()) == 4 * 2048


@pytest.mark.parametrize("place", ["eager", "function", "xla", "outside", "while"])
def test_the_report_is_on_the_call_and_of_its_graph(place):
    graphs, before = [], last_report()

    def function(x):
        graphs.append(tf.compat.v1.get_default_graph())
        return deep(x)

    PLACES[place](checkpointed(function, "inputs"), [])(tf.constant(X))
    report = last_report()
    assert report is not before
    assert report.mode == "inputs"
    assert [t.bytes for t in report.kept if t.bytes == X.nbytes] == [X.nbytes]
    types = [op.op_type for op in report.recomputed]
    assert types.count("Exp") == 3
    assert report.segments == 1
    assert not report.warnings
    assert "recomputed" in str(report)
    train_step(4096)
    # TensorFlow may trace a function again, to find out what it reads.
    assert report in [last_report(graph) for graph in graphs]
    assert report is not last_report()


def test_the_report_of_a_gradient_and_of_functions_inside():
    with tf.Graph().as_default() as graph:
        x = tf.ones([64])
        (first,) = tf.gradients(checkpointed(deep, "inputs")(x), x)
        report = last_report()
    outer = tf.function(PLACES["while"](checkpointed(deep, "speed"), []))
    inner = outer.get_concrete_function(tf.constant(X))
    assert last_report(inner) is last_report(inner.graph) is last_report()
    for of in (first, first.op, graph):
        assert last_report(of) is report
    assert last_report(tf.Graph()) is None


def test_reports_of_what_has_no_graph_are_refused():
    for of in (1, "graph", tf.function(deep)):
        with pytest.raises(ArgumentTypeError, match="get_concrete_function returns"):
            last_report(of)


def test_the_report_after_a_fit_with_a_strategy():
    """Its threads build the gradients."""
    train_step(4096)
    before = last_report()
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(32, "tanh") for _ in "abc"])
        model.build([None, 32])
        checkpointed(model, "inputs")
        model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, X, batch_size=64, verbose=0)
    assert last_report() is not before
    assert any(op.op_type == "Tanh" for op in last_report().recomputed)


@pytest.mark.parametrize("depth", [0, 5])
def test_a_report_is_on_one_call_and_on_nothing_around_it(depth):
    first, second = (checkpointed(deep, "inputs") for _ in range(2))

    @tf.function
    def step(x):
        def function(x):
            for _ in range(depth):
                x = deep(tf.concat([x, x], 0), "around")[:64]
            x = first(x, "first")
            return deep(second(tf.cos(x), "second"), "after")

        return slope(function, x)

    step(tf.constant(X))
    report = last_report()
    # The backward pass comes to the first call last.
    assert {op.name.partition("/")[0] for op in report.recomputed} == {"first"}
    # Each op reads and writes.
    size = X.size
    assert report.forward_cost == 9 * 2 * size
    # Input, gradient, and the eight tensors that cosines are taken of.
    assert report.plain_peak <= 11 * X.nbytes
    assert report.extra_cost <= 8 * 2 * size


def test_what_is_given_is_held_and_not_computed_again():
    """Also where it is no tensor that a gradient flows into."""

    @tf.function
    def step(x, lengths):
        mask = tf.exp(tf.cast(tf.sequence_mask(lengths, 32), tf.float32))
        return slope(checkpointed(lambda x: deep(x * mask), "inputs"), x)

    step(tf.constant(X), tf.range(64))
    report = last_report()
    assert "Cast" not in {op.op_type for op in report.recomputed}
    assert "it is given" in {t.reason for t in report.kept if t.op_type == "Exp"}


WARNINGS = {
    "nothing to recompute": (lambda x: 2.0 * x, "inputs", "reads nothing of it"),
    "nor for memory": (lambda x: 2.0 * x, "memory", "reads nothing of it"),
    "everything is kept": (deep, lambda t: True, "is kept"),
    "all cosines are kept": (deep, by_type("Sin", "Exp"), "is kept"),
    "nothing is kept": (deep, by_name("nowhere"), r"keeps no tensor"),
    "nothing is heavy": (deep, "speed", "no convolution|keeps no tensor"),
}


@pytest.mark.parametrize("traced", [False, True])
def test_warnings_are_logged(traced, caplog):
    run = PLACES["function" if traced else "eager"]
    for case, (fn, checkpoints, words) in WARNINGS.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING, "geutil"):
            wrapped = checkpointed(fn, checkpoints, min_checkpoint_size=0)
            run(wrapped, [])(tf.constant(X))
        (warning,) = last_report().warnings
        said = [r.getMessage() for r in caplog.records if r.name == "geutil"]
        assert said == [warning], case
        # It says which call it is about.
        assert warning.startswith("the checkpointed call that yields '")
        assert caplog.records[-1].levelno == logging.WARNING
        assert re.search(words, warning), case
        assert bool(last_report().recomputed) != ("plain gradients" in warning), case


def test_memory_that_would_not_be_saved_is_told():
    """The call ends the forward pass, and its backward pass starts with most of it."""

    @tf.function
    def step(x):
        return slope(checkpointed(lambda x: tf.reduce_sum(tf.sin(tf.exp(x)))), x)

    step(tf.constant(X))
    report = last_report()
    assert not report.recomputed
    (warning,) = report.warnings
    assert "these are plain gradients: " in warning
    # In the planned order, with a scalar at another place.
    assert report.peak <= report.plain_peak + 4


def test_nothing_is_offloaded_under_xla(caplog):
    wrapped = checkpointed(deep, by_name("Sin_2"), offload=True, min_checkpoint_size=0)
    with caplog.at_level(logging.WARNING, "geutil"):
        PLACES["xla"](wrapped, [])(tf.constant(X))
    assert last_report().recomputed
    assert last_report().offloaded == ()
    assert "nothing is offloaded" in caplog.text
