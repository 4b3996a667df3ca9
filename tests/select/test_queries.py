import re

import pytest
import tensorflow as tf

import geutil as ge
from tests.select.samples import diamond, looking, other_graph
from tests.settings import names


def scoped():
    """Make a diamond, foo/x, and bar/parts, which reads it and has two outputs."""
    g = diamond()
    g.foo = tf.constant([7.0, 8.0], name="foo/x")
    g.bar = tf.unstack(g.foo, name="bar/parts")
    return g


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        # Regexes are searched, not matched.
        (lambda g: ge.select_ops("oo/", graph=g.graph), "foo/x"),
        (lambda g: ge.select_ops("^oo/", graph=g.graph), ""),
        (lambda g: ge.select_ops("^[ab]$", graph=g.graph), "a b"),
        (lambda g: ge.select_ops(re.compile("FOO", re.I), graph=g.graph), "foo/x"),
        (lambda g: ge.select_ops("x$", graph=g.graph), "x foo/x"),
        # Argument by argument, each op once.
        (lambda g: ge.select_ops("^b$", "^a$", graph=g.graph), "b a"),
        (lambda g: ge.select_ops("^b$", "^[ab]$", graph=g.graph), "b a"),
        (lambda g: ge.select_ops(["^b$", "^[ab]$"], graph=g.graph), "b a"),
        (lambda g: ge.select_ops(["^b$", ["^b$"]], graph=g.graph), "b"),
        # Tags.
        (lambda g: ge.select_ops("(?#ops)^a$", graph=g.graph), "a"),
        (lambda g: ge.select_ops("(?#ts)^a:0$", graph=g.graph), ""),
        (lambda g: ge.select_ops("(?#ts)^a", "^b$", graph=g.graph), "b"),
        (lambda g: ge.select_ops(re.compile("(?#ts)^a"), "^b$", graph=g.graph), "b"),
        (
            lambda g: ge.select_ops("^a$", graph=g.graph, restrict_ops_regex=True),
            "",
        ),
        (
            lambda g: ge.select_ops(
                "^a$", "(?#ops)^b$", graph=g.graph, restrict_ops_regex=True
            ),
            "b",
        ),
        (
            lambda g: ge.select_ops("^a$", graph=g.graph, restrict_ops_regex=False),
            "a",
        ),
        # Ops, tensors, lists and graphs.
        (lambda g: ge.select_ops(g.b.op), "b"),
        (lambda g: ge.select_ops(g.b.op, g.a.op, g.b.op), "b a"),
        (lambda g: ge.select_ops([g.b.op, [g.a.op, (g.c.op,)]], g.d.op), "b a c d"),
        (lambda g: ge.select_ops([g.b.op, g.b.op]), "b"),
        (lambda g: ge.select_ops(g.a), ""),
        (lambda g: ge.select_ops([g.a, g.b.op]), "b"),
        (lambda g: ge.select_ops(g.graph), "x a b c d w foo/x bar/parts"),
        (lambda g: ge.select_ops(g.b.op, g.graph), "b x a c d w foo/x bar/parts"),
        (lambda g: ge.select_ops([g.graph, g.graph]), "x a b c d w foo/x bar/parts"),
        (lambda g: ge.select_ops([g.b.op, "^a$"], graph=g.graph), "b a"),
        (lambda g: ge.select_ops(), ""),
        (lambda g: ge.select_ops([]), ""),
        (lambda g: ge.select_ops(g.b.op, graph=None), "b"),
        # positive_filter
        (
            lambda g: ge.select_ops(
                "^[abc]$", g.d.op, graph=g.graph, positive_filter=ge.op_type("Neg")
            ),
            "a",
        ),
        (
            lambda g: ge.select_ops(
                g.a.op, [g.c.op], positive_filter=lambda op: op.name != "a"
            ),
            "c",
        ),
        (lambda g: ge.select_ops(g.a.op, positive_filter=None), "a"),
    ],
)
def test_select_ops(setting, select, expected):
    def body():
        g = scoped()
        with looking():
            found = select(g)
            assert type(found) is list
            assert names(found) == expected.split()

    setting.run(body)


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (lambda g: ge.select_ts("parts:1", graph=g.graph), "bar/parts:1"),
        (lambda g: ge.select_ts("parts", graph=g.graph), "bar/parts:0 bar/parts:1"),
        (lambda g: ge.select_ts("parts$", graph=g.graph), ""),
        (lambda g: ge.select_ts(re.compile("^[ab]:"), graph=g.graph), "a:0 b:0"),
        (lambda g: ge.select_ts("^b:", "^[ab]:", graph=g.graph), "b:0 a:0"),
        (lambda g: ge.select_ts(["^b:", "^[ab]:"], graph=g.graph), "b:0 a:0"),
        (lambda g: ge.select_ts("(?#ts)^a:", graph=g.graph), "a:0"),
        (lambda g: ge.select_ts("(?#ops)^a", graph=g.graph), ""),
        (lambda g: ge.select_ts("(?#ops)^a", "^b:", graph=g.graph), "b:0"),
        (lambda g: ge.select_ts("^a:", graph=g.graph, restrict_ts_regex=True), ""),
        (
            lambda g: ge.select_ts(
                "^a:", "(?#ts)^b:", graph=g.graph, restrict_ts_regex=True
            ),
            "b:0",
        ),
        (lambda g: ge.select_ts("^a:", graph=g.graph, restrict_ts_regex=False), "a:0"),
        (lambda g: ge.select_ts(g.a), "a:0"),
        (lambda g: ge.select_ts(g.b, g.a, g.b), "b:0 a:0"),
        (lambda g: ge.select_ts([g.b, [g.a, (g.c,)]], g.d), "b:0 a:0 c:0 d:0"),
        (lambda g: ge.select_ts(g.a.op), ""),
        (lambda g: ge.select_ts([g.a.op, g.b]), "b:0"),
        (lambda g: ge.select_ts(g.bar), "bar/parts:0 bar/parts:1"),
        (
            lambda g: ge.select_ts(g.graph),
            "x:0 a:0 b:0 c:0 d:0 w:0 foo/x:0 bar/parts:0 bar/parts:1",
        ),
        (lambda g: ge.select_ts(), ""),
        (
            lambda g: ge.select_ts(
                "^[abc]:", graph=g.graph, positive_filter=lambda t: t.op.type == "Neg"
            ),
            "a:0",
        ),
        (
            lambda g: ge.select_ts(g.a, g.b, positive_filter=lambda t: t is g.b),
            "b:0",
        ),
    ],
)
def test_select_ts(setting, select, expected):
    def body():
        g = scoped()
        with looking():
            found = select(g)
            assert type(found) is list
            assert names(found) == expected.split()

    setting.run(body)


