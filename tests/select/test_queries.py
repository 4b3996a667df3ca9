"""Queries and matchers find the ops that a loop over the graph finds."""

from types import SimpleNamespace

import tensorflow as tf

import geutil as ge
from tests.select import tables
from tests.select.samples import diamond, looking, many_readers, other_graph
from tests.settings import in_each_setting, names


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


TYPES = """
ge.op_type('Add', Add) => True
ge.op_type('AddV2', AddV2) => True
ge.op_type('Add', AddV2) => False
ge.op_type('add', Add) => False
ge.op_type('Add|Neg', Add) => False
ge.op_type('.*', Neg) => False
ge.op_type(['Add', 'AddV2'], AddV2) => True
ge.op_type(['Add', 'AddV2'], AddN) => False
ge.op_type({'Neg'}, Neg) => True
ge.op_type([], Neg) => False
ge.op_type(iter(['Add', 'Neg']), Neg) => True
"""


def test_op_type():
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0)
        tf.raw_ops.Neg(x=x, name="Neg")
        tf.raw_ops.Add(x=x, y=x, name="Add")
        tf.raw_ops.AddV2(x=x, y=x, name="AddV2")
        tf.raw_ops.AddN(inputs=[x, x], name="AddN")
    ops = {op.type: op for op in graph.get_operations()}
    sample = SimpleNamespace(graph=graph, **ops)

    def check(call, result):
        assert str(tables.evaluate(call, sample)) == result

    tables.check_rows(TYPES, check)
    # Without an op it is a predicate, which keeps the types of an iterator.
    predicate = ge.op_type(iter(["Neg", "AddN"]))
    for _ in range(2):
        assert names(ge.filter_ops(graph, predicate)) == ["Neg", "AddN"]


POSITIVE = r"""
# A string: the whole name, or all that follows its last slash.
matches('Add', 'Add') => True
matches('Add', 'scope/Add') => True
matches('Add', 'AddN') => False
matches('Add', 'scope/Add_1') => False
matches('Add', 'Add/x') => False
matches('scope/Add', 'scope/Add') => True
matches('scope/Add', 'big/scope/Add') => False
matches('Add.*', 'Add_1') => True
matches('.*/Add', 'scope/Add') => True
matches('add', 'Add') => False
# A compiled regex is searched.
matches(re.compile('Add'), 'scope/BiasAdd_1') => True
matches(re.compile('^Add$'), 'scope/Add') => False
matches(re.compile('/Add$'), 'scope/Add') => True
# A predicate, or anything.
matches(lambda op: op.name.endswith('1'), 'Add_1') => True
matches(lambda op: op.name.endswith('1'), 'Add') => False
matches(ge.op_type('Const'), 'Add') => True
matches(ge.op_type('Con'), 'Add') => False
matches(True, 'Add') => True
"""


@in_each_setting
def test_op_matcher():
    def check(call, result):
        def matches(wanted, name):
            with tf.Graph().as_default():
                op = tf.constant(1.0, name=name).op
                assert op.name == name
                with looking():
                    return ge.OpMatcher(wanted)(op)

        assert str(tables.evaluate(call, diamond(), matches=matches)) == result

    tables.check_rows(POSITIVE, check)


