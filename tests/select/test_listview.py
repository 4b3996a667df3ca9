from operator import add

import pytest

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
        assert repr(ListView([g.x])) == repr([g.x])
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
