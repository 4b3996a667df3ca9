"""What can be differentiated by a tape: each form of tensor, variable and op."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.errors import TapeError
from geutil.gradients import gradients
from geutil.gradients.tape import TapeEngine
from tests.gradients import test_control_flow as flow
from tests.gradients.checking import assert_close, flat, forms, run
from tests.settings import V1, needs_eager
from tests.thorough import crossed

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

FLOWS = {
    "looped": flow.looped,
    "loop_of_two": flow.loop_of_two,
    "nested": flow.nested,
    "branched": flow.branched,
    "branched_into_two": flow.branched_into_two,
    "called": flow.called,
    "called_twice": flow.called_twice,
}


def chosen(x):
    index = tf.cast(tf.reduce_sum(x) > 0, tf.int32) + 1
    cases = [lambda: x, lambda: tf.sin(x), lambda: tf.exp(x) * x]
    return tf.switch_case(index, cases)


FLOWS["chosen"] = chosen


@contextlib.contextmanager
def functional():
    """Let `tf.cond` and `tf.while_loop` make functional ops, as inside functions."""
    with contextlib.ExitStack() as stack:
        if V1:
            v1.enable_control_flow_v2()
            stack.callback(v1.disable_control_flow_v2)
        yield


@pytest.mark.parametrize(
    ("name", "first", "engine"),
    crossed(FLOWS, ["alone", "after tf.gradients"], ENGINES, together=1),
)
def test_control_flow(name, first, engine):
    engine = ENGINES[engine]
    with functional(), tf.Graph().as_default() as graph:
        x = flow.start()
        y = tf.reduce_sum(FLOWS[name](tf.tanh(x)) ** 2)
        if first == "after tf.gradients":
            plain = tf.gradients(y, x)
            ours = taped(y, x, engine=engine)
        else:
            ours = taped(y, x, engine=engine)
            plain = tf.gradients(y, x)
        ge.verify(graph)
        check_forms_and_values(plain, ours)


@needs_eager
@pytest.mark.parametrize("compiled", [False, True], ids=["as it is", "xla"])
@pytest.mark.parametrize("name", ["looped", "branched", "called", "chosen"])
def test_control_flow_in_functions(name, compiled):
    @tf.function(jit_compile=compiled or None)
    def both(x):
        y = tf.reduce_sum(FLOWS[name](tf.tanh(x)) ** 2)
        return taped(y, x) + tf.gradients(y, x)

    if compiled and name == "looped":
        pytest.skip("XLA needs maximum_iterations to differentiate a loop")
    x = np.cos(np.arange(48.0, dtype=np.float32)).reshape(flow.SHAPE)
    actual, expected = both(tf.constant(x))
    assert_close([actual], [expected])


@needs_eager
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


@pytest.mark.parametrize("kind", ["loop", "conditional"])
def test_version_1_control_flow_is_refused(kind):
    with tf.Graph().as_default():
        enabled = v1.control_flow_v2_enabled()
        v1.disable_control_flow_v2()
        try:
            x = tf.ones([3])
            if kind == "loop":
                y = v1.while_loop(
                    lambda i, h: i < 2, lambda i, h: (i + 1, tf.sin(h)), (0, x)
                )[1]
            else:
                y = v1.cond(tf.reduce_sum(x) > 0, lambda: x * x, lambda: x)
        finally:
            if enabled:
                v1.enable_control_flow_v2()
        with pytest.raises(
            TapeError, match=r"'(while|cond)/[\w/]+' \(\w+\) is in a loop"
        ):
            taped(tf.reduce_sum(y), x)
        # Before it or behind it there is nothing to refuse.
        assert forms(taped(tf.sin(y), y)) == ["tensor"]


@needs_eager
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


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_custom_gradients(engine):
    with tf.Graph().as_default():
        x, w = tf.linspace(0.0, 1.0, 8), tf.ones([8])
        y = steep(tf.sin(x), w) + steep(x, tf.tanh(w))
        check_forms_and_values(tf.gradients(y, [x, w]), taped(y, [x, w], engine=engine))


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


@pytest.mark.parametrize(
    ("name", "kind", "engine"),
    crossed(LOOKUPS, ["constant", "resource", "ref"], ENGINES),
)
def test_slices(name, kind, engine):
    engine = ENGINES[engine]
    with tf.Graph().as_default():
        table = x = tf.constant(TABLE)
        if kind != "constant":
            x = v1.get_variable("t", initializer=table, use_resource=kind == "resource")
            table = x
        y = tf.reduce_sum(tf.sin(LOOKUPS[name](table)) ** 2)
        ours, plain = taped(y, x, engine=engine), tf.gradients(y, x)
        assert forms(ours) == forms(plain)
        if name != "dense too":
            assert forms(ours) == ["slices"]
        dense = [tf.convert_to_tensor(g) for g in plain + ours]
        expected, actual = run(dense[0].graph, dense)
        assert_close([actual], [expected])


def test_slices_as_output_gradients():
    with tf.Graph().as_default():
        x = tf.constant(TABLE)
        seed = tf.IndexedSlices(
            tf.ones([2, 4]), tf.constant([3, 3]), tf.constant([20, 4])
        )
        y = x * 2.0
        plain, ours = tf.gradients(y, x, seed), taped(y, x, seed)
        check_forms_and_values(plain, ours)


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


@needs_eager
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


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
def test_real_dtypes(dtype):
    with tf.Graph().as_default():
        x = tf.cast(tf.linspace(0.0, 1.0, 8), dtype)
        a, b = tf.split(tf.tanh(x) * x, 2)
        y = [a + tf.sin(b), tf.cast(a, tf.float32)]
        plain, ours = tf.gradients(y, [x, a]), taped(y, [x, a])
        expected, actual = run(x.graph, [plain, ours])
        for p, o in zip(expected, actual, strict=True):
            assert p.dtype == o.dtype == dtype.as_numpy_dtype
            np.testing.assert_allclose(
                o.astype(float),
                p.astype(float),
                rtol=4 * np.finfo(float).eps
                if dtype == tf.float64
                else 2.0**-6
                if dtype == tf.bfloat16
                else 1e-2,
            )


@pytest.mark.parametrize("dtype", [tf.complex64, tf.complex128])
def test_complex_dtypes(dtype):
    with tf.Graph().as_default():
        x = tf.complex(tf.linspace(0.0, 1.0, 8), tf.linspace(1.0, 2.0, 8))
        z = tf.exp(tf.cast(x, dtype)) * tf.cast(x, dtype)
        y = [tf.math.real(z), tf.abs(z) ** 2]
        check_forms_and_values(tf.gradients(y, [x, z]), taped(y, [x, z]))
        seed = tf.ones_like(z) * tf.constant(2 + 1j, dtype)
        check_forms_and_values(tf.gradients(z, x, seed), taped(z, x, seed))
        for function in (tf.gradients, taped):
            with pytest.raises(TypeError, match="must set grad_ys"):
                function(z, x)


def test_an_integer_y():
    with tf.Graph().as_default():
        x = tf.linspace(0.0, 1.0, 8)
        y = tf.cast(x, tf.int32)
        assert tf.gradients(y, x) == taped(y, x) == [None]
        assert forms(taped([y, x * x], x)) == ["tensor"]


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


# -- ends ------------------------------------------------------------------------------


def test_ends_that_coincide():
    with tf.Graph().as_default():
        x = tf.linspace(0.0, 1.0, 8)
        h = tf.sin(x)
        z = tf.exp(h)
        cases = [
            ([x], [x]),
            ([h], [h, x]),
            ([z, h, z], [x, h, x, z]),
            ([x, z], [z, x]),
            ([x], [z]),
        ]
        for ys, xs in cases:
            check_forms_and_values(
                tf.gradients([*ys, x], [*xs, x]), taped([*ys, x], [*xs, x])
            )
        a, b = taped(z, [x, x])
        assert a is b
        assert taped(z, []) == []
        with pytest.raises(ge.ArgumentTypeError, match="ys is empty"):
            taped([], x)


def test_stopping_at_an_op_with_several_outputs():
    with tf.Graph().as_default():
        x = tf.linspace(0.0, 1.0, 8)
        a, b = tf.split(tf.sin(x), 2)
        y = a * b
        for stops in ([a], a, [b, x], None):
            plain = tf.gradients(y, [x, a, b], stop_gradients=stops)
            ours = taped(y, [x, a, b], stop_gradients=stops)
            check_forms_and_values(plain, ours)


# -- what is refused -------------------------------------------------------------------

REFUSALS = {
    "gate_gradients": ({"gate_gradients": True}, "gate_gradients is for TensorFlow's"),
    "aggregation_method": ({"aggregation_method": 2}, "aggregation_method is for"),
    "unknown": ({"unconected_gradients": "zero"}, "no argument 'unconected_gradients'"),
    "engine": ({"engine": "eager"}, "there is no engine 'eager'"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    options, message = REFUSALS[name]
    with tf.Graph().as_default() as graph:
        x = tf.ones([3])
        y = tf.sin(x)
        with pytest.raises(ge.ArgumentTypeError, match=message):
            taped(y, x, **options)
        assert graph.get_operations()[-1] is y.op or name != "engine"


@pytest.mark.parametrize(
    "options",
    [
        {"gate_gradients": False},
        {"aggregation_method": 0},
        {"name": "back"},
        {"colocate_gradients_with_ops": False},
    ],
    ids=str,
)
def test_what_is_as_usual_is_accepted(options):
    with tf.Graph().as_default():
        x = tf.ones([3])
        (gradient,) = taped(tf.sin(x), x, **options)
        assert gradient.name.startswith(options.get("name", "gradients"))


def test_engines_that_cannot_be():
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


def test_an_op_whose_gradient_is_nothing():
    with tf.Graph().as_default():
        x = tf.ones([3])
        y = tf.cast(tf.argsort(x), tf.float32)
        assert taped(y, x) == tf.gradients(y, x) == [None]
