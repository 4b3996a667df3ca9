"""Updates are a part of the order, wherever they are written."""

import logging
import re
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from geutil.errors import SelectionError, StaleGraphError
from geutil.gradients import (
    Budget,
    checkpointed,
    gradients,
    last_report,
    order_updates,
)
from geutil.memory import predict, worst_case
from tests.gradients.checking import assert_close, measured_peak, waiting
from tests.gradients.graphs import chain_loss, chain_weights
from tests.thorough import chosen

v1 = tf.compat.v1
WIDTH, ROWS, LAYERS = 256, 32, 12
BYTES = WIDTH * WIDTH * 4
"""Of a weight, which is larger than what a layer yields."""


def start(layers=LAYERS):
    return chain_weights(layers, WIDTH)


def batch():
    return np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)


def descend(weights, slopes):
    return [w.assign_sub(0.1 * g) for w, g in zip(weights, slopes, strict=True)]


def plain_descent(weights):
    return lambda slopes: descend(weights, slopes)


def accumulate(weights):
    sums = [tf.Variable(tf.zeros_like(w)) for w in weights]

    def apply(slopes):
        for s, g in zip(sums, slopes, strict=True):
            s.assign_add(g)

    return apply


def keras_adam(weights):
    optimizer = keras.optimizers.Adam(0.001)
    wrapped = [keras.Variable(w.numpy()) for w in weights]
    optimizer.build(wrapped)
    return lambda slopes: optimizer.apply(slopes, wrapped)


def clipped(weights):
    def apply(slopes):
        slopes, _ = tf.clip_by_global_norm(slopes, 1.0)
        descend(weights, slopes)

    return apply


UPDATES = {
    "descend": (plain_descent, 3),
    "accumulate": (accumulate, 3),
    "keras adam": (keras_adam, 6),
}


def traced(make_update, **how):
    """Return a step as a function, its weights, and the report on its gradients."""
    weights = start()
    update = make_update(weights)

    @tf.function(autograph=False)
    def step(x):
        loss = chain_loss(x, weights)
        update(gradients(loss, weights, **how))
        return loss

    concrete = step.get_concrete_function(tf.TensorSpec((ROWS, WIDTH)))
    # Nothing else holds what the update made.
    concrete.kept = update
    return concrete, weights, last_report()


def asked_for(function):
    return [*function.graph.outputs, *function.graph.control_outputs]


def assert_little_is_held(worst, report, most):
    assert worst.peak < most * BYTES + 1.2 * (LAYERS + 2) * ROWS * WIDTH * 4
    assert worst.peak <= 1.15 * report.peak


@pytest.mark.parametrize("name", UPDATES)
def test_no_schedule_holds_many_weight_gradients(name):
    """Each is used up before the next, which nothing but the order says."""
    update, most = UPDATES[name]
    free, _, _ = traced(update, checkpoints=None, order=False)
    ordered, _, report = traced(update, checkpoints=None)
    assert worst_case(asked_for(free)).reached > 0.9 * LAYERS * BYTES
    assert_little_is_held(worst_case(asked_for(ordered)), report, most)
    assert report.worst <= 1.15 * report.peak
    assert report.warnings == ()
    assert predict(asked_for(ordered)).peak == pytest.approx(report.peak, rel=0.03)


def test_the_values_are_those_of_plain_gradients():
    def update(weights):
        # In a function the call does nothing.
        return lambda slopes: order_updates(*descend(weights, slopes))

    ordered, weights, _ = traced(update, checkpoints="memory")
    x = tf.constant(batch())
    losses = [float(ordered(x)) for _ in range(3)]
    plain = start()
    for loss in losses:
        with tf.GradientTape() as tape:
            expected = chain_loss(x, plain)
        descend(plain, tape.gradient(expected, plain))
        assert_close([loss], [float(expected)])
    assert_close([w.numpy() for w in weights], [w.numpy() for w in plain])


def test_the_report_says_when_all_gradients_are_held(caplog):
    with caplog.at_level(logging.WARNING, "geutil"):
        _, _, report = traced(clipped, checkpoints=None)
    assert "holds_gradients=True" in report.warnings[-1]
    assert report.warnings[-1] in caplog.messages
    _, _, told = traced(clipped, checkpoints=None, holds_gradients=True)
    assert told.warnings == ()
    assert told.peak == report.peak > LAYERS * BYTES


@pytest.mark.parametrize("update", [clipped, plain_descent])
def test_a_step_above_its_budget_is_told_with_what_it_holds(update):
    """The ops at the peak are named, whether updates are to blame or not."""
    function, _, report = traced(update, checkpoints=Budget("60%"))
    assert (report.resident > report.budget) is (update is clipped)
    told = [text for text in report.warnings if "more than the budget" in text]
    assert len(told) == (update is clipped)
    held = {t.name: t.bytes for t in predict(asked_for(function)).at_peak}
    for text in told:
        assert f"{report.resident:,} bytes at its peak" in text
        named = re.findall(r"'([^']+)' \(([\d,]+)\)", text)
        assert len(named) == 3
        for name, size in named:
            assert held[name] == int(size.replace(",", "")) == BYTES


