"""What can be differentiated by a tape: each form of tensor, variable and op."""

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.errors import TapeError
from geutil.gradients import gradients
from geutil.gradients.tape import TapeEngine
from tests.gradients import test_control_flow as flow
from tests.gradients.checking import assert_close, flat, forms, run

v1 = tf.compat.v1

EAGER_SUMS = TapeEngine(min_aggregate_count=2, min_aggregate_bytes=0)
ENGINES = {"tape": "tape", "early": EAGER_SUMS}
TABLE = np.cos(np.arange(80.0)).reshape(20, 4).astype(np.float32)


def taped(*args, engine="tape", **options):
    return gradients(*args, checkpoints=None, engine=engine, **options)


def check_forms_and_values(plain, ours, feed=None):
    graph = flat(plain)[0].graph
    ge.verify(graph)
    assert forms(ours) == forms(plain)
    for p, o in zip(flat(plain), flat(ours), strict=True):
        assert o.dtype == p.dtype
        assert p.shape.is_compatible_with(o.shape)
    expected, actual = run(graph, [flat(plain), flat(ours)], feed)
    assert_close(actual, expected)


# -- control flow ----------------------------------------------------------------------


def chosen(x):
    index = tf.cast(tf.reduce_sum(x) > 0, tf.int32) + 1
    cases = [lambda: x, lambda: tf.sin(x), lambda: tf.exp(x) * x]
    return tf.switch_case(index, cases)


FLOWS = [
    flow.looped,
    flow.loop_of_two,
    flow.nested,
    flow.branched,
    flow.branched_into_two,
    flow.called,
    flow.called_twice,
    chosen,
]


def test_control_flow():
    """All in one graph, with the engines by turns, and each first by turns."""
    plain, ours = [], []
    with tf.Graph().as_default():
        for number, build in enumerate(FLOWS):
            x = flow.start()
            y = tf.reduce_sum(build(tf.tanh(x)) ** 2)
            engine = list(ENGINES.values())[number % 2]
            ways = [(ours, taped, {"engine": engine}), (plain, tf.gradients, {})]
            for found, take, options in ways if number // 2 % 2 else ways[::-1]:
                found += take(y, x, **options)
        check_forms_and_values(plain, ours)


def test_control_flow_under_xla():
    # XLA needs maximum_iterations to differentiate a loop.
    @tf.function(jit_compile=True, autograph=False)
    def both(x):
        units = (flow.branched, flow.called, chosen)
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


def test_version_1_control_flow_is_refused():
    with tf.Graph().as_default():
        with flow.version_1_control_flow():
            x = tf.ones([3])
            _, looped = v1.while_loop(
                lambda i, h: i < 2, lambda i, h: (i + 1, tf.sin(h)), (0, x)
            )
            branched = v1.cond(tf.reduce_sum(x) > 0, lambda: x * x, lambda: x)
        for y, name in ((looped, "while"), (branched, "cond")):
            with pytest.raises(
                TapeError, match=rf"'{name}/[\w/]+' \(\w+\) is in a loop"
            ):
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


# -- custom gradients ------------------------------------------------------------------


@tf.custom_gradient
def steep(x, w):
    inner = tf.exp(-x * w)
    return tf.tanh(inner), lambda dy: (dy * inner, None if w is x else dy * 3.0)


def test_custom_gradients():
    with tf.Graph().as_default():
        x, w = tf.linspace(0.0, 1.0, 8), tf.ones([8])
        y = steep(tf.sin(x), w) + steep(x, tf.tanh(w))
        for engine in ENGINES.values():
            ours = taped(y, [x, w], engine=engine)
            check_forms_and_values(tf.gradients(y, [x, w]), ours)


# -- slices ----------------------------------------------------------------------------

LOOKUPS = {
    "one": lambda t: tf.gather(t, [3, 1, 3]),
    "two": lambda t: tf.concat([tf.gather(t, [3, 1]), tf.gather(t, [1, 0])], 0),
    "of two widths": lambda t: (
        tf.gather(t, tf.constant([3, 1], tf.int64)) + tf.gather(t, [1, 0])
    ),
    "embedding": lambda t: tf.nn.embedding_lookup(t, [[3, 1], [3, 5]]),
    "dense too": lambda t: tf.matmul(tf.gather(t, [3, 1]), t, transpose_b=True),
}


