"""Sums left to chance: as with plain gradients where these repeat their bits."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config

from geutil.gradients import gradients, last_report
from tests.gradients.checking import assert_same, run
from tests.settings import slow

SIDE = 32
PARTS = {
    # The gradient of a product does not read what it yields, that of a tanh does.
    "products": tf.matmul,
    "activations": lambda x, w: tf.tanh(tf.matmul(x, w)),
    "one buffer, two tensors": lambda x, w: tf.reshape(
        tf.tanh(tf.matmul(x, w)), [SIDE, SIDE]
    ),
}
ORDERS = [(0, 1, 2), (0, 0, 1), (0, 1, 2, 0)]
# Places among the terms, their sum and what follows.
KEPT = [(3,), (4,), (0, 1), (0, 4), (1, 4), (2, 4), (0, 1, 4), (0, 1, 5)]


@pytest.fixture
def deterministic():
    tf.config.experimental.enable_op_determinism()
    yield
    config.disable_op_determinism()


def network(parts, order):
    """Return what is differentiated, by what, and what may be kept."""
    generator = np.random.default_rng(0)
    x = tf.constant(generator.normal(size=[SIDE, SIDE]), tf.float32)
    weights = tf.constant(generator.normal(size=[3, SIDE, SIDE]) / 6.0, tf.float32)
    x = tf.sin(x)
    terms = [PARTS[parts](x, w) for w in tf.unstack(weights)]
    total = tf.add_n([terms[place] for place in order])
    first = tf.sin(total)
    second = tf.sin(first)
    y = tf.sin(tf.sin(second))
    return y, x, [*terms, total, first, second]


@slow
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("optimize", [False, True], ids=["as it is", "Grappler"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("parts", PARTS)
def test_sums_begin_with_the_term_they_begin_with_otherwise(parts, order, optimize):
    with tf.Graph().as_default() as graph:
        y, x, _ = network(parts, order)
        expected = run(graph, tf.gradients(y, x), optimize=optimize)
    recomputed = []
    for kept in KEPT:
        with tf.Graph().as_default() as graph:
            y, x, tensors = network(parts, order)
            actual = gradients(y, x, checkpoints=[tensors[i] for i in kept])
            recomputed += last_report().recomputed
            assert_same(run(graph, actual, optimize=optimize), expected)
    assert recomputed


def recomputed_sums(count):
    with tf.Graph().as_default():
        x = tf.random.stateless_uniform([8], [1, 2])
        start = tf.sin(x)
        total = tf.add_n([tf.sin(start) for _ in range(count)])
        end = tf.sin(total)
        gradients(tf.sin(tf.sin(end)), x, checkpoints=[start, end])
    return [op.name for op in last_report().recomputed if op.op_type == "AddN"]


@pytest.mark.usefixtures("deterministic")
def test_sums_of_two_alone_run_again_where_bits_count():
    assert recomputed_sums(2)
    assert not recomputed_sums(3)
    (reason,) = (k.reason for k in last_report().kept if k.op_type == "AddN")
    assert "left to chance" in reason


def test_all_sums_run_again_where_bits_do_not_count():
    assert recomputed_sums(2)
    assert recomputed_sums(3)
