"""Encodings: less is kept of tensors, and the gradients stay what they are."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from geutil.errors import SelectionError
from geutil.gradients import (
    by_type,
    checkpointed,
    encoding_errors,
    explain,
    gradients,
    last_report,
    not_,
    order_updates,
)
from geutil.gradients.construction import applied
from geutil.gradients.encodings import Encoder, plan_encodings
from geutil.gradients.report import encodings_of
from geutil.gradients.step import build_step
from tests.gradients.checking import run, trace_network
from tests.gradients.networks import convolutions
from tests.memory.tracing import peak_of, trace
from tests.thorough import chosen, examples

v1 = tf.compat.v1
LOSSLESS = {"checkpoints": None, "encode": "lossless", "min_checkpoint_size": 1}


def array(*shape, seed=0):
    """Return numbers among which many are equal, zeros of both signs too."""
    rng = np.random.default_rng(seed)
    values = np.round(rng.normal(size=shape) * 2)
    return np.where(rng.random(shape) < 0.2, -0.0, values).astype(np.float32)


def images(*shape, seed=0):
    return tf.constant(array(*shape, seed=seed))


def output_gradient(y):
    """Return a gradient of y whose value no optimizer knows.

    Of a constant one Grappler computes what a linear network makes of it while it folds
    constants, without oneDNN, which rounds in other places.
    """
    return tf.raw_ops.PlaceholderWithDefault(
        input=images(*y.shape, seed=9), shape=y.shape
    )


def bits(tensors):
    """Return the bits of tensors, the sign of a zero among them."""
    return [tf.bitcast(t, tf.int32).numpy().tolist() for t in tensors]


def both(functions, inputs):
    """Return plain gradients of functions by their inputs, encoded ones, what is said.

    What is encoded here is not asked whether it pays: small steps hold more to decode.
    """
    said = []

    @tf.function(autograph=False)
    def run(inputs):
        ys = {}
        for name, function in functions.items():
            with tf.name_scope(name):
                ys[name] = function(*inputs[name])
        seeds = [output_gradient(y) for y in ys.values()]
        xs = tf.nest.flatten(inputs)
        step = build_step([*ys.values()], xs, seeds)
        plan = plan_encodings(step, 1)
        said.append(SimpleNamespace(**encodings_of(plan)))
        encoded = applied(Encoder().encode(step, plan))
        return [
            tf.nest.pack_sequence_as(inputs, slopes)
            for slopes in (tf.gradients([*ys.values()], xs, seeds), encoded.gradients)
        ]

    plain, encoded = (
        {name: bits(slopes) for name, slopes in found.items()} for found in run(inputs)
    )
    return plain, encoded, said[0]


def convolved(x, channels, seed, activation=None):
    shape = [3, 3, x.shape[-1], channels]
    y = tf.nn.conv2d(x, tf.random.stateless_normal(shape, (seed, 1)) / 4, 1, "SAME")
    return y if activation is None else activation(y)


def pooled_relu(x, w):
    y = convolved(x, 8, 1, tf.nn.relu)
    return y, tf.nn.conv2d(tf.nn.max_pool2d(y, 2, 2, "VALID"), w, 1, "SAME")


def pooled(window, dtype):
    def network(x):
        x = tf.cast(x, dtype) * 2
        return tf.cast(tf.nn.max_pool2d(x, window, window, "VALID"), tf.float32) + 1.0

    return network


def padded_relu(x, w):
    y = tf.pad(convolved(x, 8, 1, tf.nn.relu), [[0, 0], [1, 2], [0, 1], [0, 0]])
    return tf.nn.conv2d(y, w, 1, "VALID")


def resized(x):
    y = tf.image.resize(convolved(x, 8, 1, tf.nn.relu), [16, 16])
    return tf.image.resize(y + 1.0, [8, 8], "bicubic")


def signs_and_casts(x):
    drawn = images(4, 64, seed=1) > 0.5
    return tf.abs(x * 3.0) * tf.cast(tf.logical_and(drawn, x > 0.0), tf.float32)


def read_values(x, w):
    y = tf.nn.relu(x + 1.0)
    return tf.nn.max_pool2d(tf.nn.conv2d(y, w, 1, "SAME"), 3, 2, "SAME") + 1.0


def pool_of(*how):
    return lambda x: tf.nn.max_pool2d(x + 1.0, *how) + 1.0


ACTIVATIONS = {
    "Relu": tf.nn.relu,
    "Relu6": lambda t: tf.nn.relu6(4 * t),
    "LeakyRelu": lambda t: tf.nn.leaky_relu(t, 0.3),
}
IMAGE, SQUARE = (2, 8, 8, 3), (4, 64)
# Networks, the shapes of what they read, and what is kept in the place of tensors, with
# how many times less it is.
ENCODED = {
    **{
        f"held_{kind}": (lambda x, f=f: tf.sin(f(x + 1.0)), [SQUARE], {})
        for kind, f in ACTIVATIONS.items()
        if kind != "LeakyRelu"
    },
    **{
        # The gradient of the last one reads what it reads.
        kind: (
            lambda x, f=f: f(x + 1.0) + 1.0,
            [SQUARE],
            {"AddV2" if kind == "LeakyRelu" else kind: ("mask", 4)},
        )
        for kind, f in ACTIVATIONS.items()
    },
    **{
        f"windows_{m}_{n}_{dtype.name}": (
            pooled((m, n), dtype),
            [(2, 12, 12, 5)],
            {"Mul": ("places", dtype.size * m * n), "MaxPool": ("nothing", None)},
        )
        for m, n in [(2, 2), (3, 3), (1, 2), (2, 3), (1, 1)]
        for dtype in (tf.float32, tf.float64, tf.float16)
    },
    "maxima": (
        pool_of(2, 2, "VALID"),
        [IMAGE],
        {"AddV2": ("places", 16), "MaxPool": ("nothing", None)},
    ),
    "pooled_relu": (
        lambda x, w: pooled_relu(x, w)[1],
        [IMAGE, (3, 3, 8, 4)],
        {"Relu": ("places", 16)},
    ),
    "padded_relu": (padded_relu, [IMAGE, (3, 3, 8, 2)], {"Relu": ("part", None)}),
    "resized": (resized, [IMAGE], {"Relu": ("mask", 4), "AddV2": ("shape", None)}),
    "signs": (signs_and_casts, [SQUARE], {"Sign": ("sign", 4), "Cast": ("narrow", 4)}),
    "values": (read_values, [IMAGE, (3, 3, 3, 4)], {}),
    "row_left_over": (pool_of(2, 2, "SAME"), [(2, 9, 9, 3)], {}),
    "row_not_read": (pool_of(4, 4, "VALID"), [(2, 9, 9, 3)], {}),
}
ENCODED["equal_maxima"] = ENCODED["maxima"]
LEFT = {
    "values/Relu": "Conv2DBackpropFilter",
    "values/Conv2D": "its windows overlap",
    "values/MaxPool": "reads its values",
    "row_left_over/AddV2": "do not tile",
    "row_not_read/AddV2": "do not tile",
}


def by_scope(tensors, told):
    """Return what is told of tensors, by scope and type of op."""
    found = {scope: {} for scope in ENCODED}
    for t in tensors:
        scope = next(part for part in t.name.split("/") if part in ENCODED)
        found[scope][t.op_type] = told(t)
    return found


def test_what_is_kept_and_that_gradients_have_the_same_bits():
    inputs = {name: [images(*s) for s in row[1]] for name, row in ENCODED.items()}
    inputs["equal_maxima"] = [tf.zeros(IMAGE)]
    functions = {name: row[0] for name, row in ENCODED.items()}
    plain, encoded, report = both(functions, inputs)
    assert [name for name in plain if plain[name] != encoded[name]] == []
    kept = by_scope(
        report.encoded,
        lambda t: (t.keeps, t.bytes // t.kept_bytes if t.kept_bytes else None),
    )
    assert {n: kept[n] for n, row in ENCODED.items() if kept[n] != row[2]} == {}
    left = by_scope(report.not_encoded, lambda t: t.reason)
    for name, reason in LEFT.items():
        scope, op_type = name.split("/")
        assert reason in left[scope][op_type], name


def test_a_relu_whose_gradient_is_asked_for_keeps_a_mask_as_well():
    @tf.function(autograph=False)
    def run(x, w):
        y, z = pooled_relu(x, w)
        step = build_step(z, [x, y, w])
        plan = plan_encodings(step, 1)
        assert [e.keeps for e in plan.encodings] == [("mask", "places")]
        encoded = applied(Encoder().encode(step, plan))
        return tf.gradients(z, [x, y, w]), list(encoded.gradients)

    plain, encoded = run(images(2, 8, 8, 3), images(3, 3, 8, 4))
    assert bits(encoded) == bits(plain)


def test_what_is_asked_for_or_small_is_not_encoded():
    @tf.function(autograph=False)
    def run(x):
        y = tf.nn.relu(x + 1.0)
        z = tf.nn.relu(tf.nn.relu(y + 2.0) + 1.0)
        step = build_step([y, z], x)
        plan = plan_encodings(step, 1)
        assert [reason for _, reason in plan.left] == ["it is asked for"] * 2
        assert len(plan.encodings) == 1
        plan = plan_encodings(step, 65)
        assert plan.left == plan.encodings == ()

    run.get_concrete_function(tf.TensorSpec([8, 8]))


def test_what_would_hold_more_is_left_and_said():
    @tf.function(autograph=False)
    def run(x):
        y = tf.nn.relu(x + 1.0) + 1.0
        # What is differentiated is held along with the gradients.
        held = {"holds_gradients": True}
        whole_peaks.append(explain(y, x, checkpoints=None, **held).peak)
        return y, gradients(y, x, **held, **LOSSLESS)

    whole_peaks = []
    x = images(64, 64)
    _, encoded = run(x)
    assert bits(encoded) == bits([tf.cast(x + 1.0 > 0.0, tf.float32)])
    assert last_report().encoded == ()
    (left,) = last_report().not_encoded
    assert "would hold more" in left.reason
    assert last_report().peak == whole_peaks[0]


LAYERS = {
    "relu": tf.nn.relu,
    "relu6": tf.nn.relu6,
    "leaky": lambda t: tf.nn.leaky_relu(t, 0.25),
    "pool": lambda t: tf.nn.max_pool2d(t, 2, 2, "VALID") if t.shape[1] % 2 == 0 else t,
    "overlap": lambda t: tf.nn.max_pool2d(t, 3, 1, "SAME"),
    "pad": lambda t: tf.pad(t, [[0, 0], [0, 1], [1, 0], [0, 0]]),
    "abs": tf.abs,
    "convolve": lambda t: convolved(t, 4, 3),
    "resize": lambda t: tf.image.resize(t, [8, 8]),
    "skip": lambda t: t + tf.nn.relu(t),
    "concat": lambda t: tf.concat([t, tf.nn.relu(t)], -1),
    "clip": lambda t: tf.maximum(t, tf.minimum(t + 1.0, 2.0)),
    "drop": lambda t: t * tf.cast(tf.sin(t * 99.0) > 0.0, t.dtype),
}


@examples(12, suppress_health_check=[HealthCheck.too_slow])
@example(names=["convolve", "resize"], checkpoints=None, order=False)
@given(
    st.lists(st.sampled_from(sorted(LAYERS)), min_size=2, max_size=8),
    st.sampled_from([None, "memory", "speed"]),
    st.booleans(),
)
def test_gradients_of_random_networks_are_the_same_to_the_last_bit(
    names, checkpoints, order
):
    def network(x):
        for name in names:
            x = LAYERS[name](x)
        return x

    plain, encoded, _ = both({"it": network}, {"it": [images(2, 8, 8, 3)]})
    assert encoded == plain
    plain = plain["it"]
    whole_peaks = []

    @tf.function(autograph=False)
    def run(x):
        y = network(x)
        options = {**LOSSLESS, "order": order, "checkpoints": checkpoints}
        whole_peaks.append(explain(y, x, **{**options, "encode": None}).peak)
        return gradients(y, x, output_gradient(y), **options)

    values = run(images(2, 8, 8, 3))
    if checkpoints is None:
        assert bits(values) == plain
    else:
        # Of what runs again Grappler may join less, which rounds in other places.
        expected = [tf.bitcast(tf.constant(b), tf.float32).numpy() for b in plain]
        for value, other in zip(values, expected, strict=True):
            atol = 1e-5 * np.max(np.abs(other), initial=0.0)
            np.testing.assert_allclose(value, other, rtol=0, atol=atol)
    if order and checkpoints is None:
        assert last_report().peak <= 1.01 * whole_peaks[0]


vgg = partial(convolutions, 32, [(16, 2), (16, 2)])
PHOTOS = [4, 32, 32, 3]


def photos():
    return tf.random.stateless_normal(PHOTOS, (1, 2))


def v1_step(encode):
    """Return the gradients and the peak of a step that a Session runs."""
    with tf.Graph().as_default():
        weights = [
            v1.get_variable(f"w{i}", initializer=array(*shape, seed=i) / 9)
            for i, shape in enumerate([(3, 3, 3, 4), (3, 3, 12, 1), (3, 3, 12, 1)])
        ]
        x = v1.placeholder(tf.float32, [None, 32, 32, 3], "x")
        y = x
        for w in weights:
            y = tf.nn.relu(tf.nn.depthwise_conv2d(y, w, 4 * [1], "SAME"))
            y = tf.nn.max_pool2d(y, 2, 2, "VALID")
        loss = tf.reduce_mean(y * y)
        slopes = gradients(
            loss, weights, checkpoints=None, encode=encode, shapes={"x": [8, 32, 32, 3]}
        )
        optimizer = v1.train.GradientDescentOptimizer(0.1)
        train = optimizer.apply_gradients(zip(slopes, weights, strict=True))
        report = order_updates(train, loss)
    feed = {x: array(8, 32, 32, 3)}
    *values, _, value = run(loss.graph, [*slopes, train, loss], feed, optimize=True)
    assert np.isfinite(value)
    peak = peak_of(trace(loss.graph, [*slopes, train], feed))
    return values, peak, report


def test_a_session_holds_less_and_computes_the_same():
    plain, plain_peak, unasked = v1_step(None)
    assert unasked.encoded == unasked.not_encoded == ()
    encoded, peak, report = v1_step("lossless")
    assert {t.keeps for t in report.encoded} == {"places"}
    assert bits(map(tf.constant, encoded)) == bits(map(tf.constant, plain))
    assert peak < 0.85 * plain_peak


@pytest.mark.parametrize("checkpoints", chosen(["memory", "inputs"], "inputs"))
def test_a_checkpointed_model_fits_to_the_same_weights(checkpoints):
    x = np.random.default_rng(0).normal(size=(8, 32, 32, 3)).astype(np.float32)
    trained = []
    for encode in (None, "lossless"):
        model = vgg()
        checkpointed(model, checkpoints, encode=encode)
        model.compile("sgd", "mse")
        model.fit(x, np.ones((8, 10), np.float32), batch_size=4, epochs=1, verbose=0)
        trained.append(bits(map(tf.constant, model.get_weights())))
        assert bool(last_report().encoded) is (encode is not None)
    assert trained[0] == trained[1]


def test_gradients_of_a_function_capture_masks():
    def network(x):
        for _ in range(4):
            x = tf.nn.relu(x - 1.0) * 2.0
        return x

    found = []
    for encode in (None, "lossless"):
        x = images(8, 64)
        function = checkpointed(
            network, not_(by_type("Relu")), encode=encode, min_checkpoint_size=1
        )
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.function(function)(x)
        found.append(bits([tape.gradient(y, x)]))
    assert found[0] == found[1]
    assert {t.keeps for t in last_report().encoded} == {"mask"}


def test_half_the_bytes_are_told_and_their_errors_measured():
    model, x = vgg(), photos()
    peaks = {}

    def of(encode):
        def take(loss, xs):
            explained = explain(loss, xs, checkpoints=None, encode=encode)
            slopes = gradients(loss, xs, checkpoints=None, encode=encode)
            peaks[encode] = last_report().peak
            assert explained.encoded == last_report().encoded
            return slopes

        return trace_network(model, take, PHOTOS)[1](x)

    exact = of("lossless")
    encoded = last_report().encoded
    assert 2 * sum(t.kept_bytes for t in encoded) < sum(t.bytes for t in encoded)
    rounded = of("bfloat16")
    halved = [t for t in last_report().encoded if t.keeps == "bfloat16"]
    assert all(t.kept_bytes * 2 == t.bytes for t in halved)
    assert len(halved) == 3
    assert peaks["lossless"] <= 0.85 * last_report().plain_peak
    assert peaks["bfloat16"] < 0.85 * peaks["lossless"]
    errors = encoding_errors(
        lambda x: tf.reduce_mean(tf.square(model(x, training=True))),
        [v.value for v in model.trainable_variables],
        x,
    )
    assert 0 < max(error.relative for error in errors) < 0.01
    for error, a, b in zip(errors, rounded, exact, strict=True):
        expected = np.linalg.norm(a - b) / np.linalg.norm(b)
        np.testing.assert_allclose(error.relative, expected, rtol=1e-2, atol=1e-6)


def test_recomputation_from_half_the_bytes_finds_the_same_places():
    options = {"min_checkpoint_size": 1, "checkpoints": by_type("MaxPool")}

    def take(loss, xs):
        encoded = gradients(loss, xs, encode="bfloat16", **options)
        assert last_report().recomputed
        return tf.gradients(loss, xs) + encoded

    found = trace_network(vgg(), take, PHOTOS)[1](photos())
    half = len(found) // 2
    for a, b in zip(found[:half], found[half:], strict=True):
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(a)


def test_what_no_encoding_is_and_what_excludes_one_is_refused(graph):
    x = tf.ones([64])
    y = tf.nn.relu(x)
    before = len(graph.get_operations())
    with pytest.raises(SelectionError, match="'zip' is no encoding; pass one of"):
        gradients(y, x, checkpoints=None, encode="zip")
    with pytest.raises(SelectionError, match="pass offload=False"):
        explain(y, x, checkpoints=None, encode="bfloat16", offload=True)
    with pytest.raises(SelectionError, match="'zip' is no encoding"):
        checkpointed(tf.nn.relu, encode="zip")
    assert len(graph.get_operations()) == before


def test_xla_computes_the_same_and_is_not_trusted_with_bfloat16():
    model = convolutions(32, [(8, 2)])

    def compiled(take):
        return trace_network(model, take, PHOTOS, jit_compile=True)[1](photos())

    plain = compiled(tf.gradients)
    for checkpoints in (None, "memory"):
        options = {"checkpoints": checkpoints, "encode": "bfloat16"}
        encoded = compiled(partial(gradients, **options))
        kept = {t.keeps for t in last_report().encoded}
        assert "bfloat16" not in kept
        assert checkpoints or any("places" in keeps for keeps in kept)
        assert any("XLA" in w and "halved" in w for w in last_report().warnings)
        for a, b in zip(encoded, plain, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.max(np.abs(b)))
