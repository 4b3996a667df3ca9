from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil.errors import ArgumentTypeError
from geutil.gradients import gradients
from geutil.gradients.barriers import data_barrier, is_expanded, run_in_time
from geutil.graph.creation import neutral
from tests.thorough import examples

SPECIAL = [0.0, -0.0, 1.5, -2.5, np.inf, -np.inf, np.nan]
VALUES = {
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), SPECIAL),
    **{
        name: [0, 1, tf.as_dtype(name).min, tf.as_dtype(name).max]
        for name in ("int8", "int32", "int64", "uint8", "uint32", "uint64")
    },
    "bool": [True, False],
    "complex64": [0.0, complex(np.nan, 1.0), complex(np.inf, -np.inf)],
}
COMPILED = pytest.mark.parametrize("jit_compile", [False, True])


def sample(dtype):
    return tf.constant(np.array(VALUES[dtype], tf.as_dtype(dtype).as_numpy_dtype))


def computed(t):
    """Return `t` as the result of an op that neither TensorFlow nor XLA removes."""
    return tf.reverse(t, [0])


@COMPILED
def test_a_stand_in_has_the_same_bits_and_anything_can_come_first(jit_compile):
    @tf.function(jit_compile=jit_compile, autograph=False)
    def step(x, samples, firsts):
        found = {}
        for name, t in samples.items():
            first = firsts[name]
            found[name] = [
                *data_barrier([t, computed(t)], [computed(t)]),
                *data_barrier([x, computed(x)], [computed(first), first, first[:0]]),
            ]
        return found

    x, wrong = tf.constant(SPECIAL), {}
    samples = {name: sample(name) for name in VALUES}
    for place in range(len(SPECIAL)):
        firsts = {name: t[place % len(t)][tf.newaxis] for name, t in samples.items()}
        for name, found in step(x, samples, firsts).items():
            expected = [v.numpy()[::way] for v in (samples[name], x) for way in (1, -1)]
            assert [t.dtype for t in found] == [t.dtype for t in expected]
            if [t.numpy().tobytes() for t in found] != [v.tobytes() for v in expected]:
                wrong[name, place] = found
    assert wrong == {}


@tf.function(autograph=False)
def held_back(after):
    x = tf.constant([1.0, 2.0])
    return data_barrier([x, computed(x)], [after])


BITS = st.lists(st.integers(0, 2**32 - 1), max_size=3)


@examples(100)
@given(BITS, st.sampled_from([tf.float32, tf.int32, tf.uint32]))
def test_no_number_opens_the_barrier(bits, dtype):
    after = tf.bitcast(tf.constant(bits, tf.uint32, [len(bits)]), dtype)
    held, turned = held_back(after)
    assert held.numpy().tolist() == [1.0, 2.0]
    assert turned.numpy().tolist() == [2.0, 1.0]


@COMPILED
def test_dimensions_may_be_unknown(jit_compile):
    shapes = [[None, 2], [3, None], [None, None], *([] if jit_compile else [None])]
    specs = [tf.TensorSpec(shape) for shape in shapes]

    @tf.function(input_signature=specs, autograph=False, jit_compile=jit_compile)
    def step(*xs):
        held = [data_barrier([x, computed(x)], [x]) for x in xs]
        for (one, other), spec in zip(held, specs, strict=True):
            assert str(one.shape) == str(other.shape) == str(spec.shape)
        return held

    x = np.arange(6.0, dtype="f").reshape(3, 2)
    for held, turned in step(*[x] * len(specs)):
        np.testing.assert_array_equal(held, x)
        np.testing.assert_array_equal(turned, x[::-1])


def optimized(function, *args):
    """Return what XLA makes of a compiled function, as text."""
    return function.experimental_get_compiler_ir(*args)(stage="optimized_hlo")


def count_dots(text):
    return text.count(" dot(") + text.count('custom_call_target="__onednn$matmul"')


SOURCES = ["computed", "placeholder", "variable"]


@pytest.mark.parametrize("in_scopes", [True, False])
def test_xla_merges_copies_but_for_barriers(in_scopes):
    w = tf.Variable(tf.eye(8))
    x = tf.reshape(tf.range(64.0), [8, 8]) / 64.0

    def products(barrier):
        @tf.function(jit_compile=True, autograph=False)
        def step(x):
            found = {}
            reads = tf.tanh(x), x, w.read_value()
            for source, read in zip(SOURCES, reads, strict=True):
                found[source] = [tf.cos(read @ w)]
                # What reads the last stand-in is merged with none of what came before.
                for _ in range(3 if source == "computed" else 1):
                    with nullcontext() if in_scopes else neutral(read.graph):
                        (read,) = barrier([read], found[source][-1:])
                    found[source].append(tf.cos(read @ w))
            return found

        return count_dots(optimized(step, x)), step(x)

    plain, expected = products(lambda tensors, _: tensors)
    held, found = products(data_barrier)
    assert (plain, held) == (3, 4 + 2 + 2)
    for source in SOURCES:
        same = {t.numpy().tobytes() for t in found[source] + expected[source]}
        assert len(same) == 1, source


