from operator import add

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from tests.select import tables
from tests.select.samples import diamond, looking, many_readers, other_graph
from tests.settings import in_each_setting, names, needs_eager

FOUND = """
ge.make_list_of_op(a.op) => a
ge.make_list_of_op([b.op, a.op]) => b a
ge.make_list_of_op((b.op, b.op)) => b b
ge.make_list_of_op((t.op for t in (b, a))) => b a
ge.make_list_of_op({b.op: 1}) => b
ge.make_list_of_op(ge.util.ListView([a.op])) => a
ge.make_list_of_op(graph) => x a b c d w
ge.make_list_of_op([]) =>
ge.make_list_of_op([a.op, b], ignore_ts=True) => a
ge.make_list_of_op(b, ignore_ts=True) =>
ge.make_list_of_t(a) => a
ge.make_list_of_t([b, a]) => b a
ge.make_list_of_t((t for t in (b, a))) => b a
ge.make_list_of_t(c.op.inputs) => a b
ge.make_list_of_t(ge.sgv(c.op).inputs) => a b
ge.make_list_of_t(graph) => x a b c d w
ge.make_list_of_t([]) =>
ge.make_list_of_t([a.op, b], ignore_ops=True) => b
ge.make_list_of_t(b.op, ignore_ops=True) =>
ge.get_tensors(graph) => x a b c d w
ge.get_generating_ops([b, a, b]) => b a b
ge.get_generating_ops(b) => b
ge.get_consuming_ops(x) => a b
ge.get_consuming_ops([c, x]) => d a b
ge.get_consuming_ops(d) =>
"""
NEW = [
    lambda g: ge.make_list_of_op(g.graph),
    lambda g: ge.make_list_of_t(g.graph),
    lambda g: ge.get_tensors(g.graph),
]


@in_each_setting
def test_lists():
    g = diamond()
    tables.check_found(FOUND, g)
    for make in NEW:
        make(g).clear()
        assert len(make(g)) == 6
    for tops in (g.graph, [g.a, g.b.op]):
        assert ge.util.get_unique_graph(tops) is g.graph
    assert ge.util.get_unique_graph([g.a], [tf.Tensor]) is g.graph
    assert ge.util.get_unique_graph([], none_if_empty=True) is None
    given, given_ts = [g.a.op], [g.a]
    assert ge.make_list_of_op(given) is not given
    assert ge.make_list_of_t(given_ts) is not given_ts
    parts = tf.unstack(g.x, name="parts")
    assert names(ge.get_tensors(g.graph)[-2:]) == names(parts)
    # A reader is listed once.
    tf.add(g.c, g.c, name="twice")
    assert names(ge.get_consuming_ops(g.c)) == ["d", "twice"]
    source, readers = many_readers(30)
    assert names(ge.get_consuming_ops(source)) == [t.op.name for t in readers]
    with looking():
        assert not any(map(ge.util.is_iterable, (g.a, g.a.op, 1, None, tf.constant)))
        assert all(
            map(ge.util.is_iterable, ([g.a], (), {}, "abc", iter([]), np.ones(2)))
        )
        assert ge.util.is_iterable(ge.sgv(g.a.op).inputs)


