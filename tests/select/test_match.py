from types import SimpleNamespace

import tensorflow as tf

import geutil as ge
from tests.select import tables
from tests.select.samples import diamond, looking, many_readers
from tests.settings import in_each_setting, names

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


REFUSED = """
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
def test_refusals():
    tables.check_refusals(REFUSED, diamond())
