"""What can be differentiated by a tape, beside what the tests of all engines show."""

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.errors import TapeError
from geutil.gradients import gradients
from geutil.gradients.tape import TapeEngine
from tests.gradients import test_control_flow as flow
from tests.gradients.checking import (
    EAGER_SUMS,
    assert_close,
    check_forms_and_values,
    forms,
    run,
)
from tests.settings import control_flow

v1 = tf.compat.v1


def taped(*args, engine="tape", **options):
    return gradients(*args, checkpoints=None, engine=engine, **options)


# -- control flow ----------------------------------------------------------------------


def test_control_flow_under_xla():
    # XLA needs maximum_iterations to differentiate a loop.
    @tf.function(jit_compile=True, autograph=False)
    def both(x):
        units = (flow.branched, flow.called, flow.switched)
        ys = [tf.reduce_sum(unit(tf.tanh(x)) ** 2) for unit in units]
        return [[take(y, x)[0] for y in ys] for take in (taped, tf.gradients)]

    x = np.cos(np.arange(48.0, dtype=np.float32)).reshape(flow.SHAPE)
    actual, expected = both(tf.constant(x))
    assert_close(actual, expected)


def test_a_function_of_an_imported_graph_has_the_gradient_of_its_body():
    body = tf.function(lambda x: tf.tanh(x) * x, autograph=False)
    with tf.Graph().as_default() as source:
        body(tf.identity(v1.placeholder(tf.float32, [3], "x"), name="start"))
        definition = source.as_graph_def()
    with tf.Graph().as_default():
        x = tf.ones([3]) / 3
        call = next(n.name for n in definition.node if n.op.endswith("PartitionedCall"))
        (y,) = tf.graph_util.import_graph_def(
            definition, {"x": x}, [f"{call}:0"], name=""
        )
        plain, ours = tf.gradients(y, x), taped(y, x)
        check_forms_and_values(plain, ours)


def test_version_1_control_flow_is_refused(graph):
    with control_flow(1):
        x = tf.ones([3])
        _, looped = v1.while_loop(
            lambda i, h: i < 2, lambda i, h: (i + 1, tf.sin(h)), (0, x)
        )
        branched = v1.cond(tf.reduce_sum(x) > 0, lambda: x * x, lambda: x)
    for y, name in ((looped, "while"), (branched, "cond")):
        with pytest.raises(TapeError, match=rf"'{name}/[\w/]+' \(\w+\) is in a loop"):
            taped(tf.reduce_sum(y), x)
        # Before it or behind it there is nothing to refuse.
        assert forms(taped(tf.sin(y), y)) == ["tensor"]


def test_a_branch_that_reads_what_is_made_around_it():
    variable = tf.Variable([1.0, 2.0])

    @tf.function
    def slopes(z):
        h = tf.sin(variable * z)

        def inside():
            y = tf.tanh(h * h)
            return taped(y, [variable, z, h]) + tf.gradients(y, [z, h])

        return tf.cond(tf.reduce_sum(z) > 0, inside, inside)

    z = tf.constant([1.0, 3.0])
    by_variable, *actual, by_z, by_h = slopes(z)
    assert_close(actual, [by_z, by_h])
    with tf.GradientTape() as tape:
        y = tf.tanh(tf.sin(variable * z) ** 2)
    assert_close([by_variable], [tape.gradient(y, variable)])


# -- dtypes and shapes -----------------------------------------------------------------


def test_real_dtypes():
    limits = {
        tf.float16: 1e-2,
        tf.bfloat16: 2.0**-6,
        tf.float32: 1e-2,
        tf.float64: 4 * np.finfo(float).eps,
    }
    with tf.Graph().as_default() as graph:
        pairs = {}
        for dtype in limits:
            x = tf.cast(tf.linspace(0.0, 1.0, 8), dtype)
            a, b = tf.split(tf.tanh(x) * x, 2)
            y = [a + tf.sin(b), tf.cast(a, tf.float32)]
            pairs[dtype] = tf.gradients(y, [x, a]), taped(y, [x, a])
        for dtype, (expected, actual) in run(graph, pairs).items():
            for p, o in zip(expected, actual, strict=True):
                assert p.dtype == o.dtype == dtype.as_numpy_dtype
                p, o = p.astype(float), o.astype(float)
                np.testing.assert_allclose(o, p, rtol=limits[dtype])


