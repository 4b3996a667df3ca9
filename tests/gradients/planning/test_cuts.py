"""Where the forward pass can be cut, against networkx and naive sums."""

import networkx as nx
import pytest
import tensorflow as tf

from geutil.gradients.choices import AlwaysKept
from geutil.gradients.planning.cuts import (
    crossing_tensors,
    measure_stretches,
    read_forward,
)
from geutil.gradients.segments import StepProgram
from geutil.gradients.step import build_step
from tests.gradients.planning.graphs import chain_step, random_step
from tests.thorough import some

v1 = tf.compat.v1


def forward_of(step):
    return read_forward(step, AlwaysKept(step))


def stretches_of(step, **options):
    forward = forward_of(step)
    gradient_bytes = StepProgram(step).gradient_bytes(step.backward)
    return forward, measure_stretches(forward, gradient_bytes, **options)


def digraph(forward):
    """Return the ops between a source and a sink, with an edge for each tensor."""
    graph = nx.DiGraph()
    members = set(forward.ops)
    for op in forward.ops:
        behind = [t.op.name for t in op.inputs if t.op in members]
        graph.add_edges_from((name, op.name) for name in behind or ["source"])
    ends = [name for name in list(graph) if not graph.out_degree(name)]
    graph.add_edges_from((name, "sink") for name in ends)
    return graph


@pytest.mark.parametrize("seed", some(range(25), 4))
def test_cuts_and_the_bytes_they_keep(seed):
    forward, stretches = stretches_of(random_step(seed))
    ops, buffers, places = forward.ops, forward.buffers, stretches.places
    # What every path crosses is a cut of one op.
    graph = digraph(forward)
    dominators = nx.immediate_dominators(graph, "source")
    expected, name = set(), dominators["sink"]
    while name != "source":
        expected.add(name)
        name = dominators[name]
    found = set()
    for place, op in enumerate(ops[:-1]):
        cut = crossing_tensors(buffers, [place])
        found |= {op.name} if {t.op for t in cut} == {op} else set()
        # A cut separates what is before from what is after.
        kept, before = set(map(id, cut)), set(ops[: place + 1])
        for after in ops[place + 1 :]:
            assert all(t.op not in before or id(t) in kept for t in after.inputs)
    # The last op need not be cut off: nothing lies behind it.
    assert found - expected == set()
    assert expected - found <= {ops[-1].name}

    def price(cuts):
        inner = [places[c] for c in cuts if 0 < c < len(places) - 1]
        ids = set(map(id, crossing_tensors(buffers, inner)))
        return sum(b.price for b in buffers if ids & {id(t) for t, _, _ in b.tensors})

    for i in range(len(places) - 1):
        for j in range(i + 1, len(places) - 1):
            assert stretches.kept[i, j] == price([i, j]) - price([i])


def test_a_stretch_of_a_chain_by_hand():
    # 256 rows: layers yield 64, 32 and 128 KiB; weights count when they are made.
    step = chain_step([8, 64, 32, 128])
    forward, stretches = stretches_of(step)
    kib = 1024
    names = [op.type for op in forward.ops]
    assert names == ["MatMul", "Tanh"] * 3 + ["Square"] * (len(names) - 6)
    after_tanh = {1: 64 * kib, 3: 32 * kib}
    for cut, place in enumerate(stretches.places[1:-1], start=1):
        if int(place) in after_tanh:
            assert stretches.kept[0, cut] == after_tanh[int(place)]
    # Passing all backwards at once holds what plain gradients do.
    assert stretches.in_turn[0, -1] >= (64 + 32 + 128) * kib


def test_the_number_of_cuts_is_bounded_and_the_best_are_left():
    step = chain_step([16, *([64, 8] * 40)])
    _, all_of_them = stretches_of(step)
    _, few = stretches_of(step, most=20)
    assert len(all_of_them.places) > 80
    assert len(few.places) <= 22
    # Narrow layers, of which each portion has one.
    assert (few.kept[0, 1:-1] == 256 * 8 * 4).all()


def test_casts_cost_more_than_their_sources():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [64, 64])
        y = tf.sin(x)
        z = tf.sin(tf.cast(tf.sin(y), tf.float64))
        step = build_step(tf.reduce_sum(tf.exp(z)), x)
        forward = forward_of(step)
    prices = {b.tensors[0][0].op.type: b.price for b in forward.buffers}
    half = tf.float32.size * 64 * 64
    assert prices["Cast"] == 2 * half + 1
    assert prices["Sin"] in (half, 2 * half)


def test_the_bytes_of_gradients_alone():
    step = chain_step([64, 64, 64, 64])
    alone = StepProgram(step).gradient_bytes(step.backward)
    assert len(alone) == len(step.backward)
    weight = 64 * 64 * 4
    # At the end there are three weight gradients, and what the last op reads.
    assert 3 * weight <= alone[-1] <= 3 * weight + 256 * 64 * 4
    assert max(alone) <= 3 * weight + 3 * 256 * 64 * 4
