import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.rewrite import rewrite
from geutil.rewrite.rules import identity_elimination
from tests.graph.building import snapshot
from tests.networks.conftest import mobilenet  # noqa: F401
from tests.settings import evaluate, names, needs_eager


def test_a_run_of_identities_goes():
    with tf.Graph().as_default() as graph:
        x = tf.constant([1.0, 2.0], name="x")
        t = x
        for _ in range(5):
            t = tf.identity(t)
        y = tf.negative(t, name="y")
        fetched = tf.identity(y, name="fetched")
    report = rewrite(graph, identity_elimination(), debug=True)
    assert len(report.rewritten) == 5
    assert names(y.op.inputs) == ["x:0"]
    [refused] = report.refused
    assert (refused.op, refused.reason) == (
        "fetched",
        "nobody reads it, so it may be what is fetched",
    )
    assert evaluate(graph, [fetched])[0].tolist() == [-1.0, -2.0]
    again = rewrite(graph, identity_elimination())
    assert not again.rewritten
    assert again.refused == report.refused


def test_the_result_of_a_function_stays():
    function = tf.function(lambda x: tf.negative(tf.identity(x, name="inner")))
    graph = function.get_concrete_function(tf.TensorSpec([2])).graph
    [result] = graph.outputs
    assert result.op.type == "Identity"
    with ge.allow_stale(graph):
        report = rewrite(graph, identity_elimination())
    assert [r.op for r in report.rewritten] == ["inner"]
    assert [r.reason for r in report.refused] == [
        f"'{result.name}' is an output of the function"
    ]


def one_that_waits(graph):
    x = tf.constant(1.0)
    with tf.control_dependencies([tf.no_op(name="first")]):
        return tf.identity(x)


def one_with_a_gradient(graph):
    with graph.gradient_override_map({"Identity": "Sin"}):
        return tf.identity(tf.constant(1.0))


def one_that_reads_a_variable(graph):
    return tf.identity(tf.raw_ops.VariableV2(shape=[], dtype=tf.float32, name="v"))


REASONS = {
    one_that_waits: "it waits for 'first'",
    one_with_a_gradient: "it has a gradient of its own",
    one_that_reads_a_variable: "it reads the variable 'v:0' at a certain time",
}


def test_reasons():
    found = {}
    for build in REASONS:
        with tf.Graph().as_default() as graph:
            tf.negative(build(graph))
        before = snapshot(graph)
        report = rewrite(graph, identity_elimination())
        assert not report.rewritten
        assert snapshot(graph) == before
        [refused] = report.refused
        found[build] = refused.reason
    assert found == REASONS


@pytest.mark.usefixtures("control_flow_v1")
def test_version_1_control_flow_stays():
    with tf.Graph().as_default() as graph:
        x = tf.constant([0.25, 0.5], name="x")
        y = tf.compat.v1.cond(x[0] > 0, lambda: x, lambda: tf.sin(x))
        _, z = tf.compat.v1.while_loop(
            lambda i, _: i < 3, lambda i, t: (i + 1, tf.identity(t) * 2.0), [0, y]
        )
        out = tf.negative(tf.identity(z))
    expected = evaluate(graph, [out])
    report = rewrite(graph, identity_elimination(), debug=True)
    assert report.rewritten
    assert any("Switch" in r.reason for r in report.refused)
    np.testing.assert_array_equal(evaluate(graph, [out])[0], expected[0])


def freeze_weights(graph):
    """Let every reader of a constant read it through an Identity; return how many."""
    constants = ge.filter_ops(graph, ge.op_type("Const"))
    with graph.as_default():
        for op in constants:
            read = tf.identity(op.outputs[0])
            ge.reroute_ts(read, op.outputs[0], cannot_modify=[read.op])
    return len(constants)


@needs_eager
def test_a_network_with_frozen_weights(mobilenet):  # noqa: F811
    _, info = ge.copy(mobilenet.graph, tf.Graph())
    image, output = info.transformed([mobilenet.image, mobilenet.output])
    frozen = freeze_weights(image.graph)
    report = rewrite(image.graph, identity_elimination(), keep=[output])
    assert len(report.rewritten) == frozen > 50
    assert [r.reason for r in report.refused] == [f"'{output.name}' is in keep"]
    ge.verify(image.graph)
    used = ge.get_backward_walk_ops(output)
    assert len(ge.filter_ops(used, ge.op_type("Identity"))) == 1
    [value] = evaluate(image.graph, [output], {image: mobilenet.images})
    np.testing.assert_allclose(value, mobilenet.keras_output(), rtol=1e-4, atol=1e-6)
    assert not rewrite(image.graph, identity_elimination()).rewritten
