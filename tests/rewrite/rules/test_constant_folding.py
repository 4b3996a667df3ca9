import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

import geutil as ge
from geutil.rewrite import constant_value, rewrite, rules
from tests.graph.building import snapshot
from tests.random_graphs import drawn_graphs
from tests.settings import default_graph, evaluate
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
