"""Loops, branches and calls are units: recomputed whole, or kept, always right."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.gradients import by_type, gradients, last_report
from tests.gradients.checking import (
    TAPES,
    assert_close,
    check,
    copied,
    deep,
    named,
    plain_values,
    run,
    unlike,
)
from tests.settings import control_flow
from tests.thorough import chosen

SHAPE = [6, 8]


def start():
    return tf.constant(np.cos(np.arange(48.0)).reshape(SHAPE), tf.float32)


def looped(x):
    return tf.while_loop(
        lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h) * x), (0, x)
    )[1]


def loop_of_two(x):
    _, h, g = tf.while_loop(
        lambda i, h, g: i < 3,
        # In version 1 the three gradients of `g` stay one sum.
        lambda i, h, g: (i + 1, tf.tanh(h * g) * tf.cos(g), tf.sin(g) + x),
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
    called,
    branched_into_two,
    called_twice,
    mapped,
    scanned,
    arrays,
    switched,
]
UNITS = {looped: "StatelessWhile", branched: "StatelessIf", called: "PartitionedCall"}
IN_VERSION_1 = [b for b in BODIES if b not in (called, called_twice, switched)]
KEPT = {
    "around it": lambda before, unit, after: [before, after],
    "its output": lambda before, unit, after: [before, unit, after],
    "only its output": lambda before, unit, after: [unit],
    "far behind": lambda before, unit, after: [after],
}


def build(body):
    """Return x, what stands before, at and behind the unit, and y."""
    x = start()
    before = deep(x)
    unit = body(deep(before))
    unit.set_shape(SHAPE)
    after = deep(unit)
    return x, before, unit, after, deep(deep(after))


def build_all(bodies):
    """Return what `build` does with each body, which has an x of its own."""
    built = []
    for body in bodies:
        with tf.name_scope(body.__name__):
            built.append(build(body))
    return built


def check_values(bodies, choose, tape=None, **options):
    """Check gradients by the xs of bodies; return the types of copied ops, by body.

    Args:
        bodies: functions of one tensor.
        choose: returns the checkpoints, given what `build_all` does.
        tape: an engine to compare as well.
        options: of `gradients`.
    """
    with tf.Graph().as_default():
        xs, *_, ys = zip(*build_all(bodies), strict=True)
        plain = plain_values(bodies, ys, list(xs), tape)
    with tf.Graph().as_default() as graph:
        built = build_all(bodies)
        xs, *_, ys = zip(*built, strict=True)
        count = len(graph.get_operations())
        options |= {"checkpoints": choose(built), "min_checkpoint_size": 0}
        ours = gradients(ys, list(xs), **options)
        check(ours, last_report(), count)
        ours = named(bodies, ours)
        assert unlike(run(graph, ours), plain) == {}
        assert unlike(run(graph, ours, optimize=True), plain) == {}
        types = {body.__name__: set() for body in bodies}
        for name, op in copied(graph).items():
            types.setdefault(name.partition("/")[0], set()).add(op.type)
        return types


def in_turn(turn):
    """Return a function that keeps for each body what stands at another place."""

    def choose(built):
        lists = [*KEPT.values()] * len(built)
        turns = zip(built, lists[turn:], strict=False)
        return [t for (_, *between, _), keep in turns for t in keep(*between)]

    return choose


TURNS = chosen(range(len(KEPT)), 0)


@pytest.mark.parametrize("bodies", [BODIES[:5], BODIES[5:]], ids=["first", "others"])
@pytest.mark.parametrize("turn", TURNS)
def test_functional(turn, bodies):
    types = check_values(bodies, in_turn(turn), TAPES[bodies == BODIES[:5]])
    kept = [*KEPT] * len(bodies)
    for body, choice in zip(bodies, kept[turn:], strict=False):
        assert types[body.__name__] or choice == "only its output"
        if body in UNITS and choice in ("around it", "far behind"):
            assert UNITS[body] in types[body.__name__]


def test_speed_keeps_what_units_yield():
    types = check_values([*UNITS], lambda _: "speed")
    wrong = {b.__name__ for b in UNITS if UNITS[b] in types[b.__name__]}
    assert wrong == set()


@pytest.mark.parametrize("turn", TURNS)
def test_version_1(turn):
    with control_flow(1):
        types = check_values(IN_VERSION_1, in_turn(turn))
    units = {"Enter", "Exit", "Switch", "Merge", "NextIteration"}
    assert {body for body, found in types.items() if found & units} == set()


@pytest.mark.parametrize("offload", [False, True])
def test_version_1_by_policy_and_offloaded(offload):
    bodies = [loop_of_two, branched]

    def choose(built):
        between = [t for _, *between, _ in built for t in between]
        return between if offload else by_type("Exp")

    with control_flow(1):
        check_values(bodies, choose, offload=offload)


@pytest.mark.parametrize("unit", ["while", "cond", "call", "version 1"])
def test_gradients_within_a_body(unit):
    def inner(take, h):
        a = deep(h)
        b = deep(a)
        return take(deep(b), h, [a, b])

    def values(take):
        with contextlib.ExitStack() as stack:
            if unit == "version 1":
                stack.enter_context(control_flow(1))
            graph = stack.enter_context(tf.Graph().as_default())
            x = start()
            if unit in ("while", "version 1"):
                result = tf.while_loop(
                    lambda i, h: i < 2, lambda i, h: (i + 1, h + inner(take, h)), (0, x)
                )[1]
            elif unit == "cond":
                result = tf.cond(
                    x[0, 0] > 0, lambda: inner(take, x * 2.0), lambda: inner(take, x)
                )
            else:
                result = tf.function(lambda h: inner(take, h))(x)
            ge.verify(graph)
            return run(graph, [result])

    made = []

    def ours(y, x, kept):
        result = gradients(y, x, checkpoints=kept, min_checkpoint_size=0)[0]
        made.append(last_report())
        return result

    assert_close(values(ours), values(lambda y, x, kept: tf.gradients(y, x)[0]))
    # What a loop of version 1 does stays as it is.
    assert [bool(r.recomputed) for r in made] == [unit != "version 1"] * len(made)


def test_second_gradients_through_a_loop(graph):
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
