import re

import pytest
import tensorflow as tf

import geutil as ge
from tests.select.samples import diamond, looking, other_graph
from tests.settings import names


def described(view):
    return [names(part) for part in (view.ops, view.inputs, view.outputs)]


@pytest.mark.parametrize(
    ("make", "ops", "inputs", "outputs"),
    [
        (lambda g: ge.make_view(g.c.op), "c", "a b", "c"),
        (lambda g: ge.make_view([g.c.op, [g.d.op]]), "c d", "a b", "d"),
        (lambda g: ge.make_view(g.c.op, g.d.op), "c d", "a b", "d"),
        (lambda g: ge.make_view("^[cd]$", graph=g.graph), "c d", "a b", "d"),
        (lambda g: ge.make_view(re.compile("^c$"), graph=g.graph), "c", "a b", "c"),
        (
            lambda g: ge.make_view("^c$", "(?#ts)^x:", graph=g.graph),
            "c",
            "a b x",
            "c x",
        ),
        (lambda g: ge.make_view(g.c.op, g.x), "c", "a b x", "c x"),
        (lambda g: ge.make_view(g.c.op, g.a), "c", "a b", "c"),
        (lambda g: ge.make_view([g.a, g.b]), "", "a b", "a b"),
        (lambda g: ge.make_view(g.a, graph=g.graph), "", "a", "a"),
        (lambda g: ge.make_view(ge.sgv(g.c.op).inputs), "", "a b", "a b"),
        (lambda g: ge.make_view(g.graph), "x a b c d w", "", "d w"),
        (
            lambda g: ge.make_view(
                g.c.op, g.d.op, g.x, positive_filter=lambda e: e.name == "c"
            ),
            "c",
            "a b",
            "c",
        ),
        (lambda g: ge.make_view(), "", "", ""),
        (lambda g: ge.make_view([]), "", "", ""),
        (lambda g: ge.make_view([], graph=g.graph), "", "", ""),
    ],
)
def test_make_view(setting, make, ops, inputs, outputs):
    def body():
        g = diamond()
        with looking():
            assert described(make(g)) == [
                ops.split(),
                [f"{name}:0" for name in inputs.split()],
                [f"{name}:0" for name in outputs.split()],
            ]

    setting.run(body)


def test_a_graph_makes_a_view_of_everything(setting):
    def body():
        g = diamond()
        view = ge.make_view(g.graph)
        assert len(view.passthroughs) == 0

    setting.run(body)


def test_a_view_is_returned_as_it_is(setting):
    def body():
        g = diamond()
        view = ge.sgv(g.c.op).remap_inputs([1])
        with looking():
            assert ge.make_view(view) is view
            assert ge.make_view(view, graph=g.graph) is view

    setting.run(body)


@pytest.mark.parametrize(
    ("make", "error", "builtin", "words"),
    [
        (
            lambda g, o: ge.make_view(ge.sgv(o.c.op), graph=g.graph),
            ge.SelectionError,
            ValueError,
            ["another graph"],
        ),
        (
            lambda g, o: ge.make_view(o.c.op, graph=g.graph),
            ge.SelectionError,
            ValueError,
            ["another graph"],
        ),
        (
            lambda g, o: ge.make_view(o.c, graph=g.graph),
            ge.SelectionError,
            ValueError,
            ["another graph"],
        ),
        (
            lambda g, o: ge.make_view(g.c.op, o.c),
            ge.SelectionError,
            ValueError,
            ["different graphs"],
        ),
        (
            lambda g, o: ge.make_view(ge.sgv(g.c.op), graph="g"),
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Graph"],
        ),
        (
            lambda g, o: ge.make_view("^c$"),
            ge.SelectionError,
            ValueError,
            ["graph="],
        ),
        (
            lambda g, o: ge.make_view(3),
            ge.ArgumentTypeError,
            TypeError,
            ["int"],
        ),
        (
            lambda g, o: ge.make_view(None),
            ge.ArgumentTypeError,
            TypeError,
            ["NoneType"],
        ),
        (
            lambda g, o: ge.make_view(ge.sgv(g.c.op), ge.sgv(g.d.op)),
            ge.ArgumentTypeError,
            TypeError,
            ["SubGraphView"],
        ),
        (
            lambda g, o: ge.make_view(g.c.op, scope="c"),
            ge.SelectionError,
            ValueError,
            ["'scope'"],
        ),
        (
            lambda g, o: ge.make_view(ge.sgv(g.c.op), scope="c"),
            ge.SelectionError,
            ValueError,
            ["'scope'"],
        ),
        (
            lambda g, o: ge.make_view_from_scope("c", None),
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Graph"],
        ),
        (
            lambda g, o: ge.make_view_from_scope("c", [g.c.op]),
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Graph"],
        ),
    ],
)
def test_refusals(setting, make, error, builtin, words):
    other = other_graph()

    def body():
        g = diamond()
        with looking(), pytest.raises(error) as caught:
            make(g, other)
        assert isinstance(caught.value, ge.GeutilError)
        assert isinstance(caught.value, builtin)
        for word in words:
            assert word in str(caught.value)

    setting.run(body)


@pytest.mark.parametrize(
    ("scope", "ops", "inputs", "outputs"),
    [
        ("foo/bar", "foo/bar/x foo/bar/y", "", "foo/bar/y:0"),
        ("foo/bar/", "foo/bar/x foo/bar/y", "", "foo/bar/y:0"),
        ("foo/barn", "foo/barn/z", "foo/bar/y:0", "foo/barn/z:0"),
        ("foo", "foo/bar/x foo/bar/y foo/barn/z", "", "foo/barn/z:0"),
        ("foo.bar", "", "", ""),
        ("nowhere", "", "", ""),
    ],
)
def test_make_view_from_scope(setting, scope, ops, inputs, outputs):
    def body():
        x = tf.constant(1.0, name="foo/bar/x")
        y = tf.negative(x, name="foo/bar/y")
        tf.negative(y, name="foo/barn/z")
        with looking():
            view = ge.make_view_from_scope(scope, x.graph)
            assert described(view) == [ops.split(), inputs.split(), outputs.split()]

    setting.run(body)


def test_short_names_and_submodules():
    assert ge.sgv is ge.make_view is ge.subgraph.make_view
    assert ge.sgv_scope is ge.make_view_from_scope is ge.subgraph.make_view_from_scope
    assert ge.SubGraphView is ge.subgraph.SubGraphView
    assert ge.OpMatcher is ge.match.OpMatcher
    assert ge.op_type is ge.match.op_type
    assert ge.ControlOutputs is ge.util.ControlOutputs
    for name in ("make_list_of_op", "make_list_of_t", "get_tensors"):
        assert getattr(ge, name) is getattr(ge.util, name)
    for name in ("get_generating_ops", "get_consuming_ops"):
        assert getattr(ge, name) is getattr(ge.util, name)
    # What the old module did not have is not among the short names.
    for name in {*ge.select.__all__} - {"by_device"}:
        assert getattr(ge, name, None) is getattr(ge.select, name)
