"""One counter of training steps for a graph."""

from __future__ import annotations

import gc

import pytest
import tensorflow as tf

from geutil.errors import ArgumentTypeError, TransformError
from geutil.transform.step_counter import STEP_NAME, step_counter
from tests.settings import needs_eager

v1 = tf.compat.v1


def test_a_session_counts_once_for_all_readers():
    with tf.Graph().as_default() as graph:
        first, second = (step_counter(graph).value + i for i in (0, 10))
        apart = tf.constant(1)
        start = v1.global_variables_initializer()
        variable = step_counter(graph).variable
    with v1.Session(graph=graph) as session:
        session.run(start)
        assert session.run([first, second]) == [1, 11]
        assert session.run([second]) == [12]
        assert session.run(apart) == 1
        assert session.run(variable) == 2


def test_it_is_a_global_variable_that_is_not_trained():
    with tf.Graph().as_default() as graph:
        variable = step_counter(graph).variable
        assert [v.name for v in v1.global_variables()] == [f"{STEP_NAME}:0"]
        assert v1.trainable_variables() == []
    assert variable.dtype == tf.int64


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
def test_the_graph_keeps_the_variable_alive():
    @tf.function
    def step():
        return step_counter(v1.get_default_graph()).value

    values = []
    for _ in range(3):
        values.append(int(step()))
        gc.collect()
    assert values == [1, 2, 3]


@needs_eager
@pytest.mark.parametrize("jit", [False, True])
def test_traces_share_a_variable(jit):
    variable = tf.Variable(0, dtype=tf.int64, trainable=False)

    @tf.function(jit_compile=jit)
    def step(x):
        return step_counter(v1.get_default_graph(), variable).value + tf.size(
            x, tf.int64
        )

    assert int(step(tf.zeros([1]))) == 2
    assert int(step(tf.zeros([5]))) == 7
    assert int(step(tf.zeros([1]))) == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(7, r"not in .*int"), (lambda: tf.Variable(0), "is of type int32")],
)
def test_wrong_variables(wrong, message):
    graph = tf.Graph()
    variable = wrong() if callable(wrong) else wrong
    with pytest.raises(ArgumentTypeError, match=message):
        step_counter(graph, variable)
    assert not graph.get_operations()


@needs_eager
def test_another_variable_than_before():
    one, other = (tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(2))

    @tf.function
    def step():
        graph = v1.get_default_graph()
        value = step_counter(graph, one).value
        size = len(graph.get_operations())
        with pytest.raises(TransformError, match="counts its steps in"):
            step_counter(graph, other)
        assert len(graph.get_operations()) == size
        return value

    assert int(step()) == 1
