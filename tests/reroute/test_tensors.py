import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from tests.reroute.samples import EAGER, VARIABLE, check_refused, foreign, inputs, wires

A, B, C = np.array([1.0, 2.0]), np.array([3.0, 5.0]), np.array([7.0, 11.0])
VALUES = {"a": A, "b": B, "c": C}
START = "ab ba aa b c"


@pytest.mark.parametrize(
    ("edit", "count", "wiring"),
    [
        (lambda g: ge.swap_ts(g.a, g.b), 7, "ba ab bb a c"),
        (lambda g: ge.swap_ts([g.a], [g.b]), 7, "ba ab bb a c"),
        (lambda g: ge.swap_ts(g.b, g.c), 4, "ac ca aa c b"),
        (lambda g: ge.swap_ts([g.a, g.a], [g.b, g.b]), 7, "ba ab bb a c"),
        (lambda g: ge.swap_ts(g.a, g.a), 0, START),
        (lambda g: ge.swap_ts([], []), 0, START),
        (lambda g: ge.swap_ts([g.c, g.a], [g.c, g.b]), 7, "ba ab bb a c"),
        (lambda g: ge.swap_ts(g.a, g.b, can_modify=[g.p.op]), 2, "ba ba aa b c"),
        (lambda g: ge.swap_ts(g.a, g.b, can_modify=g.p.op), 2, "ba ba aa b c"),
        (lambda g: ge.swap_ts(g.a, g.b, g.r.op), 2, "ab ba bb b c"),
        (lambda g: ge.swap_ts(g.a, g.b, cannot_modify=[g.p.op]), 5, "ab ab bb a c"),
        (lambda g: ge.swap_ts(g.a, g.b, None, g.p.op), 5, "ab ab bb a c"),
        (lambda g: ge.swap_ts(g.a, g.b, can_modify=[]), 0, START),
        (lambda g: ge.swap_ts(g.a, g.b, cannot_modify=[]), 7, "ba ab bb a c"),
        (lambda g: ge.swap_ts(g.a, g.b, cannot_modify=g.graph), 0, START),
        (lambda g: ge.swap_ts(g.a, g.b, can_modify=g.graph), 7, "ba ab bb a c"),
        (
            lambda g: ge.swap_ts(
                g.a, g.b, can_modify=[g.p.op, g.q.op], cannot_modify=[g.q.op]
            ),
            2,
            "ba ba aa b c",
        ),
        (lambda g: ge.reroute_ts(g.a, g.b), 3, "aa aa aa a c"),
        (lambda g: ge.reroute_ts(g.b, g.a), 4, "bb bb bb b c"),
        (lambda g: ge.reroute_ts((g.a,), (g.b,)), 3, "aa aa aa a c"),
        (lambda g: ge.reroute_ts(iter([g.a]), iter([g.b])), 3, "aa aa aa a c"),
        (lambda g: ge.reroute_ts(g.a, g.a), 0, START),
        (lambda g: ge.reroute_ts([], []), 0, START),
        # A repeated tensor: its first partner counts, and nothing is counted twice.
        (lambda g: ge.reroute_ts([g.a, g.a], [g.b, g.b]), 3, "aa aa aa a c"),
        (lambda g: ge.reroute_ts([g.c, g.a], [g.b, g.b]), 3, "ac ca aa c c"),
        (lambda g: ge.reroute_ts([g.c, g.c], [g.a, g.b]), 7, "cc cc cc c c"),
        # All pairs at once: what the first pair brings in, the second leaves alone.
        (lambda g: ge.reroute_ts([g.a, g.b], [g.b, g.a]), 7, "ba ab bb a c"),
        (lambda g: ge.reroute_ts([g.b, g.c], [g.a, g.b]), 7, "bc cb bb c c"),
        (lambda g: ge.reroute_ts(g.a, g.b, can_modify=[g.q.op]), 1, "ab aa aa b c"),
        (
            lambda g: ge.reroute_ts(g.a, g.b, cannot_modify=[g.q.op]),
            2,
            "aa ba aa a c",
        ),
        (lambda g: ge.reroute_ts(g.a, g.b, can_modify=[]), 0, START),
        (lambda g: ge.reroute_ts(g.a, g.b, can_modify=[g.u.op]), 0, START),
        (lambda g: ge.reroute_ts(g.c, g.a, can_modify=[g.r.op]), 2, "ab ba cc b c"),
    ],
)
def test_rewires(setting, edit, count, wiring):
    def body():
        g = wires()
        outputs = [g.p, g.q, g.r, g.s, g.u]
        changed = edit(g)
        assert type(changed) is int
        assert changed == count
        assert inputs(*outputs) == [
            [f"{name}:0" for name in reads] for reads in wiring.split()
        ]
        ge.verify(g.graph)
        return outputs

    values = setting.run(body)
    p, q, r, s, u = ([VALUES[name] for name in reads] for reads in wiring.split())
    expected = [p[0] - p[1], q[0] - q[1], r[0] * r[1], -s[0], -u[0]]
    for value, wanted in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, wanted)


