"""Checkpointed functions hold less under XLA, as TensorFlow's allocator counts.

XLA asks for all that it holds as one piece, and the allocator hands out one of up to
twice that size if other tests left it: the peak is only known where none ran.
"""

import pytest
import tensorflow as tf

from geutil.gradients import by_name, checkpointed
from tests.gradients.apart import is_child
from tests.gradients.wrapped import test_memory
from tests.gradients.wrapped.comparing import peak_bytes
from tests.thorough import chosen

pytestmark = [
    test_memory.pytestmark,
    pytest.mark.skipif(not is_child("xla"), reason="needs a process of its own"),
]

WRAPPED = {
    "blocks": lambda f: checkpointed(f, "inputs"),
    "blocks by default": checkpointed,
    "all": lambda f: checkpointed(f, by_name("block")),
}


def step(function, weights):
    return tf.function(test_memory.gradients_of(function, weights), jit_compile=True)


@pytest.mark.parametrize("wrapped", chosen(WRAPPED, "blocks"))
def test_the_peak_falls(wrapped, weights):
    plain = test_memory.chain(weights, lambda f: f)
    wrap = WRAPPED[wrapped]
    saving = wrap(plain) if wrapped == "all" else test_memory.chain(weights, wrap)
    x = tf.constant(test_memory.X)
    saved, kept = step(saving, weights), step(plain, weights)
    assert peak_bytes(lambda: saved(x)) < 0.55 * peak_bytes(lambda: kept(x))


@pytest.fixture(scope="module")
def weights():
    return test_memory.make_weights()
