import copy

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.graph import types
from tests.select.samples import diamond, looking, many_readers, other_graph
from tests.settings import names


def view_of(g, ops, passthroughs=""):
    return ge.SubGraphView(
        [getattr(g, name).op for name in ops.split()],
        [getattr(g, name) for name in passthroughs.split()],
    )


def described(view):
    """Return what a view holds, by name."""
    return [names(part) for part in (view.ops, view.inputs, view.outputs)]


@pytest.mark.parametrize(
    ("ops", "passthroughs", "inputs", "outputs", "passing"),
    [
        ("c d", "", "a b", "d", ""),
        ("a b", "", "x", "a b", ""),
        ("x a", "", "", "x a", ""),
        # x and d pass; a, b and c are read or made by an op of the view.
        ("c", "x", "a b x", "c x", "x"),
        ("c", "x d", "a b x d", "c x d", "x d"),
        ("c", "d x a c", "a b d x", "c d x", "d x"),
        ("c d", "c", "a b", "d", ""),
        ("", "a b", "a b", "a b", "a b"),
        ("", "a a", "a", "a", "a"),
        ("", "", "", "", ""),
    ],
)
def test_inputs_and_outputs(setting, ops, passthroughs, inputs, outputs, passing):
    def ts(part):
        return [f"{name}:0" for name in part.split()]

    def body():
        g = diamond()
        with looking():
            view = view_of(g, ops, passthroughs)
            assert described(view) == [ops.split(), ts(inputs), ts(outputs)]
            assert names(view.passthroughs) == ts(passing)
            assert names(view.connected_inputs) == [
                t for t in ts(inputs) if t not in ts(passing)
            ]
            assert names(view.connected_outputs) == [
                t for t in ts(outputs) if t not in ts(passing)
            ]
            for name in "xabcdw":
                passes = f"{name}:0" in ts(passing)
                assert view.is_passthrough(getattr(g, name)) is passes

    setting.run(body)


def test_takes_one_op_a_tensor_or_a_graph(setting):
    def body():
        g = diamond()
        with looking():
            assert described(ge.SubGraphView(g.c.op)) == [
                ["c"],
                ["a:0", "b:0"],
                ["c:0"],
            ]
            assert described(ge.SubGraphView((), g.c)) == [[], ["c:0"], ["c:0"]]
            assert described(ge.SubGraphView(g.graph)) == [
                ["x", "a", "b", "c", "d", "w"],
                [],
                ["d:0", "w:0"],
            ]

    setting.run(body)


def test_graph_and_truth(setting):
    def body():
        g = diamond()
        with looking():
            assert ge.sgv(g.c.op).graph is g.graph
            assert ge.sgv(g.c).graph is g.graph
            assert ge.sgv(g.c.op)
            assert ge.sgv(g.c)
            empty = ge.SubGraphView()
            assert empty.graph is None
            assert not empty

    setting.run(body)


@pytest.mark.parametrize(
    ("make", "error", "builtin"),
    [
        (lambda g, o: ge.SubGraphView(g.a), ge.ArgumentTypeError, TypeError),
        (lambda g, o: ge.SubGraphView("a"), ge.ArgumentTypeError, TypeError),
        (lambda g, o: ge.SubGraphView(None), ge.ArgumentTypeError, TypeError),
        (lambda g, o: ge.SubGraphView((), g.a.op), ge.ArgumentTypeError, TypeError),
        (
            lambda g, o: ge.SubGraphView([g.a.op, o.a.op]),
            ge.SelectionError,
            ValueError,
        ),
        (lambda g, o: ge.SubGraphView(g.a.op, o.a), ge.SelectionError, ValueError),
        (lambda g, o: ge.SubGraphView((), [g.a, o.a]), ge.SelectionError, ValueError),
    ],
)
def test_refuses_what_makes_no_view(setting, make, error, builtin):
    other = other_graph()

    def body():
        g = diamond()
        with looking(), pytest.raises(error) as caught:
            make(g, other)
        assert isinstance(caught.value, ge.GeutilError)
        assert isinstance(caught.value, builtin)

    setting.run(body)


