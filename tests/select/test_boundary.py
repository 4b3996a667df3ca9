import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import geutil as ge
from tests.random_graphs import drawn_graphs
from tests.select.samples import diamond, looking, other_graph
from tests.settings import NAMES, Setting, names


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda g: ge.get_ops_ios(g.c.op), ["a", "b", "d"]),
        (lambda g: ge.get_ops_ios([g.a.op, g.b.op]), ["x", "c"]),
        (lambda g: ge.get_ops_ios([g.d.op, g.x.op]), ["c", "a", "b"]),
        (lambda g: ge.get_ops_ios([g.c.op, g.d.op]), ["a", "b", "d", "c"]),
        (lambda g: ge.get_ops_ios([]), []),
        (lambda g: ge.get_ops_ios(g.w.op), []),
        (lambda g: ge.get_ops_ios(g.w.op, control_inputs=True), ["a"]),
        (lambda g: ge.get_ops_ios(g.a.op, control_inputs=True), ["x", "c"]),
        (
            lambda g: ge.get_ops_ios(
                g.a.op, control_outputs=ge.ControlOutputs(g.graph)
            ),
            ["x", "c", "w"],
        ),
        (
            lambda g: ge.get_ops_ios(
                [g.a.op, g.w.op], control_ios=ge.ControlOutputs(g.graph)
            ),
            ["x", "c", "w", "a"],
        ),
        (
            lambda g: ge.get_ops_ios(
                g.w.op, control_outputs=ge.ControlOutputs(g.graph)
            ),
            [],
        ),
    ],
)
def test_get_ops_ios(setting, call, expected):
    def body():
        g = diamond()
        with looking():
            assert names(call(g)) == expected

    setting.run(body)


@pytest.mark.parametrize(
    ("ops", "inputs", "outputs", "inside"),
    [
        ("c", ["a:0", "b:0"], ["c:0"], []),
        ("c d", ["a:0", "b:0"], ["d:0"], ["c:0"]),
        ("d c", ["a:0", "b:0"], ["d:0"], ["c:0"]),
        # x is read inside, by a, and outside, by b: an output and inside, no input.
        ("x a", [], ["x:0", "a:0"], ["x:0"]),
        ("a x", [], ["a:0", "x:0"], ["x:0"]),
        ("a b", ["x:0"], ["a:0", "b:0"], []),
        ("b a d", ["x:0", "c:0"], ["b:0", "a:0", "d:0"], []),
        ("x a b c d w", [], ["d:0", "w:0"], ["x:0", "a:0", "b:0", "c:0"]),
        # Nobody reads w and d.
        ("w", [], ["w:0"], []),
        ("d", ["c:0"], ["d:0"], []),
        ("", [], [], []),
    ],
)
def test_compute_boundary_ts(setting, ops, inputs, outputs, inside):
    def body():
        g = diamond()
        selected = [getattr(g, name).op for name in ops.split()]
        with looking():
            found = ge.compute_boundary_ts(selected)
        assert [names(ts) for ts in found] == [inputs, outputs, inside]

    setting.run(body)


def test_compute_boundary_ts_of_a_graph(setting):
    def body():
        g = diamond()
        found = ge.compute_boundary_ts(g.graph)
        assert names(found[1]) == ["d:0", "w:0"]

    setting.run(body)


def test_compute_boundary_ts_of_several_outputs(setting):
    def body():
        x = tf.constant([1.0, 2.0, 3.0], name="x")
        parts = tf.unstack(x, name="parts")
        inner = tf.add(parts[0], parts[1], name="inner")
        outer = tf.negative(parts[1], name="outer")
        found = ge.compute_boundary_ts([parts[0].op, inner.op])
        assert [names(ts) for ts in found] == [
            ["x:0"],
            ["parts:1", "parts:2", "inner:0"],
            ["parts:0", "parts:1"],
        ]
        assert names(ge.compute_boundary_ts([outer.op, inner.op])[0]) == [
            "parts:1",
            "parts:0",
        ]

    setting.run(body)


def test_an_op_given_twice_counts_once(setting):
    def body():
        g = diamond()
        found = ge.compute_boundary_ts([g.c.op, g.c.op])
        assert [names(ts) for ts in found] == [["a:0", "b:0"], ["c:0"], []]

    setting.run(body)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(drawn=drawn_graphs(), data=st.data())
