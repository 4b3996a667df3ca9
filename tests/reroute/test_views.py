import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from tests.reroute.samples import EAGER, chains, check_refused, foreign, inputs
from tests.settings import names

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


def computed(wiring):
    """Return the values of c, d, e, f and both, each of which reads what is given."""
    reads = dict(zip(("c", "d", "e", "f", "both"), wiring.split(), strict=True))

    def value(name):
        if name in "ab":
            return {"a": A, "b": B}[name]
        return UNARY[name](value(reads[name]))

    values = [value(name) for name in "cdef"]
    return [*values, value(reads["both"][0]) - value(reads["both"][1])]


@pytest.mark.parametrize("form", ["op", "list", "view"])
@pytest.mark.parametrize(
    ("edit", "first", "second", "wiring", "inputs0", "inputs1"),
    [
        ("swap_inputs", "c", "d", "b a c d ab", "b", "a"),
        ("reroute_inputs", "c", "d", "a a c d ab", "a", "a"),
        ("reroute_inputs", "d", "c", "b b c d ab", "b", "b"),
        ("swap_outputs", "c", "d", "a b d c ab", "a", "b"),
        ("reroute_outputs", "c", "d", "a b c c ab", "a", "b"),
        ("swap_ios", "c", "d", "b a d c ab", "b", "a"),
        ("reroute_ios", "c", "d", "a a c c ab", "a", "a"),
        ("swap_inputs", "e", "f", "a b d c ab", "d", "c"),
        # A view with itself.
        ("swap_inputs", "c", "c", START, "a", "a"),
        ("reroute_ios", "c", "c", START, "a", "a"),
        # An output that the other view reads stays: ops of the views are left alone.
        ("swap_outputs", "c", "e", START, "a", "c"),
    ],
)
def test_views_of_one_op(setting, form, edit, first, second, wiring, inputs0, inputs1):
    make = {"op": lambda op: op, "list": lambda op: [op], "view": ge.sgv}[form]

    def body():
        g = chains()
        ops = getattr(g, first).op, getattr(g, second).op
        given = [make(op) for op in ops]
        count = len(g.graph.get_operations())
        views = EDITS[edit](*given)
        assert type(views) is tuple
        assert [names(view.ops) for view in views] == [[first], [second]]
        assert [names(view.inputs) for view in views] == [
            [f"{inputs0}:0"],
            [f"{inputs1}:0"],
        ]
        assert [names(view.outputs) for view in views] == [
            [f"{first}:0"],
            [f"{second}:0"],
        ]
        if form == "view":
            assert views[0] is given[0]
            assert views[1] is given[1]
        readers = [g.c, g.d, g.e, g.f, g.both]
        assert inputs(*readers) == [
            [f"{name}:0" for name in reads] for reads in wiring.split()
        ]
        assert len(g.graph.get_operations()) == count
        ge.verify(g.graph)
        return readers

    values = setting.run(body)
    for value, wanted in zip(values, computed(wiring), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("edit", "wiring", "parts0", "parts1"),
    [
        # Whoever reads a passthrough tensor reads an input of its view.
        ("swap_inputs", "b a c d ba", "b", "a"),
        ("reroute_inputs", "a a c d aa", "a", "a"),
        ("swap_outputs", "b a c d ba", "a", "b"),
        ("reroute_outputs", "a a c d aa", "a", "b"),
    ],
)
def test_passthrough_views(setting, edit, wiring, parts0, parts1):
    def body():
        g = chains()
        view0, view1 = ge.sgv(g.a), ge.sgv(g.b)
        EDITS[edit](view0, view1)
        for view, part in ((view0, parts0), (view1, parts1)):
            assert names(view.inputs) == [f"{part}:0"]
            assert names(view.outputs) == [f"{part}:0"]
            assert names(view.passthroughs) == [f"{part}:0"]
            assert view.is_passthrough(getattr(g, part))
        readers = [g.c, g.d, g.e, g.f]
        # w waits for a: a control edge is no input.
        assert names(g.w.op.control_inputs) == ["a"]
        assert inputs(*readers, g.both) == [
            [f"{name}:0" for name in reads] for reads in wiring.split()
        ]
        return [*readers, g.both]

    values = setting.run(body)
    for value, wanted in zip(values, computed(wiring), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5)


