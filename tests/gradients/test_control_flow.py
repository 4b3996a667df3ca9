"""Loops, branches and calls are units: recomputed whole, or kept, always right."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.gradients import by_type, gradients, last_report
from tests.gradients.checking import assert_close, check, copied, run
from tests.thorough import crossed

v1 = tf.compat.v1
SHAPE = [6, 8]


def start():
    return tf.constant(np.cos(np.arange(48.0)).reshape(SHAPE), tf.float32)


def deep(x):
    return tf.sin(tf.exp(tf.sin(x)))


def looped(x):
    return tf.while_loop(
        lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h) * x), (0, x)
    )[1]


def loop_of_two(x):
    _, h, g = tf.while_loop(
        lambda i, h, g: i < 3,
        lambda i, h, g: (i + 1, tf.tanh(h * g), tf.sin(g) + x),
        (0, tf.cos(x), x),
    )
    return h * g


def nested(x):
    return tf.while_loop(
        lambda i, h: i < 2,
        lambda i, h: (
            i + 1,
            tf.cond(tf.reduce_sum(h) > 0, lambda: looped(h), lambda: tf.sin(h * x)),
        ),
        (0, x),
    )[1]


def branched(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.sin(x) * x, lambda: tf.tanh(x))


def branched_into_two(x):
    a, b = tf.cond(
        tf.reduce_sum(x) > 0,
        lambda: (tf.sin(x), tf.exp(x)),
        lambda: (tf.tanh(x), x * 2.0),
    )
    return a * tf.sin(b)


def called(x):
    @tf.function
    def body(a):
        return tf.tanh(a) * tf.sin(a)

    return body(x)


def called_twice(x):
    @tf.function
    def body(a):
        return tf.tanh(a) * tf.sin(a)

    return body(body(x))


def mapped(x):
    return tf.map_fn(lambda row: tf.tanh(row) * tf.reduce_sum(row), x)


def scanned(x):
    return tf.scan(lambda h, row: tf.tanh(h + row), x)


def arrays(x):
    array = tf.TensorArray(tf.float32, SHAPE[0]).unstack(tf.sin(x))
    return tf.stack([array.read(i) * float(i + 1) for i in range(SHAPE[0])])


def switched(x):
    return tf.switch_case(
        tf.cast(tf.reduce_sum(x) > 0, tf.int32), [lambda: tf.sin(x), lambda: x * x]
    )


BODIES = [
    looped,
    loop_of_two,
    nested,
    branched,
    branched_into_two,
    called,
    called_twice,
    mapped,
    scanned,
    arrays,
    switched,
]
KEPT = {
    "around it": lambda before, unit, after: [before, after],
    "its output": lambda before, unit, after: [before, unit, after],
    "only its output": lambda before, unit, after: [unit],
    "far behind": lambda before, unit, after: [after],
}


@contextlib.contextmanager
def version_1_control_flow():
    enabled = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        yield
    finally:
        if enabled:
            v1.enable_control_flow_v2()


def build(body):
    """Return x, what stands before, at and behind the unit, and y."""
    x = start()
    before = deep(x)
    unit = body(deep(before))
    unit.set_shape(SHAPE)
    after = deep(unit)
    return x, before, unit, after, deep(deep(after))


def check_values(body, choose, **options):
    with tf.Graph().as_default() as graph:
        x, *_, y = build(body)
        plain = run(graph, tf.gradients(y, x))
    with tf.Graph().as_default() as graph:
        x, before, unit, after, y = build(body)
        count = len(graph.get_operations())
        ours = gradients(
            y,
            x,
            checkpoints=choose(before, unit, after),
            min_checkpoint_size=0,
            **options,
        )
        check(ours, last_report(), count)
        assert_close(run(graph, ours), plain)
        assert_close(run(graph, ours, optimize=True), plain)
        return {op.type for op in copied(graph).values()}


@pytest.mark.parametrize(("body", "kept"), crossed(BODIES, KEPT, together=1))
def test_functional(body, kept):
    types = check_values(body, KEPT[kept])
    assert types or kept == "only its output"


@pytest.mark.parametrize(
    ("body", "op_type"),
    [
        (looped, "StatelessWhile"),
        (branched, "StatelessIf"),
        (called, "PartitionedCall"),
    ],
)
def test_units_are_run_again(body, op_type):
    assert op_type in check_values(body, KEPT["around it"])
    assert op_type not in check_values(body, lambda *_: "speed")


@pytest.mark.parametrize(
    ("kept", "body"),
    crossed(
        KEPT,
        [b for b in BODIES if b not in (called, called_twice, switched)],
        together=1,
    ),
)
def test_version_1(body, kept):
    with version_1_control_flow():
        types = check_values(body, KEPT[kept])
    assert not types & {"Enter", "Exit", "Switch", "Merge", "NextIteration"}


@pytest.mark.parametrize("body", [looped, branched, branched_into_two, loop_of_two])
def test_version_1_by_policy(body):
    with version_1_control_flow():
        check_values(body, lambda *_: by_type("Exp"))


@pytest.mark.parametrize("body", [looped, loop_of_two, branched, nested])
def test_version_1_offloaded(body):
    with version_1_control_flow():
        check_values(body, KEPT["its output"], offload=True)


def test_gradients_within_a_version_1_loop():
    def values(take):
        with version_1_control_flow(), tf.Graph().as_default() as graph:

            def step(i, h):
                a = deep(h)
                b = deep(a)
                return i + 1, h + take(deep(b), h, [a, b])

            result = tf.while_loop(lambda i, h: i < 2, step, (0, start()))[1]
            ge.verify(graph)
            return run(graph, [result])

    plain = values(lambda y, x, kept: tf.gradients(y, x)[0])
    ours = values(lambda y, x, kept: gradients(y, x, checkpoints=kept)[0])
    assert_close(ours, plain)


@pytest.mark.parametrize("unit", ["while", "cond", "call"])
def test_gradients_within_a_body(unit):
    def inner(take, h):
        a = deep(h)
        b = deep(a)
        return take(deep(b), h, [a, b])

    def values(take):
        with tf.Graph().as_default() as graph:
            x = start()
            if unit == "while":
                result = tf.while_loop(
                    lambda i, h: i < 2,
                    lambda i, h: (i + 1, h + inner(take, h)),
                    (0, x),
                )[1]
            elif unit == "cond":
                result = tf.cond(
                    x[0, 0] > 0, lambda: inner(take, x * 2.0), lambda: inner(take, x)
                )
            else:
                result = tf.function(lambda h: inner(take, h))(x)
            return run(graph, [result])

    made = []

    def ours(y, x, kept):
        result = gradients(y, x, checkpoints=kept, min_checkpoint_size=0)[0]
        made.append(last_report())
        return result

    assert_close(values(ours), values(lambda y, x, kept: tf.gradients(y, x)[0]))
    assert all(report.recomputed for report in made)


def test_second_gradients_through_a_loop():
    with tf.Graph().as_default() as graph:
        x, before, unit, after, y = build(looped)
        (plain,) = tf.gradients(tf.reduce_sum(tf.square(tf.gradients(y, x)[0])), x)
        (first,) = gradients(y, x, checkpoints=[before, after], min_checkpoint_size=0)
        (ours,) = tf.gradients(tf.reduce_sum(tf.square(first)), x)
        assert_close(*run(graph, ([ours], [plain])))


def listed(x):
    rows = tf.TensorArray(tf.float32, size=4)
    for i in tf.range(4):
        rows = rows.write(i, tf.tanh(x) * tf.cast(i + 1, tf.float32))
    return tf.reduce_sum(rows.stack(), 0)


def test_a_list_that_is_made_again_has_a_shape_that_can_be_read():
    @tf.function(input_signature=[tf.TensorSpec([8, 8])])
    def step(x):
        kept = [tf.sin(x)]
        for _ in range(2):
            kept.append(tf.sin(listed(tf.tanh(kept[-1]))))
        y = tf.reduce_sum(tf.sin(kept[-1]))
        return gradients(y, x, checkpoints=kept)[0], tf.gradients(y, x)[0]

    function = step.get_concrete_function()
    made = {op.op_type for op in last_report().recomputed}
    assert "TensorListReserve" in made
    # TensorFlow reads the shape again where the graph is imported or saved.
    with tf.Graph().as_default():
        tf.graph_util.import_graph_def(function.graph.as_graph_def())
    ours, plain = function(tf.ones([8, 8]))
    assert_close([ours], [plain])