REFUSED = """
ge.make_list_of_op(a) => ArgumentTypeError: tf.Operation; Tensor
ge.make_list_of_op([a.op, b]) => ArgumentTypeError: tf.Operation
ge.make_list_of_op('a') => ArgumentTypeError: tf.Operation; str
ge.make_list_of_op(None) => ArgumentTypeError: NoneType
ge.make_list_of_op([a.op, 1], ignore_ts=True) => ArgumentTypeError: int
ge.make_list_of_op(graph, allow_graph=False)
    => ArgumentTypeError: graph.get_operations()
ge.make_list_of_op([a.op, other.b.op])
    => SelectionError: 'a'; 'b'; different graphs; geutil.copy
ge.make_list_of_op([a.op, other.b], ignore_ts=True) => SelectionError: 'a'; 'b:0'
ge.make_list_of_t(a.op) => ArgumentTypeError: tf.Tensor; Operation
ge.make_list_of_t([a, b.op]) => ArgumentTypeError: tf.Tensor
ge.make_list_of_t('a:0') => ArgumentTypeError: str
ge.make_list_of_t(1.0) => ArgumentTypeError: float
ge.make_list_of_t(graph, allow_graph=False) => ArgumentTypeError: tf.Graph
ge.make_list_of_t([a, other.b]) => SelectionError: 'a:0'; 'b:0'; different graphs
ge.get_tensors(a) => ArgumentTypeError: tf.Graph
ge.get_generating_ops(a.op) => ArgumentTypeError: tf.Tensor
ge.get_generating_ops(graph) => ArgumentTypeError: tf.Graph
ge.get_consuming_ops([a.op]) => ArgumentTypeError: tf.Tensor
ge.get_consuming_ops(graph) => ArgumentTypeError: tf.Graph
ge.util.get_unique_graph(a) => ArgumentTypeError: iterable; Tensor
ge.util.get_unique_graph([a, 1]) => ArgumentTypeError: Operation or Tensor; int
ge.util.get_unique_graph([a], type(a.op)) => ArgumentTypeError: Operation; Tensor
ge.util.get_unique_graph([a, other.b]) => SelectionError: 'a:0'; 'b:0'; geutil.copy
ge.util.get_unique_graph([]) => SelectionError: no graph; none_if_empty=True
"""


@in_each_setting
def test_refusals():
    tables.check_refusals(REFUSED, diamond(), other=other_graph())


@in_each_setting
def test_elements_of_several_graphs():
    other = other_graph()
    g = diamond()
    ops = ge.make_list_of_op([g.a.op, other.b.op], check_graph=False)
    assert names(ops) == ["a", "b"]
    ts = ge.make_list_of_t([g.a, other.b], check_graph=False)
    assert names(ts) == ["a:0", "b:0"]
    view, empty = ge.sgv(g.a.op), ge.SubGraphView()
    ge.util.check_graphs()
    ge.util.check_graphs(empty, view, empty, ge.sgv(g.b.op))
    with pytest.raises(ge.SelectionError, match="another graph"):
        ge.util.check_graphs(view, ge.sgv(other.a.op))


@needs_eager
def test_eager_tensors_are_refused():
    with pytest.raises(ge.ArgumentTypeError, match="eager tensors belong to no graph"):
        ge.util.get_unique_graph([tf.constant(1.0)])


@in_each_setting
def test_a_list_view_is_a_sequence():
    g = diamond()
    view = ge.util.ListView([g.x, g.a, g.b])
    with looking():
        assert len(view) == 3
        assert view[0] is g.x
        assert view[-1] is g.b
        assert names(view[1:]) == ["a:0", "b:0"]
        assert names(view) == ["x:0", "a:0", "b:0"]
        assert names(reversed(view)) == ["b:0", "a:0", "x:0"]
        assert not ge.util.ListView([])
        assert repr(ge.util.ListView([g.x])) == repr([g.x])
        # It adds up to a list, and is read-only.
        assert names(add(view, [g.c])) == ["x:0", "a:0", "b:0", "c:0"]
        assert names(add([g.c], view)) == ["c:0", "x:0", "a:0", "b:0"]
        assert names(view + view) == ["x:0", "a:0", "b:0"] * 2
        assert type(add(view, [])) is list
        with pytest.raises(TypeError):
            view[0] = g.x
        assert not hasattr(view, "append")
        assert names(view) == ["x:0", "a:0", "b:0"]


@in_each_setting
def test_look_ups_of_a_list_view_compare_by_identity():
    g = diamond()
    view = ge.util.ListView([g.x, g.a, g.x, g.b])
    with looking():
        assert (view.count(g.x), view.count(g.a), view.count(g.c)) == (2, 1, 0)
        assert g.a in view
        assert g.c not in view
        assert "a:0" not in view
        assert view.index(g.x) == 0
        assert view.index(g.b) == 3
        assert view.index(g.x, 1) == 2
        assert view.index(g.x, 1, 3) == 2
        assert view.index(g.b, -1) == 3
        for arguments in [(g.c,), (g.b, 0, 3), (g.a, 2)]:
            with pytest.raises(ValueError, match=arguments[0].name):
                view.index(*arguments)
