"""Standing in for `tf.gradients` in a whole process."""

import importlib

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import gradients as gradients_module
from tensorflow.python.ops import gradients_impl, gradients_util

from geutil.gradients import (
    gradients_collection,
    gradients_memory,
    gradients_speed,
    last_report,
)
from tests.gradients.checking import assert_close, run
from tests.settings import needs_eager

v1 = tf.compat.v1
STAND_INS = {
    gradients_collection: "collection",
    gradients_memory: "memory",
    gradients_speed: "speed",
}
plain_gradients = tf.gradients


@pytest.fixture(params=STAND_INS)
def replaced(request, monkeypatch):
    """TensorFlow with each stand-in in every place that holds `gradients`."""
    for holder in (tf, gradients_module, gradients_impl, gradients_util):
        if hasattr(holder, "gradients"):
            monkeypatch.setattr(holder, "gradients", request.param)
    monkeypatch.setattr(v1, "gradients", request.param)
    return request.param


def network():
    v = v1.get_variable(
        "v", initializer=np.cos(np.arange(4096.0)).reshape(64, 64).astype(np.float32)
    )
    h = tf.ones([32, 64])
    for _ in range(6):
        h = tf.sin(tf.exp(tf.sin(tf.matmul(h, v))))
        v1.add_to_collection("checkpoints", h)
    return v, tf.reduce_sum(h)


def test_the_attribute_of_every_module_of_tensorflow(monkeypatch):
    for name in ("tensorflow", "tensorflow.compat.v1", "tensorflow.compat.v2"):
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "gradients", gradients_memory)
        with tf.Graph().as_default() as graph:
            x = y = tf.ones([1024])
            for _ in range(10):
                y = tf.tanh(y)
            module.gradients(y, x)
        assert last_report(graph).recomputed, name


def test_optimizers_of_version_1(replaced):
    def train(build):
        with tf.Graph().as_default() as graph:
            v, loss = network()
            optimizer = v1.train.GradientDescentOptimizer(1e-6)
            step = build(optimizer, loss, v)
            with v1.Session(graph=graph) as session:
                session.run(v1.global_variables_initializer())
                for _ in range(3):
                    session.run(step)
                return session.run(v)

    ours = train(lambda optimizer, loss, v: optimizer.minimize(loss))
    report = last_report()
    assert report.mode == STAND_INS[replaced]
    assert report.recomputed
    plain = train(
        lambda optimizer, loss, v: optimizer.apply_gradients(
            [(plain_gradients(loss, v)[0], v)]
        )
    )
    assert_close([ours], [plain])


def test_hessians(replaced, graph):
    x = tf.constant([0.3, -0.7, 1.1])
    y = tf.reduce_sum(tf.sin(tf.exp(x)) * x)
    v1.add_to_collection("checkpoints", y.op.inputs[0])
    (hessian,) = tf.hessians(y, x)
    a, e = np.array([0.3, -0.7, 1.1]), np.exp([0.3, -0.7, 1.1])
    curve = 2 * np.cos(e) * e + a * (np.cos(e) * e - np.sin(e) * e * e)
    np.testing.assert_allclose(run(graph, hessian), np.diag(curve), atol=1e-5)


def test_gradients_of_loops_and_functions(replaced, graph):
    x = tf.linspace(0.1, 1.0, 2048)
    v1.add_to_collection("checkpoints", x)
    h = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.sin(h) * x), (0, x))[
        1
    ]
    h = tf.function(lambda a: tf.tanh(a) * a)(h)
    h = tf.cond(h[0] > 0, lambda: tf.exp(h), lambda: h)
    v1.add_to_collection("checkpoints", h)
    ours, plain = (
        tf.gradients(tf.exp(tf.sin(h)), x),
        plain_gradients(tf.exp(tf.sin(h)), x),
    )
    assert_close(*run(graph, (ours, plain)))


@needs_eager
def test_tapes_go_on_working(replaced):
    x = tf.constant([1.0, 2.0])

    @tf.function
    def slope():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.function(lambda a: a * a * a)(x)
        return tape.gradient(y, x)

    np.testing.assert_allclose(slope(), [3.0, 12.0])