def test_a_view_may_read_a_bare_tensor(setting):
    def body():
        g = chains()
        view = ge.sgv(g.d.op)
        ge.reroute_inputs(g.w, view)
        assert inputs(g.c, g.d, g.both) == [["a:0"], ["w:0"], ["a:0", "b:0"]]
        assert names(view.inputs) == ["w:0"]

    setting.run(body)


def test_a_passthrough_beside_ops_stays_one(setting):
    def body():
        g = chains()
        view = ge.SubGraphView(g.c.op, g.w)
        assert names(view.outputs) == ["c:0", "w:0"]
        ge.swap_inputs(view, [g.b, g.d])
        assert names(view.inputs) == ["b:0", "d:0"]
        assert names(view.outputs) == ["c:0", "d:0"]
        assert names(view.passthroughs) == ["d:0"]
        assert names(view.connected_outputs) == ["c:0"]

    setting.run(body)


def test_a_passthrough_that_is_no_input_stays_as_it_is(setting):
    def body():
        g = chains()
        view = ge.SubGraphView(g.c.op, g.w).remap_inputs([0])
        ge.swap_inputs(view, [g.b])
        assert names(view.inputs) == ["b:0"]
        assert names(view.outputs) == ["c:0", "w:0"]
        assert names(view.passthroughs) == ["w:0"]

    setting.run(body)


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


def test_an_op_that_reads_its_input_twice(setting):
    def body():
        g = chains()
        square = tf.multiply(g.a, g.a, name="square")
        ge.reroute_inputs(g.d.op, square.op)
        assert inputs(square) == [["b:0", "b:0"]]
        return [square]

    np.testing.assert_allclose(setting.run(body)[0], B**2)


def test_views_of_several_ops(setting):
    def body():
        g = chains()
        left, right = ge.sgv(g.c.op, g.e.op), ge.sgv(g.d.op, g.f.op)
        out = tf.negative(g.e, name="out")
        other = tf.abs(g.f, name="other")
        ge.swap_ios(left, right)
        assert inputs(g.c, g.d, g.e, g.f) == [["b:0"], ["a:0"], ["c:0"], ["d:0"]]
        assert inputs(out, other) == [["f:0"], ["e:0"]]
        assert names(left.inputs) == ["b:0"]
        assert names(right.inputs) == ["a:0"]
        return [out, other]

    out, other = setting.run(body)
    np.testing.assert_allclose(out, -np.tanh(A**2), rtol=1e-5)
    np.testing.assert_allclose(other, np.exp(-B), rtol=1e-5)


def test_swapping_twice_restores_views_and_edges(setting):
    def body():
        g = chains()
        view0, view1 = ge.sgv(g.c.op), ge.sgv(g.d.op)
        before = inputs(g.c, g.d, g.e, g.f, g.both)
        for _ in range(2):
            ge.swap_ios(view0, view1)
        assert inputs(g.c, g.d, g.e, g.f, g.both) == before
        assert names(view0.inputs) == ["a:0"]
        assert names(view1.inputs) == ["b:0"]

    setting.run(body)


def test_empty_views_change_nothing(setting):
    def body():
        g = chains()
        before = inputs(g.c, g.d, g.e, g.f)
        for edit in EDITS.values():
            view0, view1 = edit([], ge.SubGraphView())
            assert not view0
            assert not view1
        assert inputs(g.c, g.d, g.e, g.f) == before

    setting.run(body)


def test_an_aborted_transaction_puts_views_back(setting):
    def body():
        g = chains()
        view0 = ge.SubGraphView(g.c.op, g.w)
        view1 = ge.sgv(g.d.op)
        with pytest.raises(KeyError), ge.transaction(g.graph):
            ge.swap_inputs(view0.remap_inputs([0]), view1)
            ge.swap_inputs(view0, [g.b, g.f])
            assert names(view0.inputs) == ["b:0", "f:0"]
            raise KeyError
        assert names(view0.inputs) == ["a:0", "w:0"]
        assert names(view0.outputs) == ["c:0", "w:0"]
        assert names(view1.inputs) == ["b:0"]
        assert inputs(g.c, g.d) == [["a:0"], ["b:0"]]

    setting.run(body)


