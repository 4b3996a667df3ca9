import pytest
import tensorflow as tf

import geutil as ge
from tests.select.samples import diamond, looking, other_graph
from tests.settings import names


def test_get_lists_control_outputs_in_graph_order(setting):
    def body():
        g = diamond()
        with tf.control_dependencies([g.a]):
            for i in range(25):
                tf.constant(1.0, name=f"late{i}")
        controls = ge.ControlOutputs(g.graph)
        with looking():
            expected = ["w", *(f"late{i}" for i in range(25))]
            assert names(controls.get(g.a.op)) == expected
            assert list(controls.get(g.b.op)) == []

    setting.run(body)


def test_get_all_lists_only_ops_that_have_any(setting):
    def body():
        g = diamond()
        with looking():
            found = ge.ControlOutputs(g.graph).get_all()
        assert {op.name: names(outputs) for op, outputs in found.items()} == {
            "a": ["w"]
        }

    setting.run(body)


def test_graph_is_the_graph(setting):
    def body():
        g = diamond()
        assert ge.ControlOutputs(g.graph).graph is g.graph

    setting.run(body)


def test_look_ups_are_never_out_of_date(setting):
    def body():
        g = diamond()
        controls = ge.ControlOutputs(g.graph)
        assert names(controls.get(g.a.op)) == ["w"]
        ge.add_control_inputs(g.d.op, g.a.op)
        assert names(controls.get(g.a.op)) == ["d", "w"]
        ge.remove_control_inputs(g.w.op, g.a.op)
        assert names(controls.get(g.a.op)) == ["d"]
        with tf.control_dependencies([g.b]):
            tf.constant(1.0, name="new")
        found = controls.get_all()
        assert {op.name: names(outputs) for op, outputs in found.items()} == {
            "a": ["d"],
            "b": ["new"],
        }

    setting.run(body)


def test_update_returns_the_same_object(setting):
    def body():
        g = diamond()
        controls = ge.ControlOutputs(g.graph)
        ge.add_control_inputs(g.d.op, g.b.op)
        with looking():
            assert controls.update() is controls
            assert names(controls.get(g.b.op)) == ["d"]

    setting.run(body)


@pytest.mark.parametrize("graph", [None, "graph", 1])
def test_only_a_graph_has_control_outputs(graph):
    with pytest.raises(ge.ArgumentTypeError, match=r"tf\.Graph") as caught:
        ge.ControlOutputs(graph)
    assert isinstance(caught.value, TypeError)


def test_get_refuses_what_is_no_op(setting):
    def body():
        g = diamond()
        for wrong in ("a", None, g.a):
            with pytest.raises(ge.ArgumentTypeError, match=r"tf\.Operation"):
                ge.ControlOutputs(g.graph).get(wrong)

    setting.run(body)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (lambda c: {}, lambda c: (False, None)),
        (lambda c: {"control_inputs": False}, lambda c: (False, None)),
        (lambda c: {"control_inputs": True}, lambda c: (True, None)),
        (lambda c: {"control_outputs": c}, lambda c: (False, c)),
        (lambda c: {"control_inputs": True, "control_outputs": c}, lambda c: (True, c)),
        (lambda c: {"control_ios": c}, lambda c: (True, c)),
        (lambda c: {"control_inputs": True, "control_ios": c}, lambda c: (True, c)),
    ],
)
def test_check_cios(setting, arguments, expected):
    def body():
        controls = ge.ControlOutputs(diamond().graph)
        with looking():
            inputs, outputs = ge.check_cios(**arguments(controls))
        assert (inputs, outputs) == expected(controls)

    setting.run(body)


@pytest.mark.parametrize(
    ("arguments", "error", "builtin", "words"),
    [
        (
            lambda c: {"control_outputs": True},
            ge.ArgumentTypeError,
            TypeError,
            ["control_outputs", "bool", "geutil.ControlOutputs(graph)"],
        ),
        (
            lambda c: {"control_outputs": c.graph},
            ge.ArgumentTypeError,
            TypeError,
            ["control_outputs", "Graph"],
        ),
        (
            lambda c: {"control_ios": [c]},
            ge.ArgumentTypeError,
            TypeError,
            ["control_ios", "list"],
        ),
        (
            lambda c: {"control_ios": c, "control_outputs": c},
            ge.SelectionError,
            ValueError,
            ["control_ios", "control_outputs", "not both"],
        ),
    ],
)
def test_check_cios_refuses(setting, arguments, error, builtin, words):
    def body():
        controls = ge.ControlOutputs(diamond().graph)
        with pytest.raises(error) as caught:
            ge.check_cios(**arguments(controls))
        assert isinstance(caught.value, builtin)
        for word in words:
            assert word in str(caught.value)

    setting.run(body)


def test_a_foreign_op_has_no_control_outputs_here(setting):
    other = other_graph()

    def body():
        g = diamond()
        controls = ge.ControlOutputs(g.graph)
        assert names(other.w.op.control_inputs) == ["a"]
        assert list(controls.get(other.a.op)) == []

    setting.run(body)