def test_plain_gradients_hold_what_the_step_returns_of_them():
    """Both peaks are of a step that holds all gradients to its end, or neither is."""
    weights = start()

    def step_of(take):
        step = tf.function(lambda x: take(chain_loss(x, weights), weights))
        return step.get_concrete_function(tf.TensorSpec([ROWS, WIDTH]))

    plain = predict(asked_for(step_of(tf.gradients))).peak
    for checkpoints in ("memory", "speed"):
        report = last_report(step_of(partial(gradients, checkpoints=checkpoints)))
        assert report.plain_peak == pytest.approx(plain, rel=0.03)
        assert report.peak <= report.plain_peak
        assert report.plain_worst >= LAYERS * BYTES


def test_fit_with_checkpointed_holds_no_heap_of_gradients():
    """Keras' optimizers hand on all gradients together, in one op."""
    layers = [
        keras.layers.Dense(WIDTH, activation="tanh", use_bias=False)
        for _ in range(LAYERS)
    ]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    checkpointed(model)
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    x = batch()
    model.fit(x, x, batch_size=ROWS, epochs=1, verbose=0)
    step = tf.function(
        lambda x, y: model.train_step((x, y)), autograph=False
    ).get_concrete_function(tf.TensorSpec(x.shape), tf.TensorSpec(x.shape))
    assert worst_case(asked_for(step)).peak < 0.5 * LAYERS * BYTES


def version_1_step(**how):
    x = v1.placeholder(tf.float32, [ROWS, WIDTH], name="x")
    weights = start()
    loss = chain_loss(x, weights)
    slopes = gradients(loss, weights, **how)
    return x, weights, loss, slopes


@pytest.mark.parametrize(
    "optimizer",
    [
        v1.train.GradientDescentOptimizer(0.1),
        v1.train.AdamOptimizer(),
        v1.train.MomentumOptimizer(0.1, 0.9),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_a_train_op_of_version_1(optimizer, graph):
    _, weights, loss, slopes = version_1_step(checkpoints=None)
    train = optimizer.apply_gradients(zip(slopes, weights, strict=True))
    assert worst_case([train, loss]).reached > 0.9 * LAYERS * BYTES
    report = order_updates(train, loss)
    assert report is last_report()
    assert_little_is_held(worst_case([train, loss]), report, 3)


@pytest.mark.parametrize("finalized", [False, True])
def test_a_session_orders_updates_at_a_first_run_that_has_them(
    finalized, caplog, graph
):
    x, weights, _, slopes = version_1_step(checkpoints=None)
    updates = [u.op for u in descend(weights, slopes)]
    before = len(waiting(graph))
    if finalized:
        graph.finalize()
    with (
        v1.Session() as session,
        caplog.at_level(logging.WARNING, "geutil"),
        pytest.raises(tf.errors.FailedPreconditionError, match="variable"),
    ):
        session.run(updates, {x: batch()})
    assert (len(waiting(graph)) > before) is not finalized
    assert any("finalized" in message for message in caplog.messages) is finalized


def test_updates_after_the_first_run_are_told_of(caplog, graph):
    x, weights, loss, slopes = version_1_step(checkpoints=None)
    train = tf.group(*(u.op for u in descend(weights, slopes)))
    before = len(waiting(graph))
    with v1.Session() as session, caplog.at_level(logging.WARNING, "geutil"):
        session.run([v.initializer for v in weights])
        assert caplog.messages == []
        first = session.run([loss, train], {x: batch()})[0]
        second = session.run([loss, train], {x: batch()})[0]
        with pytest.raises(StaleGraphError, match="order_updates"):
            order_updates(train)
    assert second < first
    assert len(waiting(graph)) == before
    (message,) = caplog.messages
    assert "order_updates" in message


def test_no_run_changes_state_that_it_was_not_asked_to(graph):
    x, weights, loss, slopes = version_1_step(checkpoints=None)
    train = tf.group(*(u.op for u in descend(weights, slopes)))
    order_updates(train, loss)
    with v1.Session() as session:
        session.run([v.initializer for v in weights])
        values = session.run(weights)
        # The forward pass waits for none of them.
        session.run(loss, {x: batch()})
        assert_close(session.run(weights), values)
        with pytest.raises(StaleGraphError, match="does not ask for"):
            session.run(slopes[0], {x: batch()})
        assert_close(session.run(weights), values)
        session.run([train, *slopes], {x: batch()})
        assert not np.allclose(session.run(weights[0]), values[0])


def test_what_cannot_be_ordered_is_refused(graph):
    w = v1.get_variable("w", [4])
    with pytest.raises(SelectionError, match=r"gradients\(..., order=True\)"):
        order_updates(w.assign_sub([1.0] * 4))
    (slope,) = gradients(tf.reduce_sum(w * w), [w], checkpoints=None)
    with pytest.raises(SelectionError, match="pass the train op"):
        order_updates(slope)
    with pytest.raises(SelectionError, match="pass the train op"):
        order_updates(w.assign_sub([1.0] * 4))


@pytest.mark.parametrize("threads", chosen([1, 8], 8))
def test_a_function_holds_what_its_report_says(threads):
    function, _, report = traced(keras_adam, checkpoints="memory")
    peak = measured_peak(function, batch(), inter_op_threads=threads)
    assert peak <= 1.05 * report.peak


def test_under_xla_nothing_is_promised():
    weights = start(3)

    @tf.function(autograph=False, jit_compile=True)
    def step(x):
        loss = chain_loss(x, weights)
        descend(weights, gradients(loss, weights, checkpoints="speed"))
        return loss

    graph = step.get_concrete_function(tf.TensorSpec((ROWS, WIDTH))).graph
    assert not waiting(graph)
    report = last_report()
    assert report.worst is None
    assert "XLA has an order of its own" in str(report)