def test_an_edit_adds_no_op(setting):
    def body():
        g = wires()
        count = len(g.graph.get_operations())
        ge.swap_ts(g.a, g.b)
        ge.reroute_ts(g.a, g.c)
        assert len(g.graph.get_operations()) == count

    setting.run(body)


def test_all_inputs_of_an_op_with_many(setting):
    def body():
        g = wires()
        total = tf.add_n([g.a, g.b, g.a, g.c, g.a], name="total")
        assert ge.reroute_ts(g.c, g.a, can_modify=total.op) == 3
        assert inputs(total) == [["c:0", "b:0", "c:0", "c:0", "c:0"]]
        return [total]

    np.testing.assert_allclose(setting.run(body)[0], 4 * C + B)


def test_many_readers_are_all_counted(setting):
    def body():
        g = wires()
        readers = [tf.negative(g.c, name=f"reader{i}") for i in range(40)]
        assert ge.reroute_ts(g.a, g.c) == 41
        assert inputs(*readers) == [["a:0"]] * 40

    setting.run(body)


def test_several_outputs_of_one_op(setting):
    def body():
        parts = tf.unstack(tf.constant([[1.0, 2.0], [3.0, 5.0]]), name="parts")
        difference = tf.subtract(*parts, name="difference")
        assert ge.swap_ts(parts[0], parts[1]) == 2
        assert inputs(difference) == [["parts:1", "parts:0"]]
        return [difference]

    np.testing.assert_allclose(setting.run(body)[0], B - A)


def test_an_unknown_shape_is_compatible(setting):
    def body():
        g = wires()
        for shape in (None, [None], [2]):
            ph = ge.ph(tf.float32, shape)
            assert ge.reroute_ts(ph, g.c) == 1
            assert ge.reroute_ts(g.c, ph) == 1
        assert inputs(g.u) == [["c:0"]]

    setting.run(body)


def test_an_open_session_that_has_not_run_is_no_reason_to_refuse():
    with tf.Graph().as_default():
        g = wires()
        with tf.compat.v1.Session() as session:
            assert ge.reroute_ts(g.a, g.c) == 1
            np.testing.assert_allclose(session.run(g.u), -A)


def test_ops_that_a_session_has_not_seen_may_be_edited():
    with tf.Graph().as_default():
        g = wires()
        with tf.compat.v1.Session() as session:
            session.run(g.u)
            new = tf.exp(g.a, name="new")
            assert ge.reroute_ts(g.b, g.a, can_modify=new.op) == 1
            np.testing.assert_allclose(session.run(new), np.exp(B), rtol=1e-5)


def test_allow_stale_lets_the_edit_through():
    with tf.Graph().as_default() as graph:
        g = wires()
        with tf.compat.v1.Session() as session:
            session.run(g.u)
            check_refused(graph, lambda: ge.swap_ts(g.a, g.b), ge.StaleGraphError)
            with ge.allow_stale(graph):
                assert ge.reroute_ts(g.a, g.c) == 1
        with tf.compat.v1.Session() as session:
            np.testing.assert_allclose(session.run(g.u), -A)


