"""Gradients of random graphs are those of `tf.gradients`, whatever is kept."""

from functools import partial

import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

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
from geutil.graph.runtime import is_determinism_enabled
from tests.gradients.checking import (
    add_in_order,
    assert_as_near,
    check,
    flat,
    forms,
    run,
)
from tests.gradients.random_networks import SIDE, networks
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

quick = examples(
    25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def values(graph, gradients):
    """Return the values of gradients, as far as TensorFlow repeats them."""
    if is_determinism_enabled():
        add_in_order(graph)
    return run(graph, flat(gradients))


def check_network(network, take, **options):
    """Check gradients of a network against plain ones.

    `take` calls a function for the gradients, with the network's sources and tensors.
    """
    with tf.Graph().as_default() as graph:
        plain = take(tf.gradients, *network.build())
        expected = values(graph, plain)
    with tf.Graph().as_default() as graph:
        sources, tensors = network.build()
        before = len(graph.get_operations())
        actual = take(partial(gradients, **options), sources, tensors)
        check(actual, last_report(), before)
        assert forms(actual) == forms(plain)
        assert_as_near(values(graph, actual), expected)


@quick
@given(networks(), st.data())
def test_kept_tensors(network, data):
    ys = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    kept = data.draw(st.sets(st.integers(0, 40), max_size=6))

    def take(function, sources, tensors):
        options = {}
        if function is not tf.gradients:
            options["checkpoints"] = [tensors[i % len(tensors)] for i in kept]
        targets = [tensors[-1], *(tensors[i % len(tensors)] for i in ys)]
        return function(targets, sources, **options)

    check_network(network, take)


@quick
@given(networks(), st.sampled_from(sorted(POLICIES)))
def test_policies(network, policy):
    def take(function, sources, tensors):
        return function(tensors[-1], sources)

    check_network(network, take, checkpoints=POLICIES[policy], min_checkpoint_size=0)


@quick
@given(networks(8), st.data())
def test_options(network, data):
    unconnected = data.draw(st.sampled_from(["none", "zero"]))
    stops = data.draw(st.sets(st.integers(0, 20), max_size=2))
    outside = data.draw(st.booleans())
    gated = data.draw(st.booleans())
    way = data.draw(st.sampled_from([0, 2]))

    def take(function, sources, tensors):
        options = {} if function is tf.gradients else {"checkpoints": tensors[::3]}
        targets = [tensors[-1], tensors[len(tensors) // 2]]
        xs = [*sources, tf.ones([2])] if outside else sources
        with tf.control_dependencies(None):
            seed = tf.fill([SIDE, SIDE], 0.25)
        return function(
            targets,
            xs,
            [None, seed],
            stop_gradients=[tensors[i % len(tensors)] for i in stops],
            unconnected_gradients=unconnected,
            gate_gradients=gated,
            aggregation_method=way,
            **options,
        )

    check_network(network, take)
