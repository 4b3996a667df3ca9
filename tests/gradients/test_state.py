"""Nothing stateful runs twice: its outputs are kept."""

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.gradients import by_name, gradients, last_report
from tests.gradients.checking import assert_close, copied, run, unlike
from tests.settings import needs_eager

v1 = tf.compat.v1
SHAPE = [64]


def values(number=1):
    return np.cos(np.arange(64.0) * number).astype(np.float32)


def deep(x, name="deep"):
    """Return something that is worth recomputing and has to be."""
    return tf.sin(tf.exp(tf.sin(x, name=f"{name}/first")), name=f"{name}/last")


def take(y, x, *kept):
    """Return the gradient of something deep behind `y`.

    What lies between `kept` and `y` is recomputed; only the last part never is.
    """
    end = deep(y, "end")
    result = gradients(end, x, checkpoints=[*kept, y], min_checkpoint_size=0)
    assert last_report().recomputed
    return result


def plainly(y, x, *kept):
    return tf.gradients(deep(y, "end"), x)


def types_of_copies(graph=None):
    return {op.type for op in copied(graph or v1.get_default_graph()).values()}


MASKS = {
    "dropout": lambda x: tf.nn.dropout(x, 0.5),
    "uniform": lambda x: x * tf.round(tf.random.uniform(SHAPE)),
    "normal": lambda x: x * tf.random.normal(SHAPE),
    "shuffle": lambda x: tf.gather(x, tf.random.shuffle(tf.range(64))),
}


@needs_eager
def test_random_numbers_are_the_same_forward_and_backward():
    generator = tf.random.Generator.from_seed(1)
    masks = MASKS | {"generator": lambda x: x * generator.normal(SHAPE)}

    @tf.function(autograph=False)
    def both():
        xs, kept, ys = {}, [], []
        for name, mask in masks.items():
            xs[name] = tf.constant(values())
            kept.append(deep(xs[name], name))
            y = deep(deep(mask(kept[-1]), f"{name}/second"), f"{name}/third")
            kept.append(y)
            ys.append(deep(y, f"{name}/end"))
        # Both read the same numbers in one run.
        plain = tf.gradients(ys, [*xs.values()])
        ours = gradients(ys, [*xs.values()], checkpoints=kept, min_checkpoint_size=0)
        again = {op.name.partition("/")[0] for op in last_report().recomputed}
        assert set(masks) <= again
        return [dict(zip(masks, taken, strict=True)) for taken in (plain, ours)]

    for _ in range(2):
        plain, ours = both()
        assert unlike(ours, plain) == {}


@needs_eager
def test_moving_averages_move_once():
    moving = tf.Variable(tf.zeros(SHAPE))

    @tf.function(autograph=False)
    def step(take_gradients):
        x = tf.constant(values())
        kept = deep(x)
        # The op that assigns stands between two that are recomputed.
        moving.assign(moving * 0.5 + deep(kept) * 0.5)
        return take_gradients(deep(deep(kept + moving)), x, kept)

    plain = step(plainly)
    once = moving.numpy()
    moving.assign(tf.zeros(SHAPE))
    ours = step(take)
    np.testing.assert_array_equal(moving, once)
    assert_close([ours[0].numpy()], [plain[0].numpy()])


@needs_eager
def test_reads_around_an_assignment():
    v = tf.Variable(values())

    @tf.function(autograph=False)
    def step(take_gradients):
        v.assign(values())
        first = v.read_value()
        kept = deep(first)
        y = deep(kept * v.read_value())
        v.assign_add(tf.ones(SHAPE))
        return take_gradients(deep(y * v.read_value()), first, kept)

    plain = step(plainly)
    assert_close([step(take)[0].numpy()], [plain[0].numpy()])


