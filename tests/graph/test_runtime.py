"""Whether XLA compiles what is traced: gradients report no bytes of its own order."""

import pytest
import tensorflow as tf

from geutil.gradients import gradients, last_report
from tests.settings import needs_eager


def is_compiled():
    """Tell whether gradients that are built here take the graph to be compiled."""
    x = tf.ones([4])
    (slope,) = gradients(tf.sin(tf.sin(x)), x, checkpoints=None, order=False)
    return last_report(slope).resident is None


def note(answers):
    answers.append(is_compiled())


def in_itself(answers):
    note(answers)


def in_a_function(answers):
    @tf.function
    def inner():
        note(answers)
        return tf.constant(1.0)

    inner()


def in_a_nested_function(answers):
    tf.function(lambda: in_a_function(answers))()


def in_a_loop(answers):
    def body(i):
        note(answers)
        return i + 1

    tf.while_loop(lambda i: i < 2, body, [tf.constant(0)])


def in_a_branch(answers):
    def branch():
        note(answers)
        return tf.constant(1)

    tf.cond(tf.random.stateless_uniform([], [1, 2]) < 0.5, branch, branch)


@needs_eager
@pytest.mark.parametrize("jit_compile", [True, False, None])
def test_what_is_traced_in_a_compiled_function_is_compiled(jit_compile):
    traces = in_itself, in_a_function, in_a_nested_function, in_a_loop, in_a_branch
    answers = {where.__name__: [] for where in traces}

    def everywhere():
        for where in traces:
            where(answers[where.__name__])

    tf.function(everywhere, jit_compile=jit_compile)()
    found = {name: {*told} for name, told in answers.items()}
    assert found == {name: {bool(jit_compile)} for name in answers}
    # So is a compiled function in one that is not; known during the trace only.
    answers, graphs = [], []
    compiled = tf.function(lambda: note(answers), jit_compile=True)

    @tf.function(jit_compile=jit_compile)
    def outer():
        compiled()
        note(answers)
        graphs.append(tf.compat.v1.get_default_graph())

    outer()
    assert answers == [True, bool(jit_compile)]
    with graphs[0].as_default():
        assert not is_compiled()


@pytest.mark.parametrize("level", ["OFF", "ON_1"])
def test_a_plain_graph_is_not_compiled(level):
    graph = tf.Graph()
    options = tf.compat.v1.GraphOptions()
    options.optimizer_options.global_jit_level = getattr(
        tf.compat.v1.OptimizerOptions, level
    )
    config = tf.compat.v1.ConfigProto(graph_options=options)
    with graph.as_default(), tf.compat.v1.Session(config=config) as session:
        assert not is_compiled()
        assert session.run(tf.constant(1.0) + 1.0) == 2.0
