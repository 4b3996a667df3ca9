"""What holds of the choice for memory whatever the graph is."""

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil.gradients import gradients
from geutil.gradients.planning import choose_for_memory
from geutil.gradients.planning.local_search import Trial, Trials
from geutil.gradients.prediction import StepProgram
from geutil.gradients.recomputing import build_recomputation
from geutil.gradients.segments import plan_recomputation
from geutil.gradients.selection import AlwaysKept
from tests.call_counts import count_calls
from tests.gradients.planning.graphs import chain_step, random_step
from tests.thorough import examples, thorough

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
@examples(25)
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
    assert StepProgram(built).plan().peak <= plain


@given(st.integers(0, 10**6), st.integers(1, 14))
@examples(25)
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


def calls_of_a_trial(layers):
    """Return how many functions are called to try out a choice for a chain."""
    step = chain_step([8] * (layers + 1))
    trials = Trials(step, AlwaysKept(step))
    kept = [op.outputs[0] for op in step.graph.get_operations() if op.type == "Tanh"]
    return count_calls(lambda: trials.run(kept[4::5]))[0]


def test_a_trial_takes_work_in_proportion_to_the_ops():
    """Each hundred layers add the same work."""
    first, second, third = map(calls_of_a_trial, (100, 200, 300))
    assert third - second == pytest.approx(second - first, rel=0.001)
    # And there is hardly any besides.
    assert second - first > 0.95 * first


@pytest.mark.parametrize(
    ("layers", "most"),
    [(5, 400), (40, 60), (250, 60), pytest.param(900, 17, marks=thorough)],
)
def test_of_large_graphs_few_choices_are_tried(layers, most, monkeypatch):
    """So the work of all trials is bounded, but for a few of the whole step."""
    step = chain_step([8] * (layers + 1), rows=4096)
    tried = []

    def run(trials, kept):
        tried.append(kept)
        # All are as good, so the search goes on until it may not.
        return Trial(tuple(kept), 1, 1, 0)

    monkeypatch.setattr(Trials, "run", run)
    assert choose_for_memory(step, AlwaysKept(step)).peak == 1
    assert 0 < len(tried) <= most
    if layers > 5:
        assert len(tried) == most
