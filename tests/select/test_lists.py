import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.graph.types import as_list
from geutil.select.conversions import (
    ListView,
    check_graphs,
    get_unique_graph,
    is_iterable,
)
from tests.select.samples import diamond, looking, many_readers, other_graph
from tests.settings import names

ALL_OPS = ["x", "a", "b", "c", "d", "w"]
ALL_TS = [f"{name}:0" for name in ALL_OPS]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda g: ge.make_list_of_op(g.a.op), ["a"]),
        (lambda g: ge.make_list_of_op([g.b.op, g.a.op]), ["b", "a"]),
        (lambda g: ge.make_list_of_op((g.b.op, g.b.op)), ["b", "b"]),
        (lambda g: ge.make_list_of_op(t.op for t in (g.b, g.a)), ["b", "a"]),
        (lambda g: ge.make_list_of_op({g.b.op}), ["b"]),
        (lambda g: ge.make_list_of_op({g.b.op: 1}), ["b"]),
        (lambda g: ge.make_list_of_op(ListView([g.a.op])), ["a"]),
        (lambda g: ge.make_list_of_op(g.graph), ALL_OPS),
        (lambda g: ge.make_list_of_op([]), []),
        (lambda g: ge.make_list_of_op(()), []),
        (lambda g: ge.make_list_of_op([g.a.op, g.b], ignore_ts=True), ["a"]),
        (lambda g: ge.make_list_of_op(g.b, ignore_ts=True), []),
        (lambda g: ge.make_list_of_t(g.a), ["a:0"]),
        (lambda g: ge.make_list_of_t([g.b, g.a]), ["b:0", "a:0"]),
        (lambda g: ge.make_list_of_t((g.b, g.b)), ["b:0", "b:0"]),
        (lambda g: ge.make_list_of_t(t for t in (g.b, g.a)), ["b:0", "a:0"]),
        (lambda g: ge.make_list_of_t(g.c.op.inputs), ["a:0", "b:0"]),
        (lambda g: ge.make_list_of_t(ge.sgv(g.c.op).inputs), ["a:0", "b:0"]),
        (lambda g: ge.make_list_of_t(g.graph), ALL_TS),
        (lambda g: ge.make_list_of_t([]), []),
        (lambda g: ge.make_list_of_t([g.a.op, g.b], ignore_ops=True), ["b:0"]),
        (lambda g: ge.make_list_of_t(g.b.op, ignore_ops=True), []),
    ],
)
def test_make_list(setting, make, expected):
    def body():
        g = diamond()
        with looking():
            made = make(g)
            assert type(made) is list
            assert names(made) == expected

    setting.run(body)


