import pytest
import tensorflow as tf

import geutil as ge
from tests.reroute.samples import EAGER, chains, check_refused, foreign, state
from tests.settings import names


def waiting(*tensors):
    return [names(t.op.control_inputs) for t in tensors]


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda g: ge.add_control_inputs(g.d.op, g.a.op), "a"),
        (lambda g: ge.add_control_inputs(g.d.op, [g.a.op]), "a"),
        (lambda g: ge.add_control_inputs(g.d.op, [g.a.op, g.w.op]), "a w"),
        (lambda g: ge.add_control_inputs(g.d.op, [g.a.op, g.a.op]), "a"),
        (lambda g: ge.add_control_inputs(g.d.op, (t.op for t in [g.a])), "a"),
        (lambda g: ge.add_control_inputs(g.d.op, []), ""),
        # An op may wait for what it reads.
        (lambda g: ge.add_control_inputs(g.d.op, g.b.op), "b"),
    ],
)
def test_add(setting, edit, expected):
    def body():
        g = chains()
        count = len(g.graph.get_operations())
        assert edit(g) is None
        assert sorted(waiting(g.d)[0]) == expected.split()
        assert waiting(g.w) == [["a"]]
        assert len(g.graph.get_operations()) == count
        ge.verify(g.graph)

    setting.run(body)


def test_add_keeps_what_is_there(setting):
    def body():
        g = chains()
        ge.add_control_inputs(g.w.op, g.b.op)
        ge.add_control_inputs(g.w.op, [g.c.op])
        assert sorted(waiting(g.w)[0]) == ["a", "b", "c"]

    setting.run(body)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda g: ge.remove_control_inputs(g.w.op, g.a.op), "b c"),
        (lambda g: ge.remove_control_inputs(g.w.op, [g.a.op]), "b c"),
        (lambda g: ge.remove_control_inputs(g.w.op, [g.c.op, g.a.op]), "b"),
        (lambda g: ge.remove_control_inputs(g.w.op, [g.a.op, g.a.op]), "b c"),
        (lambda g: ge.remove_control_inputs(g.w.op, g.w.op.control_inputs), ""),
        (lambda g: ge.remove_control_inputs(g.w.op, []), "a b c"),
    ],
)
def test_remove(setting, edit, expected):
    def body():
        g = chains()
        ge.add_control_inputs(g.w.op, [g.b.op, g.c.op])
        assert edit(g) is None
        assert sorted(waiting(g.w)[0]) == expected.split()
        ge.verify(g.graph)

    setting.run(body)


def test_remove_undoes_add(setting):
    def body():
        g = chains()
        before = state(g.graph)
        ge.add_control_inputs(g.d.op, [g.a.op, g.w.op])
        assert state(g.graph) != before
        ge.remove_control_inputs(g.d.op, [g.w.op, g.a.op])
        assert state(g.graph)[0] == before[0]

    setting.run(body)


def test_a_session_keeps_the_new_order():
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [], name="x")
        check = tf.debugging.Assert(x > 0.0, [x], name="check")
        y = tf.identity(x, name="y")
        with tf.compat.v1.Session() as session:
            ge.add_control_inputs(y.op, check)
            assert session.run(y, {x: 1.0}) == 1.0
            with pytest.raises(tf.errors.InvalidArgumentError):
                session.run(y, {x: -1.0})


