from __future__ import annotations

import tensorflow as tf

from geutil import report
from geutil.report.accepted_inputs import Subject
from geutil.report.differences import pairs_of
from tests.report import samples


def subject(*labels):
    bodies = tuple(Subject(label, tf.Graph()) for label in labels)
    return Subject("main", tf.Graph(), bodies=bodies)


def names(before, after):
    """Return the pairs by name, with "-" for what has no counterpart."""
    known = {id(body) for side in (before, after) for body in side.bodies}
    return [
        tuple(side.label if id(side) in known else "-" for side in pair)
        for pair in pairs_of(before, after)[1:]
    ]


def test_the_graphs_themselves_come_first():
    before, after = subject(), subject("f")
    assert pairs_of(before, after)[0] == (before, after)


def test_functions_of_one_name_belong_together():
    assert names(subject("f", "g"), subject("g", "f")) == [("g", "g"), ("f", "f")]


def test_numbers_at_the_end_may_differ():
    before, after = subject("body_12", "body_3", "cond_4"), subject("body_20", "cond_9")
    assert names(before, after) == [
        ("body_12", "body_20"),
        ("cond_4", "cond_9"),
        ("body_3", "-"),
    ]


def test_what_only_one_has_stands_alone():
    before, after = subject("old"), subject("new")
    assert names(before, after) == [("-", "new"), ("old", "-")]


def test_two_models_of_one_function_have_the_same_functions(flow):
    graphs = report.diff(flow, samples.flow()).payload["graphs"]
    assert len(graphs) == 2 * (1 + len(flow.functions))
    for before, after in zip(graphs[::2], graphs[1::2], strict=True):
        assert before["names"] == after["names"]
        assert set(before["status"]) == set(after["status"]) == {0}
