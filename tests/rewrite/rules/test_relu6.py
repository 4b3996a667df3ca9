import numpy as np
import tensorflow as tf

from geutil.rewrite import rewrite
from geutil.rewrite.rules import relu6_to_relu
from tests.settings import edges, evaluate

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
