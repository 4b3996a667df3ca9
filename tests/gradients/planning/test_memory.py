"""The choice with the least peak, against all others where these can be tried."""

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.networks import NETWORKS
from geutil.batchnorm import fold_batch_norms
from geutil.gradients.planning import choose_for_memory
from geutil.gradients.planning.local_search import AS_GOOD, Trials
from geutil.gradients.segments import plan_recomputation
from geutil.gradients.selection import AlwaysKept
from geutil.gradients.step import build_step
from tests.gradients.networks import SMALL, trace_forward
from tests.gradients.planning.graphs import (
    Everything,
    chain_step,
    random_step,
    rewired_chain_step,
)
from tests.thorough import chosen, some

v1 = tf.compat.v1
# Of the random steps with seeds 0 to 70, all are within 1 % of the best but 16 and 44,
# which miss it by 17 %: of their 17 places not all three can be tried together, and
# from what is found no single change leads to the best.
MISSED = {16: 1.17}
# For 31 and 36 all reckonings tell not to cut; before the sweep they were left plain.
SEEDS = [*range(17), 31, 36]
# 2 % less than plain is not worth while.
WORTH_WHILE = 0.98
# The small networks of other tests would have nothing that is worth recomputing.
LARGER = {"U-Net": {"batch": 4, "pixels": 128, "width": 16}}


def choose(step, smallest=0):
    return choose_for_memory(step, AlwaysKept(step), smallest)


def peaks(step, choice):
    """Return the peaks of plain gradients, put in order, and of a choice."""
    trials = Trials(step, AlwaysKept(step))
    plain_peak = min(trials.program.plain_peak(), trials.without().peak)
    return plain_peak, trials.run(choice.kept).peak


def assert_nearly_best(step, bound):
    best = Everything(step).best()
    plain, found = peaks(step, choose(step))
    assert found <= bound * best.peak or best.peak > WORTH_WHILE * plain


def test_a_choice_that_no_cutting_leads_to():
    """Nothing is large enough to be kept where all that is needed is cut through."""
    step = chain_step([64] * 21)
    best = choose(step)
    other = choose_for_memory(step, AlwaysKept(step), 10**9, others=[best.kept])
    assert choose(step, 10**9).kept == ()
    assert (other.kept, other.peak) == (best.kept, best.peak)


@pytest.mark.parametrize("seed", some(range(12), 3))
def test_the_best_cuts_of_a_chain_are_found(seed):
    widths = np.random.default_rng(seed).integers(8, 128, 7)
    assert_nearly_best(chain_step([int(w) for w in widths]), AS_GOOD)


@pytest.mark.parametrize("seed", some(SEEDS, 4))
def test_the_best_cuts_of_nearly_any_graph_are_found(seed):
    assert_nearly_best(random_step(seed, layers=4), MISSED.get(seed, AS_GOOD))


@pytest.fixture(scope="module")
def long_chain():
    """A chain of a hundred layers, and the choice for it."""
    step = chain_step([64] * 101)
    return step, choose(step)


def test_a_long_chain_takes_little_and_no_op_runs_twice_again(long_chain):
    step, choice = long_chain
    assert choice.reason is None
    # 100 activations and as many weight gradients of a quarter: of 125, at least 25.
    assert choice.peak < 0.4 * choice.plain_peak
    plan = plan_of(step, choice)
    again = [op for segment in plan.segments for op in segment.ops]
    assert len(again) == len(set(again))


@pytest.fixture(scope="module")
def straight():
    """The choice for a chain of twenty layers, made in their order."""
    return choose(chain_step([64] * 21))


@pytest.mark.parametrize(
    "order", [range(20)[::-1], [*range(1, 20, 2), *range(0, 20, 2)]]
)
def test_the_order_of_creation_does_not_matter(order, straight):
    step = rewired_chain_step(order)
    choice = choose(step)
    assert choice.reason is None
    assert choice.peak == straight.peak
    assert choice.plain_peak == straight.plain_peak
    assert len(choice.kept) == len(straight.kept)


