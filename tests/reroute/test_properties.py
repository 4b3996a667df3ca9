"""Values of random graphs that were detached, against numpy.

For the edges that other edits leave see tests/graph/test_order.py, and for their values
test_tensors.py.
"""

import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import geutil as ge
from tests.random_graphs import drawn_graphs
from tests.settings import evaluate
from tests.thorough import examples


def reads_of(drawn):
    """Return the ops that each op reads; `build` lets it read its first one twice."""
    return [[*reads, reads[0]] if reads else [] for reads in drawn.inputs]


def computed(reads):
    """Evaluate the drawn graph in numpy."""
    values = []
    for i, inputs in enumerate(reads):
        leaf = np.array([i + 1.0, 0.5 * i])
        values.append(np.sum([values[r] for r in inputs], axis=0) if inputs else leaf)
    return values


@examples(40, derandomize=True)
@given(drawn=drawn_graphs(), data=st.data())
def test_a_detached_view_computes_the_function_of_its_inputs(drawn, data):
    """Feeding the placeholders what the inputs were changes no value inside."""
    count = len(drawn.inputs)
    chosen = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    reads = reads_of(drawn)
    values = computed(reads)
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
