import re

import pytest
import tensorflow as tf

import geutil as ge
from tests.select.samples import diamond, looking, many_readers
from tests.settings import names


def op_of_type(wanted):
    with tf.Graph().as_default():
        x = tf.constant(1.0)
        made = {
            "Neg": lambda: tf.raw_ops.Neg(x=x),
            "Add": lambda: tf.raw_ops.Add(x=x, y=x),
            "AddV2": lambda: tf.raw_ops.AddV2(x=x, y=x),
            "AddN": lambda: tf.raw_ops.AddN(inputs=[x, x]),
        }[wanted]()
    assert made.op.type == wanted
    return made.op


@pytest.mark.parametrize(
    ("types", "of", "expected"),
    [
        ("Add", "Add", True),
        ("AddV2", "AddV2", True),
        ("AddV2", "Add", False),
        ("Add", "AddV2", False),
        ("Add", "AddN", False),
        ("A", "Add", False),
        ("", "Add", False),
        ("add", "Add", False),
        ("Add|Neg", "Add", False),
        ("AddV2Neg", "Neg", False),
        (".*", "Neg", False),
        (["Add", "AddV2"], "AddV2", True),
        (("Add", "AddV2"), "AddN", False),
        ({"Neg"}, "Neg", True),
        ([], "Neg", False),
        (iter(["Add", "Neg"]), "Neg", True),
    ],
)
def test_op_type(types, of, expected):
    assert ge.op_type(types, op_of_type(of)) is expected


def test_op_type_without_an_op_is_a_predicate(setting):
    def body():
        g = diamond()
        is_unary = ge.op_type(["Neg", "Square"])
        with looking():
            assert names(ge.filter_ops(g.graph, is_unary)) == ["a", "b"]
            assert [is_unary(t.op) for t in (g.a, g.b, g.c)] == [True, True, False]

    setting.run(body)


def test_op_type_keeps_the_types_of_an_iterator():
    op = op_of_type("Neg")
    predicate = ge.op_type(iter(["Neg"]))
    assert predicate(op)
    assert predicate(op)


@pytest.mark.parametrize("wrong", ["Neg", 1, []])
def test_op_type_refuses_what_is_no_op(wrong):
    with pytest.raises(ge.ArgumentTypeError, match=r"tf\.Operation") as caught:
        ge.op_type("Neg", wrong)
    assert isinstance(caught.value, TypeError)
    with pytest.raises(ge.ArgumentTypeError, match=r"tf\.Operation"):
        ge.op_type("Neg")(wrong)


@pytest.mark.parametrize(
    ("wanted", "name", "expected"),
    [
        # A string: the whole name, or all that follows its last slash.
        ("Add", "Add", True),
        ("Add", "scope/Add", True),
        ("Add", "AddN", False),
        ("Add", "Add_1", False),
        ("Add", "scope/Add_1", False),
        ("Add", "BiasAdd", False),
        ("Add", "Add/x", False),
        ("scope/Add", "scope/Add", True),
        ("scope/Add", "big/scope/Add", False),
        ("scope", "scope/Add", False),
        ("Add.*", "Add_1", True),
        ("Add(_1)?", "scope/Add_1", True),
        (".*/Add", "scope/Add", True),
        ("add", "Add", False),
        # A compiled regex is searched.
        (re.compile("Add"), "scope/BiasAdd_1", True),
        (re.compile("^Add$"), "scope/Add", False),
        (re.compile("/Add$"), "scope/Add", True),
        # A predicate, or anything.
        (lambda op: op.name.endswith("1"), "Add_1", True),
        (lambda op: op.name.endswith("1"), "Add", False),
        (ge.op_type("Const"), "Add", True),
        (ge.op_type("Con"), "Add", False),
        (True, "Add", True),
    ],
)
def test_positive_filter(setting, wanted, name, expected):
    def body():
        op = tf.constant(1.0, name=name).op
        assert op.name == name
        with looking():
            assert ge.OpMatcher(wanted)(op) is expected

    setting.run(body)


def test_an_op_matches_itself_only(setting):
    def body():
        g = diamond()
        with looking():
            matcher = ge.OpMatcher(g.a.op)
            assert matcher(g.a.op)
            assert not matcher(g.b.op)

    setting.run(body)