def test_batch_norms_that_were_folded_for_training():
    """A fold makes new ops, and lets older ones read them."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [4, 16, 16, 16])
        weights = []
        for layer in range(5):
            w = v1.get_variable(f"w{layer}", [3, 3, 16, 16])
            gamma, beta = (v1.get_variable(f"{n}{layer}", [16]) for n in ("g", "b"))
            x = tf.nn.conv2d(x, w, 1, "SAME")
            x, *statistics = v1.nn.fused_batch_norm(x, gamma, beta)[:3]
            for name, value in zip(("mean", "variance"), statistics, strict=True):
                moving = v1.get_variable(f"{name}{layer}", [16], use_resource=True)
                moving.assign_sub(0.1 * (moving - value))
            x = tf.nn.relu(x)
            weights += [w, gamma, beta]
        assert len(fold_batch_norms(graph, is_training=True).folded) == 5
        step = build_step(tf.reduce_mean(tf.square(x)), weights)
    choice = choose(step)
    assert choice.peak < 0.6 * choice.plain_peak


def test_segments_are_shorter_near_the_loss(long_chain):
    """There the backward pass finds all that is kept."""
    # In the order of the backward pass; the last one may be what is left over.
    lengths = [len(segment.ops) for segment in plan_of(*long_chain).segments]
    third = len(lengths) // 3
    assert third
    assert sum(lengths[:third]) < sum(lengths[-third - 1 : -1])


def plan_of(step, choice):
    always = AlwaysKept(step)
    kept = set(map(id, choice.kept))
    return plan_recomputation(step, lambda t: id(t) in kept or always(t))


@pytest.mark.parametrize("name", chosen(["U-Net", "DenseNet121", "encoder"], "encoder"))
def test_real_networks_take_less(name):
    forward = trace_forward(NETWORKS[name](**SMALL[name] | LARGER.get(name, {})))
    with forward.graph.as_default():
        step = build_step(forward.loss, forward.xs)
    ops = len(forward.graph.get_operations())
    choice = choose(step)
    assert choice.reason is None and choice.kept
    assert choice.peak < WORTH_WHILE * choice.plain_peak
    assert len(forward.graph.get_operations()) == ops
    for t in choice.kept:
        assert t.op.type != "Cast"
    for segment in plan_of(step, choice).segments:
        assert not any(op.op_def.is_stateful for op in segment.ops)


def test_the_same_choice_each_time():
    first, second = choose(random_step(3)), choose(random_step(3))
    assert [t.name for t in first.kept] == [t.name for t in second.kept]
    assert first.peak == second.peak


def test_plain_where_nothing_is_read_that_could_be_recomputed():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [64, 64])
        choice = choose(build_step(tf.reduce_sum(x + x), x))
    assert choice.kept == ()
    assert choice.peak == choice.plain_peak
    assert "reads nothing that could be recomputed" in choice.reason


def test_plain_where_recomputing_saves_nothing():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [64, 64])
        choice = choose(build_step(tf.reduce_sum(tf.square(tf.sin(x))), x))
    assert choice.kept == ()
    assert choice.peak < choice.plain_peak, "order alone saves"
    assert "predicted to need" in choice.reason


def test_plain_where_the_weights_are_all_there_is():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [1, 512])
        y = x
        weights = [v1.get_variable(f"w{i}", [512, 512]) for i in range(4)]
        for w in weights:
            y = tf.tanh(y @ w)
        choice = choose(build_step(tf.reduce_sum(y), weights))
    assert choice.kept == ()
    assert choice.reason is not None


def test_nothing_smaller_than_asked_for_is_chosen():
    step = chain_step([64, 32] * 20)
    smallest = 256 * 64
    chosen = choose(step, smallest).kept
    assert chosen
    assert all(t.shape.num_elements() >= smallest for t in chosen)
    assert any(t.shape.num_elements() < smallest for t in choose(step).kept)


def test_a_tiny_tensor_that_every_layer_reads_is_kept_along():
    with tf.Graph().as_default():
        x = y = v1.placeholder(tf.float32, [256, 64])
        mask = tf.greater(v1.placeholder(tf.float32, [64]), 0.0)
        for _ in range(20):
            shares = tf.cast(mask, tf.float32)
            y = tf.sin(y) * tf.broadcast_to(shares, [256, 64])
        step = build_step(tf.reduce_sum(y), x)
        choice = choose(step, 1024)
    assert choice.peak < 0.6 * choice.plain_peak
    assert [t for t in choice.kept if t.shape.num_elements() < 1024] == [mask]


def test_plain_where_everything_is_too_small_to_choose():
    choice = choose(chain_step([64] * 20), 10**9)
    assert choice.kept == ()
    assert choice.reason is not None


def test_unknown_dimensions():
    with tf.Graph().as_default():
        x = y = v1.placeholder(tf.float32, [None, 64])
        for _ in range(40):
            y = tf.sin(y)
        choice = choose(build_step(tf.reduce_sum(y), x))
    assert choice.reason is None
    assert choice.peak < 0.5 * choice.plain_peak


def test_random_numbers_are_kept_not_drawn_again():
    with tf.Graph().as_default():
        x = y = v1.placeholder(tf.float32, [64, 64])
        for _ in range(20):
            y = tf.sin(y * tf.random.uniform([64, 64]))
        step = build_step(tf.reduce_sum(y), x)
        plan = plan_of(step, choose(step))
    types = {op.type for segment in plan.segments for op in segment.ops}
    assert "Sin" not in types or "RandomUniform" not in types
    assert "RandomUniform" not in types


def test_the_source_of_a_cast_is_kept():
    with tf.Graph().as_default():
        x = y = v1.placeholder(tf.float32, [64, 64])
        for _ in range(20):
            half = tf.cast(tf.sin(y), tf.float16)
            y = tf.cast(tf.exp(half), tf.float32)
        choice = choose(build_step(tf.reduce_sum(y), x))
    assert choice.reason is None
    assert "Cast" not in {t.op.type for t in choice.kept}