@COMPILED
def test_gradients_pass_to_the_tensor_alone(jit_compile):
    @tf.function(jit_compile=jit_compile, autograph=False)
    def step(x, y, other):
        tensors = [x, tf.exp(y), y, tf.cast(x, tf.int32)]
        first, second, unread, whole = data_barrier(tensors, [tf.exp(other)])
        result = first * first * first + second
        # No gradient can pass a whole number.
        result += 0.0 * tf.cast(whole, tf.float32)
        slopes = tf.gradients(result, [x, y])
        assert tf.gradients(result, [other, unread]) == [None, None]
        return [*slopes, *tf.gradients(slopes, [x, y])]

    values = [t.numpy() for t in step(*map(tf.constant, (2.0, 0.0, 1.0)))]
    np.testing.assert_allclose(values, [12.0, 1.0, 12.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize("empty", ["tensors", "after"])
def test_nothing_to_hold_back_or_to_wait_for(empty):
    graph = tf.Graph()
    with graph.as_default():
        x = tf.constant(1.0)
        ops = graph.get_operations()
        held = data_barrier(**{"tensors": [x], "after": [x], empty: []})
    assert len(held) == (empty == "after")
    assert all(t is x for t in held)
    assert graph.get_operations() == ops


WRONG = {
    "resource": lambda: tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[]),
    "variant": lambda: tf.raw_ops.TensorListReserve(
        element_shape=[1], num_elements=1, element_dtype=tf.float32
    ),
    "string": lambda: tf.constant("text"),
    "qint8": lambda: tf.compat.v1.placeholder(tf.qint8, name="quantized"),
    "none": lambda: None,
    "number": lambda: 1.0,
}


def test_refuses_what_cannot_depend_on_data():
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0)
        for make in WRONG.values():
            bad = make()
            is_tensor = isinstance(bad, tf.Tensor)
            name = f"'{bad.name}'" if is_tensor else "expected a tf.Tensor"
            ops = graph.get_operations()
            for arguments in ([[x, bad], [x]], [[x], [x, bad]]):
                with pytest.raises(ArgumentTypeError, match=name):
                    data_barrier(*arguments)
            assert graph.get_operations() == ops
    eager = tf.constant(1.0)
    with pytest.raises(ArgumentTypeError, match="eager tensors belong to no graph"):
        data_barrier([eager], [eager])


@pytest.mark.parametrize("dimensions", [2, 3])
def test_the_gradient_of_a_pool_has_the_same_bits(dimensions):
    pool = {2: tf.nn.max_pool2d, 3: tf.nn.max_pool3d}[dimensions]
    # Few values, so that maxima are often reached twice.
    shape = [2, *[7] * dimensions, 3]
    x = tf.cast(tf.random.stateless_uniform(shape, [1, 2], 0, 3, tf.int32), tf.float32)

    @tf.function(jit_compile=True, autograph=False)
    def step(x):
        y = pool(x, 3, 2, "SAME")
        (slope,) = tf.gradients(
            y * tf.sin(y + tf.random.stateless_normal([], [3, 4])), x
        )
        assert is_expanded(slope.op)
        instead = run_in_time(slope.op)
        # Second gradients pass as if there were no loop.
        return slope, instead, *tf.gradients(slope, x), *tf.gradients(instead, x)

    values = [t.numpy().tobytes() for t in step(x)]
    assert values[0] == values[1]
    assert values[2] == values[3]


def test_the_gradient_of_a_pool_may_be_what_is_asked_for():
    x = tf.random.stateless_normal([2, 16, 16, 3], [1, 2])

    def slopes(compute):
        @tf.function(jit_compile=True, autograph=False)
        def step(x):
            held = tf.nn.max_pool2d(x, 3, 2, "SAME")
            for _ in range(8):
                held = tf.sin(held * 2.0)
            (slope,) = compute(tf.reduce_sum(held), x)
            assert is_expanded(slope.op) == (compute is tf.gradients)
            return slope

        return step(x).numpy()

    kept = partial(gradients, checkpoints="memory", min_checkpoint_size=0)
    np.testing.assert_array_equal(slopes(kept), slopes(tf.gradients))
