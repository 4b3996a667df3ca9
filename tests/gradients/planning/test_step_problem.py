"""Recomputation as a schedule has it: any op, any number of times."""

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil.gradients import Budget, gradients, last_report, plan
from geutil.gradients.choices import AlwaysKept
from geutil.gradients.construction import build_recomputation
from geutil.gradients.planner import solve
from geutil.gradients.planning.least_peak import Trials
from geutil.gradients.planning.step_problem import step_problem
from geutil.gradients.segments import StepProgram, recomputable, scheduled_recomputation
from geutil.gradients.step import build_step
from tests.gradients.checking import assert_close, assert_same, measured_peak, run
from tests.gradients.networks import convolution
from tests.gradients.planning.graphs import (
    chain_function,
    chain_loss,
    chain_step,
    chain_weights,
    random_step,
)
from tests.thorough import examples

ROWS, WIDTH, LAYERS = 512, 32, 12


def values(step, built):
    graph = step.graph
    feed = {
        op.outputs[0]: np.linspace(-1, 1, 64 * 64).reshape(64, 64)
        for op in graph.get_operations()
        if op.type == "Placeholder"
    }
    return run(graph, list(built.gradients), feed)


@given(st.integers(0, 10**6), st.integers(2, 12), st.data())
@examples(20)
def test_any_ops_may_run_again_at_any_time(seed, layers, data):
    wanted = values(*2 * (random_step(seed, layers),))
    step = random_step(seed, layers)
    always = AlwaysKept(step)
    free = [op for op in recomputable(step, always) if not any(map(always, op.outputs))]
    if not free:
        return
    random = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    bursts = []
    for _ in range(int(random.integers(1, 6))):
        drawn = random.random(len(free)) < random.uniform(0.2, 0.9)
        bursts.append([op for op, take in zip(free, drawn, strict=True) if take])
    bursts = [burst for burst in bursts if burst]
    before = {op: int(random.integers(len(bursts) + 1)) for op in step.backward}
    plan = scheduled_recomputation(step, bursts, before)
    program = StepProgram(step)
    assert program.peak(plan.segments) > 0
    with step.graph.as_default():
        built = build_recomputation(plan)
    assert_close(values(step, built), wanted)
    # Each burst is copied for itself.
    names = Counter(built.copied.values())
    assert len(names) == sum(map(len, bursts)) and set(names.values()) <= {1}


def swish_blocks():
    """Residual blocks of a layer normalization and two layers, `swish` between them.

    Its gradient makes tensors of forward tensors alone, and waits for gradients.
    """
    inputs = keras.Input([64], batch_size=512)
    y = inputs
    for _ in range(2):
        z = keras.layers.LayerNormalization()(y)
        z = keras.layers.Dense(256, activation="swish")(z)
        y = y + keras.layers.Dense(64)(z)
    return keras.Model(inputs, y), [512, 64]


def convolutions():
    """Convolutions with biases, batch norms, and a pool."""
    inputs = keras.Input([32, 32, 3], batch_size=8)
    y = inputs
    for width in (16, 16, 32, 32):
        y = convolution(y, width)
        y = keras.layers.BatchNormalization()(y)
        y = keras.layers.Activation("relu")(y)
    y = keras.layers.MaxPooling2D(4)(y)
    y = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(y))
    return keras.Model(inputs, y), [8, 32, 32, 3]


@pytest.mark.parametrize("network", [swish_blocks, convolutions])
def test_a_step_holds_what_its_schedule_does(network):
    with tf.Graph().as_default() as graph:
        model, shape = network()
        x = tf.compat.v1.placeholder(tf.float32, shape)
        loss = tf.reduce_mean(tf.square(model(x, training=True)))
        weights = [v.value for v in model.trainable_variables]
        step = build_step(loss, weights)
        always = AlwaysKept(step)
        trials = Trials(step, always)
        told = step_problem(step, always, trials.program)
    for share in (0.7, 0.5):
        budget = share * StepProgram(step).plain_peak()
        schedule = solve(told.problem, budget, iterations=5000, workers=1)
        assert schedule.status == "feasible"
        assert len(schedule.runs) > len(told.problem)
        trial = trials.scheduled(told.recomputation(schedule.runs))
        # Kernels that take over buffers hold less than the planner knows. A gradient
        # that something waits for is there before the planner has it, with what it is
        # read by.
        largest = max(told.problem.sizes)
        assert 0.93 * schedule.peak <= trial.peak <= schedule.peak + largest
    if network is convolutions:
        assert_told(told, step, trials.without().peak)
        again = {op.type for op in run_again(told)}
        assert again >= {"DepthwiseConv2dNative", "Relu"}
        return
    # A swish may run again although its factor is tiny.
    swishes = {
        node
        for node, ops in enumerate(told.ops)
        if any(op.type == "IdentityN" for op in ops)
    }
    assert len(swishes - set(told.problem.no_recompute)) == 2
    # Within a budget the gradients are the plain ones.
    with graph.as_default():
        plain = tf.gradients(loss, weights)
        slopes = gradients(loss, weights, checkpoints=Budget(0.6), holds_gradients=True)
        assert last_report(graph).recomputed
    feed = {x: np.random.default_rng(0).normal(size=shape)}
    found = run(graph, [*slopes, *plain], feed)
    assert_close(found[: len(slopes)], found[len(slopes) :])


