import numpy as np
import tensorflow as tf

import geutil as ge
from tests.reroute.samples import EAGER, VARIABLE, foreign, inputs, wired, wires
from tests.select import tables
from tests.select.tables import check_refused
from tests.settings import in_each_setting

A, B, C = np.array([1.0, 2.0]), np.array([3.0, 5.0]), np.array([7.0, 11.0])
VALUES = {"a": A, "b": B, "c": C}
START = "ab ba aa b c"
# The number of edges that an edit moves, and what p, q, r, s and u read after it.
EDITS = f"""
ge.swap_ts(a, b) => 7 | ba ab bb a c
ge.swap_ts([a, a], [b, b]) => 7 | ba ab bb a c
ge.swap_ts(a, a) => 0 | {START}
ge.swap_ts([], []) => 0 | {START}
ge.swap_ts([c, a], [c, b]) => 7 | ba ab bb a c
ge.swap_ts(a, b, can_modify=[p.op]) => 2 | ba ba aa b c
ge.swap_ts(a, b, r.op) => 2 | ab ba bb b c
ge.swap_ts(a, b, cannot_modify=[p.op]) => 5 | ab ab bb a c
ge.swap_ts(a, b, can_modify=[]) => 0 | {START}
ge.swap_ts(a, b, cannot_modify=graph) => 0 | {START}
ge.swap_ts(a, b, can_modify=graph) => 7 | ba ab bb a c
ge.swap_ts(a, b, can_modify=[p.op, q.op], cannot_modify=[q.op]) => 2 | ba ba aa b c
ge.reroute_ts(a, b) => 3 | aa aa aa a c
ge.reroute_ts((a,), (b,)) => 3 | aa aa aa a c
ge.reroute_ts(iter([a]), iter([b])) => 3 | aa aa aa a c
ge.reroute_ts(a, a) => 0 | {START}
ge.reroute_ts([], []) => 0 | {START}
# A repeated tensor: its first partner counts, and nothing is counted twice.
ge.reroute_ts([a, a], [b, b]) => 3 | aa aa aa a c
ge.reroute_ts([c, a], [b, b]) => 3 | ac ca aa c c
ge.reroute_ts([c, c], [a, b]) => 7 | cc cc cc c c
# All pairs at once: what the first pair brings in, the second leaves alone.
ge.reroute_ts([a, b], [b, a]) => 7 | ba ab bb a c
ge.reroute_ts([b, c], [a, b]) => 7 | bc cb bb c c
ge.reroute_ts(a, b, can_modify=[q.op]) => 1 | ab aa aa b c
ge.reroute_ts(a, b, cannot_modify=[q.op]) => 2 | aa ba aa a c
ge.reroute_ts(a, b, can_modify=[]) => 0 | {START}
ge.reroute_ts(c, a, can_modify=[r.op]) => 2 | ab ba cc b c
"""


def test_rewires(setting):
    def check(call, expected):
        count, wiring = expected.split(" | ")

        def body():
            g = wires()
            ops = len(g.graph.get_operations())
            outputs = [g.p, g.q, g.r, g.s, g.u]
            changed = tables.evaluate(call, g)
            assert type(changed) is int
            assert changed == int(count), changed
            assert inputs(*outputs) == wired(wiring), inputs(*outputs)
            assert len(g.graph.get_operations()) == ops
            ge.verify(g.graph)
            return outputs

        values = setting.run(body)
        p, q, r, s, u = ([VALUES[name] for name in reads] for reads in wiring.split())
        wanted = [p[0] - p[1], q[0] - q[1], r[0] * r[1], -s[0], -u[0]]
        for one, other in zip(values, wanted, strict=True):
            np.testing.assert_allclose(one, other)

    tables.check_rows(EDITS, check)


@in_each_setting
def test_many_readers_several_outputs_and_unknown_shapes():
    g = wires()
    readers = [tf.negative(g.c, name=f"reader{i}") for i in range(40)]
    assert ge.reroute_ts(g.a, g.c) == 41
    assert inputs(*readers) == [["a:0"]] * 40
    assert ge.reroute_ts(g.c, g.a, can_modify=g.u.op) == 1
    total = tf.add_n([g.a, g.b, g.a, g.c, g.a], name="total")
    assert ge.reroute_ts(g.c, g.a, can_modify=total.op) == 3
    assert inputs(total) == [["c:0", "b:0", "c:0", "c:0", "c:0"]]
    assert ge.reroute_ts(g.a, g.c, cannot_modify=g.u.op) == 4
    parts = tf.unstack(tf.constant([[1.0, 2.0], [3.0, 5.0]]), name="parts")
    difference = tf.subtract(*parts, name="difference")
    assert ge.swap_ts(parts[0], parts[1]) == 2
    assert inputs(difference) == [["parts:1", "parts:0"]]
    for shape in (None, [None], [2]):
        ph = ge.ph(tf.float32, shape)
        assert ge.reroute_ts(ph, g.c) == 1
        assert ge.reroute_ts(g.c, ph) == 1
    assert inputs(g.u) == [["c:0"]]


