from types import SimpleNamespace

import tensorflow as tf

import geutil as ge
from tests.select import tables
from tests.select.samples import diamond, looking, other_graph
from tests.settings import default_graph, in_each_setting

FOUND = """
ge.make_view(c.op) => c | a b | c
ge.make_view([c.op, [d.op]]) => c d | a b | d
ge.make_view(c.op, d.op) => c d | a b | d
ge.make_view('^[cd]$', graph=graph) => c d | a b | d
ge.make_view(re.compile('^c$'), graph=graph) => c | a b | c
ge.make_view('^c$', '(?#ts)^x:', graph=graph) => c | a b x | c x
ge.make_view(c.op, x) => c | a b x | c x
ge.make_view(c.op, a) => c | a b | c
ge.make_view([a, b]) =>  | a b | a b
ge.make_view(a, graph=graph) =>  | a | a
ge.make_view(ge.sgv(c.op).inputs) =>  | a b | a b
ge.make_view(graph) => x a b c d w |  | d w
ge.make_view(c.op, d.op, x, positive_filter=lambda e: e.name == 'c') => c | a b | c
ge.make_view() =>  |  |
ge.make_view([]) =>  |  |
ge.make_view([], graph=graph) =>  |  |
"""


@in_each_setting
def test_make_view():
    g = diamond()
    tables.check_found(FOUND, g)
    assert len(ge.make_view(g.graph).passthroughs) == 0
    view = ge.sgv(g.c.op).remap_inputs([1])
    with looking():
        assert ge.make_view(view) is view
        assert ge.make_view(view, graph=g.graph) is view


REFUSED = """
ge.make_view(ge.sgv(other.c.op), graph=graph) => SelectionError: another graph
ge.make_view(other.c.op, graph=graph) => SelectionError: another graph
ge.make_view(other.c, graph=graph) => SelectionError: another graph
ge.make_view(c.op, other.c) => SelectionError: different graphs
ge.make_view(ge.sgv(c.op), graph='g') => ArgumentTypeError: tf.Graph
ge.make_view('^c$') => SelectionError: graph=
ge.make_view(3) => ArgumentTypeError: int
ge.make_view(None) => ArgumentTypeError: NoneType
ge.make_view(ge.sgv(c.op), ge.sgv(d.op)) => ArgumentTypeError: SubGraphView
ge.make_view(c.op, scope='c') => SelectionError: 'scope'
ge.make_view(ge.sgv(c.op), scope='c') => SelectionError: 'scope'
ge.make_view_from_scope('c', None) => ArgumentTypeError: tf.Graph
ge.make_view_from_scope('c', [c.op]) => ArgumentTypeError: tf.Graph
"""


@in_each_setting
def test_refusals():
    tables.check_refusals(REFUSED, diamond(), other=other_graph())


SCOPES = """
ge.make_view_from_scope('foo/bar', graph) => foo/bar/x foo/bar/y |  | foo/bar/y
ge.make_view_from_scope('foo/bar/', graph) => foo/bar/x foo/bar/y |  | foo/bar/y
ge.make_view_from_scope('foo/barn', graph) => foo/barn/z | foo/bar/y | foo/barn/z
ge.make_view_from_scope('foo', graph) => foo/bar/x foo/bar/y foo/barn/z |  | foo/barn/z
ge.make_view_from_scope('foo.bar', graph) =>  |  |
ge.make_view_from_scope('nowhere', graph) =>  |  |
"""


@in_each_setting
def test_make_view_from_scope():
    x = tf.constant(1.0, name="foo/bar/x")
    y = tf.negative(x, name="foo/bar/y")
    tf.negative(y, name="foo/barn/z")
    tables.check_found(SCOPES, SimpleNamespace(graph=default_graph()))