@pytest.mark.parametrize(
    ("matcher", "matching"),
    [
        (lambda g: ge.OpMatcher(True).input_ops("a", "b"), "c"),
        (lambda g: ge.OpMatcher(True).input_ops("b", "a"), ""),
        (lambda g: ge.OpMatcher(True).input_ops("a"), ""),
        (lambda g: ge.OpMatcher(True).input_ops("a", "b", True), ""),
        (lambda g: ge.OpMatcher(True).input_ops("a", None), "c"),
        (lambda g: ge.OpMatcher(True).input_ops(None, None), "c"),
        (lambda g: ge.OpMatcher(True).input_ops(None), "a b d"),
        (lambda g: ge.OpMatcher(True).input_ops(True), "a b d"),
        (lambda g: ge.OpMatcher(True).input_ops(), "x w"),
        (lambda g: ge.OpMatcher(True).input_ops(g.x.op), "a b"),
        (lambda g: ge.OpMatcher(True).input_ops(re.compile("[xc]")), "a b d"),
        (lambda g: ge.OpMatcher("b").input_ops("x"), "b"),
        (lambda g: ge.OpMatcher("b").input_ops("a"), ""),
        (
            lambda g: ge.OpMatcher(True).input_ops(
                ge.OpMatcher(ge.op_type("Neg")).input_ops("x"), ge.op_type("Square")
            ),
            "c",
        ),
        (
            lambda g: ge.OpMatcher(True).input_ops(
                ge.OpMatcher(True).input_ops(ge.OpMatcher("a").input_ops("x"), "b")
            ),
            "d",
        ),
        (
            lambda g: ge.OpMatcher(True).input_ops(
                ge.OpMatcher(True).input_ops(ge.OpMatcher("a").input_ops("w"), "b")
            ),
            "",
        ),
        (lambda g: ge.OpMatcher(True).output_ops("c"), "a b"),
        (lambda g: ge.OpMatcher(True).output_ops(["a", "b"]), "x"),
        (lambda g: ge.OpMatcher(True).output_ops(["b", "a"]), ""),
        (lambda g: ge.OpMatcher(True).output_ops(["a", None]), "x"),
        (lambda g: ge.OpMatcher(True).output_ops(["a"]), ""),
        (lambda g: ge.OpMatcher(True).output_ops("a"), ""),
        (lambda g: ge.OpMatcher(True).output_ops([]), "d w"),
        (lambda g: ge.OpMatcher(True).output_ops(None), "x a b c d w"),
        (lambda g: ge.OpMatcher(True).output_ops(None, None), ""),
        (lambda g: ge.OpMatcher(True).output_ops(), ""),
        (
            lambda g: ge.OpMatcher(True).output_ops(ge.OpMatcher("c").output_ops("d")),
            "a b",
        ),
        (lambda g: ge.OpMatcher("a").output_ops("c").input_ops("x"), "a"),
        (lambda g: ge.OpMatcher("a").output_ops("c").input_ops("b"), ""),
        (lambda g: ge.OpMatcher(True).control_input_ops("a"), "w"),
        (lambda g: ge.OpMatcher(True).control_input_ops("b"), ""),
        (lambda g: ge.OpMatcher(True).control_input_ops(None), "w"),
        (lambda g: ge.OpMatcher(True).control_input_ops("a", None), ""),
        (lambda g: ge.OpMatcher(True).control_input_ops(), "x a b c d"),
        (
            lambda g: ge.OpMatcher(True).control_input_ops(
                ge.OpMatcher("a").input_ops("x")
            ),
            "w",
        ),
        (
            lambda g: (
                ge.OpMatcher("w").input_ops().output_ops([]).control_input_ops("a")
            ),
            "w",
        ),
    ],
)
def test_neighbours(setting, matcher, matching):
    def body():
        g = diamond()
        with looking():
            found = ge.filter_ops(g.graph, matcher(g))
            assert names(found) == matching.split()

    setting.run(body)


def test_several_outputs(setting):
    def body():
        x = tf.constant([1.0, 2.0], name="x")
        parts = tf.unstack(x, name="parts")
        tf.negative(parts[0], name="left")
        tf.negative(parts[1], name="right")
        with looking():
            op = parts[0].op
            assert ge.OpMatcher("parts").output_ops("left", "right")(op)
            assert ge.OpMatcher("parts").output_ops(None, "right")(op)
            assert not ge.OpMatcher("parts").output_ops("right", "left")(op)
            assert not ge.OpMatcher("parts").output_ops("left")(op)

    setting.run(body)


def test_an_op_that_reads_twice_is_one_consumer(setting):
    def body():
        x = tf.constant(1.0, name="x")
        tf.add(x, x, name="twice")
        with looking():
            assert ge.OpMatcher("x").output_ops("twice")(x.op)

    setting.run(body)


def test_consumers_are_matched_in_graph_order(setting):
    def body():
        source, readers = many_readers(30)
        wanted = [t.op for t in readers]
        assert ge.OpMatcher(True).output_ops(wanted)(source.op)
        assert not ge.OpMatcher(True).output_ops(wanted[::-1])(source.op)

    setting.run(body)


def test_calls_are_chained():
    matcher = ge.OpMatcher(True)
    assert matcher.input_ops("a") is matcher
    assert matcher.output_ops("a") is matcher
    assert matcher.control_input_ops("a") is matcher


@pytest.mark.parametrize("ask", ["input_ops", "output_ops", "control_input_ops"])
def test_each_kind_of_neighbour_is_asked_for_once(ask):
    matcher = getattr(ge.OpMatcher(True), ask)("a")
    with pytest.raises(ge.SelectionError, match=ask) as caught:
        getattr(matcher, ask)("b")
    assert isinstance(caught.value, ValueError)
    assert "make a new one" in str(caught.value)


@pytest.mark.parametrize("wrong", [None, 1, False, ["a"], object()])
def test_refuses_what_is_no_filter(wrong):
    with pytest.raises(ge.SelectionError, match="predicate") as caught:
        ge.OpMatcher(wrong)
    assert isinstance(caught.value, ValueError)


def test_refuses_an_invalid_regex():
    with pytest.raises(ge.SelectionError, match=r"re\.escape"):
        ge.OpMatcher("a(")


def test_refuses_what_is_no_op(setting):
    def body():
        g = diamond()
        for wrong in (g.a, "a", None):
            with pytest.raises(ge.ArgumentTypeError, match=r"tf\.Operation"):
                ge.OpMatcher(True)(wrong)

    setting.run(body)