# -- references to version 1 variables -------------------------------------------------


def test_a_value_cannot_stand_in_for_an_assigned_reference(graph):
    tf.compat.v1.Variable([1.0, 2.0], use_resource=False, name="v")
    reference = graph.get_tensor_by_name("v:0")
    assert reference.dtype == tf.float32._as_ref
    read = graph.get_operation_by_name("v/read")
    value = tf.constant([3.0, 5.0], name="value")
    check_refused(
        graph,
        lambda: ge.reroute_ts(value, reference),
        ge.RerouteError,
        ["'value:0'", "'v:0'", "'v/Assign'", "cannot_modify="],
    )
    # The remedy works, and a reference may stand in for a value.
    assign = graph.get_operation_by_name("v/Assign")
    assert ge.reroute_ts(value, reference, can_modify=read) == 1
    assert ge.reroute_ts(reference, value) == 1
    assert ge.reroute_ts(value, reference, cannot_modify=assign) == 1
    assert read.inputs[0] is value
    assert assign.inputs[0] is reference
    ge.verify(graph)


# -- refusals --------------------------------------------------------------------------

REFUSED = """
# (arguments, error, words)
edit(a, other.b) => SelectionError: 'a:0'; 'b:0'; geutil.copy
edit(other.a, b) => SelectionError: different graphs
edit([a, other.a], [b, c]) => SelectionError: different graphs
edit(a, b, other.p.op) => SelectionError: 'p'; geutil.copy
edit(a, b, None, other.p.op) => SelectionError: 'p'
edit(a, whole) => RerouteError: 'a:0'; 'whole:0'; float32; int32; dtypes differ; tf.cast
edit([b, a], [c, whole]) => RerouteError: 'a:0'; 'whole:0'; dtypes differ
edit(a, wide) => RerouteError: 'a:0'; 'wide:0'; (2,); (3,); shapes differ; reshape
edit(a, flat) => RerouteError: 'flat:0'; shapes differ; geutil.graph_replace
edit([a], [b, c]) => RerouteError: 1; 2; a:0; b:0, c:0
edit([a, b], c) => RerouteError: a:0, b:0; c:0
edit([], c) => RerouteError: c:0
edit(a.op, b) => ArgumentTypeError: tf.Tensor; Operation
edit(a, b.op) => ArgumentTypeError: tf.Tensor; Operation
edit('a:0', b) => ArgumentTypeError: tf.Tensor; str
edit(a, None) => ArgumentTypeError: tf.Tensor; NoneType
edit(1.0, b) => ArgumentTypeError: tf.Tensor; float
edit(a, [b, 1]) => ArgumentTypeError: tf.Tensor; int
edit(a, b, p) => ArgumentTypeError: tf.Operation; Tensor
edit(a, b, 'p') => ArgumentTypeError: tf.Operation; str
edit(a, b, None, [p]) => ArgumentTypeError: tf.Operation
edit(a, b, None, 1) => ArgumentTypeError: int
"""
if EAGER is not None:
    REFUSED += """
edit(eager, b) => ArgumentTypeError: eager
edit(a, eager) => ArgumentTypeError: eager
edit(a, [eager]) => ArgumentTypeError: eager
edit(variable, b) => ArgumentTypeError: tf.Tensor; Variable
edit(a, [variable]) => ArgumentTypeError: Variable
"""


@in_each_setting
def test_refusals():
    more = {"other": foreign(wires), "eager": EAGER, "variable": VARIABLE}
    g = wires()
    g.whole = tf.constant([1, 2], name="whole")
    g.wide = tf.constant([1.0, 2.0, 3.0], name="wide")
    g.flat = tf.constant(1.0, name="flat")
    tf.negative(g.whole), tf.negative(g.wide), tf.negative(g.flat)
    for edit in (ge.swap_ts, ge.reroute_ts):
        tables.check_refusals(REFUSED, g, edit=edit, **more)


CYCLES = """
ge.reroute_ts(u, c) => u
ge.reroute_ts(last, c) => u middle last
ge.reroute_ts(last, c, can_modify=[u.op]) => u middle last
ge.reroute_ts(last, u, can_modify=middle.op) => middle last
ge.swap_ts(u, last) => middle last
ge.swap_ts(c, last) => u middle last
# Each of the two alone would be legal.
ge.reroute_ts([u, s], [b, c]) => s u
# The control edge from u to late closes the cycle.
ge.reroute_ts(after, c) => late u after
"""


@in_each_setting
def test_a_cycle_is_refused_and_listed():
    g = wires()
    g.middle = tf.exp(g.u, name="middle")
    g.last = tf.tanh(g.middle, name="last")
    with tf.control_dependencies([g.u]):
        g.late = tf.constant([1.0, 2.0], name="late")
    g.after = tf.abs(g.late, name="after")
    tables.check_cycles(CYCLES, g)