# -- references to version 1 variables -------------------------------------------------


def variable():
    tf.compat.v1.Variable([1.0, 2.0], use_resource=False, name="v")
    graph = tf.compat.v1.get_default_graph()
    reference = graph.get_tensor_by_name("v:0")
    assert reference.dtype == tf.float32._as_ref
    return graph, reference, graph.get_operation_by_name("v/read")


def test_a_value_cannot_stand_in_for_an_assigned_reference():
    with tf.Graph().as_default():
        graph, reference, _ = variable()
        value = tf.constant([3.0, 5.0], name="value")
        check_refused(
            graph,
            lambda: ge.reroute_ts(value, reference),
            ge.RerouteError,
            ["'value:0'", "'v:0'", "'v/Assign'", "cannot_modify="],
        )


def test_the_remedy_for_a_reference_works():
    with tf.Graph().as_default():
        graph, reference, read = variable()
        value = tf.constant([3.0, 5.0], name="value")
        assign = graph.get_operation_by_name("v/Assign")
        assert ge.reroute_ts(value, reference, cannot_modify=assign) == 1
        assert read.inputs[0] is value
        assert assign.inputs[0] is reference


def test_readers_chosen_by_can_modify_take_a_value_for_a_reference():
    with tf.Graph().as_default():
        _, reference, read = variable()
        value = tf.constant([3.0, 5.0], name="value")
        assert ge.reroute_ts(value, reference, can_modify=read) == 1
        assert read.inputs[0] is value


def test_a_reference_may_stand_in_for_a_value():
    with tf.Graph().as_default() as graph:
        _, reference, _ = variable()
        g = wires()
        assert ge.reroute_ts(reference, g.c) == 1
        ge.verify(graph)


# -- refusals --------------------------------------------------------------------------

REFUSALS = [
    # (arguments, error, words)
    (lambda g, o: (g.a, o.b), ge.SelectionError, ["'a:0'", "'b:0'", "geutil.copy"]),
    (lambda g, o: (o.a, g.b), ge.SelectionError, ["different graphs"]),
    (lambda g, o: ([g.a, o.a], [g.b, g.c]), ge.SelectionError, ["different graphs"]),
    (lambda g, o: (g.a, g.b, o.p.op), ge.SelectionError, ["'p'", "geutil.copy"]),
    (lambda g, o: (g.a, g.b, None, o.p.op), ge.SelectionError, ["'p'"]),
    (
        lambda g, o: (g.a, g.whole),
        ge.RerouteError,
        ["'a:0'", "'whole:0'", "float32", "int32", "dtypes differ", "tf.cast"],
    ),
    (
        lambda g, o: ([g.b, g.a], [g.c, g.whole]),
        ge.RerouteError,
        ["'a:0'", "'whole:0'", "dtypes differ"],
    ),
    (
        lambda g, o: (g.a, g.wide),
        ge.RerouteError,
        ["'a:0'", "'wide:0'", "(2,)", "(3,)", "shapes differ", "reshape"],
    ),
    (
        lambda g, o: (g.a, g.flat),
        ge.RerouteError,
        ["'flat:0'", "shapes differ", "geutil.graph_replace"],
    ),
    (lambda g, o: ([g.a], [g.b, g.c]), ge.RerouteError, ["1", "2", "a:0", "b:0, c:0"]),
    (lambda g, o: ([g.a, g.b], g.c), ge.RerouteError, ["a:0, b:0", "c:0"]),
    (lambda g, o: ([], g.c), ge.RerouteError, ["c:0"]),
    (lambda g, o: (g.a.op, g.b), ge.ArgumentTypeError, ["tf.Tensor", "Operation"]),
    (lambda g, o: (g.a, g.b.op), ge.ArgumentTypeError, ["tf.Tensor", "Operation"]),
    (lambda g, o: ("a:0", g.b), ge.ArgumentTypeError, ["tf.Tensor", "str"]),
    (lambda g, o: (g.a, None), ge.ArgumentTypeError, ["tf.Tensor", "NoneType"]),
    (lambda g, o: (1.0, g.b), ge.ArgumentTypeError, ["tf.Tensor", "float"]),
    (lambda g, o: (g.a, [g.b, 1]), ge.ArgumentTypeError, ["tf.Tensor", "int"]),
    (lambda g, o: (g.a, g.b, g.p), ge.ArgumentTypeError, ["tf.Operation", "Tensor"]),
    (lambda g, o: (g.a, g.b, "p"), ge.ArgumentTypeError, ["tf.Operation", "str"]),
    (lambda g, o: (g.a, g.b, None, [g.p]), ge.ArgumentTypeError, ["tf.Operation"]),
    (lambda g, o: (g.a, g.b, None, 1), ge.ArgumentTypeError, ["int"]),
]
if EAGER is not None:
    REFUSALS += [
        (lambda g, o: (EAGER, g.b), ge.ArgumentTypeError, ["eager"]),
        (lambda g, o: (g.a, EAGER), ge.ArgumentTypeError, ["eager"]),
        (lambda g, o: (g.a, [EAGER]), ge.ArgumentTypeError, ["eager"]),
        (lambda g, o: (VARIABLE, g.b), ge.ArgumentTypeError, ["tf.Tensor", "Variable"]),
        (lambda g, o: (g.a, [VARIABLE]), ge.ArgumentTypeError, ["Variable"]),
    ]