def test_compute_boundary_ts_agrees_with_the_drawn_edges(name, drawn, data):
    count = len(drawn.inputs)
    chosen = data.draw(st.lists(st.integers(0, count - 1), unique=True))
    reads = dict(enumerate(drawn.inputs))
    readers = {i: {j for j in reads if i in reads[j]} for i in reads}
    used = list(dict.fromkeys(r for i in chosen for r in reads[i]))
    inputs = [r for r in used if r not in chosen]
    inside = [r for r in used if r in chosen]
    outputs = [i for i in chosen if not readers[i] or readers[i] - set(chosen)]

    def body():
        tensors = drawn.build()
        found = ge.compute_boundary_ts([tensors[i].op for i in chosen])
        assert [names(ts) for ts in found] == [
            [f"op{i}:0" for i in part] for part in (inputs, outputs, inside)
        ]

    Setting(name).run(body)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda g: ge.get_within_boundary_ops(g.graph, g.x.op),
            ["x", "a", "b", "c", "d"],
        ),
        (
            lambda g: ge.get_within_boundary_ops(g.graph, g.d.op, g.c.op),
            ["c", "d"],
        ),
        (
            lambda g: ge.get_within_boundary_ops(
                g.graph, g.d.op, [g.c.op], inclusive=False
            ),
            ["d"],
        ),
        (
            lambda g: ge.get_within_boundary_ops(g.graph, g.x.op, [g.a.op, g.b.op]),
            ["x", "a", "b"],
        ),
        # a is walled off, but b leads round it.
        (
            lambda g: ge.get_within_boundary_ops(
                g.graph, g.x.op, g.a.op, inclusive=False
            ),
            ["x", "b", "c", "d"],
        ),
        (
            lambda g: ge.get_within_boundary_ops([g.d.op, g.x.op], g.c.op),
            ["d", "x"],
        ),
        (lambda g: ge.get_within_boundary_ops([], g.x.op), []),
        (lambda g: ge.get_within_boundary_ops(g.graph, []), []),
        (lambda g: ge.get_within_boundary_ops(g.graph, g.w.op), ["w"]),
        (
            lambda g: ge.get_within_boundary_ops(
                g.graph, g.w.op, [g.c.op, g.x.op], control_inputs=True
            ),
            ["x", "a", "c", "w"],
        ),
        (
            lambda g: ge.get_within_boundary_ops(
                g.graph,
                g.a.op,
                [g.x.op, g.c.op],
                control_outputs=ge.ControlOutputs(g.graph),
            ),
            ["x", "a", "c", "w"],
        ),
        (
            lambda g: ge.get_within_boundary_ops(
                g.graph,
                [g.w.op, g.w.op],
                g.x.op,
                False,
                control_ios=ge.ControlOutputs(g.graph),
            ),
            ["a", "b", "c", "d", "w"],
        ),
    ],
)
def test_get_within_boundary_ops(setting, call, expected):
    def body():
        g = diamond()
        with looking():
            assert names(call(g)) == expected

    setting.run(body)


@pytest.mark.parametrize(
    ("call", "error", "builtin", "words"),
    [
        (
            lambda g, o: ge.get_within_boundary_ops(
                g.graph, [g.a.op, g.b.op], [g.b.op]
            ),
            ge.SelectionError,
            ValueError,
            ["'b'", "boundary_ops"],
        ),
        (
            lambda g, o: ge.get_within_boundary_ops(g.graph, g.graph),
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Graph"],
        ),
        (
            lambda g, o: ge.get_within_boundary_ops(g.graph, g.a),
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Operation"],
        ),
        (
            lambda g, o: ge.get_within_boundary_ops(g.graph, g.a.op, control_ios=True),
            ge.ArgumentTypeError,
            TypeError,
            ["control_ios"],
        ),
        (
            lambda g, o: ge.get_ops_ios(g.a),
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Operation"],
        ),
        (
            lambda g, o: ge.get_ops_ios([g.a.op, o.a.op]),
            ge.SelectionError,
            ValueError,
            ["different graphs"],
        ),
        (
            lambda g, o: ge.get_ops_ios(g.a.op, control_outputs=g.graph),
            ge.ArgumentTypeError,
            TypeError,
            ["geutil.ControlOutputs(graph)"],
        ),
        (
            lambda g, o: ge.compute_boundary_ts([g.a]),
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Operation"],
        ),
        (
            lambda g, o: ge.compute_boundary_ts([g.a.op, o.a.op]),
            ge.SelectionError,
            ValueError,
            ["different graphs"],
        ),
    ],
)
def test_refusals(setting, call, error, builtin, words):
    other = other_graph()

    def body():
        g = diamond()
        with looking(), pytest.raises(error) as caught:
            call(g, other)
        assert isinstance(caught.value, ge.GeutilError)
        assert isinstance(caught.value, builtin)
        for word in words:
            assert word in str(caught.value)

    setting.run(body)
