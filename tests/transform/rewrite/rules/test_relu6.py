import numpy as np
import tensorflow as tf

import geutil as ge
from geutil.transform.rewrite import rewrite
from geutil.transform.rewrite.rules import relu6_to_relu
from tests.settings import default_graph, edges, evaluate, needs_eager

X = np.array([-1.0, 3.0, 9.0], np.float32)


def test_what_is_above_six_comes_through():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [3], name="x")
        with tf.name_scope("block"), tf.device("/device:CPU:0"):
            activation = tf.nn.relu6(x, name="act")
        y = tf.negative(activation)
    report = rewrite(graph, relu6_to_relu(), debug=True)
    assert [str(entry) for entry in report.rewritten] == [
        "relu6_to_relu: 'block/act' -> 'block/Relu'"
    ]
    assert y.op.inputs[0].op.device == activation.op.device
    assert evaluate(graph, [y], {x: X})[0].tolist() == [0.0, -3.0, -9.0]
    assert report.current(activation) is y.op.inputs[0]
    assert not rewrite(graph, relu6_to_relu()).rewritten


def test_in_any_setting(setting):
    reports = []

    def body():
        y = tf.negative(tf.nn.relu6(tf.constant(X)))
        reports.append(rewrite(default_graph(), relu6_to_relu(), debug=True))
        return [y]

    [value] = setting.run(body)
    assert value.tolist() == [0.0, -3.0, -9.0]
    assert len(reports[0].rewritten) == 1


def test_a_kept_relu6_is_refused():
    with tf.Graph().as_default() as graph:
        y = tf.nn.relu6(tf.zeros([2]), name="y")
        tf.negative(y)
    before = edges(graph)
    for keep in (y, y.op, [y], [y.op]):
        [refused] = rewrite(graph, relu6_to_relu(), keep=keep).refused
        assert refused.op == "y"
        assert "in keep" in refused.reason
        assert edges(graph) == before


@needs_eager
def test_a_network(mobilenet_copy):
    network = mobilenet_copy
    count = len(ge.filter_ops(network.graph, ge.op_type("Relu6")))
    report = rewrite(network.graph, relu6_to_relu(), keep=[network.output])
    assert len(report.rewritten) == count > 30
    ge.verify(network.graph)
    # 6 is above what these activations reach, so the numbers must not move.
    [value] = evaluate(network.graph, [network.output], {network.image: network.images})
    np.testing.assert_allclose(value, network.expected, rtol=1e-4, atol=1e-6)
