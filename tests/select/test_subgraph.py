import copy

import pytest
import tensorflow as tf

import geutil as ge
from tests.call_counts import count_calls
from tests.select import tables
from tests.select.samples import diamond, looking, many_readers, other_graph
from tests.settings import in_each_setting, names


def view_of(g, ops, passthroughs=""):
    return ge.SubGraphView(
        [getattr(g, name).op for name in ops.split()],
        [getattr(g, name) for name in passthroughs.split()],
    )


def described(view):
    """Return what a view holds, by name."""
    return [names(part) for part in (view.ops, view.inputs, view.outputs)]


# Ops, inputs and outputs of a view, then the tensors that pass it.
PARTS = """
parts('c d', '') => c d | a b | d |
parts('a b', '') => a b | x | a b |
parts('x a', '') => x a | | x a |
# x and d pass; a, b and c are read or made by an op of the view.
parts('c', 'x') => c | a b x | c x | x
parts('c', 'x d') => c | a b x d | c x d | x d
parts('c', 'd x a c') => c | a b d x | c d x | d x
parts('c d', 'c') => c d | a b | d |
parts('', 'a a') => | a | a | a
parts('', '') => | | |
"""
MADE = """
ge.SubGraphView(c.op) => c | a b | c
ge.SubGraphView((), c) => | c | c
ge.SubGraphView(graph) => x a b c d w | | d w
"""


@in_each_setting
def test_inputs_and_outputs():
    g = diamond()

    def parts(ops, passthroughs):
        view = view_of(g, ops, passthroughs)
        passing = names(view.passthroughs)
        assert names(view.connected_inputs) == [
            name for name in names(view.inputs) if name not in passing
        ]
        assert names(view.connected_outputs) == [
            name for name in names(view.outputs) if name not in passing
        ]
        for t in (g.x, g.a, g.b, g.c, g.d, g.w):
            assert view.is_passthrough(t) is (t.name in passing)
        return view.ops, view.inputs, view.outputs, view.passthroughs

    tables.check_found(PARTS, g, parts=parts)
    tables.check_found(MADE, g)
    with looking():
        for view in (ge.sgv(g.c.op), ge.sgv(g.c)):
            assert view.graph is g.graph
            assert view
        empty = ge.SubGraphView()
        assert empty.graph is None
        assert not empty
        with ge.sgv(g.c.op) as view:
            assert names(view.ops) == ["c"]
        with pytest.raises(KeyError), view:
            raise KeyError
        # The lists of a view cannot be changed through it.
        for part in (view.inputs, view.outputs, view.passthroughs):
            assert not hasattr(part, "append")
        view.connected_inputs.clear()
        view.connected_outputs.clear()
        assert described(view) == [["c"], ["a:0", "b:0"], ["c:0"]]


# -- remapping -------------------------------------------------------------------------

REMAPPED = """
v.remap_inputs([2, 0]) => x a | None
v.remap_inputs([]) =>  | None
v.remap_inputs(iter([1, 0])) => b a | None
v.remap_outputs([1, 0, 1]) => None | x c x
v.remap_outputs([]) => None |
v.remap_outputs(iter([1, 1])) => None | x x
v.remap_inputs([v.inputs[2], v.inputs[0]]) => x a | None
v.remap_inputs([v.inputs[2], 0]) => x a | None
v.remap_outputs([v.outputs[1], 0, v.outputs[1]]) => None | x c x
v.remap(v.inputs[1:], v.outputs[:1]) => b x | c
v.remap_outputs(np.array([1, 0])) => None | x c
v.remap() => None | None
v.remap([0], [1]) => a | x
v.remap(new_output_indices=[1]) => None | x
v.remap([], []) =>  |
v.remap_inputs([2, 1]).remap_inputs([1]) => b | None
v.remap([1], [1]).remap_default() => None | None
v.remap([1], [1]).remap_default(remove_output_map=False) => None | x
v.remap([1], [1]).remap_default(remove_input_map=False) => b | None
v.remap([1], [1]).remap_default(False, False) => b | x
v.remap_outputs([1, 0, 1]).remap_outputs_make_unique() => None | x c
v.remap_outputs_make_unique() => None | None
# d reads c; a and b read x.
v.remap_outputs_to_consumers() => None | c x x
v.remap_outputs([1, 1]).remap_outputs_to_consumers() => None | x x
"""
UNUSED = """
used(view_of('x a b c d w').remap_outputs([0])) => x a b c d
used(view_of('x a b c d w').remap_outputs([1])) => x a w
used(view_of('x a b c d w').remap_outputs([])) =>
used(view_of('a b c').remap([], [])) =>
used(view_of('a b c')) => a b c
used(view_of('c b a d')) => c b a d
# The input c leads to d; nothing leads to w.
used(view_of('d w').remap_outputs([])) => d
used(view_of('a w').remap([], [1])) => a w
used(view_of('a w').remap([0], [])) => a
# A passthrough tensor uses no op.
used(view_of('w', 'c').remap_outputs([1])) =>
"""