# -- remapping -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remap", "inputs", "outputs"),
    [
        (lambda v: v.remap_inputs([1]), "b", None),
        (lambda v: v.remap_inputs([2, 0]), "x a", None),
        (lambda v: v.remap_inputs([]), "", None),
        (lambda v: v.remap_inputs(iter([1, 0])), "b a", None),
        (lambda v: v.remap_outputs([1]), None, "x"),
        (lambda v: v.remap_outputs([1, 0, 1]), None, "x c x"),
        (lambda v: v.remap_outputs([0, 0]), None, "c c"),
        (lambda v: v.remap_outputs([]), None, ""),
        (lambda v: v.remap_outputs(iter([1, 1])), None, "x x"),
        (lambda v: v.remap_inputs([v.inputs[2], v.inputs[0]]), "x a", None),
        (lambda v: v.remap_inputs([v.inputs[2], 0]), "x a", None),
        (lambda v: v.remap_inputs(v.inputs), "a b x", None),
        (lambda v: v.remap_outputs([v.outputs[1], 0, v.outputs[1]]), None, "x c x"),
        (lambda v: v.remap(v.inputs[1:], v.outputs[:1]), "b x", "c"),
        (lambda v: v.remap_outputs(np.array([1, 0])), None, "x c"),
        (lambda v: v.remap(), None, None),
        (lambda v: v.remap([0]), "a", None),
        (lambda v: v.remap([0], [1]), "a", "x"),
        (lambda v: v.remap(new_output_indices=[1]), None, "x"),
        (lambda v: v.remap([], []), "", ""),
        (lambda v: v.remap_inputs([2, 1]).remap_inputs([1]), "b", None),
        (lambda v: v.remap([1], [1]).remap_default(), None, None),
        (
            lambda v: v.remap([1], [1]).remap_default(remove_output_map=False),
            None,
            "x",
        ),
        (lambda v: v.remap([1], [1]).remap_default(remove_input_map=False), "b", None),
        (lambda v: v.remap([1], [1]).remap_default(False, False), "b", "x"),
        (lambda v: v.remap_outputs([1, 0, 1]).remap_outputs_make_unique(), None, "x c"),
        (lambda v: v.remap_outputs_make_unique(), None, None),
        # d reads c; a and b read x.
        (lambda v: v.remap_outputs_to_consumers(), None, "c x x"),
        (
            lambda v: v.remap_outputs([1, 1]).remap_outputs_to_consumers(),
            None,
            "x x",
        ),
    ],
)
def test_remap(setting, remap, inputs, outputs):
    def ts(part):
        return [f"{name}:0" for name in part.split()]

    def body():
        g = diamond()
        view = view_of(g, "c", "x")
        before = described(view)
        with looking():
            remapped = remap(view)
            assert described(remapped) == [
                ["c"],
                ts("a b x" if inputs is None else inputs),
                ts("c x" if outputs is None else outputs),
            ]
            assert remapped is not view
            assert described(view) == before
            assert names(remapped.passthroughs) == ["x:0"]

    setting.run(body)


def test_remap_to_consumers_counts_each_input_and_drops_the_unread(setting):
    def body():
        x = tf.constant([1.0, 2.0], name="x")
        parts = tf.unstack(x, name="parts")
        tf.add(parts[0], parts[0], name="twice")
        tf.negative(parts[0], name="once")
        view = ge.sgv(parts[0].op).remap_outputs_to_consumers()
        assert names(view.outputs) == ["parts:0"] * 3

    setting.run(body)


@pytest.mark.parametrize(
    ("remap", "words"),
    [
        (lambda v: v.remap_inputs([3]), ["no index 3", "has 3"]),
        (lambda v: v.remap_inputs([-1]), ["no index -1", "has 3"]),
        (lambda v: v.remap_inputs([0, 1, 0]), ["once", "[0, 1, 0]"]),
        (lambda v: v.remap_outputs([2]), ["no index 2", "has 2"]),
        (lambda v: v.remap_outputs([0, -1]), ["no index -1", "has 2"]),
        (lambda v: v.remap([9], [0]), ["9"]),
        (lambda v: v.remap([0], [9]), ["9"]),
        (lambda v: v.remap([0, 0], [0]), ["once"]),
        (lambda v: v.remap_inputs([v.outputs[0]]), ["'c:0' is not an input"]),
        (lambda v: v.remap_outputs([v.inputs[0]]), ["'a:0' is not an output"]),
        (lambda v: v.remap_inputs([v.inputs[0], 0]), ["once", "[0, 0]"]),
    ],
)
def test_remap_refuses(setting, remap, words):
    def body():
        g = diamond()
        view = view_of(g, "c", "x")
        before = described(view)
        with looking(), pytest.raises(ge.SelectionError) as caught:
            remap(view)
        assert isinstance(caught.value, ValueError)
        for word in words:
            assert word in str(caught.value)
        assert described(view) == before

    setting.run(body)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (lambda v: v.inputs[0], "expected a list of indices or tensors, got"),
        (lambda v: 0, "expected a list of indices or tensors, got"),
        (lambda v: ["a:0"], "expected an index or a tensor, got"),
        (lambda v: [v.ops[0]], "expected an index or a tensor, got"),
        (lambda v: [0.0], "expected an index or a tensor, got"),
    ],
)
@pytest.mark.parametrize("remap", ["remap", "remap_inputs", "remap_outputs"])
def test_remap_refuses_what_is_no_index(setting, remap, chosen, words):
    def body():
        view = view_of(diamond(), "c", "x")
        with looking(), pytest.raises(ge.ArgumentTypeError) as caught:
            getattr(view, remap)(chosen(view))
        assert words in str(caught.value)

    setting.run(body)


