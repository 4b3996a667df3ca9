import pytest
import tensorflow as tf

import geutil as ge
from tests.reroute.samples import EAGER, chains, foreign
from tests.select import tables
from tests.settings import in_each_setting, names

ADDED = """
ge.add_control_inputs(d.op, a.op) => a
ge.add_control_inputs(d.op, [a.op]) => a
ge.add_control_inputs(d.op, [a.op, w.op]) => a w
ge.add_control_inputs(d.op, [a.op, a.op]) => a
ge.add_control_inputs(d.op, (t.op for t in [a])) => a
ge.add_control_inputs(d.op, []) =>
# An op may wait for what it reads.
ge.add_control_inputs(d.op, b.op) => b
"""
REMOVED = """
ge.remove_control_inputs(w.op, a.op) => b c
ge.remove_control_inputs(w.op, [a.op]) => b c
ge.remove_control_inputs(w.op, [c.op, a.op]) => b
ge.remove_control_inputs(w.op, [a.op, a.op]) => b c
ge.remove_control_inputs(w.op, w.op.control_inputs) =>
ge.remove_control_inputs(w.op, []) => a b c
"""


def waits_for(t):
    return " ".join(sorted(names(t.op.control_inputs)))


def test_add(setting):
    def check(call, expected):
        g = chains()
        count = len(g.graph.get_operations())
        assert tables.evaluate(call, g) is None
        assert waits_for(g.d) == expected, waits_for(g.d)
        assert waits_for(g.w) == "a"
        # Another edit keeps what is there.
        ge.add_control_inputs(g.w.op, g.b.op)
        ge.add_control_inputs(g.w.op, [g.c.op])
        assert waits_for(g.w) == "a b c"
        assert len(g.graph.get_operations()) == count
        ge.verify(g.graph)

    tables.check_edits(setting, ADDED, check)


def test_remove(setting):
    def check(call, expected):
        g = chains()
        ge.add_control_inputs(g.w.op, [g.b.op, g.c.op])
        assert tables.evaluate(call, g) is None
        assert waits_for(g.w) == expected, waits_for(g.w)
        ge.verify(g.graph)

    tables.check_edits(setting, REMOVED, check)


def test_a_session_keeps_the_new_order(graph):
    x = tf.compat.v1.placeholder(tf.float32, [], name="x")
    check = tf.debugging.Assert(x > 0.0, [x], name="check")
    y = tf.identity(x, name="y")
    with tf.compat.v1.Session() as session:
        ge.add_control_inputs(y.op, check)
        assert session.run(y, {x: 1.0}) == 1.0
        with pytest.raises(tf.errors.InvalidArgumentError):
            session.run(y, {x: -1.0})


REFUSED = """
ge.remove_control_inputs(w.op, b.op) => RerouteError: 'b'; 'w'; ['a']
ge.remove_control_inputs(w.op, [a.op, b.op]) => RerouteError: 'b'; 'w'
ge.remove_control_inputs(a.op, w.op) => RerouteError: 'w'; 'a'; []
ge.add_control_inputs(w.op, a.op) => RerouteError: 'a'; 'w'; already; leave it out
ge.add_control_inputs(w.op, [b.op, a.op]) => RerouteError: 'a'; 'w'
"""
REFUSED_BY_BOTH = """
edit(w.op, other.b.op) => SelectionError: 'b'; geutil.copy
edit(w.op, [b.op, other.c.op]) => SelectionError: 'c'
edit(w, a.op) => ArgumentTypeError: tf.Operation
edit('w', a.op) => ArgumentTypeError: str
edit([w.op], a.op) => ArgumentTypeError: list
edit(None, a.op) => ArgumentTypeError: NoneType
edit(w.op, a) => ArgumentTypeError: tf.Operation
edit(w.op, 'a') => ArgumentTypeError: str
edit(w.op, None) => ArgumentTypeError: NoneType
edit(w.op, graph) => ArgumentTypeError: get_operations
"""
if EAGER is not None:
    REFUSED_BY_BOTH += "edit(w.op, eager) => ArgumentTypeError: tf.Operation"
CYCLES = """
ge.add_control_inputs(a.op, a.op) => a
ge.add_control_inputs(a.op, c.op) => a c
ge.add_control_inputs(a.op, e.op) => a c e
ge.add_control_inputs(a.op, w.op) => a w
ge.add_control_inputs(a.op, [b.op, e.op]) => a c e
"""


@in_each_setting
def test_refusals():
    other = foreign(chains)
    g = chains()
    tables.check_refusals(REFUSED, g)
    tables.check_cycles(CYCLES, g)
    for edit in (ge.add_control_inputs, ge.remove_control_inputs):
        more = {"edit": edit, "other": other, "eager": EAGER}
        tables.check_refusals(REFUSED_BY_BOTH, g, **more)
