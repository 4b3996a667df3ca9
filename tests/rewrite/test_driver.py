import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.errors import (
    ArgumentTypeError,
    FinalizedGraphError,
    SelectionError,
    StaleGraphError,
    TransformError,
    VerificationError,
)
from geutil.rewrite import Any, Op, Rule, match, rewrite
from geutil.rewrite.rules import identity_elimination
from tests.graph.building import chain, snapshot
from tests.settings import edges, evaluate, names, slow
from tests.thorough import length

X = np.array([0.25, -1.5], np.float32)


def swap(old, new, **options):
    """A rule that replaces an op of one input by the result of a function."""
    options.setdefault("name", f"{old} -> {new.__name__}")
    return Rule(Op(old, Any("x")), lambda m: new(m["x"]), **options)


def unchanged(graph, before):
    """Tell whether the ops that there were have the edges that they had."""
    after = edges(graph)
    return {name: after[name] for name in before} == before


def test_new_ops_stand_where_the_root_stood(graph):
    x = tf.constant(X)
    with tf.name_scope("outer"), tf.device("/device:CPU:0"):
        old = tf.exp(x, name="e")
    y = tf.negative(old, name="y")
    waited = tf.no_op()
    with (
        tf.name_scope("elsewhere"),
        tf.device("/device:GPU:7"),
        tf.control_dependencies([waited]),
    ):
        report = rewrite(graph, swap("Exp", tf.sin), debug=True)
    new = y.op.inputs[0].op
    assert (new.type, new.name, new.device) == ("Sin", "outer/Sin", old.op.device)
    assert not new.control_inputs
    [entry] = report.rewritten
    assert (entry.rule, entry.op) == ("Exp -> sin", "outer/e")
    assert (entry.ops, entry.new_ops) == (("outer/e",), ("outer/Sin",))
    assert str(report).splitlines() == [
        "1 rewritten, 0 refused",
        "  Exp -> sin: 1 rewritten, 0 refused",
        "rewritten:",
        "  Exp -> sin: 'outer/e' -> 'outer/Sin'",
    ]
    np.testing.assert_allclose(evaluate(graph, [y])[0], -np.sin(X), rtol=1e-6)


def test_ordering_is_carried_over(graph):
    first, second, x = tf.no_op("first"), tf.no_op("second"), tf.constant(X)
    with tf.control_dependencies([first]):
        inner = tf.sin(x, name="inner")
    with tf.control_dependencies([second]):
        outer = tf.exp(inner, name="outer")
    tf.negative(outer)
    with tf.control_dependencies([outer, inner]):
        last = tf.no_op("last")
    pattern = Op("Exp", Op("Sin", Any("x")))
    rewrite(graph, Rule(pattern, lambda m: tf.cos(m["x"])), debug=True)
    [new] = last.control_inputs
    assert new.type == "Cos"
    assert sorted(names(new.control_inputs)) == ["first", "second"]
    # A tensor that was there cannot wait itself.
    rewrite(graph, Rule(Op("Cos", Any("x")), lambda m: m["x"]), debug=True)
    [passed] = last.control_inputs
    assert passed.type == "Identity"
    assert passed.inputs[0] is x
    assert sorted(names(passed.control_inputs)) == ["first", "second"]


def test_a_root_may_be_wrapped_once(graph):
    x = tf.constant(X)
    y = tf.negative(tf.nn.relu(x, name="r"), name="y")
    rule = Rule(Op("Relu", name="r"), lambda m: tf.exp(m["r"].outputs[0]), name="wrap")
    report = rewrite(graph, rule, debug=True)
    assert len(report.rewritten) == 1
    assert y.op.inputs[0].op.type == "Exp"
    assert names(y.op.inputs[0].op.inputs) == ["r:0"]
    np.testing.assert_allclose(
        evaluate(graph, [y])[0], -np.exp(np.maximum(X, 0)), rtol=1e-6
    )


def test_rules_take_up_each_others_results(graph):
    y = tf.negative(tf.exp(tf.constant(X)))
    # They may be nested, and earlier ones go first.
    rules = [(swap("Sin", tf.cos),), [[swap("Exp", tf.sin)], swap("Exp", tf.tanh)]]
    rules.append(swap("Cos", tf.tanh))
    report = rewrite(graph, rules, debug=True)
    assert [entry.rule for entry in report.rewritten] == [
        "Exp -> sin",
        "Sin -> cos",
        "Cos -> tanh",
    ]
    assert y.op.inputs[0].op.type == "Tanh"
    assert not rewrite(graph, rules).rewritten
    # One that looks further up than the op that reads the result.
    tf.cos(tf.negative(tf.exp(tf.constant(X))))
    deep = Op("Cos", Op("Neg", Op("Sin", Any("x"))))
    rules = [swap("Exp", tf.sin), Rule(deep, lambda m: tf.tanh(m["x"]), name="deep")]
    assert [e.rule for e in rewrite(graph, rules).rewritten] == ["Exp -> sin", "deep"]


