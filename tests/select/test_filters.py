import re
from types import SimpleNamespace

import pytest
import tensorflow as tf

import geutil as ge
from geutil.errors import ArgumentTypeError, SelectionError
from geutil.select import by_device
from tests.select import tables
from tests.select.samples import diamond, other_graph
from tests.settings import default_graph, in_each_setting, names

SCOPED = "top foo/bar/x foo/bar foo/bar/deep/y foo/barn/z foo a.b/u axb/v bar/t"
IN_SCOPE = f"""
scope('foo/bar') => foo/bar/x foo/bar foo/bar/deep/y
scope('foo/bar/') => foo/bar/x foo/bar foo/bar/deep/y
scope('foo') => foo/bar/x foo/bar foo/bar/deep/y foo/barn/z foo
scope('foo/bar/deep') => foo/bar/deep/y
scope('foo/bar/x') => foo/bar/x
scope('foo/ba') =>
scope('bar') => bar/t
scope('a.b') => a.b/u
scope('fo.') =>
scope('foo/(bar|barn)') =>
scope('.*') =>
scope('foo/bar(') =>
scope('FOO') =>
scope('') => {SCOPED}
"""
SEARCHED = rf"""
ops('bar') => foo/bar/x foo/bar foo/bar/deep/y foo/barn/z bar/t
ops('bar$') => foo/bar
ops('^foo(/.*)?$') => foo/bar/x foo/bar foo/bar/deep/y foo/barn/z foo
ops('a.b') => a.b/u axb/v
ops(r'a\.b') => a.b/u
ops('BAR') =>
ops(re.compile('^BAR', re.IGNORECASE)) => bar/t
ops('') => {SCOPED}
ts('bar') => foo/bar/x foo/bar foo/bar/deep/y foo/barn/z bar/t
ts('bar:0$') => foo/bar
ts('bar$') =>
ts(r'^foo(/.*)?:\d+$') => foo/bar/x foo/bar foo/bar/deep/y foo/barn/z foo
ts(re.compile('^BAR', re.IGNORECASE)) => bar/t
ts('') => {SCOPED}
ts(':0$') => {SCOPED}
"""


def scoped():
    for name in SCOPED.split():
        tf.constant(1.0, name=name)
    graph = default_graph()
    assert names(graph.get_operations()) == SCOPED.split()
    return SimpleNamespace(graph=graph)


@in_each_setting
def test_names():
    g = scoped()
    ops = g.graph.get_operations()

    def scope(name):
        found = ge.get_name_scope_ops(g.graph, name)
        assert ge.get_name_scope_ops(ops, name) == found
        assert ge.get_name_scope_ops(reversed(ops), name) == found[::-1]
        return found

    tables.check_found(IN_SCOPE, g, scope=scope)
    searches = {
        "ops": lambda regex: ge.filter_ops_from_regex(g.graph, regex),
        "ts": lambda regex: ge.filter_ts_from_regex(g.graph, regex),
    }
    tables.check_found(SEARCHED, g, **searches)
    parts = tf.unstack(tf.constant([1.0, 2.0], name="numbers"), name="parts")
    assert names(searches["ts"](":1$")) == names(parts[1:])
    assert names(searches["ts"]("^parts:")) == names(parts)
    assert searches["ts"]("^parts$") == []


FILTERED = """
ge.filter_ops(graph, True) => x a b c d w
ge.filter_ops([c.op, a.op, c.op], True) => c a c
ge.filter_ops(c.op, True) => c
ge.filter_ops([], True) =>
ge.filter_ops(graph, lambda op: len(op.inputs) == 1) => a b d
ge.filter_ops(graph, lambda op: op.name > 'c') => x d w
ge.filter_ops(graph, lambda op: None) =>
ge.filter_ops(graph, lambda op: 'truthy') => x a b c d w
ge.filter_ops([d.op, a.op], True) => d a
ge.filter_ops(graph, ge.op_type('Neg')) => a
ge.filter_ops(graph, ge.OpMatcher('a')) => a
ge.filter_ts(graph, True) => x a b c d w
ge.filter_ts(c.op, True) => a b c
ge.filter_ts([d.op, c.op], True) => c d a b
ge.filter_ts([a.op, b.op], True) => x a b
ge.filter_ts([], True) =>
ge.filter_ts(graph, lambda t: t.consumers()) => x a b c
ge.filter_ts(c.op, lambda t: t.op.type == 'Neg') => a
ge.filter_ts(graph, lambda t: None) =>
"""


