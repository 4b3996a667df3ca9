"""On random graphs a tape gives what TensorFlow's own engines give."""

import tensorflow as tf
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

import geutil as ge
from geutil.gradients import gradients
from geutil.gradients.tape import (
    Tape,
    TapeEngine,
    imperative_grad,
    tensorflow_vspace,
)
from tests.gradients.checking import assert_close, flat, forms, run
from tests.gradients.random_networks import SIDE, Network, networks
from tests.thorough import examples

EAGER_SUMS = TapeEngine(min_aggregate_count=2, min_aggregate_bytes=0)
quick = examples(
    40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
ONE_OF_TWO = Network((("identities", (0, 1)), ("tanh", (4,))))
"""The gradient of one result of an op needs that of the other, which is not there."""
places = st.lists(st.integers(0, 60), min_size=1, max_size=3)


def at(tensors, chosen):
    return [tensors[i % len(tensors)] for i in chosen]


def seeds(given_to):
    """Return gradients of targets; None where `given_to` says no."""
    with tf.control_dependencies(None):
        return [
            tf.fill([SIDE, SIDE], 0.25 * (i + 1)) if given else None
            for i, given in enumerate(given_to)
        ]


def check(network, take_reference, take):
    """Check that two ways give gradients of the same forms and values."""
    with tf.Graph().as_default() as graph:
        expected = take_reference(network)
        expected_values = run(graph, flat(expected))
    with tf.Graph().as_default() as graph:
        actual = take(network)
        ge.verify(graph)
        assert forms(actual) == forms(expected)
        # Of the means that are taken away, and the seeds, which are up to 1.
        assert_close(run(graph, flat(actual)), expected_values, summands=0.25)


@quick
@given(
    networks(),
    places,
    places,
    st.lists(st.integers(0, 60), max_size=2),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.sampled_from(["tape", EAGER_SUMS]),
    st.sampled_from(["none", "zero"]),
)
@example(ONE_OF_TWO, [5], [3], [], [False] * 3, "tape", "none")
def test_sources_that_depend_on_each_other(
    network, ys, xs, stops, given_to, engine, unconnected
):
    def take(function, **options):
        def taken(network):
            sources, tensors = network.build()
            targets = [tensors[-1], *at(tensors, ys)][:3]
            return function(
                targets,
                [*sources, *at(tensors, xs)],
                seeds(given_to[: len(targets)]),
                stop_gradients=at(tensors, stops),
                unconnected_gradients=unconnected,
                **options,
            )

        return taken

    check(network, take(tf.gradients), take(gradients, checkpoints=None, engine=engine))


@quick
@given(
    networks(),
    places,
    st.lists(st.integers(0, 60), max_size=4),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.integers(2, 5),
)
def test_sources_that_stop_the_walk(network, ys, xs, given_to, count):
    def ends(network):
        sources, tensors = network.build()
        # TensorFlow stops at all outputs of an op, if it stops at one.
        chosen = [t for t in at(tensors, xs) if len(t.op.outputs) == 1]
        return at(tensors, ys), [*sources, *chosen]

    def reference(network):
        targets, sources = ends(network)
        given = seeds(given_to[: len(targets)])
        return tf.gradients(targets, sources, given, stop_gradients=sources)

    def ours(network):
        targets, sources = ends(network)
        return imperative_grad(
            tensorflow_vspace(),
            Tape.from_graph(targets, sources),
            targets,
            sources,
            seeds(given_to[: len(targets)]),
            min_aggregate_count=count,
            min_aggregate_bytes=4 * SIDE * SIDE,
        )

    check(network, reference, ours)


@quick
@given(networks(8), st.lists(st.integers(0, 40), max_size=5), st.booleans())
def test_checkpoints(network, kept, listed):
    def reference(network):
        sources, tensors = network.build()
        return tf.gradients(tensors[-1], sources)

    def ours(network):
        sources, tensors = network.build()
        return gradients(
            tensors[-1],
            sources,
            checkpoints=at(tensors, kept) if listed else "memory",
            min_checkpoint_size=0,
            engine=EAGER_SUMS,
        )

    check(network, reference, ours)