def test_replaced_results_are_followed_to_the_end(graph):
    x = tf.constant(X)
    fetched = tf.exp(x)
    other = tf.sin(x)
    rules = [swap("Exp", tf.sin), swap("Sin", tf.cos)]
    report = rewrite(graph, rules, keep=[other])
    assert report.current(fetched).op.type == "Cos"
    assert report.current(other) is other
    assert len(report.replaced) == 2
    [refused] = report.refused
    assert (refused.rule, refused.op) == ("Sin -> cos", other.op.name)


def test_a_replaced_op_no_longer_counts_as_a_reader(graph):
    x = tf.constant(X)
    s = tf.sin(x, name="s")
    tf.negative(tf.exp(s, name="kept"))
    tf.negative(tf.cos(s, name="leaves"))
    lone = Rule(
        Op("Exp", Op("Sin", Any("x"), only_consumer=True)),
        lambda m: tf.tanh(m["x"]),
        name="lone",
    )
    leaves = Rule(Op("Cos", Op("Sin", Any("x"))), lambda m: m["x"], name="leaves")
    assert not match(graph, lone.pattern)
    for rules in ([lone, leaves], [leaves, lone]):
        _, info = ge.copy(graph, tf.Graph())
        report = rewrite(info.transformed(s).graph, rules, debug=True)
        assert report.counts == {"leaves": (1, 0), "lone": (1, 0)}


def test_an_op_that_counts_again_does_not_when_that_is_undone(graph):
    old = tf.exp(tf.constant(X))
    y = tf.negative(old)
    rewrite(graph, swap("Exp", tf.sin))
    with pytest.raises(KeyError), ge.transaction(graph):
        ge.reroute_ts(old, y.op.inputs[0])
        assert len(match(graph, Op("Exp"))) == 1
        before = edges(graph)
        with pytest.raises(KeyError), ge.transaction(graph):
            assert rewrite(graph, swap("Exp", tf.sin)).rewritten
            raise KeyError
        assert unchanged(graph, before)
        assert len(match(graph, Op("Exp"))) == 1
        raise KeyError
    assert not match(graph, Op("Exp"))


@pytest.mark.parametrize(
    ("options", "check", "reason"),
    [
        ({}, lambda m: "not today", "not today"),
        ({}, lambda m: False, "<lambda>() is false"),
        ({"where": lambda op: False}, None, "<lambda>() is false for 'e'"),
    ],
)
def test_candidates_are_refused_with_a_reason(graph, options, check, reason):
    tf.negative(tf.exp(tf.constant(X), name="e"))
    before = snapshot(graph)
    rule = Rule(Op("Exp", Any("x"), **options), lambda m: m["x"], check, "rule")
    report = rewrite(graph, rule)
    assert [(r.rule, r.op, r.reason) for r in report.refused] == [("rule", "e", reason)]
    assert not report.rewritten
    assert snapshot(graph) == before
    assert str(report).splitlines() == [
        "0 rewritten, 1 refused",
        "  rule: 0 rewritten, 1 refused",
        "refused:",
        f"  rule: 'e': {reason}",
    ]


def test_a_shared_op_is_a_reason(graph):
    s = tf.sin(tf.constant(X), name="s")
    tf.exp(s, name="e"), tf.cos(s, name="c")
    before = snapshot(graph)
    lone = Op("Sin", only_consumer=True, name="sin")
    report = rewrite(graph, Rule(Op("Exp", lone), lambda m: m["sin"].outputs[0]))
    [refused] = report.refused
    assert refused.reason == (
        "Op('Sin', name='sin') asks for only_consumer: 'c' reads 's' too"
    )
    kept = Rule(Op("Cos", Op("Sin")), lambda m: m.root.inputs[0])
    assert rewrite(graph, kept, ops=[graph.get_operation_by_name("c")]).refused[
        0
    ].reason == ("'s' is not among ops")
    assert snapshot(graph) == before


