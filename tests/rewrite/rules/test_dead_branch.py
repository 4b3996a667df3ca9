import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.rewrite import rewrite
from geutil.rewrite.rules import dead_branch_folding
from tests.graph.building import snapshot
from tests.settings import evaluate, needs_eager

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
