"""Gradients that somebody else defined, and gradients of gradients."""

import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import checkpointed, gradients, gradients_speed, last_report
from geutil.gradients.step import build_step
from tests.gradients.checking import assert_as_near, assert_close, check, copied, run
from tests.settings import needs_eager

SHAPE = [6, 8]


def start():
    return tf.constant(np.cos(np.arange(48.0)).reshape(SHAPE), tf.float32)


def deep(x):
    return tf.sin(tf.exp(tf.sin(x)))


@tf.custom_gradient
def reading_inside(x):
    inside = tf.exp(-x * x, name="inside")
    return tf.tanh(inside), lambda dy: dy * inside * x


@tf.custom_gradient
def many_values(x, y):
    product = x * y
    return (product, tf.sin(x)), lambda da, db: (da * y + db * product, da * x)


@tf.custom_gradient
def clipping(x):
    return tf.identity(x), lambda dy: tf.clip_by_norm(dy, 1.0)


def reading_outside(x):
    outside = tf.exp(tf.cos(x), name="outside")

    @tf.custom_gradient
    def layer(h):
        return tf.tanh(h), lambda dy: dy * outside

    return layer(tf.sin(x))


def nested(x):
    @tf.custom_gradient
    def outer(h):
        inside = reading_inside(h)
        return inside * h, lambda dy: dy * inside

    return outer(x)


def recomputed_by_tensorflow(x):
    return tf.recompute_grad(lambda h: tf.tanh(tf.exp(tf.sin(h)) * h))(x)


def two_recomputed(x):
    a, b = tf.recompute_grad(lambda h: (tf.tanh(h) * h, tf.exp(tf.sin(h))))(x)
    # One result is used early, the other late.
    return a * deep(deep(b))


def grad_of_two(x):
    a, b = many_values(x, tf.sin(x))
    return a * deep(b)


LAYERS = [
    reading_inside,
    reading_outside,
    nested,
    clipping,
    grad_of_two,
    recomputed_by_tensorflow,
    two_recomputed,
]


def build(layer):
    x = start()
    before = deep(x)
    between = layer(deep(before))
    after = deep(between)
    return x, [before, after], deep(deep(after))


@pytest.mark.usefixtures("determinism")
@pytest.mark.parametrize("layer", LAYERS)
def test_graphs(layer):
    with tf.Graph().as_default() as graph:
        x, _, y = build(layer)
        plain = run(graph, tf.gradients(y, x))
    with tf.Graph().as_default() as graph:
        x, kept, y = build(layer)
        count = len(graph.get_operations())
        ours = gradients(y, x, checkpoints=kept, min_checkpoint_size=0)
        assert last_report().recomputed
        # No backward op reads the original of what is recomputed: closures' too.
        check(ours, last_report(), count)
        assert_as_near(run(graph, ours), plain)


@needs_eager
@pytest.mark.parametrize("layer", LAYERS)
def test_functions(layer):
    @tf.function
    def take(plain):
        x, kept, y = build(layer)
        if plain:
            return tf.gradients(y, x)
        return gradients(y, x, checkpoints=kept, min_checkpoint_size=0)

    assert_close([take(False)[0].numpy()], [take(True)[0].numpy()])


def test_backward_ops_are_sorted_where_a_gradient_function_edits():
    """What is checkpointed inside reads copies that were made after it."""
    block = checkpointed(lambda h: deep(deep(deep(h))), "inputs")
    with tf.Graph().as_default():
        x = start()
        step = build_step(deep(block(deep(block(x)))), [x])
    place = {op: i for i, op in enumerate(step.backward)}
    producers = [
        (op, p)
        for op in place
        for p in (*(t.op for t in op.inputs), *op.control_inputs)
    ]
    assert all(place[p] < place[op] for op, p in producers if p in place)
    created = [op._id for op in step.backward]
    assert created != sorted(created)


@pytest.mark.parametrize(
    ("layer", "name"), [(reading_inside, "inside"), (reading_outside, "outside")]
)
def test_what_a_closure_reads_is_recomputed(layer, name):
    with tf.Graph().as_default() as graph:
        x, kept, y = build(layer)
        gradients(y, x, checkpoints=kept, min_checkpoint_size=0)
        original = graph.get_operation_by_name(name)
        copy = copied(graph)[name]
        forward = {op.name for op in original.outputs[0].consumers()}
        backward = {op.name for op in copy.outputs[0].consumers()}
    assert any(reader.startswith("gradients/") for reader in backward)
    assert not any(reader.startswith("gradients/") for reader in forward)


def second(first_by, second_by):
    """Return the gradient of the sum of squares of a gradient, and the two reports."""
    x, kept, y = build(tf.tanh)
    (slope,) = first_by(y, x, kept)
    (curve,) = second_by(tf.reduce_sum(tf.square(deep(slope))), x, kept)
    return curve


def plainly(y, x, kept):
    return tf.gradients(y, x)


def by_list(y, x, kept):
    return gradients(y, x, checkpoints=kept, min_checkpoint_size=0)


def by_speed(y, x, kept):
    return gradients_speed(y, x, min_checkpoint_size=0)


@pytest.mark.parametrize("inner", [plainly, by_list, by_speed])
@pytest.mark.parametrize("outer", [plainly, by_list, by_speed])
def test_second_gradients(inner, outer):
    with tf.Graph().as_default() as graph:
        expected = second(plainly, plainly)
        actual = second(inner, outer)
        assert_close(*run(graph, ([actual], [expected])))
        assert_close(*run(graph, ([actual], [expected]), optimize=True))


def test_third_gradients():
    def third(take):
        x, kept, y = build(tf.tanh)
        for _ in range(3):
            (y,) = take(tf.reduce_sum(y), x, kept)
        return y

    with tf.Graph().as_default() as graph:
        assert_close(*run(graph, ([third(by_list)], [third(plainly)])))


def test_hessians():
    with tf.Graph().as_default() as graph:
        x = tf.constant([0.3, -0.7, 1.1])
        y = tf.reduce_sum(tf.sin(tf.exp(x)) * x)
        (plain,) = tf.hessians(y, x)
        (slope,) = by_list(deep(y), x, [y])
        rows = [by_list(slope[i], x, [y])[0] for i in range(3)]
        (reference,) = tf.hessians(deep(y), x)
        assert_close(*run(graph, ([tf.stack(rows)], [reference])))


@needs_eager
def test_a_tape_around():
    x = start()

    @tf.function
    def take(function):
        with tf.GradientTape() as tape:
            tape.watch(x)
            before = deep(x)
            after = deep(tf.tanh(deep(before)))
            (slope,) = function(deep(deep(after)), before, [after])
        return tape.gradient(slope, x)

    assert_close([take(by_list).numpy()], [take(plainly).numpy()])