@in_each_setting
def test_remap():
    g = diamond()
    view = view_of(g, "c", "x")
    before = described(view)

    def check(call, result):
        with looking():
            remapped = tables.evaluate(call, g, v=view)
        wanted = [part.strip() for part in result.split("|")]
        for default, place in (("a b x", 0), ("c x", 1)):
            if wanted[place] == "None":
                wanted[place] = default
        assert tables.shown(remapped) == f"c | {wanted[0]} | {wanted[1]}"
        assert remapped is not view
        assert described(view) == before
        assert names(remapped.passthroughs) == ["x:0"]

    tables.check_rows(REMAPPED, check)
    # Each input that reads counts, and what is not read is dropped.
    parts = tf.unstack(g.x, name="parts")
    tf.add(parts[0], parts[0], name="twice")
    tf.negative(parts[0], name="once")
    view = ge.sgv(parts[0].op).remap_outputs_to_consumers()
    assert names(view.outputs) == ["parts:0"] * 3
    # The default is that of the graph as it is.
    view = ge.sgv(g.c.op)
    ge.reroute_ts(g.x, g.a, can_modify=g.c.op)
    assert names(view.remap_default().inputs) == ["x:0", "b:0"]
    assert names(view.inputs) == ["a:0", "b:0"]


@in_each_setting
def test_remove_unused_ops():
    g = diamond()

    def used(view):
        before = described(view)
        ops = view.remove_unused_ops().ops
        assert described(view) == before
        return list(ops)

    def made(*parts):
        return view_of(g, *parts)

    tables.check_found(UNUSED, g, view_of=made, used=used)
    view = view_of(g, "a w").remap([], [1])
    with looking():
        assert names(view.outputs) == ["w:0"]
        assert names(view.remove_unused_ops(control_inputs=True).ops) == ["a", "w"]
        assert names(view.remove_unused_ops(control_inputs=False).ops) == ["w"]
        kept = view.remove_unused_ops(False)
        assert [names(kept.inputs), names(kept.outputs)] == [[], ["w:0"]]


REFUSED = """
ge.SubGraphView(a) => ArgumentTypeError
ge.SubGraphView('a') => ArgumentTypeError
ge.SubGraphView(None) => ArgumentTypeError
ge.SubGraphView((), a.op) => ArgumentTypeError
ge.SubGraphView([a.op, other.a.op]) => SelectionError
ge.SubGraphView(a.op, other.a) => SelectionError
ge.SubGraphView((), [a, other.a]) => SelectionError
v.remap_inputs([3]) => SelectionError: no index 3; has 3
v.remap_inputs([-1]) => SelectionError: no index -1; has 3
v.remap_inputs([0, 1, 0]) => SelectionError: once; [0, 1, 0]
v.remap_outputs([2]) => SelectionError: no index 2; has 2
v.remap_outputs([0, -1]) => SelectionError: no index -1; has 2
v.remap([9], [0]) => SelectionError: 9
v.remap([0, 0], [0]) => SelectionError: once
v.remap_inputs([v.outputs[0]]) => SelectionError: 'c:0' is not an input
v.remap_outputs([v.inputs[0]]) => SelectionError: 'a:0' is not an output
v.remap_inputs([v.inputs[0], 0]) => SelectionError: once; [0, 0]
"""
NO_INDEX = """
remap(v.inputs[0]) => ArgumentTypeError: expected a list of indices or tensors, got
remap(0) => ArgumentTypeError: expected a list of indices or tensors, got
remap(['a:0']) => ArgumentTypeError: expected an index or a tensor, got
remap([v.ops[0]]) => ArgumentTypeError: expected an index or a tensor, got
remap([0.0]) => ArgumentTypeError: expected an index or a tensor, got
"""


@in_each_setting
def test_refusals():
    other = other_graph()
    g = diamond()
    v = view_of(g, "c", "x")
    before = described(v)
    tables.check_refusals(REFUSED, g, v=v, other=other)
    for remap in (v.remap, v.remap_inputs, v.remap_outputs):
        tables.check_refusals(NO_INDEX, g, v=v, remap=remap)
    assert described(v) == before


# -- look-ups --------------------------------------------------------------------------


