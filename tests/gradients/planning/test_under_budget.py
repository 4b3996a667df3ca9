"""Steps within a byte budget."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import keras
import numpy as np
import pytest
import tensorflow as tf
from parameterized import parameterized

from geutil import memory
from geutil.errors import ArgumentTypeError, PlanError
from geutil.gradients import (
    Budget,
    checkpointed,
    explain,
    gradients,
    last_report,
    plan,
    plan_curve,
)
from geutil.gradients.planning.local_search import Trials
from geutil.gradients.planning.step_problem import step_problem
from geutil.gradients.prediction import StepProgram
from geutil.gradients.selection import AlwaysKept
from geutil.gradients.step import build_step
from geutil.memory import simulation
from geutil.memory.scheduling import order_around

ROWS, WIDTH, LAYERS = 512, 64, 16


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(0)
    scale = 1 / np.sqrt(WIDTH)
    return [
        tf.Variable(rng.normal(0, scale, [WIDTH, WIDTH]).astype("f"))
        for _ in range(LAYERS)
    ]


def loss_of(x, weights):
    y = x
    for w in weights:
        y = tf.tanh(y @ w)
    return tf.reduce_mean(y * y)


def step(weights, checkpoints):
    """Return a step as a function, and what its gradients report."""

    @tf.function(autograph=False)
    def train(x):
        loss = loss_of(x, weights)
        if checkpoints is None:
            return tf.gradients(loss, weights)
        return gradients(loss, weights, checkpoints=checkpoints, holds_gradients=True)

    function = train.get_concrete_function(tf.TensorSpec([ROWS, WIDTH]))
    return function, last_report(function.graph)


@parameterized.expand(
    [
        ("bytes", 1000, 10**6, 1000),
        ("share", 0.5, 1000, 500),
        ("percent", "25 %", 1000, 250),
        ("gigabytes", "1.5GB", 0, 1_500_000_000),
        ("mebibytes", "2 MiB", 0, 2 << 20),
        ("whole", 1.0, 700, 700),
        ("number", "64", 0, 64),
    ]
)
def test_budgets_are_read(_, limit, plain, wanted):
    assert Budget(limit).bytes(plain) == wanted


@parameterized.expand(
    [(0,), (-1,), (True,), (None,), ("",), ("1.5 apples",), ("1.2.3",), (float("nan"),)]
)
def test_what_is_no_budget_is_refused(limit):
    with pytest.raises(ArgumentTypeError, match=r"1\.5GB"):
        Budget(limit)


@pytest.mark.parametrize(
    "share",
    [0.6, *(pytest.param(x, marks=pytest.mark.thorough) for x in (0.8, 0.5))],
)
def test_the_budget_is_kept_and_the_gradients_are_the_same(weights, share):
    ours, report = step(weights, Budget(share))
    plain, _ = step(weights, None)
    x = tf.constant(np.random.default_rng(1).normal(size=[ROWS, WIDTH]).astype("f"))
    for found, wanted in zip(ours(x), plain(x), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    budget = share * report.plain_peak
    assert report.peak <= budget
    assert memory.measure(ours, args=(x,), steps=1).peak <= 1.02 * budget
    # Never more computing than for the least peak.
    _, least = step(weights, "memory")
    assert 0 < report.extra_cost <= least.extra_cost


@parameterized.expand(
    [(0.0,), (-0.1,), (True,), ("20",), ("a lot",), ([1],), (float("nan"),)]
)
def test_what_is_no_extra_time_is_refused(extra_time):
    with pytest.raises(ArgumentTypeError, match="extra_time is a positive number"):
        Budget(extra_time=extra_time)


def test_a_budget_is_one_of_bytes_or_of_time():
    with pytest.raises(ArgumentTypeError, match="either a limit"):
        Budget("50%", extra_time=0.2)
    assert str(Budget(extra_time="12.5 %")) == "least peak in 12.5 % more time"


def test_extra_time_is_kept_and_the_gradients_are_the_same(weights):
    peaks = []
    x = tf.constant(np.random.default_rng(1).normal(size=[ROWS, WIDTH]).astype("f"))
    plain, _ = step(weights, None)
    for share in (0.04, 0.4):
        ours, report = step(weights, Budget(extra_time=share))
        for found, wanted in zip(ours(x), plain(x), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
        assert 0 < report.extra_time <= share
        assert memory.measure(ours, args=(x,), steps=1).peak <= 1.02 * report.peak
        peaks.append(report.peak)
    # More time for less memory, and never more of it than by the cuts.
    assert peaks[1] < peaks[0] < report.plain_peak
    _, by_cuts = step(weights, "memory")
    assert by_cuts.extra_time <= 0.4
    assert peaks[1] <= by_cuts.peak


def test_a_plan_of_extra_time_is_used_again(weights):
    @tf.function(autograph=False)
    def train(x):
        loss = loss_of(x, weights)
        budget = Budget(extra_time="20%")
        plans.append(plan(loss, weights, budget, holds_gradients=True))
        return gradients(loss, weights, checkpoints=plans[-1], holds_gradients=True)

    plans = []
    function = train.get_concrete_function(tf.TensorSpec([ROWS, WIDTH]))
    found = plans[0]
    assert last_report(function.graph).peak <= found.peak == found.budget
    assert 0 < found.bound <= found.extra_time <= 0.2


def test_large_steps_are_bounded_too():
    """The report says how much time there is no way around."""
    with tf.Graph().as_default():
        y = x = tf.ones([1000])
        for _ in range(250):
            y = tf.tanh(y)
        found = plan(y, x, "10%")
        slopes = gradients(y, x, checkpoints=found)
        report = last_report()
    assert len(slopes) == 1
    assert found.ops > 500
    assert 0 < found.bound <= found.extra_time
    assert report.extra_time_bound == found.bound
    said = f"no schedule takes less than {found.bound:.1%}"
    assert said in str(found)
    assert said in str(report)


def test_a_curve_is_drawn_through_limits():
    with tf.Graph().as_default():
        x = tf.ones([1000])
        y = tf.tanh(tf.tanh(x))
        with pytest.raises(ArgumentTypeError, match="through limits"):
            plan_curve(y, x, ["50%", Budget(extra_time=0.2)])


def test_less_memory_takes_more_computing(weights):
    costs = [step(weights, Budget(share))[1].extra_cost for share in (0.9, 0.5)]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]


def test_a_budget_that_order_alone_keeps_costs_nothing(weights):
    _, report = step(weights, Budget(1.0))
    assert (report.extra_cost, report.recomputed) == (0, ())
    assert report.mode == "budget of 100 % of plain gradients"
    assert not report.warnings


def test_a_refused_budget_leaves_a_graph_untouched():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [ROWS, WIDTH])
        w = tf.compat.v1.get_variable("w", [WIDTH, WIDTH])
        y = tf.tanh(tf.tanh(tf.tanh(x @ w) @ w) @ w)
        before = graph.as_graph_def()
        with pytest.raises(PlanError, match="larger budget"):
            gradients(y, [w], checkpoints=Budget(1000))
        assert graph.as_graph_def() == before
        (slope,) = gradients(y, [w], checkpoints=Budget(1.0))
        assert slope.shape == [WIDTH, WIDTH]


def test_a_budget_below_all_is_refused(weights):
    with pytest.raises(PlanError, match=r"within 0\.01 MB; the least .* is .* MB"):
        step(weights, Budget(10_000))


def test_it_is_explained_without_being_built(weights):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [ROWS, WIDTH])
        y = x
        for n in range(LAYERS):
            w = tf.compat.v1.get_variable(f"w{n}", [WIDTH, WIDTH])
            y = tf.tanh(y @ w)
        before = len(graph.get_operations())
        variables = tf.compat.v1.trainable_variables()
        report = explain(y, variables, checkpoints=Budget(0.5))
        assert len(graph.get_operations()) == before
    assert report.peak <= 0.5 * report.plain_peak


def test_the_planner_is_told_the_step_as_it_is():
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [8, 16, 16, 3])
        network = keras.Sequential(
            [
                keras.layers.Conv2D(8, 3, padding="same"),
                keras.layers.BatchNormalization(),
                keras.layers.Activation("swish"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )
        loss = tf.reduce_mean(tf.square(network(x, training=True)))
        plain = build_step(loss, [v.value for v in network.trainable_variables])
        always = AlwaysKept(plain)
        trials = Trials(plain, always)
        told = step_problem(plain, always, trials.program)
    problem, tensors = told.problem, told.tensors
    # Numbered in the planned order, each node behind its inputs.
    assert problem.first_order == tuple(range(len(problem)))
    alone = trials.without().peak
    # Some bytes of tiny tensors are not counted.
    assert 0.99 * alone <= problem.peak(problem.first_order) <= 1.2 * alone
    again = {node for node, _ in tensors}
    assert not again & set(problem.no_recompute)
    assert {t.op.type for _, t in tensors} >= {"Conv2D", "MaxPool"}
    # What follows from a gradient runs once.
    assert not any(t.op in plain.backward for _, t in tensors)


def test_a_swish_may_run_again_although_its_factor_is_tiny():
    with tf.Graph().as_default():
        y = x = tf.compat.v1.placeholder(tf.float32, [ROWS, WIDTH])
        for _ in range(4):
            y = tf.nn.silu(y)
        plain = build_step(tf.reduce_sum(y), x)
        always = AlwaysKept(plain)
        problem = step_problem(plain, always, Trials(plain, always).program)
    swishes = [
        node
        for node, ops in enumerate(problem.ops)
        if any(op.type == "IdentityN" for op in ops)
    ]
    # The gradient of each but the last is read again.
    assert len(set(swishes) - set(problem.problem.no_recompute)) >= 3


@parameterized.expand([("in place",), ("apart",)])
def test_an_update_before_the_last_read_leaves_the_old_value(updates):
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [4, WIDTH])
        v = tf.Variable(tf.zeros([WIDTH, WIDTH]), use_resource=True)
        plain = build_step(tf.reduce_sum(tf.tanh(x @ v)), [v, x])
        program = StepProgram(plain, updates=updates).program()
    nodes = program.nodes
    update, other = (i for i, n in enumerate(nodes) if n.type.startswith("Assign"))
    (value,) = nodes[update].updates
    # The gradient of x reads v, as the forward pass does.
    *_, last = readers = [i for i, node in enumerate(nodes) if value in node.inputs]
    assert [nodes[i].type for i in readers] == ["MatMul", "MatMul"]
    order = [i for i in simulation.simulate(program).order if i not in (last, other)]
    order += [last, other]
    gone = list(nodes)
    gone[update] = nodes[update].changed(updates=(), outputs=())
    held = [
        simulation.simulate(replace(program, nodes=some), order).held[-2]
        for some in (nodes, gone)
    ]
    assert held[0] - held[1] == 4 * WIDTH * WIDTH


@parameterized.expand([("in place",), ("apart",)])
def test_the_planner_knows_that_updates_wait(updates):
    """Where weights are most of a step, it holds what the schedule says."""
    with tf.Graph().as_default():
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
    found = simulation.simulate(program, order_around(program, known)).peak
    assert found == pytest.approx(problem.peak(order), rel=0.02)
    assert found > 4 * 128 * 128 * (1 + (updates == "apart"))


def test_updates_of_large_weights_are_within_the_budget():
    """Here weights are most of what a step holds."""
    rng = np.random.default_rng(0)
    sizes = [64, 256, 1024, 512, 1024, 256, 64]
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
    measured = memory.measure(function, args=(x,), steps=1).peak
    assert measured <= 1.02 * 0.6 * report.plain_peak


@parameterized.expand([(0.6,), (1.0,)])
def test_keras_fits_within_a_budget(share):
    def network():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(WIDTH, "tanh") for _ in range(LAYERS)]
        made = keras.Sequential([keras.Input([WIDTH]), *layers])
        made.compile("sgd", "mse")
        return made

    rng = np.random.default_rng(1)
    x, y = rng.normal(size=[2, ROWS, WIDTH]).astype("f")
    plain, ours = network(), network()
    checkpointed(ours, Budget(share))
    for one in (plain, ours):
        one.fit(x, y, batch_size=ROWS, epochs=1, verbose=0)
    for found, wanted in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