NEIGHBOURS = """
ge.filter_ops(graph, ge.OpMatcher(a.op)) => a
ge.filter_ops(graph, any_op().input_ops('a', 'b')) => c
ge.filter_ops(graph, any_op().input_ops('b', 'a')) =>
ge.filter_ops(graph, any_op().input_ops('a', 'b', True)) =>
ge.filter_ops(graph, any_op().input_ops('a', None)) => c
ge.filter_ops(graph, any_op().input_ops(None)) => a b d
ge.filter_ops(graph, any_op().input_ops()) => x w
ge.filter_ops(graph, any_op().input_ops(x.op)) => a b
ge.filter_ops(graph, any_op().input_ops(re.compile('[xc]'))) => a b d
ge.filter_ops(graph, ge.OpMatcher('b').input_ops('x')) => b
ge.filter_ops(graph, ge.OpMatcher('b').input_ops('a')) =>
ge.filter_ops(graph,
    any_op().input_ops(ge.OpMatcher(ge.op_type('Neg')).input_ops('x'),
    ge.op_type('Square'))) => c
ge.filter_ops(graph,
    any_op().input_ops(any_op().input_ops(ge.OpMatcher('a').input_ops('x'), 'b'))) => d
ge.filter_ops(graph,
    any_op().input_ops(any_op().input_ops(ge.OpMatcher('a').input_ops('w'), 'b'))) =>
ge.filter_ops(graph, any_op().output_ops('c')) => a b
ge.filter_ops(graph, any_op().output_ops(['a', 'b'])) => x
ge.filter_ops(graph, any_op().output_ops(['b', 'a'])) =>
ge.filter_ops(graph, any_op().output_ops(['a', None])) => x
ge.filter_ops(graph, any_op().output_ops('a')) =>
ge.filter_ops(graph, any_op().output_ops([])) => d w
ge.filter_ops(graph, any_op().output_ops(None)) => x a b c d w
ge.filter_ops(graph, any_op().output_ops(None, None)) =>
ge.filter_ops(graph, any_op().output_ops(ge.OpMatcher('c').output_ops('d'))) => a b
ge.filter_ops(graph, ge.OpMatcher('a').output_ops('c').input_ops('x')) => a
ge.filter_ops(graph, ge.OpMatcher('a').output_ops('c').input_ops('b')) =>
ge.filter_ops(graph, any_op().control_input_ops('a')) => w
ge.filter_ops(graph, any_op().control_input_ops(None)) => w
ge.filter_ops(graph, any_op().control_input_ops('a', None)) =>
ge.filter_ops(graph, any_op().control_input_ops()) => x a b c d
ge.filter_ops(graph, any_op().control_input_ops(ge.OpMatcher('a').input_ops('x'))) => w
ge.filter_ops(graph,
    ge.OpMatcher('w').input_ops().output_ops([]).control_input_ops('a')) => w
"""


def test_neighbours(setting):
    def any_op():
        return ge.OpMatcher(True)

    setting.run(lambda: tables.check_found(NEIGHBOURS, diamond(), any_op=any_op))


@in_each_setting
def test_consumers_are_matched_in_graph_order():
    source, readers = many_readers(30)
    wanted = [t.op for t in readers]
    assert ge.OpMatcher(True).output_ops(wanted)(source.op)
    assert not ge.OpMatcher(True).output_ops(wanted[::-1])(source.op)
    # One that reads twice is one; those of several outputs come output by output.
    x = tf.constant([1.0, 2.0], name="x")
    tf.add(x, x, name="twice")
    assert ge.OpMatcher("x").output_ops("twice")(x.op)
    parts = tf.unstack(x, name="parts")
    tf.negative(parts[0], name="left")
    tf.negative(parts[1], name="right")
    with looking():
        op = parts[0].op
        assert ge.OpMatcher("parts").output_ops("left", "right")(op)
        assert ge.OpMatcher("parts").output_ops(None, "right")(op)
        assert not ge.OpMatcher("parts").output_ops("right", "left")(op)
        assert not ge.OpMatcher("parts").output_ops("left")(op)


REFUSED_MATCHERS = """
ge.op_type('Neg', 'Neg') => ArgumentTypeError: tf.Operation
ge.op_type('Neg', 1) => ArgumentTypeError: tf.Operation
ge.op_type('Neg', []) => ArgumentTypeError: tf.Operation
ge.op_type('Neg')('Neg') => ArgumentTypeError: tf.Operation
ge.op_type('Neg')(1) => ArgumentTypeError: tf.Operation
ge.op_type('Neg')([]) => ArgumentTypeError: tf.Operation
ge.OpMatcher(True)(a) => ArgumentTypeError: tf.Operation
ge.OpMatcher(True)('a') => ArgumentTypeError: tf.Operation
ge.OpMatcher(True)(None) => ArgumentTypeError: tf.Operation
ge.OpMatcher(None) => SelectionError: predicate
ge.OpMatcher(1) => SelectionError: predicate
ge.OpMatcher(False) => SelectionError: predicate
ge.OpMatcher(['a']) => SelectionError: predicate
ge.OpMatcher(object()) => SelectionError: predicate
ge.OpMatcher('a(') => SelectionError: re.escape
# Each kind of neighbour is asked for once.
ge.OpMatcher(True).input_ops('a').input_ops('b')
    => SelectionError: input_ops; make a new one
ge.OpMatcher(True).output_ops('a').output_ops('b')
    => SelectionError: output_ops; make a new one
ge.OpMatcher(True).control_input_ops('a').control_input_ops('b')
    => SelectionError: control_input_ops; make a new one
"""


@in_each_setting
def test_refusals_of_matchers():
    tables.check_refusals(REFUSED_MATCHERS, diamond())
