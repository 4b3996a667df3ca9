"""Nothing but the tape keeps an intermediate alive, and the tape lets go in time."""

import weakref

import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients.tape import Tape, imperative_grad, numpy_vspace, tensorflow_vspace

LENGTH = 10


class Kind:
    """Arrays of numpy, or eager tensors of TensorFlow."""

    def __init__(self, name):
        self.is_numpy = name == "numpy"
        self.space = numpy_vspace() if self.is_numpy else tensorflow_vspace()

    def start(self, size=3):
        return np.ones(size) / 3 if self.is_numpy else tf.ones(size) / 3

    def sin(self, x):
        return np.sin(x) if self.is_numpy else tf.sin(x)

    def cos(self, x):
        return np.cos(x) if self.is_numpy else tf.cos(x)


@pytest.fixture(params=["numpy", "tensorflow"])
def kind(request):
    return Kind(request.param)


def chain(kind, log):
    """Return a tape of sines, its ends, and weak references to all in between."""
    tape, x = Tape(), kind.start()
    made, h = [], x
    for i in range(LENGTH):
        y = kind.sin(h)

        def back(gradient, h=h, i=i):
            log(i)
            return gradient * kind.cos(h)

        tape.record("sin", [y], [h], back)
        made.append(weakref.ref(y))
        h = y
    return tape, x, h, made


def alive(references):
    return [i for i, reference in enumerate(references) if reference() is not None]


def test_what_is_held_goes_as_the_walk_goes(kind):
    seen, sides = [], []
    references = []

    def log(i):
        seen.append((i, alive(references)))
        sides.append(aside() is not None)

    tape, x, y, made = chain(kind, log)
    references += made[:-1]
    # The targets do not depend on it, so that it goes at once.
    unused = kind.sin(x)
    aside = weakref.ref(unused)
    more = kind.sin(unused)
    tape.record("sin", [more], [unused], lambda g, held=unused: g)
    del unused
    (gradient,) = imperative_grad(kind.space, tape, [y], [x])
    # While entry i is gone through it holds what it read, and those before hold theirs.
    assert seen == [(i, list(range(i))) for i in reversed(range(LENGTH))]
    assert sides == [False] * LENGTH
    assert alive(references) == []
    assert gradient.shape == (3,)
    # A tape that is dropped holds nothing.
    tape, _, _, made = chain(kind, lambda i: None)
    assert alive(made[:-1]) == list(range(LENGTH - 1))
    del tape
    assert alive(made[:-1]) == []


def test_gradients_go_as_they_are_used(kind):
    tape, x = Tape(), kind.start()
    made, counts, h = [], [], x
    for _ in range(LENGTH):
        y = kind.sin(h)

        def back(gradient, h=h):
            counts.append(len(alive(made)))
            result = gradient * kind.cos(h)
            made.append(weakref.ref(result))
            return result

        tape.record("sin", [y], [h], back)
        h = y
    imperative_grad(kind.space, tape, [h], [x])
    # The gradient that comes in, and no other.
    assert counts == [0] + [1] * (LENGTH - 1)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_few_gradients_of_a_tensor_wait(kind, count):
    branches = 32
    tape, x = Tape(), kind.start()
    hub = kind.sin(x)
    tape.record("sin", [hub], [x], lambda g: g * kind.cos(x))
    made, counts, ends = [], [], []

    def back(gradient):
        result = gradient * 2.0
        made.append(weakref.ref(result))
        counts.append(len(alive(made)))
        return result

    for _ in range(branches):
        end = hub * 2.0
        tape.record("double", [end], [hub], back)
        ends.append(end)
    (gradient,) = imperative_grad(
        kind.space, tape, ends, [x], min_aggregate_count=count, min_aggregate_bytes=0
    )
    np.testing.assert_allclose(gradient, 2.0 * branches * kind.cos(x), rtol=1e-6)
    assert max(counts) == count
    assert len(counts) == branches


def test_eager_slices_stay_slices():
    table = tf.Variable(tf.ones([5, 2]))
    tape = Tape()

    def look_up(rows):
        found = tf.gather(table, rows)

        def back(gradient, zeros):
            # What nothing reads has a gradient of zeros.
            values = gradient + zeros
            return tf.IndexedSlices(values, tf.constant(rows), tf.constant([5, 2]))

        tape.record("Gather", [found, tf.ones([2, 2])], [table], back)
        return found

    ends = [look_up([i, 0]) for i in range(5)]
    (gradient,) = imperative_grad(
        tensorflow_vspace(), tape, ends, [table], min_aggregate_bytes=0
    )
    assert isinstance(gradient, tf.IndexedSlices)
    dense = tf.convert_to_tensor(gradient).numpy()
    np.testing.assert_array_equal(dense[:, 0], [6, 1, 1, 1, 1])
