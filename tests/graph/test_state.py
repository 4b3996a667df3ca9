"""What is noted of a graph and of variables."""

import gc

import keras
import pytest
import tensorflow as tf

import geutil as ge
from geutil.graph.edits import InputEdit, apply_edits
from geutil.graph.keras_calls import flags_as_noted, set_trainable, trained
from geutil.graph.state import renew_order, state_of
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
    assert [*map(id, trained([one, two, three]))] == [id(two)]
    with pytest.raises(KeyError), flags_as_noted([one, two, three]):
        assert [v.trainable for v in (one, two, three)] == [False, True, False]
        raise KeyError
    assert [v.trainable for v in (one, two, three)] == [True, True, False]
    set_trainable(one, True)
    unfinished = keras.layers.Dense.__new__(keras.layers.Dense)
    with pytest.raises(TypeError):
        unfinished.__init__()
    assert trained([one, tf.Variable(2.0)])


def test_what_keras_freezes_is_not_trained_wherever_it_is_found(tmp_path):
    layers = keras.layers
    inner = keras.Sequential([layers.Dense(3), layers.BatchNormalization()])
    late = layers.Dense(4)
    late.trainable = False
    net = keras.Sequential([keras.Input([2]), inner, late, layers.Dense(1)])
    head = ["kernel", "bias"]

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def called(x):
        return net(x, training=True)

    def names():
        opened = ge.model.open(called).to_function()
        assert ge.model.open(net).to_function().trainable_variables == (
            opened.trainable_variables
        )
        return [v.name.split("/")[-1].split(":")[0] for v in opened.trainable_variables]

    assert names() == [*head, "gamma", "beta", *head]
    inner.trainable = False
    assert names() == head
    net.export(tmp_path / "exported", verbose=False)
    exported = ge.model.open(tmp_path / "exported")
    assert len(exported.to_function().trainable_variables) == 2
    saved = tmp_path / "saved"
    tf.saved_model.save(net, saved, signatures=called)
    # Nothing in such a file tells of frozen layers.
    assert len(ge.model.open(saved).to_function().trainable_variables) == 8
    layer = net.layers[-1].kernel.path.rpartition("/")[0]
    told = ge.model.open(saved, trainable=[layer]).to_function().trainable_variables
    assert [v.name for v in told] == [f"{layer}/{name}:0" for name in head]
    for source, name, reason in (
        (saved, "hea", "'hea' is the name of no variable"),
        (net, layer, "is for SavedModels"),
    ):
        with pytest.raises(ge.errors.ModelError, match=reason):
            ge.model.open(source, trainable=name)
    inner.trainable = late.trainable = True
    assert len(names()) == 8
    net.trainable, late.trainable = False, True
    assert not ge.model.open(net).to_function().trainable_variables


def test_flags_are_kept_when_the_layers_are_gone():
    def opened():
        net = keras.Sequential([keras.Input([2]), keras.layers.Dense(3)])
        net.trainable = False
        return ge.model.open(net)

    m = opened()
    gc.collect()
    assert not m.to_function().trainable_variables
