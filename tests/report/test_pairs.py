from __future__ import annotations

import pytest
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


@pytest.mark.parametrize(
    ("before", "after", "pairs"),
    [
        ("f g", "g f", "g/g f/f"),
        # Numbers at the end may differ.
        (
            *("body_12 body_3 cond_4", "body_20 cond_9"),
            "body_12/body_20 cond_4/cond_9 body_3/-",
        ),
        ("old", "new", "-/new old/-"),
    ],
)
def test_functions_of_one_name_belong_together(before, after, pairs):
    sides = subject(*before.split()), subject(*after.split())
    assert pairs_of(*sides)[0] == sides
    assert names(*sides) == [tuple(pair.split("/")) for pair in pairs.split()]


def test_two_models_of_one_function_have_the_same_functions(flow):
    graphs = report.diff(flow, samples.flow()).payload["graphs"]
    assert len(graphs) == 2 * (1 + len(flow.functions))
    for before, after in zip(graphs[::2], graphs[1::2], strict=True):
        assert before["names"] == after["names"]
        assert set(before["status"]) == set(after["status"]) == {0}
