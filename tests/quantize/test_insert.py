"""One FakeQuant op between an op and those that shall read it."""

import logging

import numpy as np
import pytest
import tensorflow as tf

from geutil.errors import ArgumentTypeError, QuantizeError, StaleGraphError
from geutil.graph import verify
from geutil.quantize import fixed_quantize, insert_quant_op, quantize
from tests.quantize.tiny import (
    close,
    ends,
    fake_quant,
    fake_quants,
    refused,
    session,
    types,
)
from tests.settings import edges, evaluate

v1 = tf.compat.v1
X = np.float32(np.random.default_rng(0).normal(size=(6, 4)) * 3)


def _graph():
    """Return a graph with one producer and three consumers."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder_with_default(X, [None, 4], name="data")
        x = tf.identity(x, name="block/x")
        tf.square(x, name="block/square")
        tf.add(x, x, name="block/twice")
        tf.exp(x, name="other/exp")
    return graph


def _op(graph, name):
    return graph.get_operation_by_name(name)


def _insert(graph, consumers, **options):
    options = {"is_training": True, **options}
    ops = [_op(graph, name) for name in consumers]
    return insert_quant_op("block", "x_quant", _op(graph, "block/x"), ops, **options)


NAMES = ["block/square", "block/twice", "other/exp"]


def _values(graph):
    return evaluate(graph, [_op(graph, name).outputs[0] for name in NAMES])


@pytest.mark.parametrize(
    "moving, bits, narrow", [(True, 2, True), (False, 8, False), (True, 16, False)]
)
def test_only_the_consumers_given_read_it(moving, bits, narrow):
    graph = _graph()
    options = {"init_min": -1.0, "init_max": 2.0, "ema_decay": 0.9, "bits": bits}
    options |= {"moving_avg": moving, "narrow_range": narrow}
    report = _insert(graph, NAMES[:2], **options)
    verify(graph)
    assert len(report.variables) == 2 + moving
    x = fake_quant(X, *ends(X), bits, narrow)
    for actual, expected in zip(_values(graph), [x**2, x + x, np.exp(X)], strict=True):
        close(actual, expected, 1e-6)
    assert report.consumers == tuple(NAMES[:2])
    assert report.tensor.op.inputs[0].op.name == "block/x"
    assert report.skipped == ()
    # Both inputs of a consumer that reads it twice.
    assert all(t is report.tensor for t in _op(graph, "block/twice").inputs)
    assert len(fake_quants(graph)) == 1


def test_otherwise_nothing_is_assigned():
    graph = _graph()
    before = len(graph.get_operations())
    report = _insert(graph, NAMES, is_training=False, init_min=-2.0, init_max=2.0)
    made = graph.get_operations()[before:]
    assigns = [op for op in made if op.type.startswith("Assign")]
    # The initializers of the two variables.
    assert len(assigns) == 2
    assert all(op.name.startswith("block/x_quant/m") for op in assigns)
    close(_values(graph)[0], fake_quant(X, -2.0, 2.0) ** 2)
    assert report.step is None


def test_a_delay():
    graph = _graph()
    report = _insert(graph, NAMES, moving_avg=False, quant_delay=2)
    assert report.tensor.op.type == "SelectV2"
    square = _op(graph, "block/square").outputs[0]
    with session(graph) as opened:
        for step in range(4):
            value = opened.run(square)
            x = X if step + 1 < 2 else fake_quant(X, *ends(X))
            close(value, x**2)
            close(opened.run(list(report.variables.values())), ends(X))
        assert opened.run(report.step) == 4
    for delay in (None, 0):
        graph = _graph()
        assert _insert(graph, NAMES, quant_delay=delay).step is None
        choosing = {"SelectV2", "Select", "If", "Switch", "StatelessIf"}
        assert not choosing & set(types(graph))


def test_names_and_collections():
    graph = _graph()
    report = _insert(graph, NAMES[:1], vars_collection="mine")
    names = ["block/x_quant/min", "block/x_quant/max"]
    assert report.range == "block/x_quant"
    count = "block/x_quant/learnt"
    assert list(report.variables) == [*names, count]
    assert [v.op.name for v in graph.get_collection("mine")] == names
    assert [v.op.name for v in graph.get_collection("variables")] == [*names, count]
    assert report.tensor.name == "block/x_quant/FakeQuantWithMinMaxVars:0"


def test_a_name_that_is_taken_is_numbered():
    with tf.Graph().as_default():
        x, y = (tf.identity(tf.constant(X)) for _ in range(2))
        reports = [
            insert_quant_op("a", "q", t.op, [tf.exp(t).op], is_training=False)
            for t in (x, y)
        ]
        assert [r.range for r in reports] == ["a/q", "a/q_1"]
        names = [v.op.name for v in v1.global_variables()]
        assert names == ["a/q/min", "a/q/max", "a/q_1/min", "a/q_1/max"]
        assert [list(r.variables) for r in reports] == [names[:2], names[2:]]


def test_what_stands_around_the_caller_counts_for_nothing():
    graph = _graph()
    with (
        graph.as_default(),
        tf.name_scope("around"),
        tf.device("/device:CPU:1"),
        tf.control_dependencies([_op(graph, "other/exp")]),
    ):
        report = _insert(graph, NAMES[:1])
    op = report.tensor.op
    assert op.name == "block/x_quant/FakeQuantWithMinMaxVars"
    assert (op.device, list(op.control_inputs)) == ("", [])


# -- what is skipped -------------------------------------------------------------------


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "geutil")
    return caplog


def _unchanged(graph, call):
    before = edges(graph)
    result = call()
    assert edges(graph) == before
    return result


def test_a_producer_outside_the_scope(log):
    graph = _graph()
    report = _unchanged(graph, lambda: _insert(graph, NAMES, producer_scope="bloc"))
    assert report.tensor is None
    (entry,) = report.skipped
    assert (entry.op, entry.op_type) == ("block/x", "Identity")
    assert entry.reason == "is outside the scope 'bloc'"
    assert "'block/x' (Identity) is outside the scope 'bloc'" in log.text
    assert str(report).splitlines()[0] == "nothing was inserted"


def test_consumers_outside_the_scope(log):
    graph = _graph()
    report = _insert(graph, NAMES, consumer_scope="block", producer_scope="block/")
    assert report.consumers == tuple(NAMES[:2])
    assert [entry.op for entry in report.skipped] == ["other/exp"]
    assert "'other/exp' (Exp) reads 'block/x' from outside" in log.text
    assert _op(graph, "other/exp").inputs[0].op.name == "block/x"
    assert "other/exp (Exp): reads" in str(report)
    graph = _graph()
    report = _unchanged(graph, lambda: _insert(graph, NAMES, consumer_scope="none"))
    assert report.tensor is None
    assert [entry.op for entry in report.skipped] == NAMES


@pytest.mark.parametrize("delay", [None, 3])
def test_a_producer_that_is_quantized_already(log, delay):
    graph = _graph()
    first = _insert(graph, NAMES[:1], quant_delay=delay)
    second = _unchanged(graph, lambda: _insert(graph, NAMES[1:], quant_delay=delay))
    assert second.tensor is first.tensor
    assert f"is quantized already, to '{first.tensor.name}'" in second.skipped[0].reason
    assert "quantized already" in log.text
    # One that quantizes itself.
    with tf.Graph().as_default() as graph:
        x = fixed_quantize(tf.constant(X))
        y = tf.exp(x)
    report = _unchanged(
        graph, lambda: insert_quant_op("", "q", x.op, [y.op], is_training=True)
    )
    assert report.skipped[0].reason == "quantizes itself"


def test_quantize_takes_the_tensor_for_quantized():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 4], "x")
        y = tf.nn.relu(tf.matmul(x, tf.ones([4, 3]), name="dense"))
        z = tf.matmul(y, tf.ones([3, 2]), name="last")
    insert_quant_op("mine", "q", y.op, [z.op], is_training=False, bits=4)
    report = quantize(graph, is_training=False)
    assert len([op for op in fake_quants(graph) if op.inputs[0] is y]) == 1
    assert report.coverage == 1.0
    assert report.tensor(y).name == "mine/q/FakeQuantWithMinMaxVars:0"


# -- what is refused -------------------------------------------------------------------


def _refused(graph, error, match, *args, is_training=True, **options):
    options["is_training"] = is_training
    refused(graph, error, match, insert_quant_op, *args, **options)


def test_other_consumers_and_types():
    graph = _graph()
    x, exp, data = (_op(graph, n) for n in ("block/x", "other/exp", "data"))
    with graph.as_default():
        shape = tf.shape(x.outputs[0])
        size = tf.identity(shape)
        nothing = tf.no_op()
    unread = r"'other/exp' \(Exp\) does not read 'data:0'; its consumers are block/x"
    for error, said, producer, consumers in [
        (QuantizeError, unread, data, [x, exp]),
        (QuantizeError, "its consumers are none", exp, [x]),
        (QuantizeError, "no consumer", x, []),
        (ArgumentTypeError, "tf.Operation", x.outputs[0], [exp]),
        (ArgumentTypeError, "tf.Operation", "block/x", [exp]),
        (ArgumentTypeError, "tf.Operation", x, ["other/exp"]),
        (ArgumentTypeError, "tf.Operation", x, exp.outputs),
        (QuantizeError, "no float32", shape.op, [size.op]),
        (QuantizeError, "no float32", nothing, [exp]),
    ]:
        _refused(graph, error, said, "", "q", producer, consumers)
    _refused(
        graph, ArgumentTypeError, "number of steps", "", "q", x, [exp], quant_delay=2.5
    )


def test_numbers_out_of_range():
    graph = _graph()
    ops = _op(graph, "block/x"), [_op(graph, "other/exp")]
    for options, message in [
        ({"bits": 1}, "bits=1"),
        ({"bits": 17}, "bits=17"),
        ({"quant_delay": -1}, "quant_delay is -1"),
        ({"quant_delay": 2, "is_training": False}, "is for training"),
        ({"ema_decay": 1.5}, "ema_decay=1.5"),
        ({"init_min": 1.0}, "init_min=1.0"),
        ({"init_min": 0.0, "init_max": -1.0}, "no range"),
    ]:
        _refused(graph, QuantizeError, message, "", "q", *ops, **options)


def test_gradients_and_runs():
    graph = _graph()
    x, exp = _op(graph, "block/x"), _op(graph, "other/exp")
    with v1.Session(graph=graph) as opened:
        opened.run(exp.outputs[0])
        _refused(graph, StaleGraphError, "live Session", "", "q", x, [exp])
    with graph.as_default():
        weights = v1.get_variable("weights", [4, 2])
        loss = tf.nn.relu(tf.matmul(x.outputs[0], weights))
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    _refused(graph, QuantizeError, "before gradients", "", "q", x, [exp])
