"""The largest batch that fits into memory."""

import functools

import pytest
import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.gradients import gradients
from geutil.memory import largest_batch, measure, predict
from tests.gradients.graphs import chain_loss, chain_weights
from tests.memory.refusals import refused
from tests.processes import forked

WIDTH = 96
v1 = tf.compat.v1


@functools.cache
def step(batch):
    """Return a step of four dense layers, held to an order."""
    weights = chain_weights(4, WIDTH)

    @tf.function(autograph=False)
    def train(x):
        loss = chain_loss(x, weights)
        slopes = gradients(loss, weights, checkpoints=None)
        for w, slope in zip(weights, slopes, strict=True):
            w.assign_sub(slope)
        return loss

    function = train.get_concrete_function(tf.TensorSpec([batch, WIDTH]))
    # The variables are alive as long as the function is.
    function.kept = weights
    return function


def held(batch):
    function = step(batch)
    graph = function.graph
    timeline = predict([*graph.outputs, *graph.control_outputs])
    return timeline.peak + timeline.variable_bytes + timeline.constant_bytes


@pytest.mark.parametrize("batch", [1, 2, 13])
def test_it_is_the_largest(batch):
    sizes = held(batch), held(batch + 1)
    for limit in sizes[0], sizes[1] - 1:
        # With 20 rows another order of the step becomes the best.
        fit = largest_batch(step, limit, most=19)
        assert (fit.batch, fit.bytes, fit.memory) == (batch, sizes[0], limit)
        assert len(fit.tried) <= 5


def parts(*, fixed=0, jump_at=None, power=1):
    """Return steps of a part that does not depend on the batch, and one that does."""

    def step(batch):
        width = 1000 + (2000 if jump_at is not None and batch > jump_at else 0)
        with tf.Graph().as_default():
            first = tf.reduce_sum(tf.tanh(v1.placeholder(tf.float32, [fixed])))
            with tf.control_dependencies([first]):
                return tf.tanh(v1.placeholder(tf.float32, [batch**power, width]))

    return step


GROWTHS = {
    "in proportion": ({}, 2),
    "flat at first": ({"fixed": 30_000}, 5),
    "a jump": ({"jump_at": 37}, 8),
    "a jump beyond": ({"jump_at": 200}, 5),
    "by the square": ({"power": 2}, 10),
}


def test_it_is_the_largest_however_bytes_grow():
    """Against every batch size, with few of them tried."""
    wrong = {}
    for name, (growth, most_tries) in GROWTHS.items():
        step = parts(**growth)
        sizes = {batch: predict(step(batch)).peak for batch in range(1, 61)}
        for limit in (30_000, 148_000, 200_000):
            expected = max((b for b in sizes if sizes[b] <= limit), default=0)
            fit = largest_batch(step, limit)
            said = dict(fit.tried)
            same = all(sizes[b] == said[b] for b in sizes.keys() & said.keys())
            if fit.batch != expected or not same or len(said) > most_tries:
                wrong[name, limit] = expected, fit
    assert wrong == {}


def test_what_kernels_take_beside_the_allocator_can_count():
    @functools.cache
    def product(batch):
        with tf.Graph().as_default():
            x = tf.compat.v1.placeholder(tf.float32, [batch, 512])
            return tf.nn.conv2d(x[:, None, None], tf.ones([1, 1, 512, 2048]), 1, "SAME")

    def resident(batch):
        timeline = predict(product(batch))
        return timeline.resident + timeline.constant_bytes

    sizes = resident(64), resident(65)
    fit = largest_batch(product, sizes[0], resident=True)
    assert (fit.batch, fit.bytes) == (64, sizes[0])
    assert sizes[0] < sizes[1]
    assert largest_batch(product, sizes[0]).batch > 64


def test_the_step_takes_no_more_when_it_runs():
    limit = 1_500_000
    fit = largest_batch(step, limit)
    variables = 4 * WIDTH * WIDTH * 4
    with forked():
        measured, larger = (
            measure(step(batch), [tf.ones([batch, WIDTH])], steps=1).peak
            for batch in (fit.batch, fit.batch + fit.batch // 10)
        )
    assert measured + variables <= 1.02 * limit
    assert larger + variables > limit


def test_what_fits_at_the_ends_of_the_range():
    fit = largest_batch(step, 1000)
    assert (fit.batch, fit.bytes) == (0, 0)
    assert str(fit).startswith("no batch fits: one row takes ")
    fit = largest_batch(step, "1GB", most=20)
    assert fit.batch == 20
    assert str(fit) == f"batch size 20: {fit.bytes / 1e3:.0f} kB of 1.00 GB"


def test_what_is_no_memory_or_no_number_is_refused():
    for memory in ("much", 0, -5, None, True, float("inf")):
        with refused(ArgumentTypeError, "8GB", memory):
            largest_batch(step, memory)
    with pytest.raises(ArgumentTypeError, match="most is a number from 1 up"):
        largest_batch(step, "1GB", most=0)


def test_sizes_for_which_there_is_no_step_do_not_fit():
    fit = largest_batch(lambda batch: step(batch) if batch < 6 else None, "1GB")
    assert fit.batch == 5
    assert {batch for batch, _ in fit.tried} <= set(range(1, 6))
    none = largest_batch(lambda batch: None, "1GB", most=64)
    assert none.batch == 0
    assert "there is no such step" in str(none)
