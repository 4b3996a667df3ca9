"""Two devices: copies stay where originals are, towers apart, and tensors travel."""

import networkx as nx
import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.gradients import by_name, gradients, last_report, pipelined
from geutil.transform import partition
from tests.gradients.apart import is_child
from tests.gradients.checking import (
    assert_as_near,
    check,
    copied,
    deep,
    dependencies,
    gates,
)
from tests.thorough import chosen, crossed

pytestmark = pytest.mark.skipif(
    not is_child("two_devices"), reason="needs a process with two devices"
)
if is_child("two_devices"):
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )
    # Grappler would fuse the ops of the two steps in different ways.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

FIRST, SECOND = "/device:CPU:0", "/device:CPU:1"


def start(number=1):
    return tf.constant(np.cos(np.arange(4096.0) * number).reshape(64, 64), tf.float32)


def chain(x, *weights):
    """Return the tensors to keep, and the end of a chain of five parts."""
    kept = []
    for number in range(4):
        if weights:
            x = tf.matmul(x, weights[number % len(weights)]) * 0.1
        x = deep(x)
        kept.append(x)
    return kept, deep(x)


def traced(build):
    return tf.function(build, autograph=False).get_concrete_function()


def as_numpy(values):
    return [value.numpy() for value in values]


def by_list(y, x, kept, **options):
    before = len(tf.compat.v1.get_default_graph().get_operations())
    result = gradients(y, x, checkpoints=kept, min_checkpoint_size=0, **options)
    check(result, last_report(), before)
    assert last_report().recomputed
    return result


def plainly(y, x, kept, **options):
    return tf.gradients(y, x)


def towers(take, shared):
    """Return gradients of two towers, one on each device."""
    kept, ends, xs = [], [], []
    weights = [start(3), start(4)]
    for number, device in enumerate((FIRST, SECOND)):
        with tf.device(device), tf.name_scope(f"tower{number}"):
            x = tf.identity(start(number + 1), name="start")
            own = weights if shared else [tf.identity(w) for w in weights]
            held, end = chain(x, *own)
            kept += held
            ends.append(tf.reduce_sum(end))
            xs += [x, *own]
    return take(ends[0] + ends[1], list({id(x): x for x in xs}.values()), kept)


@pytest.mark.parametrize("shared", [False, True])
def test_towers_stay_apart(shared):
    ours = traced(lambda: towers(by_list, shared))
    segment = {op.name: op.segment for op in last_report().recomputed}
    edges = dependencies(ours.graph)
    copies = copied(ours.graph)
    behind = {name: nx.ancestors(edges, op) for name, op in copies.items()}
    for mine, other in (("tower0/", "tower1/"), ("tower1/", "tower0/")):
        own = [name for name in copies if name.startswith(mine)]
        assert own
        strangers = [op for name, op in copies.items() if name.startswith(other)]
        first = min(segment[name] for name in own)
        for name in own:
            assert behind[name].isdisjoint(strangers)
            # Segments of a tower wait for those before.
            awaited = {segment[n] for n in own if copies[n] in behind[name]}
            assert segment[name] == first or min(awaited) < segment[name]
    plain = traced(lambda: towers(plainly, shared))
    assert_as_near(as_numpy(ours()), as_numpy(plain()))


def test_an_op_on_another_device_does_not_break_the_order():
    def build(pinned):
        x = h = start()
        kept = []
        for number in range(4):
            with tf.device(SECOND if number == pinned else None):
                h = tf.sin(h)
            h = deep(h)
            kept.append(h)
        return by_list(deep(h), x, kept)

    wrong = []
    for pinned in (None, 0, 1, 2, 3):
        graph = traced(lambda pinned=pinned: build(pinned)).graph
        edges = dependencies(graph)
        segment = {op.name: op.segment for op in last_report().recomputed}
        copies = copied(graph)
        assert len(set(segment.values())) == 4
        for name, copy in copies.items():
            behind = nx.ancestors(edges, copy)
            earlier = {segment[n] for n, other in copies.items() if other in behind}
            if not earlier >= set(range(segment[name])):
                wrong.append((pinned, name))
    assert wrong == []


