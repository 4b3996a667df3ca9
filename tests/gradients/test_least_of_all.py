"""The least peak of "memory" against every choice of kept tensors, measured."""

from itertools import chain, combinations

import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import gradients, last_report
from geutil.gradients.choices import AlwaysKept
from geutil.gradients.least_peak import Trials
from geutil.gradients.segments import recomputable
from geutil.gradients.step import build_step
from tests.memory.tracing import peak_of, trace

v1 = tf.compat.v1
ELEMENTS = 2**18
MB = 4 * ELEMENTS


def chain_of(length):
    def make(x):
        for _ in range(length):
            x = tf.tanh(x)
        return x

    return make


def with_loss(make):
    return lambda x: tf.reduce_sum(make(x))


def tree(x):
    first, second = (tf.tanh(tf.tanh(x) * tf.sin(x)) for _ in range(2))
    return tf.tanh(first * second)


def diamonds(x):
    for _ in range(2):
        x = tf.tanh(x)
        x = tf.sin(x) + tf.exp(x)
    return x


def residual(x):
    for _ in range(3):
        x = x + tf.sin(tf.tanh(x))
    return x


# Each with the most tensors that are kept at once in the choices tried, all if None.
GRAPHS = {
    "chain of 5": (chain_of(5), None),
    "chain of 6": (chain_of(6), None),
    "chain of 10": (chain_of(10), 4),
    "chain of 20": (chain_of(20), 2),
    "chain of 5, and a sum": (with_loss(chain_of(5)), None),
    "chain of 9, and a sum": (with_loss(chain_of(9)), 4),
    "tree": (tree, 3),
    "diamonds": (diamonds, None),
    "residual": (residual, None),
}


def least_of_all(make, most):
    """Return the least predicted peak of all choices that run each op once again."""
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [ELEMENTS])
        step = build_step(make(x), x)
    always = AlwaysKept(step)
    trials = Trials(step, always)
    tensors = [t for op in recomputable(step, always) for t in op.outputs]
    counts = range(len(tensors) + 1 if most is None else most + 1)
    choices = chain.from_iterable(combinations(tensors, count) for count in counts)
    return min(
        trials.run(choice, spare_last=spared).peak
        for choice in choices
        for spared in (True, False)
    )


def measured(make, checkpoints):
    """Return the predicted and the measured peak of a choice."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [ELEMENTS])
        (gradient,) = gradients(make(x), [x], checkpoints=checkpoints)
        predicted = last_report(graph).peak
        stats = trace(graph, gradient.op, {x: np.ones(ELEMENTS, "f")})
    return predicted, peak_of(stats)


@pytest.mark.parametrize("name", GRAPHS)
def test_memory_holds_the_least_of_all_choices(name):
    make, most = GRAPHS[name]
    predicted, peak = measured(make, "memory")
    assert peak == pytest.approx(predicted, rel=0.01)
    assert predicted <= 1.01 * least_of_all(make, most)


def test_lists_are_predicted_as_measured():
    """The ones that the backward pass starts with are a constant of TensorFlow's."""

    def keeping(places):
        with tf.Graph().as_default() as graph:
            made = [v1.placeholder(tf.float32, [ELEMENTS])]
            for _ in range(6):
                made.append(tf.tanh(made[-1]))
            kept = [made[place] for place in places]
            (gradient,) = gradients(made[-1], made[:1], checkpoints=kept)
            stats = trace(graph, gradient.op, {made[0]: np.ones(ELEMENTS, "f")})
            return last_report(graph).peak / MB, peak_of(stats) / MB

    for places, expected in {(2,): 5, (1, 4): 4, (2, 5): 4, (3, 5): 3}.items():
        assert keeping(places) == (expected, expected), places


def test_large_ones_are_a_constant_as_well(graph):
    elements = 11 * ELEMENTS
    x = y = v1.placeholder(tf.float32, [elements])
    for _ in range(3):
        y = tf.tanh(y)
    (gradient,) = gradients(y, [x], checkpoints=None)
    stats = trace(graph, gradient.op, {x: np.ones(elements, "f")})
    assert last_report(graph).peak == peak_of(stats) == 3 * 4 * elements
