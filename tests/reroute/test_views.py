import numpy as np
import tensorflow as tf

import geutil as ge
from tests.reroute.samples import EAGER, chains, foreign, inputs, wired
from tests.select import tables
from tests.settings import in_each_setting, names

A, B = np.array([1.0, 2.0]), np.array([3.0, 5.0])
UNARY = {"c": np.negative, "d": np.square, "e": np.exp, "f": np.tanh}
START = "a b c d ab"
EDITS = {
    "swap_inputs": ge.swap_inputs,
    "reroute_inputs": ge.reroute_inputs,
    "swap_outputs": ge.swap_outputs,
    "reroute_outputs": ge.reroute_outputs,
    "swap_ios": ge.swap_ios,
    "reroute_ios": ge.reroute_ios,
}
# What c, d, e, f and both read after an edit, and then the inputs of either view.
OF_ONE_OP = f"""
swap_inputs(c, d) => b a c d ab | b | a
reroute_inputs(c, d) => a a c d ab | a | a
reroute_inputs(d, c) => b b c d ab | b | b
swap_outputs(c, d) => a b d c ab | a | b
reroute_outputs(c, d) => a b c c ab | a | b
swap_ios(c, d) => b a d c ab | b | a
reroute_ios(c, d) => a a c c ab | a | a
swap_inputs(e, f) => a b d c ab | d | c
# A view with itself.
swap_inputs(c, c) => {START} | a | a
reroute_ios(c, c) => {START} | a | a
# An output that the other view reads stays: ops of the views are left alone.
swap_outputs(c, e) => {START} | a | c
"""
# Whoever reads a passthrough tensor reads an input of its view.
OF_TENSORS = """
swap_inputs(a, b) => b a c d ba | b | a
reroute_inputs(a, b) => a a c d aa | a | a
swap_outputs(a, b) => b a c d ba | a | b
reroute_outputs(a, b) => a a c d aa | a | b
"""


def computed(wiring):
    """Return the values of c, d, e, f and both, each of which reads what is given."""
    reads = dict(zip(("c", "d", "e", "f", "both"), wiring.split(), strict=True))

    def value(name):
        if name in "ab":
            return {"a": A, "b": B}[name]
        return UNARY[name](value(reads[name]))

    values = [value(name) for name in "cdef"]
    return [*values, value(reads["both"][0]) - value(reads["both"][1])]


def check_edit(setting, wiring, edit):
    """Check inputs and values of the readers after an edit, which adds no op."""

    def body():
        g = chains()
        count = len(g.graph.get_operations())
        edit(g)
        readers = [g.c, g.d, g.e, g.f, g.both]
        assert inputs(*readers) == wired(wiring), inputs(*readers)
        # w waits for a: a control edge is no input.
        assert names(g.w.op.control_inputs) == ["a"]
        assert len(g.graph.get_operations()) == count
        ge.verify(g.graph)
        return readers

    for value, wanted in zip(setting.run(body), computed(wiring), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5)


def parsed(call, expected):
    edit, _, pair = call.partition("(")
    return EDITS[edit], pair.strip(")").split(", "), *expected.split(" | ")


def test_views_of_one_op(setting):
    def check(call, expected):
        function, pair, wiring, *read = parsed(call, expected)

        def edit(g):
            given = [ge.sgv(getattr(g, name).op) for name in pair]
            views = function(*given)
            assert type(views) is tuple
            assert views[0] is given[0]
            assert views[1] is given[1]
            assert [tables.shown(view) for view in views] == [
                f"{name} | {source} | {name}"
                for name, source in zip(pair, read, strict=True)
            ]

        check_edit(setting, wiring, edit)

    tables.check_rows(OF_ONE_OP, check)


def test_ops_and_lists_stand_for_their_views(setting):
    for make in (lambda op: op, lambda op: [op]):
        for name, function in EDITS.items():
            wiring = next(
                expected.split(" | ")[0]
                for call, expected in tables.rows(OF_ONE_OP)
                if call == f"{name}(c, d)"
            )

            def edit(g, make=make, function=function):
                views = function(make(g.c.op), make(g.d.op))
                assert [names(view.ops) for view in views] == [["c"], ["d"]]

            check_edit(setting, wiring, edit)


def test_passthrough_views(setting):
    def check(call, expected):
        function, pair, wiring, *parts = parsed(call, expected)

        def edit(g):
            views = [ge.sgv(getattr(g, name)) for name in pair]
            function(*views)
            for view, part in zip(views, parts, strict=True):
                assert names(view.inputs) == [f"{part}:0"]
                assert names(view.outputs) == [f"{part}:0"]
                assert names(view.passthroughs) == [f"{part}:0"]
                assert view.is_passthrough(getattr(g, part))

        check_edit(setting, wiring, edit)

    tables.check_rows(OF_TENSORS, check)


@in_each_setting
def test_a_passthrough_beside_ops_stays_one():
    g = chains()
    view = ge.SubGraphView(g.c.op, g.w)
    assert names(view.outputs) == ["c:0", "w:0"]
    ge.swap_inputs(view, [g.b, g.d])
    assert names(view.inputs) == ["b:0", "d:0"]
    assert names(view.outputs) == ["c:0", "d:0"]
    assert names(view.passthroughs) == ["d:0"]
    assert names(view.connected_outputs) == ["c:0"]
    # One that is no input stays as it is.
    view = ge.SubGraphView(g.c.op, g.w).remap_inputs([0])
    ge.swap_inputs(view, [g.a])
    assert names(view.inputs) == ["a:0"]
    assert names(view.outputs) == ["c:0", "w:0"]
    assert names(view.passthroughs) == ["w:0"]
    # A view may read a bare tensor; empty views change nothing.
    view = ge.sgv(g.d.op)
    ge.reroute_inputs(g.w, view)
    before = inputs(g.c, g.d, g.both)
    assert before[1] == names(view.inputs) == ["w:0"]
    for edit in EDITS.values():
        view0, view1 = edit([], ge.SubGraphView())
        assert not view0
        assert not view1
    assert inputs(g.c, g.d, g.both) == before


