import re

import pytest
import tensorflow as tf

import geutil as ge
from geutil.errors import ArgumentTypeError, SelectionError
from geutil.select import by_device
from tests.select.samples import diamond, looking, other_graph
from tests.settings import default_graph, names

SCOPED = [
    "top",
    "foo/bar/x",
    "foo/bar",
    "foo/bar/deep/y",
    "foo/barn/z",
    "foo",
    "a.b/u",
    "axb/v",
    "bar/t",
]


def scoped():
    for name in SCOPED:
        tf.constant(1.0, name=name)
    graph = default_graph()
    assert names(graph.get_operations()) == SCOPED
    return graph


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("foo/bar", ["foo/bar/x", "foo/bar", "foo/bar/deep/y"]),
        ("foo/bar/", ["foo/bar/x", "foo/bar", "foo/bar/deep/y"]),
        ("foo/barn", ["foo/barn/z"]),
        ("foo", ["foo/bar/x", "foo/bar", "foo/bar/deep/y", "foo/barn/z", "foo"]),
        ("foo/bar/deep", ["foo/bar/deep/y"]),
        ("foo/bar/x", ["foo/bar/x"]),
        ("foo/ba", []),
        ("fo", []),
        ("oo", []),
        ("bar", ["bar/t"]),
        ("deep", []),
        ("a.b", ["a.b/u"]),
        ("a.b/", ["a.b/u"]),
        ("axb", ["axb/v"]),
        ("fo.", []),
        ("foo.bar", []),
        ("foo/(bar|barn)", []),
        ("foo|bar", []),
        (".*", []),
        ("foo/bar(", []),
        ("[", []),
        ("FOO", []),
        ("", SCOPED),
    ],
)
def test_get_name_scope_ops(setting, scope, expected):
    def body():
        graph = scoped()
        with looking():
            assert names(ge.get_name_scope_ops(graph, scope)) == expected
            ops = graph.get_operations()
            assert names(ge.get_name_scope_ops(ops, scope)) == expected
            backward = ge.get_name_scope_ops(reversed(ops), scope)
            assert names(backward) == expected[::-1]

    setting.run(body)


@pytest.mark.parametrize(
    ("regex", "expected"),
    [
        ("bar", ["foo/bar/x", "foo/bar", "foo/bar/deep/y", "foo/barn/z", "bar/t"]),
        ("^bar", ["bar/t"]),
        ("bar$", ["foo/bar"]),
        ("^foo(/.*)?$", SCOPED[1:6]),
        ("a.b", ["a.b/u", "axb/v"]),
        (r"a\.b", ["a.b/u"]),
        ("BAR", []),
        (re.compile("^BAR", re.IGNORECASE), ["bar/t"]),
        ("", SCOPED),
        ("nowhere", []),
    ],
)
def test_filter_ops_from_regex_searches(setting, regex, expected):
    def body():
        graph = scoped()
        with looking():
            assert names(ge.filter_ops_from_regex(graph, regex)) == expected

    setting.run(body)


@pytest.mark.parametrize(
    ("regex", "expected"),
    [
        ("bar", ["foo/bar/x", "foo/bar", "foo/bar/deep/y", "foo/barn/z", "bar/t"]),
        ("bar:0$", ["foo/bar"]),
        ("bar$", []),
        (r"^foo(/.*)?:\d+$", SCOPED[1:6]),
        (r"a\.b", ["a.b/u"]),
        (re.compile("^BAR", re.IGNORECASE), ["bar/t"]),
        ("", SCOPED),
    ],
)
def test_filter_ts_from_regex_searches(setting, regex, expected):
    def body():
        graph = scoped()
        with looking():
            found = ge.filter_ts_from_regex(graph, regex)
            assert names(found) == [f"{name}:0" for name in expected]

    setting.run(body)


def test_filter_ts_from_regex_sees_the_index(setting):
    def body():
        tf.unstack(tf.constant([1.0, 2.0], name="x"), name="parts")
        graph = default_graph()
        with looking():
            assert names(ge.filter_ts_from_regex(graph, ":1$")) == ["parts:1"]
            assert names(ge.filter_ts_from_regex(graph, "^parts:")) == [
                "parts:0",
                "parts:1",
            ]
            assert ge.filter_ts_from_regex(graph, "^parts$") == []

    setting.run(body)


