"""Property tests on random graphs, against networkx and numpy."""

from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import geutil as ge
from tests.graph.building import snapshot
from tests.random_graphs import drawn_graphs
from tests.settings import NAMES, Setting, evaluate
from tests.thorough import examples

EXAMPLES = examples(40, derandomize=True)


def reads_of(drawn):
    """Return the ops that each op reads; `build` lets it read its first one twice."""
    return [[*reads, reads[0]] if reads else [] for reads in drawn.inputs]


def rewired(reads, swaps, allowed=None):
    """Return `reads` with each op replaced as `swaps` says, in the allowed readers."""
    return [
        [swaps.get(r, r) for r in inputs] if allowed is None or i in allowed else inputs
        for i, inputs in enumerate(reads)
    ]


def dag(reads, drawn):
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(reads)))
    for i, inputs in enumerate(reads):
        graph.add_edges_from((r, i) for r in inputs)
        graph.add_edges_from((c, i) for c in drawn.controls[i])
    return graph


def expected_inputs(reads):
    return {f"op{i}": [f"op{r}:0" for r in inputs] for i, inputs in enumerate(reads)}


def actual_inputs(graph):
    return {name: inputs for name, (inputs, _) in snapshot(graph)[0].items()}


def computed(reads, drawn):
    """Evaluate the drawn graph with other inputs, in numpy."""
    values = {}
    for i in nx.topological_sort(dag(reads, drawn)):
        if drawn.inputs[i]:
            values[i] = np.sum([values[r] for r in reads[i]], axis=0)
        else:
            values[i] = np.array([i + 1.0, 0.5 * i])
    return [values[i] for i in range(len(reads))]


def check_cycle(error, reads, drawn):
    """Check that the cycle an error lists is one in the graph that was refused."""
    ids = [int(name.removeprefix("op")) for name in error.cycle]
    edges = dag(reads, drawn)
    assert ids[0] == ids[-1]
    assert all(edges.has_edge(u, v) for u, v in pairwise(ids))
    assert " -> ".join(error.cycle) in str(error)


@st.composite
def edits(draw):
    """Draw a graph, pairs of ops to swap, and the ops that may be rewired."""
    drawn = draw(drawn_graphs())
    ops = st.integers(0, len(drawn.inputs) - 1)
    order = draw(st.permutations(range(len(drawn.inputs))))
    count = draw(st.integers(1, min(2, len(order) // 2)))
    pairs = [(order[2 * k], order[2 * k + 1]) for k in range(count)]
    allowed = draw(st.none() | st.sets(ops))
    return drawn, pairs, allowed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("both_ways", [True, False])
@EXAMPLES
@given(edit=edits())
def test_edges_and_refusals_agree_with_networkx(name, both_ways, edit):
    drawn, pairs, allowed = edit
    swaps = {second: first for first, second in pairs}
    if both_ways:
        swaps |= dict(pairs)
    before = reads_of(drawn)
    after = rewired(before, swaps, allowed)
    changes = sum(
        r != s
        for old, new in zip(before, after, strict=True)
        for r, s in zip(old, new, strict=True)
    )

    def body():
        tensors = drawn.build()
        graph = tensors[0].graph
        start = snapshot(graph)
        assert actual_inputs(graph) == expected_inputs(before)
        ts0 = [tensors[i] for i, _ in pairs]
        ts1 = [tensors[i] for _, i in pairs]
        can_modify = None if allowed is None else [tensors[i].op for i in allowed]
        call = ge.swap_ts if both_ways else ge.reroute_ts
        try:
            count = call(ts0, ts1, can_modify=can_modify)
        except ge.CycleError as error:
            assert not nx.is_directed_acyclic_graph(dag(after, drawn))
            check_cycle(error, after, drawn)
            assert snapshot(graph) == start
        else:
            assert nx.is_directed_acyclic_graph(dag(after, drawn))
            assert count == changes
            assert actual_inputs(graph) == expected_inputs(after)
        ge.verify(graph)

    Setting(name).run(body)


@EXAMPLES
@given(edit=edits())
def test_values_after_a_swap_agree_with_numpy(edit):
    drawn, pairs, allowed = edit
    reads = reads_of(drawn)
    with tf.Graph().as_default() as graph:
        tensors = drawn.build()
        for first, second in pairs:
            swapped = rewired(reads, {first: second, second: first}, allowed)
            can_modify = None if allowed is None else [tensors[i].op for i in allowed]
            try:
                ge.swap_ts(tensors[first], tensors[second], can_modify)
            except ge.CycleError:
                continue
            reads = swapped
        values = evaluate(graph, tensors)
    for value, wanted in zip(values, computed(reads, drawn), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5)


@EXAMPLES
@given(drawn=drawn_graphs(), data=st.data())
def test_a_detached_view_computes_the_function_of_its_inputs(drawn, data):
    """Feeding the placeholders what the inputs were changes no value inside."""
    count = len(drawn.inputs)
    chosen = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    reads = reads_of(drawn)
    values = computed(reads, drawn)
    inputs = list(dict.fromkeys(r for i in sorted(chosen) for r in reads[i]))
    inputs = [r for r in inputs if r not in chosen]
    with tf.Graph().as_default() as graph:
        tensors = drawn.build()
        view = ge.sgv([tensors[i].op for i in sorted(chosen)])
        _, ins, outs = ge.detach(view, control_ios=ge.ControlOutputs(graph))
        ge.verify(graph)
        assert [t.op.name for t in ins] == [f"geph__op{i}_0" for i in inputs]
        # Nothing outside is needed, and nothing outside needs the inside.
        inside = {f"op{i}" for i in chosen} | {t.op.name for t in ins}
        for op in graph.get_operations():
            sources = {t.op.name for t in op.inputs}
            sources |= {o.name for o in op.control_inputs}
            assert not sources or sources <= inside or not sources & inside
        feed = dict(zip(ins, (values[i] for i in inputs), strict=True))
        found = evaluate(graph, [tensors[i] for i in sorted(chosen)], feed)
        for i, value in zip(sorted(chosen), found, strict=True):
            np.testing.assert_allclose(value, values[i], rtol=1e-5)
        feed = {t: values[int(t.op.name.split("_")[2][2:])] for t in outs}
        outside = [i for i in range(count) if i not in chosen]
        found = evaluate(graph, [tensors[i] for i in outside], feed)
        for i, value in zip(outside, found, strict=True):
            np.testing.assert_allclose(value, values[i], rtol=1e-5)