@pytest.mark.parametrize(
    ("select", "ops", "ts"),
    [
        (lambda g: ge.select_ops_and_ts("^[ab]", graph=g.graph), "a b bar/parts", ""),
        (
            lambda g: ge.select_ops_and_ts("^a", "(?#ts)^b:", graph=g.graph),
            "a",
            "b:0",
        ),
        (
            lambda g: ge.select_ops_and_ts("(?#ops)^a", "(?#ts)^a", graph=g.graph),
            "a",
            "a:0",
        ),
        (
            lambda g: ge.select_ops_and_ts(
                [g.d.op, g.c], re.compile("(?#ts)^b:"), "^x$", graph=g.graph
            ),
            "d x",
            "c:0 b:0",
        ),
        (lambda g: ge.select_ops_and_ts(g.a, g.b.op), "b", "a:0"),
        (lambda g: ge.select_ops_and_ts(), "", ""),
        (
            lambda g: ge.select_ops_and_ts(
                g.a, g.b.op, g.a.op, positive_filter=lambda e: "a" in e.name
            ),
            "a",
            "a:0",
        ),
    ],
)
def test_select_ops_and_ts(setting, select, ops, ts):
    def body():
        g = scoped()
        with looking():
            found = select(g)
            assert type(found) is tuple
            assert [names(part) for part in found] == [ops.split(), ts.split()]

    setting.run(body)