@pytest.mark.parametrize("edit", [ge.swap_ts, ge.reroute_ts])
@pytest.mark.parametrize(("arguments", "error", "words"), REFUSALS)
def test_refusals(setting, edit, arguments, error, words):
    other = foreign(wires)

    def body():
        g = wires()
        g.whole = tf.constant([1, 2], name="whole")
        g.wide = tf.constant([1.0, 2.0, 3.0], name="wide")
        g.flat = tf.constant(1.0, name="flat")
        tf.negative(g.whole), tf.negative(g.wide), tf.negative(g.flat)
        given = arguments(g, other)
        check_refused(g.graph, lambda: edit(*given), error, words)

    setting.run(body)


@pytest.mark.parametrize(
    ("edit", "cycle"),
    [
        (lambda g: ge.reroute_ts(g.u, g.c), "u u"),
        (lambda g: ge.reroute_ts(g.last, g.c), "u middle last u"),
        (lambda g: ge.reroute_ts(g.last, g.c, can_modify=[g.u.op]), "u middle last u"),
        (lambda g: ge.reroute_ts(g.last, g.u, can_modify=g.middle.op), "middle last"),
        (lambda g: ge.swap_ts(g.u, g.last), "middle last"),
        (lambda g: ge.swap_ts(g.c, g.last), "u middle last"),
        # Each of the two alone would be legal.
        (lambda g: ge.reroute_ts([g.u, g.s], [g.b, g.c]), "s u"),
        # The control edge from u to late closes the cycle.
        (lambda g: ge.reroute_ts(g.after, g.c), "late u after"),
    ],
)
def test_a_cycle_is_refused_and_listed(setting, edit, cycle):
    def body():
        g = wires()
        g.middle = tf.exp(g.u, name="middle")
        g.last = tf.tanh(g.middle, name="last")
        with tf.control_dependencies([g.u]):
            g.late = tf.constant([1.0, 2.0], name="late")
        g.after = tf.abs(g.late, name="after")
        error = check_refused(g.graph, lambda: edit(g), ge.CycleError, cycle.split())
        assert isinstance(error, ge.RerouteError)
        assert error.cycle[0] == error.cycle[-1]
        assert set(error.cycle) >= set(cycle.split())
        assert " -> ".join(error.cycle) in str(error)

    setting.run(body)