@pytest.mark.parametrize(
    ("ops", "keep", "expected"),
    [
        (lambda g: g.graph, True, ["x", "a", "b", "c", "d", "w"]),
        (lambda g: [g.c.op, g.a.op, g.c.op], True, ["c", "a", "c"]),
        (lambda g: g.c.op, True, ["c"]),
        (lambda g: [], True, []),
        (lambda g: g.graph, lambda op: len(op.inputs) == 1, ["a", "b", "d"]),
        (lambda g: g.graph, lambda op: op.name > "c", ["x", "d", "w"]),
        (lambda g: g.graph, lambda op: None, []),
        (lambda g: g.graph, lambda op: "truthy", ["x", "a", "b", "c", "d", "w"]),
        (lambda g: [g.d.op, g.a.op], lambda op: True, ["d", "a"]),
        (lambda g: g.graph, ge.op_type("Neg"), ["a"]),
        (lambda g: g.graph, ge.OpMatcher("a"), ["a"]),
    ],
)
def test_filter_ops(setting, ops, keep, expected):
    def body():
        g = diamond()
        with looking():
            assert names(ge.filter_ops(ops(g), keep)) == expected

    setting.run(body)


@pytest.mark.parametrize(
    ("ops", "keep", "expected"),
    [
        (lambda g: g.graph, True, ["x:0", "a:0", "b:0", "c:0", "d:0", "w:0"]),
        (lambda g: g.c.op, True, ["a:0", "b:0", "c:0"]),
        (lambda g: [g.d.op, g.c.op], True, ["c:0", "d:0", "a:0", "b:0"]),
        (lambda g: [g.a.op, g.b.op], True, ["x:0", "a:0", "b:0"]),
        (lambda g: [], True, []),
        (lambda g: g.graph, lambda t: t.consumers(), ["x:0", "a:0", "b:0", "c:0"]),
        (lambda g: g.c.op, lambda t: t.op.type == "Neg", ["a:0"]),
        (lambda g: g.graph, lambda t: None, []),
    ],
)
def test_filter_ts(setting, ops, keep, expected):
    def body():
        g = diamond()
        with looking():
            assert names(ge.filter_ts(ops(g), keep)) == expected

    setting.run(body)


def test_the_filter_sees_each_element_itself(setting):
    def body():
        g = diamond()
        seen_ops, seen_ts = [], []
        ge.filter_ops(g.c.op, seen_ops.append)
        ge.filter_ts(g.c.op, seen_ts.append)
        assert seen_ops == [g.c.op]
        assert [id(t) for t in seen_ts] == [id(g.a), id(g.b), id(g.c)]

    setting.run(body)


@pytest.mark.parametrize(
    "call",
    [
        lambda ops: ge.filter_ops(ops, True),
        lambda ops: ge.filter_ts(ops, True),
        lambda ops: ge.filter_ops_from_regex(ops, "x"),
        lambda ops: ge.filter_ts_from_regex(ops, "x"),
        lambda ops: ge.get_name_scope_ops(ops, "x"),
    ],
)
@pytest.mark.parametrize(
    ("ops", "error"),
    [
        (lambda g, o: "x", ge.ArgumentTypeError),
        (lambda g, o: g.x, ge.ArgumentTypeError),
        (lambda g, o: None, ge.ArgumentTypeError),
        (lambda g, o: [g.x.op, o.a.op], ge.SelectionError),
    ],
)
def test_refuses_what_is_not_made_of_ops(setting, call, ops, error):
    other = other_graph()

    def body():
        g = diamond()
        with looking(), pytest.raises(error):
            call(ops(g, other))

    setting.run(body)


@pytest.mark.parametrize("find", [ge.filter_ops_from_regex, ge.filter_ts_from_regex])
@pytest.mark.parametrize("regex", [None, 1, "("])
def test_refuses_what_is_no_regex(setting, find, regex):
    def body():
        g = diamond()
        with pytest.raises(ge.SelectionError):
            find(g.graph, regex)

    setting.run(body)


DEVICES = [
    "",
    "/device:CPU:0",
    "/job:worker/replica:0/task:0/device:CPU:0",
    "/job:worker/replica:0/task:1/device:GPU:1",
    "/job:ps/task:1/cpu:0",
]


@pytest.mark.parametrize(
    ("pattern", "passed"),
    [
        ("", [0]),
        ("/job:worker", [2, 3]),
        ("/job:worker/task:*", [2, 3]),
        ("/task:1", [3, 4]),
        ("/job:*/task:1", [3, 4]),
        ("/device:CPU:0", [1, 2, 4]),
        ("/gpu:*", [3]),
        ("/device:*:0", [1, 2, 4]),
        ("/replica:0", [2, 3]),
        ("/job:chief", []),
    ],
)
def test_ops_of_a_device(pattern, passed):
    with tf.Graph().as_default() as graph:
        for i, device in enumerate(DEVICES):
            with tf.device(device):
                tf.constant(1.0, name=f"x{i}")
    names = [op.name for op in ge.filter_ops(graph, by_device(pattern))]
    assert names == [f"x{i}" for i in passed]


def test_what_is_no_device_is_refused():
    with pytest.raises(SelectionError, match="'worker' is no device"):
        by_device("worker")
    with pytest.raises(ArgumentTypeError, match="a device is a text"):
        by_device(None)