@pytest.mark.usefixtures("control_flow_v1")
def test_inside_a_loop_and_across_a_conditional(graph):
    _, result = tf.compat.v1.while_loop(
        lambda i, _: i < 3,
        lambda i, t: (i + 1, tf.nn.relu6(t) + 1.0),
        [tf.constant(0), tf.constant(5.0)],
    )
    x = tf.constant(1.0)
    s = tf.sin(x, name="s")
    tf.compat.v1.cond(x > 0, lambda: tf.exp(s, name="e"), lambda: x)
    before = snapshot(graph)
    pattern = Op("Exp", Op("Switch", Op("Sin"), ...)[1])
    [refused] = rewrite(graph, Rule(pattern, lambda m: m.root.inputs[0])).refused
    assert "one match runs in one context" in refused.reason
    assert snapshot(graph) == before
    capped = swap("Relu6", lambda x: tf.minimum(tf.nn.relu(x), 6.0), name="capped")
    expected = evaluate(graph, [result])
    report = rewrite(graph, capped, debug=True)
    assert len(report.rewritten) == 1
    assert evaluate(graph, [result]) == expected


def test_a_replacement_may_decline(graph):
    tf.negative(tf.exp(tf.constant(X), name="e"))
    before = edges(graph)

    def build(m):
        tf.sin(m["x"])
        return "changed my mind"

    rule = Rule(Op("Exp", Any("x")), build)
    [refused] = rewrite(graph, rule).refused
    assert refused.reason == "changed my mind"
    assert unchanged(graph, before)
    [refused] = rewrite(graph, Rule(Op("Exp"), lambda m: None)).refused
    assert refused.reason == "the replacement replaces no output"
    # What it made is not matched.
    assert not match(graph, Op("Sin"))


def test_what_would_close_a_cycle_is_refused(graph):
    x = tf.constant(X)
    e = tf.exp(x, name="e")
    y = tf.sin(e, name="y")
    z = tf.cos(y, name="z")
    before = edges(graph)
    report = rewrite(graph, Rule(Op("Exp"), lambda m: z + 1.0, name="cycle"))
    [refused] = report.refused
    assert "close a cycle" in refused.reason
    assert unchanged(graph, before)
    assert names(r.root for r in match(graph, Op("AddV2"))) == []


A, B = Any("a"), Any("b")
THERE_AND_BACK = [swap("Relu6", tf.nn.relu, name="r"), swap("Relu", tf.nn.relu6)]
COMMUTED = Rule(Op("AddV2", A, B), lambda m: m["b"] + m["a"], name="swap")
DISTRIBUTED = [
    Rule(Op("Neg", Op("AddV2", A, B)), lambda m: -m["a"] + -m["b"], name="in"),
    Rule(Op("AddV2", Op("Neg", A), Op("Neg", B)), lambda m: -(m["a"] + m["b"])),
]
# By what is there already.
EXCHANGED = [
    Rule(Op("Neg"), lambda m: m.root.graph.get_tensor_by_name("s:0"), name="to s"),
    Rule(Op("Sin"), lambda m: m.root.graph.get_tensor_by_name("n:0"), name="to n"),
]


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (EXCHANGED, ["undo each other"]),
        (THERE_AND_BACK, ["'r'", "'Relu -> relu6'", "undo each other"]),
        (COMMUTED, ["rule 'swap' undoes itself"]),
        (DISTRIBUTED, ["'in'", "undo each other"]),
    ],
    ids=["exchanged", "there and back", "commuted", "distributed"],
)
def test_rules_that_undo_each_other(graph, rules, words):
    x = tf.constant(X)
    tf.identity(tf.negative(tf.nn.relu6(x, name="r6") + x, name="n"))
    tf.identity(tf.sin(x, name="s"))
    before = edges(graph)
    with pytest.raises(TransformError) as caught:
        rewrite(graph, rules, limit=1_000)
    for word in words:
        assert word in str(caught.value)
    assert unchanged(graph, before)
    # All that a rule may still match.
    found = match(graph, Op(lambda op: True), overlaps=True)
    assert {m.root.name for m in found} <= set(before)


@pytest.mark.parametrize("limit", [0, 7, None])
def test_rules_that_never_end(graph, limit):
    tf.identity(tf.exp(tf.constant(X)))
    before = edges(graph)
    grow = Rule(
        Op("Exp", Any("x")), lambda m: tf.exp(m["x"] + 1.0, name="more"), name="grow"
    )
    with pytest.raises(TransformError) as caught:
        rewrite(graph, grow, limit=limit)
    bound = 100 + 2 * len(before) if limit is None else limit
    assert f"more than {bound} rewrites" in str(caught.value)
    assert "'grow'" in str(caught.value)
    assert unchanged(graph, before)


