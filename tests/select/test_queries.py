import tensorflow as tf

import geutil as ge
from tests.select import tables
from tests.select.samples import diamond, other_graph
from tests.settings import in_each_setting


def scoped():
    """Make a diamond, foo/x, and bar/parts, which reads it and has two outputs."""
    g = diamond()
    g.foo = tf.constant([7.0, 8.0], name="foo/x")
    g.bar = tf.unstack(g.foo, name="bar/parts")
    return g


FOUND = """
# Regexes are searched, not matched.
ops('oo/', graph=graph) => foo/x
ops('^oo/', graph=graph) =>
ops('^[ab]$', graph=graph) => a b
ops(re.compile('FOO', re.I), graph=graph) => foo/x
# Argument by argument, each op once.
ops('^b$', '^a$', graph=graph) => b a
ops(['^b$', '^[ab]$'], graph=graph) => b a
ops(['^b$', ['^b$']], graph=graph) => b
# Tags.
ops('(?#ops)^a$', graph=graph) => a
ops('(?#ts)^a:0$', graph=graph) =>
ops('(?#ts)^a', '^b$', graph=graph) => b
ops(re.compile('(?#ts)^a'), '^b$', graph=graph) => b
ops('^a$', graph=graph, restrict_ops_regex=True) =>
ops('^a$', '(?#ops)^b$', graph=graph, restrict_ops_regex=True) => b
# Ops, tensors, lists and graphs.
ops(b.op) => b
ops(b.op, a.op, b.op) => b a
ops([b.op, [a.op, (c.op,)]], d.op) => b a c d
ops(a) =>
ops([a, b.op]) => b
ops(graph) => x a b c d w foo/x bar/parts
ops(b.op, graph) => b x a c d w foo/x bar/parts
ops([b.op, '^a$'], graph=graph) => b a
ops() =>
# positive_filter
ops('^[abc]$', d.op, graph=graph, positive_filter=ge.op_type('Neg')) => a
ops(a.op, [c.op], positive_filter=lambda op: op.name != 'a') => c
ops(a.op, positive_filter=None) => a
ts('parts', graph=graph) => bar/parts bar/parts:1
ts('parts$', graph=graph) =>
ts(re.compile('^[ab]:'), graph=graph) => a b
ts(['^b:', '^[ab]:'], graph=graph) => b a
ts('(?#ts)^a:', graph=graph) => a
ts('(?#ops)^a', graph=graph) =>
ts('(?#ops)^a', '^b:', graph=graph) => b
ts('^a:', graph=graph, restrict_ts_regex=True) =>
ts('^a:', '(?#ts)^b:', graph=graph, restrict_ts_regex=True) => b
ts(a) => a
ts(b, a, b) => b a
ts([b, [a, (c,)]], d) => b a c d
ts(a.op) =>
ts([a.op, b]) => b
ts(bar) => bar/parts bar/parts:1
ts(graph) => x a b c d w foo/x bar/parts bar/parts:1
ts() =>
ts('^[abc]:', graph=graph, positive_filter=lambda t: t.op.type == 'Neg') => a
ts(a, b, positive_filter=lambda t: t is b) => b
both('^[ab]', graph=graph) => a b bar/parts |
both('^a', '(?#ts)^b:', graph=graph) => a | b
both('(?#ops)^a', '(?#ts)^a', graph=graph) => a | a
both([d.op, c], re.compile('(?#ts)^b:'), '^x$', graph=graph) => d x | c b
both(a, b.op) => b | a
both() =>  |
both(a, b.op, a.op, positive_filter=lambda e: 'a' in e.name) => a | a
"""
SELECTS = {"ops": ge.select_ops, "ts": ge.select_ts, "both": ge.select_ops_and_ts}


@in_each_setting
def test_select():
    tables.check_found(FOUND, scoped(), **SELECTS)


REFUSED = """
select('^a') => SelectionError: graph=; ^a
select(a, re.compile('^b'), graph=None) => SelectionError: graph=; ^b
select('a(', graph=graph) => SelectionError: a(; re.escape
select('^a', grahp=graph) => SelectionError: grahp; graph; positive_filter
select(a.op, filter=None) => SelectionError: 'filter'
select(1) => ArgumentTypeError: int
select([a.op, b, None]) => ArgumentTypeError: NoneType
select('^a', graph='graph') => ArgumentTypeError: tf.Graph; str
select(a.op, other.b.op, a, other.b) => SelectionError: different graphs; 'b
select([a.op, a], [[other.b.op, other.b]]) => SelectionError: different graphs
"""
REFUSED_ONCE = """
# Mixed graphs, wherever they come from.
ge.select_ops(other.a.op, '^b$', graph=graph) => SelectionError: graph
ge.select_ts(other.a, '^b:', graph=graph) => SelectionError: graph
ge.select_ops(other.a.op, graph) => SelectionError: graph
ge.select_ts(graph, other.a) => SelectionError: graph
ge.select_ops(graph, other.graph) => SelectionError: graph
ge.make_view(graph, other.graph) => SelectionError: graph
ge.make_view(other.a, '^b$', graph=graph) => SelectionError: graph
# Restrictions belong to one kind of element.
ge.select_ops_and_ts(a.op, restrict_ops_regex=True) => SelectionError: restrict_
ge.select_ops_and_ts(a.op, restrict_ts_regex=True) => SelectionError: restrict_
ge.make_view(a.op, restrict_ops_regex=True) => SelectionError: restrict_
"""


@in_each_setting
def test_refusals():
    other = other_graph()
    g = scoped()
    for select in (*SELECTS.values(), ge.make_view):
        tables.check_refusals(REFUSED, g, select=select, other=other)
    tables.check_refusals(REFUSED_ONCE, g, other=other)