@pytest.mark.parametrize("use_resource", [False, True])
def test_version_1_assignments_run_once(use_resource, graph):
    v = v1.get_variable("v", initializer=values(), use_resource=use_resource)
    x = tf.constant(values(2))
    kept = tf.sin(x)
    moved = v1.assign_add(v, tf.ones(SHAPE))
    y = deep(deep(kept * tf.identity(moved), "second"), "third")
    (gradient,) = take(y, x, kept)
    with tf.control_dependencies([gradient]):
        after = tf.identity(v.read_value())
    assert not types_of_copies() & {"AssignAdd", "AssignAddVariableOp"}
    _, moved_by = run(graph, [gradient, after - values()])
    np.testing.assert_allclose(moved_by, np.ones(SHAPE), rtol=1e-6)


def test_a_version_1_variable_is_not_read_again_after_it_moved(graph):
    v = v1.get_variable("v", initializer=values(), use_resource=False)
    # A copy of its value, not a view of it.
    read = v + 0.0
    kept = tf.sin(read)
    squared = tf.square(kept * read)
    with tf.control_dependencies([squared]):
        moved = v1.assign_add(v, tf.ones(SHAPE))
    with tf.control_dependencies([moved]):
        seed = tf.ones(SHAPE) * 1.0
    last = tf.sin(squared)
    y = deep(last)
    (plain,) = tf.gradients(y, read, seed)
    (ours,) = gradients(y, read, seed, checkpoints=[kept, last], min_checkpoint_size=0)
    assert not any(op.startswith("v") for op in copied(graph))
    got = run(graph, [plain, ours])
    assert_close(got[1:], got[:1])


@needs_eager
def test_python_functions_are_called_and_prints_come_once(capfd):
    calls = []

    def double(a):
        calls.append(1)
        return a * 2.0

    @tf.function(autograph=False)
    def step():
        x = tf.constant(values())
        kept = deep(x)
        called = tf.py_function(double, [tf.sin(kept)], tf.float32)
        called.set_shape(SHAPE)
        with tf.control_dependencies(
            [tf.print("here", output_stream="file:///dev/null")]
        ):
            between = tf.sin(called)
        printed = v1.Print(between, [tf.constant(7)], "once")
        return take(deep(deep(printed * kept)), x, kept)

    step()
    # Once forward; the gradient of a py_function calls another one.
    assert len(calls) == 1
    assert capfd.readouterr().err.count("once") == 1


def test_a_queue_is_taken_from_once(graph):
    queue = v1.FIFOQueue(10, tf.float32, [SHAPE])
    fill = queue.enqueue_many([np.stack([values(1), values(2), values(3)])])
    x = tf.constant(values())
    kept = tf.sin(x)
    y = deep(deep(kept * tf.cos(queue.dequeue()), "second"), "third")
    (gradient,) = take(y, x, kept)
    with v1.Session(graph=graph) as session:
        session.run(fill)
        session.run(gradient)
        assert session.run(queue.size()) == 2


@pytest.mark.parametrize("stateful", [True, False])
def test_stateless_random_numbers_alone_are_drawn_again(stateful, graph):

    @tf.function(autograph=False)
    def noisy(a):
        return tf.sin(a) * tf.random.uniform(SHAPE)

    x = tf.constant(values())
    kept = tf.sin(x)
    drawn = kept * tf.random.stateless_uniform(SHAPE, seed=[1, 2])
    y = noisy(kept) if stateful else drawn
    y = deep(deep(y, "second"), "third")
    got = run(graph, [*plainly(y, x), *take(y, x, kept)])
    types = types_of_copies(graph)
    assert "StatefulPartitionedCall" not in types
    assert ("StatelessRandomUniformV2" in types) is not stateful
    ge.verify(graph)
    np.testing.assert_array_equal(got[1], got[0])


def test_a_policy_cannot_make_stateful_ops_run_again(graph):
    x = tf.constant(values())
    drawn = tf.random.uniform(SHAPE, name="drawn")
    y = deep(deep(tf.sin(x) * drawn, "second"), "third")
    gradients(y, x, checkpoints=by_name("second/last"), min_checkpoint_size=0)
    assert "RandomUniform" not in types_of_copies(graph)
    reasons = {t.name: t.reason for t in last_report().kept}
    assert "must run only once" in reasons["drawn/RandomUniform:0"]
