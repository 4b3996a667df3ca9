"""The predicted peak of a plan, against that of the graph once it is built."""

import pytest
import tensorflow as tf

from geutil.gradients import explain, gradients, last_report
from geutil.memory import predict
from tests.memory.networks import Builder, chain, residual, unet

v1 = tf.compat.v1


def test_a_chain_by_hand(graph):
    x = v1.placeholder(tf.float32, [256, 64])
    weights = [v1.get_variable(f"w{i}", [64, 64]) for i in range(3)]
    for w in weights:
        x = tf.tanh(x @ w)
    gradients(tf.reduce_mean(tf.square(x)), weights, checkpoints=None)
    plain = last_report().peak
    # Three tanhs are held; the gradient of the mean is spread out, and the square's
    # makes twice the last tanh. Besides, there are some scalars.
    held = 5 * 256 * 64 * 4
    assert held <= plain < held + 64


def pools(net, x):
    """oneDNN's pools keep the places of their maxima, which a report left out."""
    for _ in range(6):
        x = tf.nn.max_pool2d(tf.tanh(net.conv(x, 16)), 3, 1, "SAME")
    return x


NETWORKS = {
    "chain": (chain, [64, 256]),
    "residual": (residual, [2, 32, 32, 3]),
    "unet": (unet, [2, 32, 32, 3]),
    "pools": (pools, [8, 64, 64, 16]),
}


def test_reports_say_what_is_predicted_of_the_same_graphs():
    apart = {}
    for name, (network, shape) in NETWORKS.items():
        for checkpoints in "memory", "speed":
            with tf.Graph().as_default():
                net = Builder()
                loss = tf.reduce_mean(network(net, v1.placeholder(tf.float32, shape)))
                plain = [loss, *tf.gradients(loss, net.variables)]
                saved = gradients(
                    loss, net.variables, checkpoints=checkpoints, holds_gradients=True
                )
                report = last_report()
                pairs = [
                    (report.plain_peak, predict(plain, grappler=False).peak),
                    (report.peak, predict([loss, *saved], grappler=False).peak),
                ]
            if any(abs(told / predicted - 1) > 0.005 for told, predicted in pairs):
                apart[name, checkpoints] = pairs
    assert apart == {}


READS = {
    "a resource variable": lambda w: w,
    "a reference variable": lambda w: w,
    "an Identity of it": tf.identity,
    "its own shape": lambda w: tf.reshape(tf.reshape(w, [-1]), [64, 64]),
}


@pytest.mark.parametrize("kind", READS)
def test_variables_and_what_hands_them_on_take_nothing(kind, graph):
    x = h = v1.placeholder(tf.float32, [64, 64])
    for i in range(16):
        use_resource = kind != "a reference variable"
        w = v1.get_variable(f"w{i}", [64, 64], use_resource=use_resource)
        h = tf.tanh(h @ READS[kind](w) + tf.ones([64, 64]))
    loss = tf.reduce_mean(h)
    peak = explain(loss, x, checkpoints=None).peak
    # 16 results of tanh, and the gradients of two of them; no constants or feeds.
    assert 16 * 64 * 64 * 4 <= peak <= 18.5 * 64 * 64 * 4
    report = explain(loss, x, checkpoints="memory")
    assert not report.warnings
    assert report.peak <= 0.6 * peak
    # Products are as large; the constant that is added to them is there anyway.
    chosen = {t.op_type for t in report.kept if t.reason.startswith("chosen")}
    assert chosen and chosen <= {"MatMul", "Tanh"}


def test_what_a_compiled_call_passes_on_is_held_once(graph):
    @tf.function(jit_compile=True, autograph=False)
    def both(x):
        return tf.sin(x), tf.identity(x)

    x = v1.placeholder(tf.float32, [256, 256])
    y = x
    for _ in range(3):
        sine, same = both(y)
        y = sine + same
    (slope,) = gradients(tf.reduce_sum(y), x, checkpoints=None)
    # Eight, if what a call passes on were another buffer.
    unit = 4 * 256 * 256
    assert last_report().peak == pytest.approx(5 * unit, rel=0.01)
    assert predict(slope).peak == pytest.approx(5 * unit, rel=0.01)
    # Within a call nothing is predicted: of three, and those of their gradients.
    (said,) = [w for w in last_report().warnings if "XLA compiles" in w]
    assert "calls of that kind: 6" in said
    gradients(tf.reduce_sum(tf.sin(tf.sin(x))), x, checkpoints=None)
    assert not [w for w in last_report().warnings if "XLA compiles" in w]