SELECTS = [ge.select_ops, ge.select_ts, ge.select_ops_and_ts, ge.make_view]


@pytest.mark.parametrize("select", SELECTS)
@pytest.mark.parametrize(
    ("call", "error", "builtin", "words"),
    [
        (
            lambda select, g, o: select("^a"),
            ge.SelectionError,
            ValueError,
            ["graph=", "^a"],
        ),
        (
            lambda select, g, o: select(g.a, re.compile("^b"), graph=None),
            ge.SelectionError,
            ValueError,
            ["graph=", "^b"],
        ),
        (
            lambda select, g, o: select("a(", graph=g.graph),
            ge.SelectionError,
            ValueError,
            ["a(", "re.escape"],
        ),
        (
            lambda select, g, o: select("^a", grahp=g.graph),
            ge.SelectionError,
            ValueError,
            ["grahp", "graph", "positive_filter"],
        ),
        (
            lambda select, g, o: select(g.a.op, filter=None),
            ge.SelectionError,
            ValueError,
            ["'filter'"],
        ),
        (
            lambda select, g, o: select(1),
            ge.ArgumentTypeError,
            TypeError,
            ["int"],
        ),
        (
            lambda select, g, o: select([g.a.op, g.b, None]),
            ge.ArgumentTypeError,
            TypeError,
            ["NoneType"],
        ),
        (
            lambda select, g, o: select("^a", graph="graph"),
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Graph", "str"],
        ),
        (
            lambda select, g, o: select(g.a.op, o.b.op, g.a, o.b),
            ge.SelectionError,
            ValueError,
            ["different graphs", "'b"],
        ),
        (
            lambda select, g, o: select([g.a.op, g.a], [[o.b.op, o.b]]),
            ge.SelectionError,
            ValueError,
            ["different graphs"],
        ),
    ],
)
def test_refusals(setting, select, call, error, builtin, words):
    other = other_graph()

    def body():
        g = scoped()
        with looking(), pytest.raises(error) as caught:
            call(select, g, other)
        assert isinstance(caught.value, ge.GeutilError)
        assert isinstance(caught.value, builtin)
        for word in words:
            assert word in str(caught.value)

    setting.run(body)


@pytest.mark.parametrize(
    "call",
    [
        lambda g, o: ge.select_ops(o.a.op, "^b$", graph=g.graph),
        lambda g, o: ge.select_ts(o.a, "^b:", graph=g.graph),
        lambda g, o: ge.select_ops(o.a.op, g.graph),
        lambda g, o: ge.select_ts(g.graph, o.a),
        lambda g, o: ge.select_ops(g.graph, o.graph),
        lambda g, o: ge.make_view(g.graph, o.graph),
        lambda g, o: ge.make_view(o.a, "^b$", graph=g.graph),
    ],
)
def test_mixed_graphs_are_refused_wherever_they_come_from(setting, call):
    other = other_graph()

    def body():
        g = scoped()
        with pytest.raises(ge.SelectionError, match="graph"):
            call(g, other)

    setting.run(body)


@pytest.mark.parametrize(
    "call",
    [
        lambda g: ge.select_ops_and_ts(g.a.op, restrict_ops_regex=True),
        lambda g: ge.select_ops_and_ts(g.a.op, restrict_ts_regex=True),
        lambda g: ge.make_view(g.a.op, restrict_ops_regex=True),
    ],
)
def test_restrictions_belong_to_one_kind_of_element(setting, call):
    def body():
        g = scoped()
        with pytest.raises(ge.SelectionError, match="restrict_"):
            call(g)

    setting.run(body)
