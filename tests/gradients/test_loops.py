"""Loops whose backward pass computes values again, against TensorFlow's gradients."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import keras
import networkx as nx
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil.errors import PlanError
from geutil.gradients import (
    Budget,
    Plan,
    checkpointed,
    explain,
    gradients,
    last_report,
    plan,
    plan_curve,
)
from geutil.gradients.choices import LoopChoices, best_of
from geutil.gradients.construction import applied
from geutil.gradients.loops import ALL, LIGHT, find_loops, least_cut
from geutil.gradients.segments import StepProgram
from geutil.gradients.step import build_step
from tests.gradients.checking import assert_close, assert_same, measured_peak
from tests.gradients.loop_networks import (
    ROWS,
    SEQUENCES,
    STATES,
    Gated,
    batch,
    by_one,
    check_gradients,
    repeated,
    traced,
)

layers = keras.layers
RECURRENT = {
    "both_ways": (
        [8, 10, 16],
        lambda: layers.Bidirectional(
            layers.SimpleRNN(16, "swish", recurrent_dropout=0.2, seed=1)
        ),
    ),
    # Biases are of another type than what its lists hold.
    "mixed": (
        SEQUENCES,
        lambda: layers.LSTM(32, return_sequences=True, dtype="mixed_bfloat16"),
    ),
    "cells": (
        [8, 10, 16],
        lambda: layers.RNN(
            [layers.LSTMCell(16), layers.GRUCell(32, activation="silu")]
        ),
    ),
    "convolutions": ([2, 5, 12, 12, 3], lambda: layers.ConvLSTM2D(8, 3)),
}


def lstm():
    return layers.LSTM(32, return_sequences=True)


@pytest.fixture(scope="module")
def plain():
    """The plain gradients of the layer of few ops, as a function."""
    return traced(tf.gradients)


def test_memory_takes_less_by_it_and_says_so():
    explained = []

    def ours(loss, xs):
        explained.append(explain(loss, xs, checkpoints="memory"))
        return gradients(loss, xs, checkpoints="memory")

    function = traced(ours, lstm, SEQUENCES)
    report = last_report(function.graph)

    (loop,) = report.loops
    assert report.peak < 0.75 * report.plain_peak
    assert loop.reason is None
    assert sorted(name.rpartition("/")[2] for name in loop.values) == [
        *("Sigmoid:0", "Sigmoid_1:0", "Sigmoid_2:0", "Tanh:0", "Tanh_1:0")
    ]
    # Twelve times four gates and the tanh of the state.
    assert loop.bytes == 12 * 5 * 16 * 32 * 4
    assert 0.1 < report.extra_time < 0.5
    said = f"loop '{loop.name}': 5 values are computed again each time it"
    assert said in str(report)
    assert not any("plain gradients" in w for w in report.warnings)
    check_gradients(function, traced(tf.gradients, lstm, SEQUENCES), SEQUENCES)
    # Explaining in a function is of all gradients.
    (before,) = explained
    assert before.plain_peak == pytest.approx(report.plain_peak, rel=1e-3)
    assert before.peak == pytest.approx(report.peak, rel=1e-3)
    assert len(before.loops) == 1


def test_under_xla_and_by_a_tape(plain):
    def ours(loss, xs):
        return gradients(loss, xs, checkpoints="memory", engine="tape")

    function = traced(ours, jit_compile=True)
    assert [loop.reason for loop in last_report(function.graph).loops] == [None]
    check_gradients(function, plain)


def test_budgets_that_only_loops_keep_and_others():
    reports = []

    def ours(loss, xs):
        for budget in (Budget(1.0), Budget(extra_time=0.5)):
            reports.append(explain(loss, xs, checkpoints=budget))
        return gradients(loss, xs, checkpoints=Budget(0.8))

    function = traced(ours)
    report = last_report(function.graph)
    assert report.mode == "budget of 80 % of plain gradients"
    assert report.peak <= report.budget == int(0.8 * report.plain_peak)
    assert measured_peak(function, batch(), inter_op_threads=1) <= 1.02 * report.budget
    # One that is met anyway leaves loops alone.
    met, much = reports
    (loop,) = met.loops
    assert loop.values == ()
    assert "less time without" in loop.reason
    assert met.extra_time == 0
    assert much.peak < met.peak
    assert much.loops[0].reason is None


def stopping(how):
    """Return `how` for a loss with a part whose gradient is not to be taken."""

    def stopped(loss, xs):
        sine = tf.sin(xs[0])
        return how(loss + tf.reduce_sum(sine), xs, stop_gradients=[sine])

    return stopped


def test_curves_and_plans_have_it_and_fit_the_step_traced_anew(plain, tmp_path):
    def curve_of(loss, xs, **options):
        # Each plan is of a copy of its own, whose gradients stop where they are told.
        curves.append(plan_curve(loss, xs, ["100%", "80%", "1%"], **options))
        return loss

    curves = []
    traced(stopping(curve_of))
    (curve,) = curves
    met, found = curve.plans
    limits = [curve.plain_peak, int(0.8 * curve.plain_peak)]
    assert [p.budget for p in curve.plans] == limits
    assert met.loops == (0,)
    assert found.loops in ((LIGHT,), (ALL,))
    assert "; loops that compute again: 1" in str(curve)
    assert curve.unmet == (curve.plain_peak // 100,)
    assert Plan.load(found.save(tmp_path / "plan.json")) == found
    function = traced(stopping(partial(gradients, checkpoints=found)))
    check_report(function.graph, found)
    check_gradients(function, plain)
    other = replace(found, loops=(ALL, ALL))
    with pytest.raises(PlanError, match=r"that one had 2 loops .* this one has 1"):
        traced(stopping(partial(gradients, checkpoints=other)))


def check_report(graph, found):
    report = last_report(graph)
    # In the graph of the copy a few scalars wait elsewhere than in a function.
    assert report.peak == pytest.approx(found.peak, rel=1e-3)
    assert report.loops[0].reason is None


def test_plans_in_a_graph_of_version_1(graph):
    layer = Gated()
    x = tf.compat.v1.placeholder(tf.float32, ROWS)
    loss = tf.reduce_sum(tf.square(layer(x)))
    xs = [v.value for v in layer.trainable_variables]
    found = plan(loss, xs, 0.8)
    gradients(loss, xs, checkpoints=found)
    check_report(graph, found)


def test_checkpointed_layers():
    keras.utils.set_random_seed(3)
    layer = Gated()
    layer.build(ROWS)
    x = batch()

    def slopes(call):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(call(x)))
        return tape.gradient(loss, layer.trainable_variables)

    plain = slopes(layer)
    for options in ({}, {"budget": 0.8}):
        wrapped = checkpointed(layer, **options)
        function = tf.function(lambda call=wrapped: slopes(call), autograph=False)
        for ours in (function, *([] if options else [lambda: slopes(layer)])):
            for slope, wanted in zip(ours(), plain, strict=True):
                np.testing.assert_allclose(slope, wanted, rtol=1e-4, atol=1e-4)
        report = last_report(function.get_concrete_function().graph)
        assert [loop.reason for loop in report.loops] == [None]
        assert report.peak <= 0.8 * report.plain_peak


def test_loops_are_differentiated_again():
    def twice(how):
        @tf.function(autograph=False)
        def slopes(x):
            loss = tf.reduce_sum(tf.square(repeated(by_one, x)))
            (once,) = how(loss, x)
            reports.append(last_report())
            (second,) = tf.gradients(tf.reduce_sum(tf.square(once)), x)
            (other,) = tf.gradients(loss * loss, x)
            return once, second, other

        return slopes(STATES)

    reports = []
    ours = twice(lambda loss, x: gradients(loss, x, checkpoints="memory"))
    (loop,) = reports[0].loops
    assert loop.reason is None
    assert_close(ours, twice(tf.gradients), tolerance=1e-5)


@pytest.mark.parametrize("is_layer", [False, True])
def test_lists_that_another_loop_reads_stay(is_layer):
    layer = layers.SimpleRNN(32, return_sequences=True)

    @tf.function(autograph=False)
    def slopes(x):
        end = layer(tf.reshape(x, [16, -1, 16])) if is_layer else repeated(by_one, x)
        loss = tf.reduce_sum(tf.square(end))
        return tf.gradients(loss, x), gradients(loss, x, checkpoints="memory")

    plain, ours = slopes(STATES)
    assert_same(ours, plain)
    reasons = "several loops read its lists", "no list of its own holds values"
    assert reasons[is_layer] in str(last_report())


def test_with_encodings():
    def make():
        return keras.Sequential(
            [
                layers.Dense(64, activation="relu"),
                layers.LSTM(32, return_sequences=True),
                layers.Dense(64, activation="relu"),
            ]
        )

    found = []

    def ours(loss, xs):
        budget = Budget(extra_time=0.02)
        found.append(explain(loss, xs, checkpoints=budget, encode="lossless"))
        return gradients(loss, xs, checkpoints="memory", encode="lossless")

    function = traced(ours, make, SEQUENCES)
    report = last_report(function.graph)
    assert report.loops[0].reason is None
    assert found[0].extra_time <= 0.02 + 1e-9
    assert found[0].encoded and found[0].peak < found[0].plain_peak
    assert report.peak < report.plain_peak
    check_gradients(function, traced(tf.gradients, make, SEQUENCES), SEQUENCES)


@st.composite
def problems(draw):
    count = draw(st.integers(1, 12))
    weights = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    read = [
        sorted(draw(st.sets(st.integers(0, i - 1), max_size=4))) if i else []
        for i in range(count)
    ]
    nodes = st.sets(st.integers(0, count - 1))
    return weights, read, sorted(draw(nodes)), sorted(draw(nodes))


def parted(read, given_nodes, needed, cut):
    """Return whether each way from a given node to a needed one meets the cut."""
    waiting = [n for n in needed if n not in cut]
    met = set(waiting)
    while waiting:
        node = waiting.pop()
        if node in given_nodes:
            return False
        more = [n for n in read[node] if n not in cut and n not in met]
        met.update(more)
        waiting += more
    return True


@given(problems())
def test_a_cut_is_one_and_none_weighs_less(problem):
    weights, read, given_nodes, needed = problem
    graph = nx.DiGraph()
    graph.add_nodes_from(["from", "to"])
    for i, weight in enumerate(weights):
        graph.add_edge((i, 0), (i, 1), capacity=weight)
        graph.add_edges_from(((j, 1), (i, 0)) for j in read[i])
    graph.add_edges_from(("from", (i, 0)) for i in given_nodes)
    graph.add_edges_from(((i, 1), "to") for i in needed)

    cut = least_cut(weights, read, given_nodes, needed)

    assert sum(weights[i] for i in cut) == nx.minimum_cut_value(graph, "from", "to")
    assert parted(read, given_nodes, needed, cut)


def test_of_equals_the_cut_nearest_to_what_is_needed():
    # A chain of nodes that weigh the same.
    assert least_cut([3, 3, 3], [[], [0], [1]], [0], [2]) == [2]


def test_nothing_is_cut_where_nothing_is_given():
    assert least_cut([3, 3], [[], [0]], [], [1]) == []
    assert least_cut([], [], [], []) == []


def test_a_long_chain():
    count = 20_000
    weights = [2] * count
    weights[7] = 1
    read = [[i - 1] if i else [] for i in range(count)]
    assert least_cut(weights, read, [0], [count - 1]) == [7]


@pytest.mark.parametrize("name", RECURRENT)
def test_gradients_are_those_of_tensorflow(name):
    shape, make = RECURRENT[name]
    plain = traced(tf.gradients, make, shape)
    peaks = []

    def rebuilt(loss, xs):
        step = build_step(loss, xs)
        loops = find_loops(step)
        # Of two loops the second one is given less.
        levels = [
            max(n for n in loop.cuts if n <= level)
            for loop, level in zip(loops, (ALL, LIGHT), strict=False)
        ]
        assert len(levels) == len(loops) == 1 + (name == "both_ways")
        planned = LoopChoices(step, loops).rebuilt(tuple(levels))
        peaks.append([StepProgram(s).peak() for s in (step, planned)])
        built = applied(planned)
        peaks.append(StepProgram(built).peak())
        return list(built.gradients)

    ours = traced(rebuilt, make, shape)
    (before, planned), built = peaks
    assert planned < before
    # Shapes of lists are the only ops that a plan does not know.
    assert planned <= built < planned + 256
    check_gradients(ours, plain, shape)


def test_a_loop_is_as_before_until_a_choice_is_made():
    seen = []

    def planned(loss, xs):
        step = build_step(loss, xs)
        before = step.graph.as_graph_def()
        choices = LoopChoices(step, find_loops(step))
        rebuilt = choices.rebuilt((ALL,))
        seen.extend(StepProgram(s).peak() for s in (rebuilt, step))
        assert choices.longer((ALL,)) > 1
        assert step.graph.as_graph_def() == before
        return list(step.gradients)

    function = traced(planned)
    assert seen[0] < seen[1]
    assert_same(function(batch()), traced(tf.gradients)(batch()))


def drawing(state):
    return tf.tanh(state * tf.random.uniform(tf.shape(state))) * tf.exp(state)


def test_what_may_run_again():
    found = {}

    @tf.function(autograph=False)
    def train(x):
        for body in (drawing, by_one, tf.square):
            step = build_step(tf.reduce_sum(repeated(body, x)), x)
            (found[body],) = find_loops(step)

    train.get_concrete_function(tf.TensorSpec([16, 16]))
    # Random numbers are never drawn again.
    cuts = found[drawing].cuts
    assert cuts
    assert not any("random" in n.lower() for c in cuts.values() for n in c.ops)
    # Products run again only where all may.
    cuts = found[by_one].cuts
    assert not any("MatMul" in name for name in cuts[LIGHT].ops)
    assert cuts[ALL].saved > cuts[LIGHT].saved
    assert cuts[ALL].time > cuts[LIGHT].time
    # A loop that keeps only its state.
    kept = found[tf.square]
    assert kept.cuts == {}
    assert "no list of its own holds values that follow from others" in kept.reason


def test_choices_are_tried_until_the_least_that_can_be_met():
    choices = [(n,) for n in range(9)]
    tried = []

    def attempt(levels):
        tried.append(levels[0])
        if levels[0] < 5:
            return PlanError("no")
        return SimpleNamespace(levels=levels, cost=levels[0])

    assert best_of(choices, attempt).levels == (5,)
    assert len(tried) <= 6
    with pytest.raises(PlanError, match="no"):
        best_of(choices[:4], attempt)