REFUSALS = [
    # (function, arguments, error, words)
    (
        ge.remove_control_inputs,
        lambda g, o: (g.w.op, g.b.op),
        ge.RerouteError,
        ["'b'", "'w'", "['a']"],
    ),
    (
        ge.remove_control_inputs,
        lambda g, o: (g.w.op, [g.a.op, g.b.op]),
        ge.RerouteError,
        ["'b'", "'w'"],
    ),
    (
        ge.remove_control_inputs,
        lambda g, o: (g.a.op, g.w.op),
        ge.RerouteError,
        ["'w'", "'a'", "[]"],
    ),
    (
        ge.add_control_inputs,
        lambda g, o: (g.w.op, g.a.op),
        ge.RerouteError,
        ["'a'", "'w'", "already", "leave it out"],
    ),
    (
        ge.add_control_inputs,
        lambda g, o: (g.w.op, [g.b.op, g.a.op]),
        ge.RerouteError,
        ["'a'", "'w'"],
    ),
    *[
        (edit, arguments, error, words)
        for edit in (ge.add_control_inputs, ge.remove_control_inputs)
        for arguments, error, words in (
            (lambda g, o: (g.w.op, o.b.op), ge.SelectionError, ["'b'", "geutil.copy"]),
            (lambda g, o: (g.w.op, [g.b.op, o.c.op]), ge.SelectionError, ["'c'"]),
            (lambda g, o: (g.w, g.a.op), ge.ArgumentTypeError, ["tf.Operation"]),
            (lambda g, o: ("w", g.a.op), ge.ArgumentTypeError, ["str"]),
            (lambda g, o: ([g.w.op], g.a.op), ge.ArgumentTypeError, ["list"]),
            (lambda g, o: (None, g.a.op), ge.ArgumentTypeError, ["NoneType"]),
            (lambda g, o: (g.w.op, g.a), ge.ArgumentTypeError, ["tf.Operation"]),
            (lambda g, o: (g.w.op, "a"), ge.ArgumentTypeError, ["str"]),
            (lambda g, o: (g.w.op, None), ge.ArgumentTypeError, ["NoneType"]),
            (lambda g, o: (g.w.op, g.graph), ge.ArgumentTypeError, ["get_operations"]),
            *(
                [(lambda g, o: (g.w.op, EAGER), ge.ArgumentTypeError, ["tf.Operation"])]
                if EAGER is not None
                else []
            ),
        )
    ],
]


@pytest.mark.parametrize(("edit", "arguments", "error", "words"), REFUSALS)
def test_refusals(setting, edit, arguments, error, words):
    other = foreign(chains)

    def body():
        g = chains()
        given = arguments(g, other)
        check_refused(g.graph, lambda: edit(*given), error, words)

    setting.run(body)


@pytest.mark.parametrize(
    ("edit", "cycle"),
    [
        (lambda g: ge.add_control_inputs(g.a.op, g.a.op), "a"),
        (lambda g: ge.add_control_inputs(g.a.op, g.c.op), "a c"),
        (lambda g: ge.add_control_inputs(g.a.op, g.e.op), "a c e"),
        (lambda g: ge.add_control_inputs(g.a.op, g.w.op), "a w"),
        (lambda g: ge.add_control_inputs(g.a.op, [g.b.op, g.e.op]), "a c e"),
    ],
)
def test_a_cycle_is_refused_and_listed(setting, edit, cycle):
    def body():
        g = chains()
        error = check_refused(g.graph, lambda: edit(g), ge.CycleError, cycle.split())
        assert error.cycle[0] == error.cycle[-1]
        assert sorted(error.cycle[:-1]) == cycle.split()
        assert " -> ".join(error.cycle) in str(error)

    setting.run(body)


@pytest.fixture
def control_flow_v1():
    enabled = tf.compat.v1.control_flow_v2_enabled()
    tf.compat.v1.disable_control_flow_v2()
    yield
    if enabled:
        tf.compat.v1.enable_control_flow_v2()


def test_a_control_edge_out_of_a_while_loop_is_refused(control_flow_v1):
    # The executor would fail: "Retval[0] has already been set".
    with tf.Graph().as_default() as graph:
        start = tf.constant(0, name="start")
        tf.compat.v1.while_loop(lambda i: i < 5, lambda i: i + 1, [start])
        body = graph.get_operation_by_name("while/add")
        after = tf.constant(1, name="after")
        check_refused(
            graph,
            lambda: ge.add_control_inputs(after.op, body),
            ge.RerouteError,
            ["'after'", "'while/add'", "while_context"],
        )