@pytest.mark.parametrize(
    ("offload", "prefetch"),
    crossed([True, by_name("Sin_3$|Sin_5$")], [0, 1, 2, 9], together=1),
)
def test_offloading(offload, prefetch):
    def build(take):
        with tf.device(FIRST):
            x, w = start(), start(2)
            kept, y = chain(x, w)
            where = {"offload_device": SECOND, "prefetch": prefetch}
            return take(y, [x, w], kept, offload=offload, **where)

    ours = traced(lambda: build(by_list))
    graph = ours.graph
    sent = journeys(graph)
    assert {op.inputs[0].name for op, _, _ in sent} == set(last_report().offloaded)
    edges = dependencies(graph)
    segments = gates(graph)
    for op, wait, back in sent:
        # It goes as soon as it is made.
        assert not op.control_inputs
        # It comes back as many segments ahead as was asked for.
        assert nx.descendants(edges, back)
        needed = min(i for i, gate in enumerate(segments) if reads_at(gate, back))
        awaited = set(wait.control_inputs)
        if needed - prefetch >= 0:
            assert awaited == {segments[needed - prefetch]}
        else:
            assert awaited
            assert awaited.isdisjoint(segments)
    plain = traced(lambda: build(plainly))
    assert_as_near(as_numpy(ours()), as_numpy(plain()))


def journeys(graph):
    """Check what is sent to the other device; return each op there, wait and return."""
    ge.verify(graph)
    away = [op for op in graph.get_operations() if op.name.endswith("/away")]
    found = []
    for op in away:
        assert op.device.endswith(SECOND)
        assert op.outputs[0].consumers()
        for wait in op.outputs[0].consumers():
            # TensorFlow sends what a plain op there holds without its reader's gate.
            assert wait.type == "PlaceholderWithDefault"
            assert wait.device.endswith(SECOND)
            (back,) = wait.outputs[0].consumers()
            assert back.name.startswith("offloaded/")
            assert back.device == op.inputs[0].op.device
            found.append((op, wait, back))
        # Nothing else reads what was sent.
        readers = [r for r in op.inputs[0].consumers() if not is_forward(r)]
        assert all(reader in away for reader in readers)
    assert found
    return found


def is_forward(op):
    return not op.name.startswith(("gradients/", "recomputed/", "offloaded/"))


def reads_at(gate, back):
    """Tell whether a barrier behind a gate reads what came back."""
    return any(
        reader.type == "PlaceholderWithDefault" and gate in reader.control_inputs
        for reader in back.outputs[0].consumers()
    )


@pytest.mark.parametrize("schedule", chosen(["1f1b", "gpipe"], "1f1b"))
def test_micro_batches_of_a_function_go_through_both(schedule):
    weights = []
    for number in range(4):
        with tf.device(FIRST if number < 2 else SECOND):
            weights.append(tf.Variable(start(number + 1) * 0.1))

    def loss_of(x):
        for w in weights:
            x = tf.tanh(x @ w)
        return tf.reduce_mean(x**2)

    @tf.function(autograph=False)
    def step(x):
        loss = loss_of(x)
        found = partition(loss, [FIRST, SECOND], "time")
        built = pipelined(loss, weights, found, [x], 4, schedule=schedule)
        assert {op.device for op in built.passes[1, True]} >= {SECOND}
        # Of captured variables.
        assert sum(built.weights) == 4 * 64 * 64 * 4
        return built.loss, built.gradients

    total, found = step(start())
    with tf.GradientTape() as tape:
        loss = loss_of(start())
    np.testing.assert_allclose(total, loss, rtol=1e-6)
    for gradient, wanted in zip(found, tape.gradient(loss, weights), strict=True):
        limit = 1e-6 * np.abs(wanted).max()
        np.testing.assert_allclose(gradient, wanted, rtol=0, atol=limit)