@pytest.mark.parametrize("kind", ["constant", "resource", "ref"])
def test_slices(kind):
    plain, ours = [], []
    with tf.Graph().as_default():
        table = tf.constant(TABLE)
        if kind != "constant":
            use_resource = kind == "resource"
            table = v1.get_variable("t", initializer=table, use_resource=use_resource)
        for name, look_up in LOOKUPS.items():
            y = tf.reduce_sum(tf.sin(look_up(table)) ** 2)
            for engine in ENGINES.values():
                ours += taped(y, table, engine=engine)
                plain += tf.gradients(y, table)
                assert forms(ours[-1:]) == forms(plain[-1:])
                if name != "dense too":
                    assert forms(ours[-1:]) == ["slices"]
        dense = [tf.convert_to_tensor(g) for g in plain + ours]
        found = run(dense[0].graph, dense)
        assert_close(found[len(plain) :], found[: len(plain)])


# -- variables -------------------------------------------------------------------------


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "ref"])
def test_version_1_variables(resource):
    with v1.Graph().as_default():
        w = v1.get_variable("w", [3], use_resource=resource)
        aside = v1.get_variable("aside", [3], use_resource=resource)
        y = tf.reduce_sum(tf.sin(w) * w)
        xs = [w, aside]
        check_forms_and_values(tf.gradients(y, xs), taped(y, xs))
        zeros = {"unconnected_gradients": "zero"}
        check_forms_and_values(tf.gradients(y, xs, **zeros), taped(y, xs, **zeros))


def test_variables_in_a_function():
    w, aside = tf.Variable([1.0, 2.0]), tf.Variable(3.0)

    @tf.function
    def both(x):
        y = tf.reduce_sum(tf.sin(w) * x + w.read_value())
        xs = [w, x, aside]
        assert taped(y, xs)[2] is None
        zeros = tf.UnconnectedGradients.ZERO
        return [f(y, xs, unconnected_gradients=zeros) for f in (taped, tf.gradients)]

    actual, expected = both(tf.constant([3.0, 4.0]))
    assert_close(actual, expected)


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


def test_complex_dtypes():
    plain, ours = [], []
    with tf.Graph().as_default():
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


def test_what_comes_behind_integers_needs_no_gradient():
    with tf.Graph().as_default():
        x = tf.linspace(0.0, 1.0, 8)
        # There is none for Unique, and none is needed.
        found, _ = tf.unique(tf.argsort(x))
        y = x * tf.cast(tf.reduce_sum(found), tf.float32)
        check_forms_and_values(tf.gradients(y, x), taped(y, x))


@pytest.mark.parametrize("shape", [None, [None, None], [None, 4]])
def test_unknown_shapes(shape):
    with tf.Graph().as_default():
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


def test_refusals_and_what_is_as_usual():
    with tf.Graph().as_default() as graph:
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


def test_an_op_without_gradient():
    with tf.Graph().as_default():
        x = tf.ones([3, 3])
        y = tf.raw_ops.Lu(input=tf.sin(x), name="apart").lu
        with pytest.raises(LookupError):
            tf.gradients(y, x)
        with pytest.raises(TapeError, match=r"no gradient for 'apart' \(Lu\).*stop"):
            taped(y, x)
        assert forms(taped(tf.stop_gradient(y) * x, x)) == ["tensor"]


def test_where_there_is_nothing_to_go_back_through():
    with tf.Graph().as_default():
        x = tf.linspace(0.0, 1.0, 8)
        for y in (tf.cast(tf.argsort(x), tf.float32), tf.cast(x, tf.int32)):
            assert taped(y, x) == tf.gradients(y, x) == [None]
            assert forms(taped([y, x * x], x)) == ["tensor"]
        a, b = taped(tf.exp(x), [x, x])
        assert a is b
        assert taped(x, []) == []
        with pytest.raises(ge.ArgumentTypeError, match="ys is empty"):
            taped([], x)