def test_remapped_inputs(setting):
    def body():
        g = chains()
        view = ge.sgv(g.both.op).remap_inputs([1])
        ge.swap_inputs(view, g.e.op)
        assert inputs(g.both, g.e, g.d) == [["a:0", "c:0"], ["b:0"], ["b:0"]]
        assert names(view.inputs) == ["c:0"]
        whole = ge.sgv(g.both.op).remap_inputs([1, 0])
        ge.reroute_inputs([g.w, g.d], whole)
        assert inputs(g.both) == [["d:0", "w:0"]]
        assert names(whole.inputs) == ["w:0", "d:0"]
        return [g.both]

    np.testing.assert_allclose(
        setting.run(body)[0], B**2 - np.array([7.0, 11.0]), rtol=1e-5
    )


def test_remapped_outputs(setting):
    def body():
        g = chains()
        parts = tf.unstack(tf.stack([g.a, g.b]), name="parts")
        left = tf.negative(parts[0], name="left")
        right = tf.negative(parts[1], name="right")
        view = ge.sgv(parts[0].op).remap_outputs([1])
        ge.reroute_outputs(view, g.c.op)
        assert inputs(g.e, left, right) == [["parts:1"], ["parts:0"], ["parts:1"]]
        assert names(view.outputs) == ["parts:1"]
        both = ge.sgv(parts[0].op).remap_outputs([1, 0])
        ge.swap_outputs(both, ge.sgv(g.c.op, g.d.op))
        assert inputs(left, right, g.f) == [["d:0"], ["c:0"], ["parts:0"]]
        return [left, right, g.f]

    left, right, f = setting.run(body)
    np.testing.assert_allclose(left, -(B**2), rtol=1e-5)
    np.testing.assert_allclose(right, A, rtol=1e-5)
    np.testing.assert_allclose(f, np.tanh(A), rtol=1e-5)


# -- refusals --------------------------------------------------------------------------

REFUSED = """
# (views, error, words)
edit(c.op, other.d.op) => SelectionError: another graph; geutil.copy
edit(ge.sgv(other.c.op), ge.sgv(d.op)) => SelectionError: geutil.copy
edit([c.op, other.c.op], d.op) => SelectionError: 'c'; geutil.copy
edit('c', d.op) => SelectionError: 'c'; graph=
edit(c.op, 1) => ArgumentTypeError: int
edit(None, d.op) => ArgumentTypeError: NoneType
edit(c.op, whole.op) => RerouteError: float32; int32; dtypes differ; tf.cast
edit(c.op, wide.op) => RerouteError: (2,); (3,); shapes differ; reshape
edit([], d.op) => RerouteError: 0; 1
edit(c.op, []) => RerouteError: 1; 0
"""
if EAGER is not None:
    REFUSED += "edit(eager, d.op) => ArgumentTypeError: agerTensor"
OTHER_INPUTS = """
edit(view, d.op) => RerouteError: 2; 1; a:0, b:0; b:0; remap
"""
OTHER_OUTPUTS = """
edit([c.op, d.op], w.op) => RerouteError: 2; 1; c:0, d:0; w:0; remap
"""


@in_each_setting
def test_refusals():
    other = foreign(chains)
    g = chains()
    for tail in (g.whole, g.wide):
        tf.identity(tail)
    for edit in EDITS.values():
        more = {"edit": edit, "other": other, "eager": EAGER}
        tables.check_refusals(REFUSED, g, **more)
    view = ge.sgv(g.both.op)
    for edit in (ge.swap_inputs, ge.reroute_inputs, ge.swap_ios):
        tables.check_refusals(OTHER_INPUTS, g, edit=edit, view=view)
    assert names(view.inputs) == ["a:0", "b:0"]
    for edit in (ge.swap_outputs, ge.reroute_outputs, ge.reroute_ios):
        tables.check_refusals(OTHER_OUTPUTS, g, edit=edit)


CYCLES = """
ge.swap_inputs(*kept(c, e)) => c
ge.reroute_inputs(*kept(e, c)) => c
ge.reroute_inputs(*kept(g, c)) => c e
ge.reroute_outputs(*kept(e, a)) => c e
ge.swap_outputs(*kept(a, e)) => c e
ge.reroute_outputs(*kept(g, a)) => c e g
ge.swap_ios(*kept(c, e)) => c
ge.reroute_ios(*kept(g, c)) => e g
"""


@in_each_setting
def test_a_cycle_is_refused_and_the_views_stay():
    g = chains()
    g.g = tf.abs(g.e, name="g")
    views = []

    def kept(*ts):
        made = [ge.sgv(t.op) for t in ts]
        views.extend((view, names(view.inputs)) for view in made)
        return made

    tables.check_cycles(CYCLES, g, kept=kept)
    assert len(views) == 16
    assert all(names(view.inputs) == before for view, before in views)
