"""Steps within a byte budget, and schedules as recomputations.

A schedule has any op run again, any number of times.
"""

from collections import Counter
from itertools import pairwise

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil.errors import ArgumentTypeError, PlanError
from geutil.gradients import Budget, explain, gradients, last_report, plan, plan_curve
from geutil.gradients.budget_search import step_problem
from geutil.gradients.choices import AlwaysKept
from geutil.gradients.construction import build_recomputation
from geutil.gradients.least_peak import Trials
from geutil.gradients.planner import solve
from geutil.gradients.segments import StepProgram, recomputable, scheduled_recomputation
from geutil.gradients.step import build_step
from geutil.memory import executor
from geutil.memory.schedule import frugal_order
from tests.gradients.checking import assert_close, assert_same, measured_peak, run
from tests.gradients.graphs import (
    chain_function,
    chain_loss,
    chain_step,
    chain_weights,
    random_step,
)
from tests.gradients.networks import convolution
from tests.thorough import examples, is_quick

ROWS, WIDTH, LAYERS = 512, 64, 16
HELD = {"holds_gradients": True}


@pytest.fixture(scope="module")
def weights():
    return chain_weights(LAYERS, WIDTH)


def step(weights, checkpoints):
    return chain_function(weights, ROWS, checkpoints)


def assert_near(found, expected, atol=1e-7):
    for value, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=atol)


@pytest.fixture(scope="module")
def batch():
    return tf.constant(np.random.default_rng(1).normal(size=[ROWS, WIDTH]).astype("f"))


@pytest.fixture(scope="module")
def plain(weights, batch):
    """The plain gradients."""
    return step(weights, None)[0](batch)


@pytest.fixture(scope="module")
def by_cuts(weights):
    """The report of the least peak that cuts lead to."""
    return step(weights, "memory")[1]


def test_budgets_are_read():
    cases = [
        (1000, 10**6, 1000),
        (0.5, 1000, 500),
        ("25 %", 1000, 250),
        ("1.5GB", 0, 1_500_000_000),
        ("2 MiB", 0, 2 << 20),
        (1.0, 700, 700),
        ("64", 0, 64),
    ]
    wrong = [case for case in cases if Budget(case[0]).bytes(case[1]) != case[2]]
    assert wrong == []
    assert str(Budget(extra_time="12.5 %")) == "least peak in 12.5 % more time"


def test_what_is_no_budget_is_refused():
    for value in (0, -1, True, None, "", "1.5 apples", "1.2.3", float("nan")):
        with pytest.raises(ArgumentTypeError, match=r"1\.5GB"):
            pytest.fail(str(Budget(value)))
    for value in (0.0, -0.1, True, "20", "a lot", [1], float("nan")):
        with pytest.raises(ArgumentTypeError, match="is a positive number"):
            pytest.fail(str(Budget(extra_time=value)))
    with pytest.raises(ArgumentTypeError, match="either a limit"):
        Budget("50%", extra_time=0.2)


def test_budgets_are_kept_and_the_gradients_are_the_same(
    weights, batch, plain, by_cuts
):
    _, alone = step(weights, Budget(1.0))
    assert (alone.extra_cost, alone.recomputed) == (0, ())
    assert alone.mode == "budget of 100 % of plain gradients"
    assert not alone.warnings
    costs = [0.0]
    for share in (0.9, 0.6) if is_quick() else (0.9, 0.8, 0.6, 0.5):
        ours, report = step(weights, Budget(share))
        assert_near(ours(batch), plain)
        budget = share * report.plain_peak
        assert report.peak <= budget
        costs.append(report.extra_cost)
    assert measured_peak(ours, batch) <= 1.02 * budget
    # Less memory takes more computing, and never more than the least peak does.
    costs.append(by_cuts.extra_cost)
    assert costs == sorted(costs)
    assert costs[1] < costs[-2]


def test_extra_time_is_kept_and_the_gradients_are_the_same(
    weights, batch, plain, by_cuts
):
    @tf.function(autograph=False)
    def planned(x):
        loss = chain_loss(x, weights)
        plans.append(plan(loss, weights, Budget(extra_time="20%"), **HELD))
        return gradients(loss, weights, checkpoints=plans[-1], **HELD)

    plans = []
    much = planned.get_concrete_function(tf.TensorSpec([ROWS, WIDTH]))
    little, report = step(weights, Budget(extra_time=0.04))
    (found,) = plans
    assert last_report(much.graph).peak <= found.peak == found.budget
    assert 0 < found.bound <= found.extra_time
    peaks = []
    for ours, share in ((little, 0.04), (much, 0.2)):
        report = last_report(ours.graph)
        assert_near(ours(batch), plain)
        assert 0 < report.extra_time <= share
        peaks.append(report.peak)
    assert measured_peak(much, batch) <= 1.02 * report.peak
    # More time for less memory, and never more of it than by the cuts.
    assert peaks[1] < peaks[0] < report.plain_peak
    assert by_cuts.extra_time <= 0.4
    _, longer = step(weights, Budget(extra_time=0.4))
    assert longer.peak <= min(by_cuts.peak, peaks[1])


def test_large_steps_are_bounded_too(graph):
    """The report says how much time there is no way around."""
    y = x = tf.ones([1000])
    for _ in range(210):
        y = tf.tanh(y)
    found = plan(y, x, "50%")
    slopes = gradients(y, x, checkpoints=found)
    report = last_report()
    assert len(slopes) == 1
    assert found.ops > 420
    assert 0 < found.bound <= found.extra_time
    assert report.extra_time_bound == found.bound
    said = f"no schedule takes less than {found.bound:.1%}"
    assert said in str(found)
    assert said in str(report)


