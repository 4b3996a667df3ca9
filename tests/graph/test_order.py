"""The topological order against networkx, on graphs whose edges the test keeps."""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import dataclass, field

import networkx as nx
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import geutil as ge
from geutil.graph.adjacency import Rewiring, TopologicalOrder, topological_sort
from geutil.graph.edits import ControlEdit, InputEdit, apply_edits
from geutil.graph.state import state_of
from tests import settings
from tests.graph import building
from tests.random_graphs import DrawnGraph, drawn_graphs
from tests.thorough import examples

PROPERTY = examples(80, derandomize=True)


@dataclass
class Model:
    """The edges of a graph as the test knows them; op i is called `op{i}`."""

    inputs: list[list[int]]
    controls: list[set[int]]
    tensors: list[tf.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, drawn: DrawnGraph) -> Model:
        # DrawnGraph.build lets an op read its first input once more.
        inputs = [[*reads, *reads[:1]] for reads in drawn.inputs]
        with tf.Graph().as_default():
            tensors = DrawnGraph(drawn.inputs, ((),) * len(inputs)).build()
        # tf.control_dependencies would drop those that an input makes superfluous.
        for t, waits in zip(tensors, drawn.controls, strict=True):
            t.op._add_control_inputs([tensors[c].op for c in waits])
        return cls(inputs, [set(c) for c in drawn.controls], tensors)

    @property
    def graph(self) -> tf.Graph:
        return self.tensors[0].graph

    def op(self, i: int) -> tf.Operation:
        return self.tensors[i].op

    def with_edges(self, inputs, controls) -> Model:
        return Model(inputs, controls, self.tensors)

    def digraph(self) -> nx.DiGraph:
        result = nx.DiGraph()
        result.add_nodes_from(f"op{i}" for i in range(len(self.inputs)))
        for i, producers in enumerate(zip(self.inputs, self.controls, strict=True)):
            for ends in producers:
                result.add_edges_from((f"op{p}", f"op{i}") for p in ends)
        return result

    def edges(self):
        return {
            f"op{i}": ([f"op{p}:0" for p in reads], sorted(f"op{c}" for c in waits))
            for i, (reads, waits) in enumerate(
                zip(self.inputs, self.controls, strict=True)
            )
        }

    def add_op(self, reads: list[int]) -> None:
        with self.graph.as_default():
            t = tf.add_n([self.tensors[r] for r in reads], name=f"op{len(self.inputs)}")
        self.tensors.append(t)
        self.inputs.append(list(reads))
        self.controls.append(set())


def is_topological(positions: dict[str, int], digraph: nx.DiGraph) -> bool:
    return all(positions[a] < positions[b] for a, b in digraph.edges)


def maintained_positions(graph: tf.Graph) -> dict[str, int]:
    position = state_of(graph).order._position
    return {op.name: position[op._id] for op in graph.get_operations()}


def is_cycle(cycle: tuple[str, ...], digraph: nx.DiGraph) -> bool:
    steps = itertools.pairwise(cycle)
    return (
        len(cycle) > 1
        and cycle[0] == cycle[-1]
        and len(set(cycle)) == len(cycle) - 1
        and all(digraph.has_edge(a, b) for a, b in steps)
    )


def attempt(model: Model, wanted: Model, edit) -> Model:
    """Make an edit that leads from `model` to `wanted`; return what must hold now."""
    before = settings.edges(model.graph)
    assert before == model.edges()
    if nx.is_directed_acyclic_graph(wanted.digraph()):
        edit()
        now = wanted
    else:
        with pytest.raises(ge.CycleError) as caught:
            edit()
        assert is_cycle(caught.value.cycle, wanted.digraph())
        assert " -> ".join(caught.value.cycle) in str(caught.value)
        now = model
    assert settings.edges(model.graph) == now.edges()
    if state_of(model.graph).order is not None:
        state_of(model.graph).order.refresh(model.graph)
        positions = maintained_positions(model.graph)
        assert sorted(positions.values()) == list(range(len(now.inputs)))
        assert is_topological(positions, now.digraph())
    return now


def reroute(data, model):
    """One or two pairs at once, rerouted or swapped, in all readers or in some."""
    indices = st.integers(0, len(model.inputs) - 1)
    drawn = data.draw(st.lists(indices, min_size=2, max_size=4, unique=True))
    pairs = list(zip(drawn[::2], drawn[1::2], strict=False))
    edit = data.draw(st.sampled_from([ge.reroute_ts, ge.swap_ts]))
    limit = data.draw(st.none() | st.sets(indices))
    allowed = range(len(model.inputs)) if limit is None else limit
    other = {old: new for new, old in pairs}
    if edit is ge.swap_ts:
        other |= dict(pairs)
    inputs = [
        [other.get(p, p) if i in allowed else p for p in reads]
        for i, reads in enumerate(model.inputs)
    ]
    can_modify = None if limit is None else [model.op(i) for i in sorted(limit)]
    places = [[model.tensors[i] for i in side] for side in zip(*pairs, strict=True)]

    def edited():
        moved = [i in other for k in allowed for i in model.inputs[k]]
        assert edit(*places, can_modify=can_modify) == sum(moved)

    return attempt(model, model.with_edges(inputs, model.controls), edited)