def test_remap_default_follows_the_graph(setting):
    def body():
        g = diamond()
        view = ge.sgv(g.c.op)
        assert names(view.outputs) == ["c:0"]
        ge.reroute_ts(g.x, g.a)
        assert names(view.remap_default().inputs) == ["x:0", "b:0"]
        assert names(view.inputs) == ["a:0", "b:0"]

    setting.run(body)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda g: view_of(g, "x a b c d w").remap_outputs([0]), "x a b c d"),
        (lambda g: view_of(g, "x a b c d w").remap_outputs([1]), "x a w"),
        (lambda g: view_of(g, "x a b c d w").remap_outputs([]), ""),
        (lambda g: view_of(g, "a b c").remap([], []), ""),
        (lambda g: view_of(g, "a b c"), "a b c"),
        (lambda g: view_of(g, "c b a d"), "c b a d"),
        # The input c leads to d; nothing leads to w.
        (lambda g: view_of(g, "d w").remap_outputs([]), "d"),
        (lambda g: view_of(g, "a w").remap([], [1]), "a w"),
        (lambda g: view_of(g, "a w").remap([0], []), "a"),
        # A passthrough tensor uses no op.
        (lambda g: view_of(g, "w", "c").remap_outputs([1]), ""),
    ],
)
def test_remove_unused_ops(setting, view, expected):
    def body():
        g = diamond()
        made = view(g)
        before = described(made)
        with looking():
            assert names(made.remove_unused_ops().ops) == expected.split()
            assert described(made) == before

    setting.run(body)


def test_remove_unused_ops_without_control_inputs(setting):
    def body():
        g = diamond()
        view = view_of(g, "a w").remap([], [1])
        with looking():
            assert names(view.outputs) == ["w:0"]
            assert names(view.remove_unused_ops(control_inputs=True).ops) == ["a", "w"]
            assert names(view.remove_unused_ops(control_inputs=False).ops) == ["w"]
            kept = view.remove_unused_ops(False)
            assert [names(kept.inputs), names(kept.outputs)] == [[], ["w:0"]]

    setting.run(body)


# -- look-ups --------------------------------------------------------------------------


def test_op_by_index(setting):
    def body():
        g = diamond()
        view = view_of(g, "d c")
        with looking():
            assert view.op(0) is g.d.op
            assert view.op(1) is g.c.op
            with pytest.raises(IndexError):
                view.op(2)

    setting.run(body)


def test_index_look_ups(setting):
    def body():
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

    setting.run(body)


def test_find_op_by_name(setting):
    def body():
        g = diamond()
        view = view_of(g, "c d")
        with looking():
            assert view.find_op_by_name("d") is g.d.op
            for missing in ("a", "nowhere", "d:0", "D", ""):
                with pytest.raises(ge.SelectionError) as caught:
                    view.find_op_by_name(missing)
                assert isinstance(caught.value, ValueError)
                assert f"'{missing}'" in str(caught.value)
            with pytest.raises(ge.SelectionError):
                ge.SubGraphView().find_op_by_name("a")

    setting.run(body)


def test_look_ups_scan_each_list_once(setting, monkeypatch):
    indexed = []
    original = types.index_by_identity

    def counted(elements):
        indexed.append(len(elements))
        return original(elements)

    monkeypatch.setattr(types, "index_by_identity", counted)

    def body():
        indexed.clear()
        source, readers = many_readers(50)
        total = tf.add_n(readers, name="total")
        view = ge.SubGraphView([total.op], [source])
        for _ in range(3):
            for i, t in enumerate(readers):
                assert view.input_index(t) == i
                assert not view.is_passthrough(t)
            assert view.output_index(total) == 0
            assert view.find_op_by_name("total") is total.op
            assert view.is_passthrough(source)
        # One index each of the inputs, outputs, ops and passthrough tensors.
        assert sorted(indexed) == [1, 1, 2, 51]

    setting.run(body)