@in_each_setting
def test_index_look_ups():
    g = diamond()
    view = view_of(g, "c", "x").remap([2, 0, 1], [1, 0, 1])
    with looking():
        assert [view.input_index(t) for t in (g.x, g.a, g.b)] == [0, 1, 2]
        assert [view.output_index(t) for t in (g.x, g.c)] == [0, 1]
        for look_up, t, what in [
            (view.input_index, g.c, "input"),
            (view.input_index, g.w, "input"),
            (view.output_index, g.a, "output"),
        ]:
            with pytest.raises(ge.SelectionError, match=what) as caught:
                look_up(t)
            assert isinstance(caught.value, ValueError)
            assert t.name in str(caught.value)
        with pytest.raises(ge.SelectionError):
            view.input_index("a:0")
        view = view_of(g, "d c")
        assert view.op(0) is g.d.op
        assert view.op(1) is view.find_op_by_name("c") is g.c.op
        with pytest.raises(IndexError):
            view.op(2)
        for missing in ("a", "nowhere", "d:0", "D", ""):
            with pytest.raises(ge.SelectionError) as caught:
                view.find_op_by_name(missing)
            assert isinstance(caught.value, ValueError)
            assert f"'{missing}'" in str(caught.value)
        with pytest.raises(ge.SelectionError):
            ge.SubGraphView().find_op_by_name("a")
    # They follow an update in place.
    first, second = ge.sgv(g.a.op), ge.sgv(g.d.op)
    assert second.input_index(g.c) == 0
    ge.reroute_inputs(first, second)
    assert second.input_index(g.x) == 0
    with pytest.raises(ge.SelectionError):
        second.input_index(g.c)


@in_each_setting
def test_look_ups_are_linear_in_the_lists():
    def look_up(count):
        source, readers = many_readers(count)
        total = tf.add_n(readers, name="total")
        view = ge.SubGraphView([total.op], [source])

        def look():
            for i, t in enumerate(readers):
                assert view.input_index(t) == i
                assert not view.is_passthrough(t)
                assert view.output_index(total) == 0
                assert view.find_op_by_name(total.op.name) is total.op
                assert view.is_passthrough(source)

        return count_calls(look)[0], count_calls(look)[0]

    (first, again), (first_of_more, again_of_more) = look_up(50), look_up(200)
    # Where each look-up went through a list, four times as many would take sixteen.
    assert first_of_more < 5 * first
    assert again_of_more < 5 * again
    # The lists are gone through at the first look-ups only.
    assert again < first


@in_each_setting
def test_consumers():
    g = diamond()
    tf.add(g.a, g.a, name="twice")
    with looking():
        assert names(view_of(g, "b a").consumers()) == ["c", "twice"]
        assert names(view_of(g, "x a").consumers()) == ["a", "b", "c", "twice"]
        assert names(view_of(g, "d").consumers()) == []
        assert names(view_of(g, "", "x").consumers()) == ["a", "b"]
        assert names(view_of(g, "b a").remap_outputs([0]).consumers()) == ["c"]
        assert ge.SubGraphView().consumers() == []


# -- the Python protocol ---------------------------------------------------------------


@pytest.mark.parametrize("copied", [lambda v: v.copy(), copy.copy])
@in_each_setting
def test_copy_is_equal_and_apart(copied):
    g = diamond()
    view = view_of(g, "c", "x").remap([1, 2], [1, 1, 0])
    with looking():
        twin = copied(view)
    assert type(twin) is ge.SubGraphView
    assert twin is not view
    assert twin.graph is view.graph
    assert described(twin) == described(view)
    assert names(twin.passthroughs) == ["x:0"]
    ge.detach_inputs(twin)
    assert names(twin.inputs) == ["geph__b_0:0", "geph__x_0:0"]
    assert names(view.inputs) == ["b:0", "x:0"]

    class Special(ge.SubGraphView):
        pass

    special = Special(g.c.op)
    assert type(copied(special)) is type(special.remap_inputs([0])) is Special


@in_each_setting
def test_str_lists_ops_inputs_and_outputs():
    g = diamond()
    with looking():
        view = view_of(g, "c d", "x")
        assert str(view) == (
            f"SubGraphView (graphid={id(g.graph)}):\n"
            "** ops[2]:\nc\nd\n"
            "** inputs[3]:\na:0\nb:0\nx:0 *\n"
            "** outputs[2]:\nd:0\nx:0 *\n"
        )
        assert repr(view) == "<SubGraphView: 2 ops, 3 inputs, 2 outputs>"
        assert str(view_of(g, "x").remap_outputs([])) == (
            f"SubGraphView (graphid={id(g.graph)}):\n"
            "** ops[1]:\nx\n"
            "** inputs: empty\n"
            "** outputs: empty\n"
        )
        assert str(ge.SubGraphView()) == "SubGraphView: empty"