# -- refusals --------------------------------------------------------------------------

COMMON = [
    # (views, error, words)
    (
        lambda g, o: (g.c.op, o.d.op),
        ge.SelectionError,
        ["another graph", "geutil.copy"],
    ),
    (lambda g, o: (ge.sgv(o.c.op), ge.sgv(g.d.op)), ge.SelectionError, ["geutil.copy"]),
    (
        lambda g, o: ([g.c.op, o.c.op], g.d.op),
        ge.SelectionError,
        ["'c'", "geutil.copy"],
    ),
    (lambda g, o: ("c", g.d.op), ge.SelectionError, ["'c'", "graph="]),
    (lambda g, o: (g.c.op, 1), ge.ArgumentTypeError, ["int"]),
    (lambda g, o: (None, g.d.op), ge.ArgumentTypeError, ["NoneType"]),
    (
        lambda g, o: (g.c.op, g.whole.op),
        ge.RerouteError,
        ["float32", "int32", "dtypes differ", "tf.cast"],
    ),
    (
        lambda g, o: (g.c.op, g.wide.op),
        ge.RerouteError,
        ["(2,)", "(3,)", "shapes differ", "reshape"],
    ),
    (lambda g, o: ([], g.d.op), ge.RerouteError, ["0", "1"]),
    (lambda g, o: (g.c.op, []), ge.RerouteError, ["1", "0"]),
]
if EAGER is not None:
    COMMON.append((lambda g, o: (EAGER, g.d.op), ge.ArgumentTypeError, ["agerTensor"]))


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(("views", "error", "words"), COMMON)
def test_refusals(setting, edit, views, error, words):
    other = foreign(chains)

    def body():
        g = chains()
        for tail in (g.whole, g.wide):
            tf.identity(tail)
        given = views(g, other)
        check_refused(g.graph, lambda: EDITS[edit](*given), error, words)

    setting.run(body)


@pytest.mark.parametrize("edit", ["swap_inputs", "reroute_inputs", "swap_ios"])
def test_refuses_other_counts_of_inputs(setting, edit):
    def body():
        g = chains()
        view = ge.sgv(g.both.op)
        check_refused(
            g.graph,
            lambda: EDITS[edit](view, g.d.op),
            ge.RerouteError,
            ["2", "1", "a:0, b:0", "b:0", "remap"],
        )
        assert names(view.inputs) == ["a:0", "b:0"]

    setting.run(body)


@pytest.mark.parametrize("edit", ["swap_outputs", "reroute_outputs", "reroute_ios"])
def test_refuses_other_counts_of_outputs(setting, edit):
    def body():
        g = chains()
        check_refused(
            g.graph,
            lambda: EDITS[edit]([g.c.op, g.d.op], g.w.op),
            ge.RerouteError,
            ["2", "1", "c:0, d:0", "w:0", "remap"],
        )

    setting.run(body)


@pytest.mark.parametrize(
    ("edit", "views", "cycle"),
    [
        ("swap_inputs", lambda g: (g.c.op, g.e.op), "c"),
        ("reroute_inputs", lambda g: (g.e.op, g.c.op), "c"),
        ("reroute_inputs", lambda g: (g.g.op, g.c.op), "c e"),
        ("reroute_outputs", lambda g: (g.e.op, g.a.op), "c e"),
        ("swap_outputs", lambda g: (g.a.op, g.e.op), "c e"),
        ("reroute_outputs", lambda g: (g.g.op, g.a.op), "c e g"),
        ("swap_ios", lambda g: (g.c.op, g.e.op), "c"),
        ("reroute_ios", lambda g: (g.g.op, g.c.op), "e g"),
    ],
)
def test_a_cycle_is_refused_and_the_views_stay(setting, edit, views, cycle):
    def body():
        g = chains()
        g.g = tf.abs(g.e, name="g")
        given = [ge.sgv(op) for op in views(g)]
        before = [names(view.inputs) for view in given]
        error = check_refused(g.graph, lambda: EDITS[edit](*given), ge.CycleError)
        assert sorted(error.cycle[:-1]) == cycle.split()
        assert error.cycle[0] == error.cycle[-1]
        assert " -> ".join(error.cycle) in str(error)
        assert [names(view.inputs) for view in given] == before

    setting.run(body)
