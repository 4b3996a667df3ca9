from operator import add

import pytest
import tensorflow as tf

import geutil as ge
from geutil.select.conversions import ListView
from tests.select.samples import diamond, looking
from tests.settings import in_each_setting, names


@in_each_setting
def test_is_a_sequence():
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


@in_each_setting
def test_look_ups_compare_by_identity():
    g = diamond()
    view = ListView([g.x, g.a, g.x, g.b])
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


@in_each_setting
def test_adds_up_to_a_list():
    g = diamond()
    view = ListView([g.x, g.a])
    with looking():
        assert names(add(view, [g.b])) == ["x:0", "a:0", "b:0"]
        assert names(add([g.b], view)) == ["b:0", "x:0", "a:0"]
        assert names(view + view) == ["x:0", "a:0", "x:0", "a:0"]
        assert type(add(view, [])) is list
        assert names(view) == ["x:0", "a:0"]


@in_each_setting
def test_is_read_only():
    g = diamond()
    view = ge.sgv(g.c.op).inputs
    with pytest.raises(TypeError):
        view[0] = g.x
    assert not hasattr(view, "append")
    assert names(view) == ["a:0", "b:0"]


def test_repr_shows_the_elements():
    with tf.Graph().as_default():
        x = tf.constant(1.0, name="x")
        assert repr(ListView([x])) == repr([x])
