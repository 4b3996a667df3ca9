"""One counter of training steps for a graph."""

import pytest
import tensorflow as tf

from geutil.errors import TransformError
from geutil.transform.step_counter import step_counter
from tests.settings import needs_eager

v1 = tf.compat.v1


@needs_eager
def test_a_function_counts_even_if_nothing_reads_it():
    made = []

    @tf.function
    def step(x):
        counter = step_counter(v1.get_default_graph())
        made.append(counter.variable)
        return x + 1.0

    for _ in range(3):
        step(tf.constant(1.0))
    assert len(made) == 1
    assert made[0].numpy() == 3


@needs_eager
@pytest.mark.parametrize("jit", [False, True])
def test_traces_share_a_variable(jit):
    variable, other = (
        tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(2)
    )

    @tf.function(jit_compile=jit)
    def step(x):
        graph = v1.get_default_graph()
        value = step_counter(graph, variable).value
        count = len(graph.get_operations())
        with pytest.raises(TransformError, match="counts its steps in"):
            step_counter(graph, other)
        assert len(graph.get_operations()) == count
        return value + tf.size(x, tf.int64)

    assert int(step(tf.zeros([1]))) == 2
    assert int(step(tf.zeros([5]))) == 7
    assert int(step(tf.zeros([1]))) == 4