@pytest.mark.parametrize(
    ("make", "error", "builtin", "words"),
    [
        (
            lambda g, o: ge.make_list_of_op(g.a),
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Operation", "Tensor"],
        ),
        (
            lambda g, o: ge.make_list_of_op([g.a.op, g.b]),
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Operation"],
        ),
        (
            lambda g, o: ge.make_list_of_op("a"),
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Operation", "str"],
        ),
        (
            lambda g, o: ge.make_list_of_op(None),
            ge.ArgumentTypeError,
            TypeError,
            ["NoneType"],
        ),
        (
            lambda g, o: ge.make_list_of_op([g.a.op, 1], ignore_ts=True),
            ge.ArgumentTypeError,
            TypeError,
            ["int"],
        ),
        (
            lambda g, o: ge.make_list_of_op(g.graph, allow_graph=False),
            ge.ArgumentTypeError,
            TypeError,
            ["graph.get_operations()"],
        ),
        (
            lambda g, o: ge.make_list_of_op([g.a.op, o.b.op]),
            ge.SelectionError,
            ValueError,
            ["'a'", "'b'", "different graphs", "geutil.copy"],
        ),
        (
            lambda g, o: ge.make_list_of_op([g.a.op, o.b], ignore_ts=True),
            ge.SelectionError,
            ValueError,
            ["'a'", "'b:0'"],
        ),
        (
            lambda g, o: ge.make_list_of_t(g.a.op),
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Tensor", "Operation"],
        ),
        (
            lambda g, o: ge.make_list_of_t([g.a, g.b.op]),
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Tensor"],
        ),
        (
            lambda g, o: ge.make_list_of_t("a:0"),
            ge.ArgumentTypeError,
            TypeError,
            ["str"],
        ),
        (
            lambda g, o: ge.make_list_of_t(1.0),
            ge.ArgumentTypeError,
            TypeError,
            ["float"],
        ),
        (
            lambda g, o: ge.make_list_of_t(g.graph, allow_graph=False),
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Graph"],
        ),
        (
            lambda g, o: ge.make_list_of_t([g.a, o.b]),
            ge.SelectionError,
            ValueError,
            ["'a:0'", "'b:0'", "different graphs"],
        ),
        (
            lambda g, o: ge.get_tensors(g.a),
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Graph"],
        ),
        (
            lambda g, o: ge.get_generating_ops(g.a.op),
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Tensor"],
        ),
        (
            lambda g, o: ge.get_generating_ops(g.graph),
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Graph"],
        ),
        (
            lambda g, o: ge.get_consuming_ops([g.a.op]),
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Tensor"],
        ),
        (
            lambda g, o: ge.get_consuming_ops(g.graph),
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


def test_check_graph_false_takes_ops_of_several_graphs(setting):
    other = other_graph()

    def body():
        g = diamond()
        ops = ge.make_list_of_op([g.a.op, other.b.op], check_graph=False)
        assert names(ops) == ["a", "b"]
        ts = ge.make_list_of_t([g.a, other.b], check_graph=False)
        assert names(ts) == ["a:0", "b:0"]

    setting.run(body)


@pytest.mark.parametrize(
    "make",
    [
        lambda g: ge.make_list_of_op(g.graph),
        lambda g: ge.make_list_of_t(g.graph),
        lambda g: ge.get_tensors(g.graph),
    ],
)
def test_the_list_is_new(setting, make):
    def body():
        g = diamond()
        make(g).clear()
        assert len(make(g)) == len(ALL_OPS)

    setting.run(body)


def test_a_list_given_is_not_handed_back(setting):
    def body():
        g = diamond()
        given = [g.a.op]
        assert ge.make_list_of_op(given) is not given
        given_ts = [g.a]
        assert ge.make_list_of_t(given_ts) is not given_ts

    setting.run(body)


def test_get_tensors_lists_every_output_in_graph_order(setting):
    def body():
        x = tf.constant([1.0, 2.0], name="x")
        tf.unstack(x, name="parts")
        with looking():
            found = ge.get_tensors(x.graph)
            assert names(found) == ["x:0", "parts:0", "parts:1"]

    setting.run(body)


def test_get_generating_ops_keeps_repetitions(setting):
    def body():
        g = diamond()
        with looking():
            assert names(ge.get_generating_ops([g.b, g.a, g.b])) == ["b", "a", "b"]
            assert names(ge.get_generating_ops(g.b)) == ["b"]
            assert ge.get_generating_ops([]) == []

    setting.run(body)


def test_get_consuming_ops_lists_each_reader_once(setting):
    def body():
        g = diamond()
        twice = tf.add(g.x, g.x, name="twice")
        with looking():
            assert names(ge.get_consuming_ops(g.x)) == ["a", "b", "twice"]
            assert names(ge.get_consuming_ops([g.b, g.a])) == ["c"]
            assert names(ge.get_consuming_ops([g.c, g.x])) == ["d", "a", "b", "twice"]
            assert ge.get_consuming_ops(twice) == []
            assert ge.get_consuming_ops([]) == []

    setting.run(body)


def test_get_consuming_ops_is_in_graph_order(setting):
    def body():
        source, readers = many_readers(30)
        assert names(ge.get_consuming_ops(source)) == [t.op.name for t in readers]

    setting.run(body)


def test_as_list(setting):
    def body():
        g = diamond()
        with looking():
            assert as_list(g.a)[0] is g.a
            assert as_list(g.a.op) == [g.a.op]
            assert as_list(3) == [3]
            assert as_list((1, 2)) == [1, 2]

    setting.run(body)


def test_get_unique_graph(setting):
    other = other_graph()

    def body():
        g = diamond()
        assert get_unique_graph([]) is None
        assert get_unique_graph([g.a, g.b.op]) is g.graph
        with pytest.raises(ge.SelectionError, match="'b' and 'a:0'"):
            get_unique_graph([g.a, other.b.op])

    setting.run(body)


def test_is_iterable(setting):
    def body():
        g = diamond()
        with looking():
            assert not any(map(is_iterable, (g.a, g.a.op, 1, None, tf.constant)))
            assert all(map(is_iterable, ([g.a], (), {}, "abc", iter([]), np.ones(2))))
            assert is_iterable(ge.sgv(g.a.op).inputs)

    setting.run(body)


def test_check_graphs(setting):
    other = other_graph()

    def body():
        g = diamond()
        view, empty = ge.sgv(g.a.op), ge.SubGraphView()
        check_graphs()
        check_graphs(empty, view, empty, ge.sgv(g.b.op))
        with pytest.raises(ge.SelectionError, match="another graph"):
            check_graphs(view, ge.sgv(other.a.op))

    setting.run(body)
