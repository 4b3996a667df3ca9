from operator import add

import pytest
import tensorflow as tf

import geutil as ge
from geutil.select.conversions import ListView
from tests.select.samples import diamond, looking
from tests.settings import names


def test_is_a_sequence(setting):
    def body():
        g = diamond()
        view = ListView([g.x, g.a, g.b])
        with looking():
            assert len(view) == 3
            assert view[0] is g.x
            assert view[-1] is g.b
            assert names(view[1:]) == ["a:0", "b:0"]
            assert names(view) == ["x:0", "a:0", "b:0"]
            assert names(reversed(view)) == ["b:0", "a:0", "x:0"]
            assert not ListView([])

    setting.run(body)


def test_contains_compares_by_identity(setting):
    def body():
        g = diamond()
        view = ge.sgv(g.c.op).inputs
        with looking():
            assert g.a in view
            assert g.b in view
            assert g.x not in view
            assert "a:0" not in view

    setting.run(body)


def test_index_compares_by_identity(setting):
    def body():
        g = diamond()
        view = ListView([g.x, g.a, g.x, g.b])
        with looking():
            assert view.index(g.x) == 0
            assert view.index(g.b) == 3
            assert view.index(g.x, 1) == 2
            assert view.index(g.x, 1, 3) == 2
            assert view.index(g.b, -1) == 3
            for arguments in [(g.c,), (g.b, 0, 3), (g.a, 2)]:
                with pytest.raises(ValueError, match=arguments[0].name):
                    view.index(*arguments)

    setting.run(body)


def test_count_compares_by_identity(setting):
    def body():
        g = diamond()
        view = ListView([g.x, g.a, g.x])
        with looking():
            assert view.count(g.x) == 2
            assert view.count(g.a) == 1
            assert view.count(g.b) == 0

    setting.run(body)


def test_adds_up_to_a_list(setting):
    def body():
        g = diamond()
        view = ListView([g.x, g.a])
        with looking():
            assert names(add(view, [g.b])) == ["x:0", "a:0", "b:0"]
            assert names(add([g.b], view)) == ["b:0", "x:0", "a:0"]
            assert names(view + view) == ["x:0", "a:0", "x:0", "a:0"]
            assert type(add(view, [])) is list
            assert names(view) == ["x:0", "a:0"]

    setting.run(body)


def test_is_read_only(setting):
    def body():
        g = diamond()
        view = ge.sgv(g.c.op).inputs
        with pytest.raises(TypeError):
            view[0] = g.x
        assert not hasattr(view, "append")
        assert names(view) == ["a:0", "b:0"]

    setting.run(body)


def test_repr_shows_the_elements():
    with tf.Graph().as_default():
        x = tf.constant(1.0, name="x")
        assert repr(ListView([x])) == repr([x])