def run_again(told):
    """Return the ops that may run again."""
    nodes = set(range(len(told.problem))) - set(told.problem.no_recompute)
    return [op for node in nodes for op in told.ops[node]]


def assert_told(told, step, alone):
    """Check what the planner is told of a step, which alone holds so much."""
    problem = told.problem
    # Numbered in the planned order, each node behind its inputs.
    assert problem.first_order == tuple(range(len(problem)))
    # Some bytes of tiny tensors are not counted.
    assert 0.99 * alone <= problem.peak(problem.first_order) <= 1.2 * alone
    # What follows from a gradient runs once.
    assert not set(run_again(told)) & set(step.backward)


def test_what_is_made_of_forward_tensors_alone_reads_what_ran_again(graph):
    """As a copy in the place of its only run, so that it takes no more time."""
    x = tf.compat.v1.placeholder(tf.float32, [64, 64])
    made = tf.exp(x)
    y = tf.maximum(made, tf.tanh(x))
    step = build_step(tf.reduce_sum(y * y), [x])
    always = AlwaysKept(step)
    told = step_problem(step, always, StepProgram(step))
    number = {op: v for v, ops in enumerate(told.ops) for op in ops}
    # The mask of the gradient waits for nothing.
    mask = next(op for op in step.ops() if op.type in ("GreaterEqual", "LessEqual"))
    assert step.is_helper(mask) and mask not in step.backward
    runs = [v for v in told.problem.first_order if v != number[mask]]
    backward = [v for op, v in number.items() if op in step.backward]
    place = next(
        i
        for i, v in enumerate(runs)
        if v in backward and number[mask] in told.problem.inputs[v]
    )
    runs[place:place] = [number[made.op], number[mask]]
    plan = told.recomputation(runs)
    assert mask in {op for segment in plan.segments for op in segment.ops}
    assert made.op in plan.run_again and mask not in plan.run_again
    # Earlier, it runs as it is.
    order = told.problem.first_order
    assert not told.recomputation(order).segments


def test_ops_run_more_than_twice_where_the_budget_asks_for_it():
    weights = chain_weights(LAYERS, WIDTH)
    x = tf.constant(np.random.default_rng(1).normal(size=[ROWS, WIDTH]).astype("f"))
    found = []

    @tf.function(autograph=False)
    def planned(x):
        loss = chain_loss(x, weights)
        found.append(plan(loss, weights, 0.3, holds_gradients=True))
        return loss

    planned.get_concrete_function(tf.TensorSpec(x.shape))
    for jit in (False, True):
        plain, _ = chain_function(weights, ROWS, None, jit_compile=jit)
        ours, report = chain_function(weights, ROWS, found[0], jit_compile=jit)
        assert report.peak <= 0.3 * report.plain_peak
        assert max(op.times for op in report.recomputed) > 1
        assert "times each" in str(report)
        assert report.extra_time > 0
        assert_same(ours(x), plain(x))
        if not jit:
            peak = measured_peak(ours, x, steps=2, inter_op_threads=1)
            assert peak <= 1.02 * report.peak


def test_backward_ops_stay_apart_though_each_takes_over_a_buffer():
    step = chain_step([64] * 31, rows=4096)
    always = AlwaysKept(step)
    told = step_problem(step, always, StepProgram(step))
    tensor = 4096 * 64 * 4
    # A layer and its gradient at once, never the whole chain.
    assert told.problem.least_budget <= 5 * tensor
    assert all(len(ops) < 12 for ops in told.ops)
