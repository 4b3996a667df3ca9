"""Values of random graphs after edits, against numpy.

For their edges see tests/graph/test_order.py.
"""

import networkx as nx
import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import geutil as ge
from tests.random_graphs import drawn_graphs
from tests.settings import evaluate
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


def computed(reads, drawn):
    """Evaluate the drawn graph with other inputs, in numpy."""
    values = {}
    for i in nx.topological_sort(dag(reads, drawn)):
        if drawn.inputs[i]:
            values[i] = np.sum([values[r] for r in reads[i]], axis=0)
        else:
            values[i] = np.array([i + 1.0, 0.5 * i])
    return [values[i] for i in range(len(reads))]


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