def test_what_is_refused_or_explained_leaves_a_graph_untouched(graph):
    x = tf.compat.v1.placeholder(tf.float32, [ROWS, WIDTH])
    shape = [WIDTH, WIDTH]
    ws = [tf.compat.v1.get_variable(f"w{n}", shape) for n in range(LAYERS)]
    loss = chain_loss(x, ws)
    before = graph.as_graph_def()
    message = r"within 10\.0 kB; the least .* is .* [kM]B; pass a larger budget"
    with pytest.raises(PlanError, match=message):
        gradients(loss, ws, checkpoints=Budget(10_000))
    with pytest.raises(ArgumentTypeError, match="through limits"):
        plan_curve(loss, ws, ["50%", Budget(extra_time=0.2)])
    report = explain(loss, ws, checkpoints=Budget(0.5))
    assert graph.as_graph_def() == before
    assert report.peak <= 0.5 * report.plain_peak
    slopes = gradients(loss, ws, checkpoints=Budget(1.0))
    assert [slope.shape for slope in slopes] == LAYERS * [shape]


@pytest.mark.parametrize("updates", ["in place", "apart"])
def test_the_planner_knows_that_updates_wait(updates, graph):
    """Where weights are most of a step, it holds what the schedule says."""
    y = x = tf.compat.v1.placeholder(tf.float32, [8, 128])
    weights = [tf.Variable(tf.zeros([128, 128]), use_resource=True) for _ in "123"]
    for w in weights:
        y = tf.tanh(y @ w)
    plain = build_step(tf.reduce_sum(y), [*weights, x])
    always = AlwaysKept(plain)
    trials = Trials(plain, always, updates=updates)
    told = step_problem(plain, always, trials.program)
    # Gradients of weights first: each is held until that of its input was computed.
    problem, order = told.problem, []
    first = {w.op for w in plain.gradients[:3]}
    hasty = sorted(
        range(len(problem)),
        key=lambda v: bool(told.ops[v]) and first.isdisjoint(told.ops[v]),
    )
    while len(order) < len(problem):
        ran = set(order)
        order.append(
            next(v for v in hasty if v not in ran and ran.issuperset(problem.inputs[v]))
        )
    places = told.recomputation(order).places
    program = trials.program.program()
    names = [node.name for node in program.nodes]
    known = {i: places[name] for i, name in enumerate(names) if name in places}
    found = executor.simulate(program, frugal_order(program, known)).peak
    assert found == pytest.approx(problem.peak(order), rel=0.02)
    assert found > 4 * 128 * 128 * (1 + (updates == "apart"))


def test_updates_of_large_weights_are_within_the_budget():
    """Here weights are most of what a step holds."""
    rng = np.random.default_rng(0)
    sizes = [64, 512, 1024, 512, 64]
    wide = [
        tf.Variable(rng.normal(0, 0.05, pair).astype("f")) for pair in pairwise(sizes)
    ]

    @tf.function(autograph=False)
    def train(x):
        y = x
        for w in wide:
            y = tf.nn.silu(tf.nn.silu(tf.nn.silu(y @ w)))
        loss = tf.reduce_mean(y * y)
        slopes = gradients(loss, wide, checkpoints=Budget(0.6))
        for w, slope in zip(wide, slopes, strict=True):
            w.assign_sub(0.1 * slope)
        return loss

    function = train.get_concrete_function(tf.TensorSpec([ROWS, sizes[0]]))
    report = last_report(function.graph)
    assert not report.warnings
    assert report.extra_time > 0
    x = tf.constant(rng.normal(size=[ROWS, sizes[0]]).astype("f"))
    assert measured_peak(function, x) <= 1.02 * 0.6 * report.plain_peak


def test_what_the_gradient_of_a_swish_computes_ahead_is_within_the_budget():
    """Products and sums of forward tensors alone ran in the forward pass: 22 % over."""
    layers = tf.keras.layers
    x = y = tf.keras.Input([32, 32, 8])
    for _ in range(4):
        z = layers.BatchNormalization()(layers.Conv2D(32, 1)(y))
        z = layers.DepthwiseConv2D(3, padding="same")(layers.Activation("silu")(z))
        z = layers.Activation("silu")(layers.BatchNormalization()(z))
        y = layers.Add()([y, layers.Conv2D(8, 1)(z)])
    network = tf.keras.Model(x, y)
    weights = [v.value for v in network.trainable_variables]

    @tf.function(autograph=False)
    def train(x):
        loss = tf.reduce_mean(network(x, training=True) ** 2)
        slopes = gradients(loss, weights, checkpoints=Budget(0.6))
        for w, slope in zip(weights, slopes, strict=True):
            w.assign_sub(0.1 * slope)
        return loss

    function = train.get_concrete_function(tf.TensorSpec([16, 32, 32, 8]))
    report = last_report(function.graph)
    assert not report.warnings and report.peak <= report.budget
    images = tf.random.stateless_normal([16, 32, 32, 8], (1, 2))
    assert measured_peak(function, images) <= 1.02 * report.budget


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
    rows, width, layers = 512, 32, 12
    weights = chain_weights(layers, width)
    x = tf.constant(np.random.default_rng(1).normal(size=[rows, width]).astype("f"))
    found = []

    @tf.function(autograph=False)
    def planned(x):
        loss = chain_loss(x, weights)
        found.append(plan(loss, weights, 0.3, holds_gradients=True))
        return loss

    planned.get_concrete_function(tf.TensorSpec(x.shape))
    for jit in (False, True):
        plain, _ = chain_function(weights, rows, None, jit_compile=jit)
        ours, report = chain_function(weights, rows, found[0], jit_compile=jit)
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
