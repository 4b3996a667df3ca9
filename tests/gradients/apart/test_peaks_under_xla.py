"""Checkpointed functions hold less under XLA, as XLA itself reports.

XLA asks for all that it holds as one piece, and TensorFlow's allocator hands out one
of up to twice that size if one is free: its peak depends on what has run before. XLA
writes the bytes of each function into a folder, if told to before it compiles the
first one.
"""

import re
from itertools import pairwise

import pytest
import tensorflow as tf

from geutil.gradients import gradients
from tests.gradients.apart import is_child
from tests.gradients.wrapped import test_memory
from tests.gradients.wrapped.test_memory import BLOCKS, LAYERS, WRAPPED, X, weights
from tests.thorough import chosen

__all__ = ["weights"]
pytestmark = pytest.mark.skipif(
    not is_child("xla"), reason="needs a process of its own"
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Let XLA write into a folder."""
    folder = tmp_path_factory.mktemp("xla")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"--xla_dump_to={folder} --xla_dump_hlo_as_text")
        yield folder


@pytest.fixture
def needed(reports):
    """Return a function that compiles another and returns the bytes that it adds."""

    def needed(step, *values):
        before = set(reports.glob("*buffer-assignment.txt"))
        tf.function(step, jit_compile=True, autograph=False)(*values)
        found = set(reports.glob("*buffer-assignment.txt")) - before
        pattern = re.compile(r"^allocation \d+: size (\d+), (?!param)", re.M)
        return max(sum(map(int, pattern.findall(f.read_text()))) for f in found)

    return needed


@pytest.mark.parametrize("wrapped", chosen(WRAPPED, "blocks"))
def test_the_peak_falls(wrapped, weights, needed):
    most, saved = (
        needed(test_memory.gradients_of(function, weights), tf.constant(X))
        for function in (test_memory.plain(weights), WRAPPED[wrapped](weights))
    )
    # All activations, or those between blocks and within one with some to spare.
    assert most > BLOCKS * LAYERS * X.nbytes
    assert saved < (BLOCKS + LAYERS + 4) * X.nbytes


def test_what_a_pool_expands_to_is_not_held_through_the_step(needed):
    side, channels = 64, 16
    size = 4 * side * side * channels * 4
    x = tf.random.stateless_normal([4, side, side, channels], [1, 2])
    # The peak is reached behind the pool, where the layers are wider.
    widths = [channels, *[4 * channels] * 12]
    weights = [
        tf.random.stateless_normal(shape, [k, 3]) / 8
        for k, shape in enumerate(pairwise(widths))
    ]

    def step_with(pool):
        def step(x, *weights):
            held = pool(tf.tanh(x), 3, 2, "SAME")
            for weight in weights:
                held = tf.tanh(tf.reshape(held, [-1, weight.shape[0]]) @ weight)
            ends = [x, *weights]
            return gradients(tf.reduce_sum(held * held), ends, checkpoints="memory")

        return step

    with_maxima = needed(step_with(tf.nn.max_pool2d), x, *weights)
    with_means = needed(step_with(tf.nn.avg_pool2d), x, *weights)
    # XLA numbers four tensors of that size for the gradient of the maxima.
    assert with_maxima < with_means + size