@in_each_setting
def test_filters():
    g = diamond()
    tables.check_found(FILTERED, g)
    # The filter sees each element itself.
    seen_ops, seen_ts = [], []
    ge.filter_ops(g.c.op, seen_ops.append)
    ge.filter_ts(g.c.op, seen_ts.append)
    assert seen_ops == [g.c.op]
    assert [id(t) for t in seen_ts] == [id(g.a), id(g.b), id(g.c)]


REFUSED = """
find('x') => ArgumentTypeError
find(x) => ArgumentTypeError
find(None) => ArgumentTypeError
find([x.op, other.a.op]) => SelectionError
"""
REFUSED_REGEXES = """
find(graph, None) => SelectionError
find(graph, 1) => SelectionError
find(graph, '(') => SelectionError
"""


@in_each_setting
def test_refusals():
    other = other_graph()
    finds = (ge.filter_ops_from_regex, ge.filter_ts_from_regex)
    g = diamond()
    for find in (ge.filter_ops, ge.filter_ts):
        refused = REFUSED.replace(") =>", ", True) =>")
        tables.check_refusals(refused, g, find=find, other=other)
    for find in (*finds, ge.get_name_scope_ops):
        refused = REFUSED.replace(") =>", ", 'x') =>")
        tables.check_refusals(refused, g, find=find, other=other)
    for find in finds:
        tables.check_refusals(REFUSED_REGEXES, g, find=find)


def test_can_be_regex():
    assert all(map(ge.can_be_regex, ("^foo/", "", re.compile("foo"))))
    others = (b"foo", 1, None, ["foo"], re.compile("foo").search)
    assert not any(map(ge.can_be_regex, others))


def test_make_regex():
    made = ge.make_regex("^fo+$")
    assert isinstance(made, re.Pattern)
    assert made.search("foo")
    assert not made.search("bar")
    regex = re.compile("foo", re.IGNORECASE)
    assert ge.make_regex(regex) is regex


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1, ["regex", "int"]),
        (None, ["regex", "NoneType"]),
        (b"foo", ["regex", "bytes"]),
        ("foo(", ["foo(", "re.escape"]),
        ("*", ["'*'", "re.escape"]),
    ],
)
def test_make_regex_refuses(value, words):
    with pytest.raises(ge.SelectionError) as caught:
        ge.make_regex(value)
    assert isinstance(caught.value, tables.BUILTINS[ge.SelectionError])
    assert all(word in str(caught.value) for word in words)


DEVICES = [
    "",
    "/device:CPU:0",
    "/job:worker/replica:0/task:0/device:CPU:0",
    "/job:worker/replica:0/task:1/device:GPU:1",
    "/job:ps/task:1/cpu:0",
]
# The devices that each pattern stands for.
PATTERNS = {
    "": [0],
    "/job:worker": [2, 3],
    "/job:worker/task:*": [2, 3],
    "/task:1": [3, 4],
    "/job:*/task:1": [3, 4],
    "/device:CPU:0": [1, 2, 4],
    "/gpu:*": [3],
    "/device:*:0": [1, 2, 4],
    "/replica:0": [2, 3],
    "/job:chief": [],
}


def test_ops_of_a_device():
    with tf.Graph().as_default():
        ops = []
        for device in DEVICES:
            with tf.device(device):
                ops.append(tf.constant(1.0).op)
    found = {
        p: list(map(ops.index, ge.filter_ops(ops, by_device(p)))) for p in PATTERNS
    }
    assert found == PATTERNS
    with pytest.raises(SelectionError, match="'worker' is no device"):
        by_device("worker")
    with pytest.raises(ArgumentTypeError, match="a device is a text"):
        by_device(None)
