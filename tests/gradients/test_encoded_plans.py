"""Budgets and plans of steps of which less is kept than their tensors."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from geutil.errors import PlanError
from geutil.gradients import (
    MIN_CHECKPOINT_SIZE,
    Budget,
    explain,
    gradients,
    last_report,
    plan,
)
from geutil.gradients.budget_search import BudgetSearch
from geutil.gradients.choices import AlwaysKept
from geutil.gradients.encodings import Encoder, plan_encodings
from geutil.gradients.step import build_step
from geutil.memory.costs import op_time
from tests.gradients.checking import measured_peak, trace_network
from tests.gradients.networks import convolutions, with_skips

PIXELS, SHARE = 32, 0.6


HELD = {"holds_gradients": True}
BATCH = [16, PIXELS, PIXELS, 3]


def ran_as_planned(net, found, **options):
    """Check gradients and the peak of a step; return the report and the graph."""

    def encoded(loss, xs):
        return gradients(loss, xs, checkpoints=found, encode="lossless", **options)

    x = np.random.default_rng(0).normal(size=BATCH).astype("f")
    _, ours = trace_network(net, encoded, BATCH)
    report = last_report(ours.graph)
    _, plain = trace_network(net, tf.gradients, BATCH)
    for slope, wanted in zip(ours(x), plain(x), strict=True):
        np.testing.assert_allclose(slope, wanted, rtol=0, atol=1e-6)
    assert measured_peak(ours, x, inter_op_threads=1) <= 1.02 * report.peak
    return report, ours.graph


def test_a_plan_of_an_encoded_step():
    net = convolutions(PIXELS, [(8, 3), (16, 2)])

    def planned(loss, xs):
        return plan(loss, xs, SHARE, encode="lossless", **HELD)

    report, _ = ran_as_planned(net, trace_network(net, planned, BATCH)[0], **HELD)
    assert report.encoded and report.recomputed
    assert report.peak <= SHARE * report.plain_peak


def pooled():
    """Return a net of which some tensors are worth a mask, and others run again."""

    def pool():
        return keras.layers.AveragePooling2D(2, 1, "same")

    return convolutions(PIXELS, 3 * [(16, 2)], pool)


def test_tensors_are_encoded_one_by_one():
    """Those that nothing runs again for; without them and with all it takes longer."""
    net = pooled()

    def planned(loss, xs):
        found = plan(loss, xs, 0.5, encode="lossless")
        whole = plan(loss, xs, 0.5)
        with pytest.raises(PlanError, match="another step"):
            gradients(loss, xs, checkpoints=found)
        # The plan of a plain step serves where encodings are asked for.
        plainly = explain(loss, xs, checkpoints=whole, encode="lossless")
        assert (plainly.encoded, plainly.peak) == ((), whole.peak)
        step = build_step(loss, xs)
        encoded = Encoder().encode(step, plan_encodings(step, MIN_CHECKPOINT_SIZE))
        trial = BudgetSearch(encoded, AlwaysKept(encoded)).within(found.budget)
        again = sum(map(op_time, trial.plan.run_again))
        every = sum(map(op_time, encoded.ops())) + again
        extra = every / sum(map(op_time, step.ops())) - 1
        return found, whole, extra

    (found, whole, extra), _ = trace_network(net, planned, BATCH)
    assert whole.budget == found.budget
    assert 0 < len(found.encoded) < 3
    assert found.extra_time < min(whole.extra_time, extra)
    assert found.bound <= found.extra_time

    report, graph = ran_as_planned(net, found)
    assert len(report.encoded) == len(found.encoded)
    assert report.extra_time == found.extra_time
    # The others are read as they are.
    masks = [op for op in graph.get_operations() if op.name.startswith("encoded/")]
    read = [op for op in masks if op.type == "Greater" and op.outputs[0].consumers()]
    assert len(read) == len(found.encoded)


def test_what_runs_again_encoded_or_not_is_told():
    def told_of(loss, xs):
        return explain(loss, xs, checkpoints=Budget(0.5), encode="lossless")

    told, _ = trace_network(pooled(), told_of, BATCH)
    reason = "it runs again, encoded or not"
    said = {t.name for t in told.not_encoded if t.reason == reason}
    assert said and told.encoded
    assert len(said) + len(told.encoded) == 3
    assert said <= {f"{op.name}:0" for op in told.recomputed if op.op_type == "Relu"}


@pytest.fixture
def with_and_without_encodings():
    """Return a function that plans a budget without encodings and with them.

    The fullest op of this network holds more when what it reads is encoded.
    """

    def both(budget):
        def reports(loss, xs):
            return [
                explain(loss, xs, checkpoints=budget, encode=encode)
                for encode in (None, "lossless")
            ], loss

        (made, _), _ = trace_network(with_skips(PIXELS), reports, BATCH)
        return made

    return both


def test_nothing_is_encoded_where_that_costs_more(with_and_without_encodings):
    whole, encoded = with_and_without_encodings(Budget(0.5))
    assert encoded.peak <= 0.5 * encoded.plain_peak
    assert encoded.extra_time <= whole.extra_time
    said = {tensor.reason for tensor in encoded.not_encoded}
    assert not encoded.encoded
    assert "within the budget the step takes less time without encodings" in said


def test_extra_time_counts_the_time_of_encodings(with_and_without_encodings):
    longer, longer_encoded = with_and_without_encodings(Budget(extra_time=0.15))
    assert longer_encoded.extra_time <= 0.15 + 1e-9
    assert longer_encoded.peak <= longer.peak
    assert longer_encoded.mode == longer.mode


def nodes(graph):
    return {node.name: node for node in graph.as_graph_def().node}


def test_a_refusal_and_what_is_tried_leave_the_graph_as_it_is():
    net = pooled()
    seen = []

    def tried(loss, xs):
        graph = loss.graph
        before = graph.as_graph_def().SerializeToString(deterministic=True)
        explain(loss, xs, checkpoints=Budget(0.5), encode="lossless")
        after = graph.as_graph_def().SerializeToString(deterministic=True)
        build_step(loss, xs)
        old = nodes(graph)
        with pytest.raises(PlanError, match="the least that was found"):
            gradients(loss, xs, checkpoints=Budget(0.01), encode="lossless")
        now = nodes(graph)
        # Whatever was tried has added ops, which nothing reads, and changed none.
        seen.append((before == after, {n: now[n] for n in old} == old))
        return loss

    trace_network(net, tried, BATCH)
    assert seen == [(True, True)]