def test_look_ups_follow_an_update_in_place(setting):
    def body():
        g = diamond()
        first, second = ge.sgv(g.a.op), ge.sgv(g.d.op)
        assert second.input_index(g.c) == 0
        ge.reroute_inputs(first, second)
        assert second.input_index(g.x) == 0
        with pytest.raises(ge.SelectionError):
            second.input_index(g.c)

    setting.run(body)


def test_consumers(setting):
    def body():
        g = diamond()
        tf.add(g.a, g.a, name="twice")
        with looking():
            assert names(view_of(g, "b a").consumers()) == ["c", "twice"]
            assert names(view_of(g, "x a").consumers()) == ["a", "b", "c", "twice"]
            assert names(view_of(g, "d").consumers()) == []
            assert names(view_of(g, "", "x").consumers()) == ["a", "b"]
            assert names(view_of(g, "b a").remap_outputs([0]).consumers()) == ["c"]
            assert ge.SubGraphView().consumers() == []

    setting.run(body)


def test_consumers_come_in_graph_order(setting):
    def body():
        source, readers = many_readers(30)
        view = ge.sgv(source.op)
        assert names(view.consumers()) == [t.op.name for t in readers]

    setting.run(body)


# -- the Python protocol ---------------------------------------------------------------


@pytest.mark.parametrize("copied", [lambda v: v.copy(), copy.copy])
def test_copy_is_equal_and_apart(setting, copied):
    def body():
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

    setting.run(body)


def test_copy_keeps_the_class():
    class Special(ge.SubGraphView):
        pass

    with tf.Graph().as_default():
        view = Special(diamond().c.op)
        assert type(view.copy()) is Special
        assert type(view.remap_inputs([0])) is Special


def test_the_lists_of_a_view_cannot_be_changed_through_it(setting):
    def body():
        g = diamond()
        view = ge.sgv(g.c.op)
        for part in (view.inputs, view.outputs, view.passthroughs):
            assert not hasattr(part, "append")
        view.connected_inputs.clear()
        view.connected_outputs.clear()
        assert described(view) == [["c"], ["a:0", "b:0"], ["c:0"]]

    setting.run(body)


def test_is_a_context_manager(setting):
    def body():
        g = diamond()
        with looking():
            with ge.sgv(g.c.op) as view:
                assert names(view.ops) == ["c"]
            assert names(view.ops) == ["c"]
            with pytest.raises(KeyError), ge.sgv(g.c.op):
                raise KeyError

    setting.run(body)


def test_str_lists_ops_inputs_and_outputs(setting):
    def body():
        g = diamond()
        with looking():
            assert str(view_of(g, "c d", "x")) == (
                f"SubGraphView (graphid={id(g.graph)}):\n"
                "** ops[2]:\nc\nd\n"
                "** inputs[3]:\na:0\nb:0\nx:0 *\n"
                "** outputs[2]:\nd:0\nx:0 *\n"
            )
            assert str(view_of(g, "x").remap_outputs([])) == (
                f"SubGraphView (graphid={id(g.graph)}):\n"
                "** ops[1]:\nx\n"
                "** inputs: empty\n"
                "** outputs: empty\n"
            )
            assert str(ge.SubGraphView()) == "SubGraphView: empty"

    setting.run(body)


def test_repr_is_one_line(setting):
    def body():
        g = diamond()
        with looking():
            assert (
                repr(view_of(g, "c d", "x"))
                == "<SubGraphView: 2 ops, 3 inputs, 2 outputs>"
            )

    setting.run(body)


def test_looking_at_every_attribute_adds_no_op(setting):
    def body():
        g = diamond()
        with looking():
            view = view_of(g, "a b c", "d w")
            str(view), repr(view), bool(view), view.copy()
            assert g.x in view.inputs
            assert g.x not in view.outputs
            assert view.inputs.index(g.d) == 1
            list(view.inputs), list(view.outputs), list(view.passthroughs)
            view.connected_inputs, view.connected_outputs, view.consumers()
            view.remap_default(), view.remap_outputs_make_unique()
            view.remap_outputs_to_consumers(), view.remove_unused_ops()
            view.input_index(g.x), view.output_index(g.w), view.is_passthrough(g.d)
            view.find_op_by_name("a")

    setting.run(body)