def control(data, model):
    """Take a control input away, or add one."""
    present = [(i, c) for i, waits in enumerate(model.controls) for c in sorted(waits)]
    indices = st.integers(0, len(model.inputs) - 1)
    pairs = st.tuples(indices, indices)
    op, waits = data.draw(st.sampled_from(present) | pairs if present else pairs)
    edit = ge.add_control_inputs
    if waits in model.controls[op]:
        edit = ge.remove_control_inputs
    controls = copy.deepcopy(model.controls)
    controls[op] ^= {waits}
    return attempt(
        model,
        model.with_edges(model.inputs, controls),
        lambda: edit(model.op(op), model.op(waits)),
    )


def several(data, model):
    """Several inputs and control inputs at once, as one edit."""
    inputs, controls = copy.deepcopy(model.inputs), copy.deepcopy(model.controls)
    places = [(i, k) for i, reads in enumerate(inputs) for k in range(len(reads))]
    indices = st.integers(0, len(inputs) - 1)
    edits = []
    if places:
        for i, k in data.draw(st.lists(st.sampled_from(places), unique=True)):
            inputs[i][k] = data.draw(indices)
            edits.append(InputEdit(model.op(i), k, model.tensors[inputs[i][k]]))
    changes = []
    for i in data.draw(st.lists(indices, unique=True, max_size=3)):
        controls[i] = data.draw(st.sets(indices, max_size=2))
        ops = tuple(model.op(c) for c in sorted(controls[i]))
        changes.append(ControlEdit(model.op(i), ops))
    return attempt(
        model,
        model.with_edges(inputs, controls),
        lambda: apply_edits(model.graph, edits, changes),
    )


def new_op(data, model):
    indices = st.integers(0, len(model.inputs) - 1)
    model.add_op(data.draw(st.lists(indices, min_size=1, max_size=3)))
    return model


def undone(data, model):
    """A transaction that fails leaves an order that later edits can trust."""

    class StopError(Exception):
        pass

    with pytest.raises(StopError), ge.transaction(model.graph):
        several(data, model)
        raise StopError
    assert settings.edges(model.graph) == model.edges()
    return model


STEPS = [reroute, reroute, control, control, several, new_op, undone]


@PROPERTY
@given(drawn_graphs(), st.data())
def test_edits_are_refused_exactly_when_they_close_a_cycle(drawn, data):
    model = Model.of(drawn)
    for _ in range(data.draw(st.integers(1, 12))):
        model = data.draw(st.sampled_from(STEPS))(data, model)
    ge.verify(model.graph)


@PROPERTY
@given(drawn_graphs(), st.data())
def test_orders_and_sorts_are_topological_whatever_was_rewired_before(drawn, data):
    model = Model.of(drawn)
    for _ in range(5):
        model = several(data, model)
    rebuilt, refreshed = TopologicalOrder(), TopologicalOrder()
    rebuilt.rebuild(model.graph)
    refreshed.refresh(model.graph)
    for order in (rebuilt, refreshed):
        ops = model.graph.get_operations()
        positions = {op.name: order._position[op._id] for op in ops}
        assert is_topological(positions, model.digraph())
    chosen = data.draw(st.sets(st.integers(0, len(model.inputs) - 1)))
    shuffled = data.draw(st.permutations(sorted(chosen)))
    result = settings.names(topological_sort(model.op(i) for i in shuffled))
    assert sorted(result) == sorted(f"op{i}" for i in chosen)
    places = {name: place for place, name in enumerate(result)}
    assert is_topological(places, model.digraph().subgraph(result))


def test_sort_keeps_the_order_of_creation_where_that_will_do():
    ops = [t.op for t in building.line(6)]
    shuffled = random.Random(1).sample(ops, len(ops))
    assert topological_sort(shuffled) == ops
    assert topological_sort([*ops, *ops]) == ops
    assert topological_sort([]) == []


def test_sort_when_the_order_of_creation_is_invalid():
    tensors = building.line(4)
    with tensors[0].graph.as_default():
        late = tf.constant(1.0, name="late")
    ge.reroute_ts(late, tensors[0])
    assert settings.names(topological_sort(tensors[0].graph.get_operations())) == [
        "op0",
        "late",
        "op1",
        "op2",
        "op3",
    ]


def test_sort_refuses_a_cycle():
    tensors = building.line(6)
    tensors[2].op._update_input(0, tensors[4])
    with pytest.raises(
        ge.SelectionError, match=r"hold a cycle, and 'op[234]' is on it"
    ):
        topological_sort(tensors[0].graph.get_operations())
    # Without one op of the cycle there is none.
    assert len(topological_sort([t.op for t in tensors if t is not tensors[3]])) == 5


