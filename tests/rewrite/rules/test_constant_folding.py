"""Constants and dead branches are folded to what TensorFlow computes."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

import geutil as ge
from geutil.rewrite import constant_value, rewrite, rules
from geutil.rewrite.rules import dead_branch_folding
from tests.graph.building import snapshot
from tests.random_graphs import drawn_graphs
from tests.settings import default_graph, evaluate, needs_eager
from tests.thorough import examples


def test_a_subgraph_becomes_its_value(setting):
    def body():
        x = tf.compat.v1.placeholder_with_default(tf.ones([2]), [2])
        y = x + tf.sqrt(tf.identity(tf.constant([2.0, 8.0])) * 8.0)
        report = rewrite(default_graph(), rules.constant_folding(), debug=True)
        assert len(report.rewritten) == 1
        assert constant_value(y.op.inputs[1]).tolist() == [4.0, 8.0]
        assert not rewrite(default_graph(), rules.constant_folding()).rewritten
        return [y]

    assert setting.run(body)[0].tolist() == [5.0, 9.0]


VALUES = [
    np.array([1, 2], np.int64),
    np.array([True, False]),
    np.array([b"a", b"bc"], object),
    np.array([1.5, 2.5], tf.bfloat16.as_numpy_dtype),
    np.array([1 + 2j]),
]


def test_any_type_of_value():
    with tf.Graph().as_default() as graph:
        results = [tf.identity(tf.reverse(tf.constant(v), [0])) for v in VALUES]
    rewrite(graph, rules.constant_folding(), debug=True)
    found = evaluate(graph, results)
    for value, y, folded in zip(VALUES, results, found, strict=True):
        assert y.op.inputs[0].op.type == "Const", value.dtype
        assert y.dtype == tf.as_dtype(value.dtype)
        assert folded.tolist() == value[::-1].tolist()


def test_several_outputs():
    with tf.Graph().as_default() as graph:
        a, b = tf.split(tf.constant([1.0, 2.0]), 2)
        y = tf.compat.v1.placeholder_with_default([10.0], [1]) + a - 3.0 * b
    rewrite(graph, rules.constant_folding(), debug=True)
    assert not ge.filter_ops(ge.get_backward_walk_ops(y), ge.op_type("Split"))
    assert evaluate(graph, [y])[0].tolist() == [5.0]


@pytest.mark.parametrize("max_ops", [1, 3, 16])
def test_long_chains_are_folded_piece_by_piece(max_ops):
    with tf.Graph().as_default() as graph:
        t = tf.constant(1.0)
        for _ in range(20):
            t = tf.negative(t)
        y = tf.compat.v1.placeholder_with_default(1.0, []) + t
    report = rewrite(graph, rules.constant_folding(max_ops=max_ops), debug=True)
    assert len(report.rewritten) == -(-20 // max_ops)
    assert constant_value(y.op.inputs[1]) == 1.0


NEVER = {
    "random": lambda: tf.random.uniform([2]),
    "variable": lambda: tf.raw_ops.ReadVariableOp(
        resource=tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[]), dtype=tf.float32
    ),
    "placeholder": lambda: tf.compat.v1.placeholder_with_default(1.0, []),
    "identity": lambda: tf.identity(tf.constant(1.0)),
    "function": lambda: tf.function(tf.exp, autograph=False)(tf.constant(1.0)),
    "fake quantization": lambda: tf.quantization.fake_quant_with_min_max_args(1.0),
    "variant": lambda: tf.raw_ops.TensorListReserve(
        element_shape=[1], num_elements=2, element_dtype=tf.float32
    ),
    "assertion": lambda: tf.raw_ops.Assert(condition=True, data=[tf.constant(1)]),
}
# What is made, options, and the reason.
REFUSED = {
    **{name: (build, {}, None) for name, build in NEVER.items()},
    "excluded": (lambda: tf.exp(tf.constant(1.0)), {"exclude": ["Exp"]}, None),
    "large": (
        lambda: tf.fill([100], tf.constant(1.0)),
        {"max_bytes": 399},
        "has 400 bytes",
    ),
    "unknown size": (
        lambda: tf.raw_ops.Where(condition=tf.constant([True, False])),
        {},
        "the size of 'Where:0' is not known",
    ),
    "no result": (
        lambda: tf.identity(tf.gather(tf.constant([1.0]), tf.constant([5]))),
        {},
        "TensorFlow cannot compute it",
    ),
}


def test_what_is_not_folded():
    wrong = {}
    for name, (build, options, reason) in REFUSED.items():
        with tf.Graph().as_default() as graph:
            build()
        before = snapshot(graph)
        report = rewrite(graph, rules.constant_folding(**options))
        reasons = [refused.reason for refused in report.refused]
        if len(reasons) != (reason is not None) or (reason or "") not in "".join(
            reasons
        ):
            wrong[name] = reasons
        assert not report.rewritten, name
        assert snapshot(graph) == before, name
    assert wrong == {}


@pytest.mark.usefixtures("control_flow_v1")
def test_a_constant_of_a_branch_stays_in_it():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [])
        y = tf.compat.v1.cond(x > 0, lambda: tf.exp(tf.constant(1.0)), lambda: x)
    report = rewrite(graph, rules.constant_folding(), debug=True)
    assert len(report.rewritten) == 1
    for value, expected in ((1.0, np.exp(1.0)), (-2.0, -2.0)):
        [result] = evaluate(graph, [y], {x: value})
        np.testing.assert_allclose(result, expected, rtol=1e-6)


@given(drawn_graphs())
@examples(15, derandomize=True)
def test_random_graphs_of_constants(drawn):
    with tf.Graph().as_default() as graph:
        results = [tf.identity(t) for t in drawn.build()]
    expected = evaluate(graph, results)
    rewrite(graph, rules.constant_folding(max_ops=4), debug=True)
    assert {t.op.inputs[0].op.type for t in results} == {"Const"}
    for value, wanted in zip(evaluate(graph, results), expected, strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert not rewrite(graph, rules.constant_folding(max_ops=4)).rewritten


X = np.array([0.25, -1.5], np.float32)
# Numbers other than zero, texts and tensors that are not empty.
TRUE = [True, 2, -0.5, b"no", [0.0]]
FALSE = [False, 0, 0.0, b"", []]


def placeholder():
    return tf.compat.v1.placeholder(tf.float32, [2], name="x")


def used_types(tensor):
    return {op.type for op in ge.get_backward_walk_ops(tensor, control_inputs=True)}


def functional_if(pred, x, stateful=False):
    """Make an If with any predicate: tf.cond only takes booleans."""
    signature = [tf.TensorSpec([2], tf.float32)]
    then_branch, else_branch = (
        tf.function(f).get_concrete_function(*signature) for f in (tf.exp, tf.sin)
    )
    make = tf.raw_ops.If if stateful else tf.raw_ops.StatelessIf
    return make(
        cond=pred,
        input=[x],
        Tout=[tf.float32],
        then_branch=then_branch,
        else_branch=else_branch,
    )[0]


def test_an_if_becomes_a_call_of_the_branch_that_runs():
    cases = [(p, stateful) for p in (*TRUE, *FALSE) for stateful in (False, True)]
    with tf.Graph().as_default() as graph:
        x = placeholder()
        results = [
            tf.negative(functional_if(tf.constant(pred), x, stateful))
            for pred, stateful in cases
        ]
    values = evaluate(graph, results, {x: X})
    report = rewrite(graph, dead_branch_folding(), debug=True)
    assert len(report.rewritten) == len(cases)
    after = evaluate(graph, results, {x: X})
    wrong, made = {}, []
    for case, z, before, value in zip(cases, results, values, after, strict=True):
        # The first cases are those of TRUE; each `before` is TensorFlow's.
        expected = np.exp(X) if len(made) < 2 * len(TRUE) else np.sin(X)
        made.append(case)
        if used_types(z) & {"If", "StatelessIf"} or (before != value).any():
            wrong[repr(case)] = value
        np.testing.assert_allclose(-value, expected, rtol=1e-6, err_msg=repr(case))
    assert wrong == {}
    # One that no constant decides is no candidate.
    with graph.as_default():
        tf.negative(functional_if(x[0] > 0, x))
    before = snapshot(graph)
    assert not rewrite(graph, dead_branch_folding()).rewritten
    assert snapshot(graph) == before


@needs_eager
def test_an_if_with_a_state_stays_in_a_function():
    reports = []

    @tf.function
    def traced(x):
        y = functional_if(tf.constant(True), x, stateful=True)
        z = tf.negative(y)
        graph = tf.compat.v1.get_default_graph()
        reports.append(rewrite(graph, dead_branch_folding()))
        return z

    np.testing.assert_allclose(traced(tf.constant(X)), -np.exp(X), rtol=1e-6)
    assert not reports[0].rewritten
    assert "would go on running" in reports[0].refused[0].reason


def test_what_waits_for_an_if_without_outputs_waits_for_the_call():
    with tf.Graph().as_default() as graph:
        v = tf.compat.v1.get_variable(
            "v", [], initializer=tf.zeros_initializer(), use_resource=True
        )

        @tf.function
        def add(amount):
            v.assign_add(amount)

        @tf.function
        def subtract(amount):
            v.assign_sub(amount)

        amount = tf.constant(2.0)
        branches = [f.get_concrete_function(amount) for f in (add, subtract)]
        op = tf.raw_ops.If(
            cond=tf.constant(False),
            input=[amount, v.handle],
            Tout=[],
            then_branch=branches[0],
            else_branch=branches[1],
        )
        with tf.control_dependencies([op]):
            y = v.read_value()
    report = rewrite(graph, dead_branch_folding(), debug=True)
    assert len(report.rewritten) == 1
    assert used_types(y).isdisjoint({"If", "StatelessIf"})
    assert evaluate(graph, [y])[0] == -2.0


@pytest.mark.parametrize("pred", [True, False])
@pytest.mark.usefixtures("control_flow_v1")
def test_v1_conditionals_keep_the_branch_that_runs(pred):
    with tf.Graph().as_default() as graph:
        x = placeholder()
        y, w = tf.compat.v1.cond(
            tf.constant(pred),
            lambda: (x * 2.0, tf.constant([1.0, 2.0])),
            lambda: (tf.constant([3.0, 4.0]) + x, x),
        )
        z = tf.negative(y + w)
        before = graph.as_graph_def()
        gradient = tf.gradients(tf.reduce_sum(z), x)[0]
    expected = evaluate(graph, [z, gradient], {x: X})
    report = rewrite(graph, dead_branch_folding(), debug=True)
    assert report.counts["dead_branch_folding (Merge)"][0] >= 2
    assert used_types(z).isdisjoint({"Merge"})
    values = evaluate(graph, [z, gradient], {x: X})
    for value, wanted in zip(values, expected, strict=True):
        np.testing.assert_array_equal(value, wanted)
    with graph.as_default():
        again = tf.gradients(tf.reduce_sum(z), x)[0]
    np.testing.assert_array_equal(evaluate(graph, [again], {x: X})[0], expected[1])
    assert not rewrite(graph, dead_branch_folding()).rewritten
    # An imported conditional has no context, and is folded all the same.
    with tf.Graph().as_default() as imported:
        x = placeholder()
        index = tf.raw_ops.Merge(inputs=[*tf.raw_ops.Switch(data=x, pred=pred)])[1]
        tf.identity(index, name="number")
        tf.import_graph_def(before, {"x:0": x}, name="")
    report = rewrite(imported, dead_branch_folding(), debug=True)
    assert report.counts["dead_branch_folding (Merge)"][0] >= 2
    fetched = [imported.get_tensor_by_name(name) for name in (z.name, "number:0")]
    assert used_types(fetched[0]).isdisjoint({"Merge"})
    value, number = evaluate(imported, fetched, {x: X})
    np.testing.assert_array_equal(value, expected[0])
    assert number == pred


@pytest.mark.usefixtures("control_flow_v1")
def test_loops_and_open_conditionals_are_refused():
    with tf.Graph().as_default() as graph:
        x = placeholder()
        y = tf.compat.v1.cond(x[0] > 0, lambda: tf.exp(x), lambda: tf.sin(x))
        tf.compat.v1.while_loop(lambda i: i < 3, lambda i: i + 1, [tf.constant(0)])
        tf.negative(y)
    before = snapshot(graph)
    report = rewrite(graph, dead_branch_folding())
    assert not report.rewritten
    assert {r.reason for r in report.refused} == {
        "no constant decides between its inputs",
        "it is part of a loop",
    }
    assert snapshot(graph) == before
