"""What is noted of a graph and of variables."""

import pytest
import tensorflow as tf

import geutil as ge
from geutil.graph.edits import InputEdit, apply_edits
from geutil.graph.state import (
    flags_as_noted,
    is_trainable,
    renew_order,
    set_trainable,
    state_of,
)
from tests.graph.building import chain
from tests.settings import V1


def positions(graph):
    place = state_of(graph).order._position
    return {op.name: place[op._id] for op in graph.get_operations()}


@pytest.mark.parametrize("edited_before", (False, True))
def test_new_ops_get_places_beside_old_ones(edited_before):
    graph = chain(51)
    ops = {op.name: op for op in graph.get_operations()}
    if edited_before:
        apply_edits(graph, [InputEdit(ops["n50"], 0, ops["n48"].outputs[0])])
    with graph.as_default():
        late = tf.abs(ops["n1"].outputs[0], name="late")
    renew_order(graph)
    place = positions(graph)
    assert place["late"] < place["n3"]
    assert all(
        place[t.op.name] < place[op.name]
        for op in graph.get_operations()
        for t in op.inputs
    )
    apply_edits(graph, [InputEdit(ops["n3"], 0, late)])
    assert positions(graph) == place
    ge.verify(graph)


pytestmark = pytest.mark.skipif(V1, reason="about eager variables")


def test_a_note_changes_the_variable_in_the_block_only():
    one, two, three = (tf.Variable(1.0, trainable=i < 2) for i in range(3))
    set_trainable(one, False)
    set_trainable(three, True)
    assert [is_trainable(v) for v in (one, two, three)] == [False, True, False]
    with pytest.raises(KeyError), flags_as_noted([one, two, three]):
        assert [v.trainable for v in (one, two, three)] == [False, True, False]
        raise KeyError
    assert [v.trainable for v in (one, two, three)] == [True, True, False]
    set_trainable(one, True)
    assert is_trainable(one)
