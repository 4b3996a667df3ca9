"""Gradients of random graphs are those of `tf.gradients`, whatever is kept."""

from functools import partial

import pytest
import tensorflow as tf
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from tensorflow.python.framework.config import is_op_determinism_enabled

import geutil as ge
from geutil.gradients import (
    any_of,
    by_name,
    by_type,
    gradients,
    inside,
    larger_than,
    last_report,
    not_,
)
from geutil.gradients.tape import Tape, imperative_grad, tensorflow_vspace
from tests.gradients.checking import (
    EAGER_SUMS,
    add_in_order,
    assert_as_near,
    assert_close,
    check,
    flat,
    forms,
    run,
)
from tests.gradients.random_networks import SIDE, Network, networks
from tests.thorough import examples

pytestmark = pytest.mark.usefixtures("determinism")

POLICIES = {
    "speed": "speed",
    "memory": "memory",
    "matrix products": by_type("MatMul", "BatchMatMulV2"),
    "even layers": by_name("layer[0-9]*[02468]/"),
    "large": larger_than(64),
    "nothing": by_type("NoSuchType"),
    "mixed": any_of(inside("layer1"), not_(by_type("Tanh", "Mul"))),
}

ONE_OF_TWO = Network((("identities", (0, 1)), ("tanh", (4,))))
"""The gradient of one result of an op needs that of the other, which is not there."""
ENGINES = "tensorflow", EAGER_SUMS
PLACE = st.integers(0, 60)
quick = examples(
    25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def values(graph, gradients):
    """Return the values of gradients, as far as TensorFlow repeats them."""
    if is_op_determinism_enabled():
        add_in_order(graph)
    return run(graph, flat(gradients))


def at(tensors, places):
    return [tensors[i % len(tensors)] for i in places]


def check_network(network, take, engines=ENGINES, **options):
    """Check gradients of a network by engines against plain ones.

    `take` calls a function for the gradients, with the network's sources and tensors,
    and a name: "plain", "tensorflow" or "tape".
    """
    with tf.Graph().as_default() as graph:
        plain = take(tf.gradients, *network.build(), "plain")
        expected = values(graph, plain)
    for engine in engines:
        name = engine if engine == "tensorflow" else "tape"
        with tf.Graph().as_default() as graph:
            sources, tensors = network.build()
            before = len(graph.get_operations())
            function = partial(gradients, engine=engine, **options)
            actual = take(function, sources, tensors, name)
            check(actual, last_report(), before)
            assert forms(actual) == forms(plain)
            found = values(graph, actual)
        if name == "tensorflow":
            assert_as_near(found, expected)
        else:
            # Of the means that are taken away, and the seeds, which are up to 1.
            assert_close(found, expected, summands=0.25)


def seeds(given_to):
    """Return gradients of targets; None where `given_to` says no."""
    with tf.control_dependencies(None):
        return [
            tf.fill([SIDE, SIDE], 0.25 * (i + 1)) if given else None
            for i, given in enumerate(given_to)
        ]


@quick
@given(networks(), st.data())
def test_kept_tensors(network, data):
    ys = data.draw(st.lists(PLACE, min_size=1, max_size=3))
    kept = data.draw(st.sets(PLACE, max_size=6))

    def take(function, sources, tensors, name):
        kept_ones = {} if name == "plain" else {"checkpoints": at(tensors, kept)}
        return function([tensors[-1], *at(tensors, ys)], sources, **kept_ones)

    check_network(network, take)


@quick
@given(networks(), st.sampled_from(sorted(POLICIES)))
def test_policies(network, policy):
    def take(function, sources, tensors, name):
        return function(tensors[-1], sources)

    check_network(network, take, checkpoints=POLICIES[policy], min_checkpoint_size=0)


@quick
@given(
    networks(),
    st.lists(PLACE, min_size=1, max_size=2),
    st.lists(PLACE, max_size=3),
    st.sets(PLACE, max_size=2),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.sampled_from(["none", "zero"]),
    st.booleans(),
    st.sampled_from([0, 2]),
)
@example(ONE_OF_TWO, [5], [3], [], [False] * 3, "none", False, 0)
def test_options(network, ys, xs, stops, given_to, unconnected, gated, way):
    """Among sources that depend on each other, and one that nothing depends on."""

    def take(function, sources, tensors, name):
        targets = [tensors[-1], *at(tensors, ys)]
        options = {"checkpoints": None}
        if name != "tape":
            options = {"gate_gradients": gated, "aggregation_method": way}
        if name == "tensorflow":
            options["checkpoints"] = tensors[::3]
        return function(
            targets,
            [*sources, *at(tensors, xs), tf.ones([2])],
            seeds(given_to[: len(targets)]),
            stop_gradients=at(tensors, stops),
            unconnected_gradients=unconnected,
            **options,
        )

    check_network(network, take, [*ENGINES, "tape"])


@quick
@given(
    networks(),
    st.lists(PLACE, min_size=1, max_size=3),
    st.lists(PLACE, max_size=4),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.integers(2, 5),
)
def test_sources_that_stop_the_walk_of_a_tape(network, ys, xs, given_to, count):
    def ends(network):
        sources, tensors = network.build()
        # TensorFlow stops at all outputs of an op, if it stops at one.
        chosen = [t for t in at(tensors, xs) if len(t.op.outputs) == 1]
        return at(tensors, ys), [*sources, *chosen], seeds(given_to[: len(ys)])

    with tf.Graph().as_default() as graph:
        targets, sources, given = ends(network)
        plain = tf.gradients(targets, sources, given, stop_gradients=sources)
        expected = run(graph, flat(plain))
    with tf.Graph().as_default() as graph:
        targets, sources, given = ends(network)
        tape = Tape.from_graph(targets, sources)
        how = {"min_aggregate_count": count, "min_aggregate_bytes": 4 * SIDE * SIDE}
        space = tensorflow_vspace()
        ours = imperative_grad(space, tape, targets, sources, given, **how)
        ge.verify(graph)
        assert forms(ours) == forms(plain)
        assert_close(run(graph, flat(ours)), expected, summands=0.25)