def test_an_error_undoes_everything(graph):
    x = tf.constant(X)
    y = tf.negative(tf.exp(tf.sin(x, name="s"), name="e"), name="y")
    before = edges(graph)

    def fail(m):
        tf.tanh(m["x"])
        raise KeyError("oh")

    rules = [swap("Exp", tf.cos), Rule(Op("Sin", Any("x")), fail)]
    with pytest.raises(KeyError, match="oh"):
        rewrite(graph, rules)
    assert unchanged(graph, before)
    ge.verify(graph)
    # Nothing is retired but what was made: the same call can be made again.
    assert names(m.root for m in match(graph, Op("Exp"))) == ["e"]
    assert not match(graph, Op({"Cos", "Tanh"}))
    assert len(rewrite(graph, rules[0]).rewritten) == 1
    np.testing.assert_allclose(evaluate(graph, [y])[0], -np.cos(np.sin(X)), rtol=1e-6)


def test_debug_verifies_each_rewrite(graph, monkeypatch):
    tf.negative(tf.exp(tf.exp(tf.constant(X))))
    before = edges(graph)
    calls = []

    def verify(checked):
        calls.append(checked)
        if len(calls) == 2:
            raise VerificationError("broken", ())

    monkeypatch.setattr("geutil.rewrite.driver.verify", verify)
    rewrite(graph, swap("Cos", tf.sin), debug=True)
    assert not calls
    with pytest.raises(VerificationError):
        rewrite(graph, swap("Exp", tf.sin), debug=True)
    assert calls == [graph, graph]
    assert unchanged(graph, before)


def test_a_graph_that_a_session_has_run_and_a_finalized_one(graph):
    y = tf.negative(tf.exp(tf.constant(X)))
    with tf.compat.v1.Session(graph=graph) as session:
        session.run(y)
        before = snapshot(graph)
        with pytest.raises(StaleGraphError):
            rewrite(graph, swap("Exp", tf.sin))
        assert snapshot(graph) == before
    graph.finalize()
    before = snapshot(graph)
    with pytest.raises(FinalizedGraphError):
        rewrite(graph, swap("Exp", tf.sin))
    assert snapshot(graph) == before
    assert not rewrite(graph, swap("Sin", tf.exp)).rewritten


def test_wrong_arguments(graph):
    x = tf.constant(X)
    rule = swap("Exp", tf.sin)
    with tf.Graph().as_default():
        foreign = tf.constant(1.0)
    before = snapshot(graph)
    for arguments, error in (
        (lambda: rewrite("graph", rule), ArgumentTypeError),
        (lambda: rewrite(graph, Op("Exp")), ArgumentTypeError),
        (lambda: rewrite(graph, [rule, None]), ArgumentTypeError),
        (lambda: rewrite(graph, rule, keep=["x"]), ArgumentTypeError),
        (lambda: rewrite(graph, rule, keep=[foreign]), SelectionError),
        (lambda: rewrite(graph, rule, ops=[x]), ArgumentTypeError),
        (lambda: rewrite(graph, rule, ops=[foreign.op]), SelectionError),
        (lambda: Rule(Op("Exp"), "sin"), ArgumentTypeError),
        (lambda: Rule(Op("Exp"), None), ArgumentTypeError),
        (lambda: Rule(Op("Exp"), tf.sin, check="x"), ArgumentTypeError),
    ):
        with pytest.raises(error):
            arguments()
    assert snapshot(graph) == before


@slow
def test_a_very_long_chain():
    count = length(100_000)
    graph = chain(count)
    end = graph.get_operation_by_name(f"n{count - 1}")
    report = rewrite(graph, identity_elimination())
    assert len(report.rewritten) == count - 2
    assert names(end.inputs) == ["n0:0"]
    assert not rewrite(graph, identity_elimination()).rewritten


def test_a_hub_of_many_readers():
    with tf.Graph().as_default() as graph:
        hub = tf.constant(1.0, name="hub")
        graph_def = tf.compat.v1.GraphDef()
        for i in range(2_000):
            node = graph_def.node.add(name=f"i{i}", op="Identity", input=["hub"])
            node.attr["T"].type = tf.float32.as_datatype_enum
            node = graph_def.node.add(name=f"n{i}", op="Neg", input=[f"i{i}"])
            node.attr["T"].type = tf.float32.as_datatype_enum
        tf.import_graph_def(graph_def, {"hub": hub}, name="")
    lone = Rule(Op("Neg", Op("Const", only_consumer=True)), lambda m: m.root.inputs[0])
    report = rewrite(graph, [identity_elimination(), lone])
    assert report.counts["identity_elimination"] == (2_000, 0)
    assert len(report.refused) == 2_000