def test_sort_takes_a_loop(loops):
    ops = loops.graph.get_operations()
    result = settings.names(topological_sort(random.Random(0).sample(ops, len(ops))))
    digraph = nx.DiGraph(
        (a, b) for a, b in building.op_edges(loops.graph) if "NextIteration" not in a
    )
    assert is_topological({n: i for i, n in enumerate(result)}, digraph)
    order = TopologicalOrder()
    order.refresh(loops.graph)
    ids = {op.name: order._position[op._id] for op in ops}
    assert is_topological(ids, digraph)


def test_a_loop_may_be_edited_but_not_closed_a_second_time(loops):
    with pytest.raises(ge.CycleError):
        ge.reroute_ts(loops.inside1, loops.inside1.op.inputs[0])
    assert ge.reroute_ts(loops.inside2.op.inputs[0], loops.inside2.op.inputs[1]) == 1


def test_the_order_after_a_refusal_is_as_it_was():
    tensors = building.line(6)
    order = TopologicalOrder()
    order.refresh(tensors[0].graph)
    before = dict(order._position)
    with tensors[0].graph.as_default():
        late = tf.constant(1.0, name="late")
    order.refresh(tensors[0].graph)
    before[late.op._id] = 6
    moving = {(tensors[1].op, 0): late.op}
    closing = {(tensors[2].op, 0): tensors[5].op}
    cycle = order.rewire(Rewiring({**moving, **closing}, {}))
    assert {op.name for op in cycle} == {"op2", "op3", "op4", "op5"}
    assert order._position == before
    assert order.rewire(Rewiring(moving, {})) is None
    assert order._position != before


def test_edges_that_tensorflow_made_around_new_ops_are_seen():
    tensors = building.line(3)
    assert ge.reroute_ts(tensors[0], tensors[0]) == 0
    ge.add_control_inputs(tensors[2].op, tensors[0].op)
    with tensors[0].graph.as_default():
        late = tf.negative(tensors[2], name="late")
        later = tf.negative(late, name="later")
    tensors[1].op._add_control_input(later.op)  # a cycle that geutil did not see made
    tensors[1].op._remove_all_control_inputs()
    with pytest.raises(ge.CycleError):
        ge.reroute_ts(later, tensors[0], can_modify=[tensors[1].op])


def test_a_graph_that_was_mended_is_guarded_again():
    # Somebody closed a cycle by private API before the first edit; geutil takes it
    # out. From then on the order must be topological, or a cycle slips through.
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0, name="x")
        b = tf.negative(x, name="b")
        c = tf.negative(x, name="c")
        a = tf.negative(x, name="a")
    b.op._update_input(0, c)  # c -> b, against the order of creation
    c.op._update_input(0, a)
    a.op._update_input(0, b)  # a -> c -> b -> a
    ge.reroute_ts(x, b, can_modify=[a.op])  # now x -> a -> c -> b
    ge.verify(graph)
    with pytest.raises(ge.CycleError):
        ge.reroute_ts(b, x, can_modify=[a.op])
    ge.verify(graph)


# -- a hundred thousand ops in a row ---------------------------------------------------


def test_a_long_chain_is_sorted_without_recursion(chain, chain_ops):
    assert topological_sort(reversed(chain_ops)) == chain_ops


def test_a_long_chain_is_sorted_by_its_edges(chain, chain_ops):
    last, first = chain_ops[-1], chain_ops[1]
    root = first.inputs[0]
    middle = chain_ops[len(chain_ops) // 2]
    # Read in the order second half, first half: creation is not topological now.
    middle._update_input(0, root)
    first._update_input(0, last.outputs[0])
    try:
        result = topological_sort(chain_ops)
        half = len(chain_ops) // 2
        assert result == [chain_ops[0], *chain_ops[half:], *chain_ops[1:half]]
    finally:
        first._update_input(0, root)
        middle._update_input(0, chain_ops[len(chain_ops) // 2 - 1].outputs[0])


def test_a_cycle_around_a_long_chain_is_refused(chain, chain_ops):
    with pytest.raises(ge.CycleError) as caught:
        ge.reroute_ts(chain_ops[-1].outputs[0], chain_ops[0].outputs[0])
    assert len(caught.value.cycle) == len(chain_ops)
    assert len(str(caught.value)) < 2000
    assert chain_ops[1].inputs[0] is chain_ops[0].outputs[0]


def test_an_edit_across_a_long_chain_needs_no_recursion(chain, chain_ops):
    with chain.as_default():
        late = tf.constant(1.0, name="late")
    ge.reroute_ts(late, chain_ops[0].outputs[0])
    try:
        position = state_of(chain).order._position
        assert (
            position[late.op._id]
            < position[chain_ops[1]._id]
            < position[chain_ops[-2]._id]
        )
    finally:
        ge.reroute_ts(chain_ops[0].outputs[0], late)
