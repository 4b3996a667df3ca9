import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import geutil as ge
from tests.random_graphs import drawn_graphs
from tests.select import tables
from tests.select.samples import diamond, looking, other_graph
from tests.settings import NAMES, Setting, in_each_setting, names
from tests.thorough import examples

FOUND = """
ge.get_ops_ios(c.op) => a b d
ge.get_ops_ios([a.op, b.op]) => x c
ge.get_ops_ios([d.op, x.op]) => c a b
ge.get_ops_ios([c.op, d.op]) => a b d c
ge.get_ops_ios([]) =>
ge.get_ops_ios(w.op) =>
ge.get_ops_ios(w.op, control_inputs=True) => a
ge.get_ops_ios(a.op, control_inputs=True) => x c
ge.get_ops_ios(a.op, control_outputs=controls) => x c w
ge.get_ops_ios([a.op, w.op], control_ios=controls) => x c w a
ge.get_ops_ios(w.op, control_outputs=controls) =>
ge.get_within_boundary_ops(graph, x.op) => x a b c d
ge.get_within_boundary_ops(graph, d.op, c.op) => c d
ge.get_within_boundary_ops(graph, d.op, [c.op], inclusive=False) => d
ge.get_within_boundary_ops(graph, x.op, [a.op, b.op]) => x a b
# a is walled off, but b leads round it.
ge.get_within_boundary_ops(graph, x.op, a.op, inclusive=False) => x b c d
ge.get_within_boundary_ops([d.op, x.op], c.op) => d x
ge.get_within_boundary_ops([], x.op) =>
ge.get_within_boundary_ops(graph, []) =>
ge.get_within_boundary_ops(graph, w.op) => w
ge.get_within_boundary_ops(graph, w.op, [c.op, x.op], control_inputs=True) => x a c w
ge.get_within_boundary_ops(graph, a.op, [x.op, c.op], control_outputs=controls)
    => x a c w
ge.get_within_boundary_ops(graph, [w.op, w.op], x.op, False, control_ios=controls)
    => a b c d w
"""
BOUNDARIES = """
boundary('c') => a b | c |
boundary('c d') => a b | d | c
boundary('d c') => a b | d | c
# x is read inside, by a, and outside, by b: an output and inside, no input.
boundary('x a') => | x a | x
boundary('a x') => | a x | x
boundary('a b') => x | a b |
boundary('b a d') => x c | b a d |
boundary('x a b c d w') => | d w | x a b c
# Nobody reads w and d.
boundary('w') => | w |
boundary('d') => c | d |
boundary('') => | |
# An op given twice counts once.
boundary('c c') => a b | c |
"""


@in_each_setting
def test_ops():
    tables.check_found(FOUND, diamond())


@in_each_setting
def test_compute_boundary_ts():
    g = diamond()

    def boundary(ops):
        return ge.compute_boundary_ts([getattr(g, name).op for name in ops.split()])

    tables.check_found(BOUNDARIES, g, boundary=boundary)
    with looking():
        assert names(ge.compute_boundary_ts(g.graph)[1]) == ["d:0", "w:0"]
    parts = tf.unstack(tf.constant([1.0, 2.0, 3.0], name="y"), name="parts")
    inner = tf.add(parts[0], parts[1], name="inner")
    outer = tf.negative(parts[1], name="outer")
    found = ge.compute_boundary_ts([parts[0].op, inner.op])
    assert [names(ts) for ts in found] == [
        ["y:0"],
        ["parts:1", "parts:2", "inner:0"],
        ["parts:0", "parts:1"],
    ]
    inputs = ge.compute_boundary_ts([outer.op, inner.op])[0]
    assert names(inputs) == ["parts:1", "parts:0"]


@pytest.mark.parametrize("name", NAMES)
@examples(40, derandomize=True)
@given(drawn=drawn_graphs(), data=st.data())
def test_compute_boundary_ts_agrees_with_the_drawn_edges(name, drawn, data):
    count = len(drawn.inputs)
    chosen = data.draw(st.lists(st.integers(0, count - 1), unique=True))
    reads = dict(enumerate(drawn.inputs))
    readers = {i: {j for j in reads if i in reads[j]} for i in reads}
    used = list(dict.fromkeys(r for i in chosen for r in reads[i]))
    inputs = [r for r in used if r not in chosen]
    inside = [r for r in used if r in chosen]
    outputs = [i for i in chosen if not readers[i] or readers[i] - set(chosen)]

    def body():
        tensors = drawn.build()
        found = ge.compute_boundary_ts([tensors[i].op for i in chosen])
        assert [names(ts) for ts in found] == [
            [f"op{i}:0" for i in part] for part in (inputs, outputs, inside)
        ]

    Setting(name).run(body)


REFUSED = """
ge.get_within_boundary_ops(graph, [a.op, b.op], [b.op])
    => SelectionError: 'b'; boundary_ops
ge.get_within_boundary_ops(graph, graph) => ArgumentTypeError: tf.Graph
ge.get_within_boundary_ops(graph, a) => ArgumentTypeError: tf.Operation
ge.get_within_boundary_ops(graph, a.op, control_ios=True)
    => ArgumentTypeError: control_ios
ge.get_ops_ios(a) => ArgumentTypeError: tf.Operation
ge.get_ops_ios([a.op, other.a.op]) => SelectionError: different graphs
ge.get_ops_ios(a.op, control_outputs=graph)
    => ArgumentTypeError: geutil.ControlOutputs(graph)
ge.compute_boundary_ts([a]) => ArgumentTypeError: tf.Operation
ge.compute_boundary_ts([a.op, other.a.op]) => SelectionError: different graphs
"""


@in_each_setting
def test_refusals():
    tables.check_refusals(REFUSED, diamond(), other=other_graph())
