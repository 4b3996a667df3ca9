"""Gradients that somebody else defined, and gradients of gradients."""

from functools import partial
from itertools import chain

import tensorflow as tf

from geutil.gradients import (
    checkpointed,
    explain,
    gradients,
    gradients_speed,
    last_report,
)
from geutil.graph import verify
from tests.gradients.checking import (
    TAPES,
    assert_as_near,
    assert_close,
    check,
    copied,
    deep,
    named,
    plain_values,
    run,
    unlike,
)
from tests.gradients.test_control_flow import start
from tests.settings import needs_eager


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
    after = deep(layer(deep(before)))
    return x, [before, after], deep(deep(after))


def build_all():
    """Build each layer with an x of its own; return xs, what is kept, and ys."""
    built = []
    for layer in LAYERS:
        with tf.name_scope(layer.__name__):
            built.append(build(layer))
    xs, kept, ys = zip(*built, strict=True)
    return list(xs), list(chain.from_iterable(kept)), list(ys)


def test_graphs(determinism):
    with tf.Graph().as_default():
        xs, _, ys = build_all()
        plain = plain_values(LAYERS, ys, xs, TAPES[determinism])
    with tf.Graph().as_default() as graph:
        xs, kept, ys = build_all()
        count = len(graph.get_operations())
        ours = gradients(ys, xs, checkpoints=kept, min_checkpoint_size=0)
        again = {op.name.partition("/")[0] for op in last_report().recomputed}
        assert {layer.__name__ for layer in LAYERS} <= again
        # No backward op reads the original of what is recomputed: closures' too.
        check(ours, last_report(), count)
        assert unlike(run(graph, named(LAYERS, ours)), plain, assert_as_near) == {}
        for layer, name in ((reading_inside, "inside"), (reading_outside, "outside")):
            name = f"{layer.__name__}/{name}"
            original = graph.get_operation_by_name(name).outputs[0].consumers()
            copy = copied(graph)[name].outputs[0].consumers()
            assert any(reader.name.startswith("gradients/") for reader in copy)
            assert not any(reader.name.startswith("gradients/") for reader in original)


@needs_eager
def test_functions():
    @tf.function(autograph=False)
    def take(plain):
        xs, kept, ys = build_all()
        if plain:
            return tf.gradients(ys, xs)
        return gradients(ys, xs, checkpoints=kept, min_checkpoint_size=0)

    assert unlike(named(LAYERS, take(False)), named(LAYERS, take(True))) == {}


def test_backward_ops_are_sorted_where_a_gradient_function_edits():
    """What is checkpointed inside reads copies that were made after it."""

    def taken(block, take):
        with tf.Graph().as_default() as graph:
            x = start()
            y = deep(block(deep(block(x))))
            slopes = take(y, [x])
            return run(graph, {"x": slopes}), graph

    def inside(h):
        return deep(deep(deep(h)))

    wanted, _ = taken(inside, tf.gradients)
    block = checkpointed(inside, "inputs")
    for checkpoints in ("memory", None):
        found, graph = taken(block, partial(gradients, checkpoints=checkpoints))
        assert unlike(found, wanted) == {}
        verify(graph)


def plainly(y, x, kept):
    return tf.gradients(y, x)


def by_list(y, x, kept):
    return gradients(y, x, checkpoints=kept, min_checkpoint_size=0)


def by_speed(y, x, kept):
    return gradients_speed(y, x, min_checkpoint_size=0)


def test_a_loop_whose_body_has_a_closure_is_explained(control_flow_v2):
    with tf.Graph().as_default():
        x = tf.ones([64, 64])
        turn = lambda i, a: (i + 1, tf.nn.silu(a @ x))  # noqa: E731
        _, y = tf.while_loop(lambda i, a: i < 4, turn, [0, x], maximum_iterations=4)
        explained = explain(y, x)
    assert explained.peak < explained.plain_peak


def test_second_gradients(graph):
    """Of each way to take the first ones, by each way to take the second ones."""
    ways = [plainly, by_list, by_speed]
    x, kept, y = build(tf.tanh)
    curves = {}
    for inner in ways:
        (slope,) = inner(y, x, kept)
        z = tf.reduce_sum(tf.square(deep(slope)))
        for outer in ways:
            curves[f"{inner.__name__}, {outer.__name__}"] = outer(z, x, kept)
    for optimize in (False, True):
        values = run(graph, curves, optimize=optimize)
        expected = dict.fromkeys(values, values["plainly, plainly"])
        assert unlike(values, expected) == {}


@needs_eager
def test_a_tape_around():
    x = start()

    @tf.function(autograph=False)
    def take(function):
        with tf.GradientTape() as tape:
            tape.watch(x)
            before = deep(x)
            after = deep(tf.tanh(deep(before)))
            (slope,) = function(deep(deep(after)), before, [after])
        return tape.gradient(slope, x)

    assert_close([take(by_list).numpy()], [take(plainly).numpy()])