def test_complex_dtypes(graph):
    plain, ours = [], []
    for dtype in (tf.complex64, tf.complex128):
        x = tf.complex(tf.linspace(0.0, 1.0, 8), tf.linspace(1.0, 2.0, 8))
        z = tf.exp(tf.cast(x, dtype)) * tf.cast(x, dtype)
        y = [tf.math.real(z), tf.abs(z) ** 2]
        seed = tf.ones_like(z) * tf.constant(2 + 1j, dtype)
        for found, take in ((plain, tf.gradients), (ours, taped)):
            found += take(y, [x, z])
            found += take(z, x, seed)
            with pytest.raises(TypeError, match="must set grad_ys"):
                take(z, x)
    check_forms_and_values(plain, ours)


def test_what_comes_behind_integers_needs_no_gradient(graph):
    x = tf.linspace(0.0, 1.0, 8)
    # There is none for Unique, and none is needed.
    found, _ = tf.unique(tf.argsort(x))
    y = x * tf.cast(tf.reduce_sum(found), tf.float32)
    check_forms_and_values(tf.gradients(y, x), taped(y, x))


@pytest.mark.parametrize("shape", [None, [None, None], [None, 4]])
def test_unknown_shapes(shape, graph):
    x = v1.placeholder(tf.float32, shape)
    a, _ = tf.unstack(tf.reshape(tf.tanh(x) * x, [2, -1]))
    values, _ = tf.math.top_k(tf.reshape(x, [-1]), 3)
    y = tf.reduce_sum(a) + tf.reduce_sum(values)
    feed = {x: np.cos(np.arange(16.0)).reshape(4, 4)}
    plain, ours = tf.gradients(y, x), taped(y, x, engine=EAGER_SUMS)
    assert str(ours[0].shape) == str(plain[0].shape)
    check_forms_and_values(plain, ours, feed)


# -- what is refused -------------------------------------------------------------------

REFUSALS = {
    "there is no engine 'eager'": {"engine": "eager"},
    "gate_gradients is for TensorFlow's": {"gate_gradients": True},
    "aggregation_method is for": {"aggregation_method": 2},
    "no argument 'unconected_gradients'": {"unconected_gradients": "zero"},
}
USUAL = [
    {"gate_gradients": False},
    {"aggregation_method": 0},
    {"name": "back"},
    {"colocate_gradients_with_ops": False},
]


def test_refusals_and_what_is_as_usual(graph):
    x = tf.ones([3])
    y = tf.sin(x)
    for message, options in REFUSALS.items():
        with pytest.raises(ge.ArgumentTypeError, match=message):
            taped(y, x, **options)
        assert graph.get_operations()[-1] is y.op or "engine" not in options
    for options in USUAL:
        (gradient,) = taped(y, x, **options)
        assert gradient.name.startswith(options.get("name", "gradients"))
    with pytest.raises(TapeError, match="pass 2 or more"):
        TapeEngine(min_aggregate_count=1)


def test_an_op_without_gradient(graph):
    x = tf.ones([3, 3])
    y = tf.raw_ops.Lu(input=tf.sin(x), name="apart").lu
    with pytest.raises(LookupError):
        tf.gradients(y, x)
    with pytest.raises(TapeError, match=r"no gradient for 'apart' \(Lu\).*stop"):
        taped(y, x)
    assert forms(taped(tf.stop_gradient(y) * x, x)) == ["tensor"]


def test_where_there_is_nothing_to_go_back_through(graph):
    x = tf.linspace(0.0, 1.0, 8)
    for y in (tf.cast(tf.argsort(x), tf.float32), tf.cast(x, tf.int32)):
        assert taped(y, x) == tf.gradients(y, x) == [None]
        assert forms(taped([y, x * x], x)) == ["tensor"]
    a, b = taped(tf.exp(x), [x, x])
    assert a is b
    assert taped(x, []) == []
    with pytest.raises(ge.ArgumentTypeError, match="ys is empty"):
        taped([], x)
