"""What holds of the choice for memory whatever the graph is."""

import sys

import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from geutil.gradients import gradients
from geutil.gradients.planning import choose_for_memory
from geutil.gradients.planning.trials import Trials
from geutil.gradients.prediction import StepProgram
from geutil.gradients.recomputing import build_recomputation
from geutil.gradients.segments import plan_recomputation
from geutil.gradients.selection import AlwaysKept
from geutil.memory.simulation import simulate
from tests.gradients.planning.graphs import chain_step, random_step

v1 = tf.compat.v1
# What holds copies back.
BETWEEN = ("NoOp", "PlaceholderWithDefault")


def planned(step):
    """Return the choice, and the plan that follows from it."""
    always = AlwaysKept(step)
    choice = choose_for_memory(step, always)
    kept = set(map(id, choice.kept))
    return choice, plan_recomputation(step, lambda t: id(t) in kept or always(t))


@given(st.integers(0, 10**6), st.integers(1, 14))
@settings(max_examples=25, deadline=None)
def test_no_plan_holds_more_than_plain_gradients(seed, layers):
    step = random_step(seed, layers)
    plain = StepProgram(step).peak()
    choice, plan = planned(step)
    if choice.reason is not None:
        assert not choice.kept
        return
    assert choice.peak < plain
    with step.graph.as_default():
        built = build_recomputation(plan)
    # Of the graph as it was built, not of the plan.
    assert simulate(StepProgram(built).program()).peak <= plain


@given(st.integers(0, 10**6), st.integers(1, 14))
@settings(max_examples=25, deadline=None)
def test_at_most_one_more_forward_pass(seed, layers):
    step = random_step(seed, layers)
    before = len(step.graph.get_operations())
    choice, plan = planned(step)
    if choice.reason is not None:
        return
    with step.graph.as_default():
        build_recomputation(plan)
    copies = [
        op
        for op in step.graph.get_operations()[before:]
        if op.name.startswith("recomputed/") and op.type not in BETWEEN
    ]
    again = [op for segment in plan.segments for op in segment.ops]
    assert len(copies) == len(again) == len(set(again))


def test_the_same_names_each_time():
    first, second = planned(random_step(3, 14)), planned(random_step(3, 14))
    assert [t.name for t in first[0].kept] == [t.name for t in second[0].kept]
    assert [[op.name for op in s.ops] for s in first[1].segments] == [
        [op.name for op in s.ops] for s in second[1].segments
    ]


def test_plain_gradients_with_a_warning_that_says_why(caplog):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [256, 256])
        (result,) = gradients(tf.reduce_sum(x + x), x, checkpoints="memory")
        assert result.shape == x.shape
    assert "reads nothing that could be recomputed" in caplog.text
    assert not [op for op in graph.get_operations() if "recomputed" in op.name]


def test_no_warning_where_it_saves(caplog):
    with tf.Graph().as_default() as graph:
        x = y = v1.placeholder(tf.float32, [256, 256])
        for _ in range(20):
            y = tf.sin(y)
        gradients(tf.reduce_sum(y), x, checkpoints="memory")
    assert not caplog.records
    assert [op for op in graph.get_operations() if "recomputed" in op.name]


def calls_for_each_trial(layers):
    """Return how many functions are called to choose for a chain, by trials."""
    step = chain_step([8] * (layers + 1), rows=4096)
    always = AlwaysKept(step)
    calls = trials = 0

    def count(frame, event, argument):
        nonlocal calls, trials
        calls += event in ("call", "c_call")
        trials += event == "call" and frame.f_code is Trials.run.__code__

    sys.setprofile(count)
    try:
        choice = choose_for_memory(step, always)
    finally:
        sys.setprofile(None)
    assert choice.kept
    assert trials <= 60
    return calls / trials


def test_ten_times_the_ops_take_ten_times_the_work():
    assert calls_for_each_trial(250) <= 12 * calls_for_each_trial(25)
