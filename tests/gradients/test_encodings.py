"""Encodings: less is kept of tensors, and the gradients stay what they are."""

from types import SimpleNamespace

import keras
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
from geutil.gradients.encoding_ops import Encoder
from geutil.gradients.encodings import plan_encodings
from geutil.gradients.report import encodings_of
from geutil.gradients.step import build_step
from tests.settings import slow
from tests.thorough import examples

pytestmark = slow

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


def both(function, *inputs):
    """Return plain gradients of a function by its inputs, encoded ones, what is said.

    What is encoded here is not asked whether it pays: small steps hold more to decode.
    """
    said = []

    @tf.function(autograph=False)
    def run(*args):
        y = function(*args)
        seed = output_gradient(y)
        step = build_step(y, args, seed)
        plan = plan_encodings(step, 1)
        said.append(SimpleNamespace(**encodings_of(plan)))
        encoded = Encoder().encode(step, plan)
        return tf.gradients(y, args, seed), list(encoded.gradients)

    plain, encoded = run(*inputs)
    return bits(plain), bits(encoded), said[0]


def kept_in_place(report):
    return {tensor.op_type: tensor.keeps for tensor in report.encoded}


ACTIVATIONS = {
    "Relu": tf.nn.relu,
    "Relu6": lambda t: tf.nn.relu6(4 * t),
    "LeakyRelu": lambda t: tf.nn.leaky_relu(t, 0.3),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_activation_keeps_a_mask(kind):
    activation = ACTIVATIONS[kind]
    plain, encoded, report = both(lambda x: activation(x + 1.0) + 1.0, images(4, 64))
    assert encoded == plain
    (tensor,) = report.encoded
    assert (tensor.keeps, tensor.kept_bytes * 4) == ("mask", tensor.bytes)


@pytest.mark.parametrize("kind", ["Relu", "Relu6"])
def test_an_activation_that_is_held_anyway_stays(kind):
    activation = ACTIVATIONS[kind]
    plain, encoded, report = both(lambda x: tf.sin(activation(x + 1.0)), images(4, 64))
    assert encoded == plain
    assert report.encoded == ()


@pytest.mark.parametrize("window", [(2, 2), (3, 3), (1, 2), (2, 3), (1, 1)])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.float16])
def test_a_pool_keeps_the_places_of_its_maxima(window, dtype):
    def pool(x):
        x = tf.cast(x, dtype) * 2
        return tf.cast(tf.nn.max_pool2d(x, window, window, "VALID"), tf.float32) + 1.0

    plain, encoded, report = both(pool, images(2, 12, 12, 5))
    assert encoded == plain
    assert kept_in_place(report)["Mul"] == "places"
    (tensor,) = [t for t in report.encoded if t.op_type == "Mul"]
    count = tensor.bytes // dtype.size
    assert tensor.kept_bytes == count // (window[0] * window[1])


def test_equal_maxima_get_the_gradient_in_the_first_place():
    def pool(x):
        return tf.nn.max_pool2d(x + 1.0, 2, 2, "VALID") + 1.0

    plain, encoded, report = both(pool, tf.zeros([1, 8, 8, 3]))
    assert kept_in_place(report)["AddV2"] == "places"
    assert encoded == plain


def convolved(x, channels, seed, activation=None):
    shape = [3, 3, x.shape[-1], channels]
    y = tf.nn.conv2d(x, tf.random.stateless_normal(shape, (seed, 1)) / 4, 1, "SAME")
    return y if activation is None else activation(y)


def pooled_relu(x, w):
    y = convolved(x, 8, 1, tf.nn.relu)
    return y, tf.nn.conv2d(tf.nn.max_pool2d(y, 2, 2, "VALID"), w, 1, "SAME")


def test_a_relu_before_a_pool_keeps_the_places_alone():
    plain, encoded, report = both(
        lambda x, w: pooled_relu(x, w)[1], images(2, 8, 8, 3), images(3, 3, 8, 4)
    )
    assert encoded == plain
    assert kept_in_place(report) == {"Relu": "places"}


def test_a_relu_whose_gradient_is_asked_for_keeps_a_mask_as_well():
    @tf.function(autograph=False)
    def run(x, w):
        y, z = pooled_relu(x, w)
        step = build_step(z, [x, y, w])
        plan = plan_encodings(step, 1)
        assert [e.keeps for e in plan.encodings] == [("mask", "places")]
        encoded = Encoder().encode(step, plan)
        return tf.gradients(z, [x, y, w]), list(encoded.gradients)

    plain, encoded = run(images(2, 8, 8, 3), images(3, 3, 8, 4))
    assert bits(encoded) == bits(plain)


def test_maxima_that_only_their_own_gradient_reads_are_let_go():
    plain, encoded, report = both(
        lambda x: tf.nn.max_pool2d(x + 1.0, 2, 2, "VALID") + 1.0, images(2, 8, 8, 3)
    )
    assert encoded == plain
    assert kept_in_place(report) == {"AddV2": "places", "MaxPool": "nothing"}


def test_a_padded_relu_is_cut_from_what_is_held():
    def trained(x, w):
        y = tf.pad(convolved(x, 8, 1, tf.nn.relu), [[0, 0], [1, 2], [0, 1], [0, 0]])
        return tf.nn.conv2d(y, w, 1, "VALID")

    plain, encoded, report = both(trained, images(2, 8, 8, 3), images(3, 3, 8, 2))
    assert encoded == plain
    (tensor,) = report.encoded
    assert (tensor.op_type, tensor.keeps, tensor.kept_bytes) == ("Relu", "part", 0)


def test_a_resized_image_keeps_its_shape():
    def network(x):
        y = tf.image.resize(convolved(x, 8, 1, tf.nn.relu), [16, 16])
        return tf.image.resize(y + 1.0, [8, 8], "bicubic")

    plain, encoded, report = both(network, images(2, 8, 8, 3))
    assert encoded == plain
    assert kept_in_place(report) == {"Relu": "mask", "AddV2": "shape"}


def test_signs_and_casts_keep_their_few_values():
    def network(x):
        drawn = images(4, 64, seed=1) > 0.5
        return tf.abs(x * 3.0) * tf.cast(tf.logical_and(drawn, x > 0.0), tf.float32)

    plain, encoded, report = both(network, images(4, 64))
    assert encoded == plain
    assert kept_in_place(report)["Sign"] == "sign"
    assert kept_in_place(report)["Cast"] == "narrow"


def test_what_is_read_for_its_values_stays_with_the_reason():
    def network(x, w):
        y = tf.nn.relu(x + 1.0)
        return tf.nn.max_pool2d(tf.nn.conv2d(y, w, 1, "SAME"), 3, 2, "SAME") + 1.0

    plain, encoded, report = both(network, images(2, 8, 8, 3), images(3, 3, 3, 4))
    assert encoded == plain
    assert report.encoded == ()
    reasons = {t.op_type: t.reason for t in report.not_encoded}
    assert "Conv2DBackpropFilter" in reasons["Relu"]
    assert "its windows overlap" in reasons["Conv2D"]
    assert "reads its values" in reasons["MaxPool"]


@pytest.mark.parametrize(
    ("pool", "reason"),
    [
        (lambda y: tf.nn.max_pool2d(y, 2, 2, "SAME"), "do not tile"),
        (lambda y: tf.nn.max_pool2d(y, 4, 4, "VALID"), "do not tile"),
        (
            lambda y: tf.nn.max_pool2d(
                tf.reshape(y, [-1, 9, 9, y.shape[-1]]), 3, 3, "VALID"
            ),
            "",
        ),
    ],
)
def test_windows_that_do_not_tile_the_image_are_told(pool, reason):
    plain, encoded, report = both(lambda x: pool(x + 1.0) + 1.0, images(2, 9, 9, 3))
    assert encoded == plain
    assert any(reason in t.reason for t in report.not_encoded) is bool(reason)
    assert bool(report.encoded) is not bool(reason)


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
        whole_peaks.append(explain(y, x, checkpoints=None).peak)
        return tf.gradients(y, x), gradients(y, x, **LOSSLESS)

    whole_peaks = []
    plain, encoded = run(images(64, 64))
    assert bits(encoded) == bits(plain)
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

    plain, encoded, _ = both(network, images(2, 8, 8, 3))
    assert encoded == plain

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


def vgg(layers):
    parts = [layers.Input([32, 32, 3])]
    for width in (16, 32):
        for _ in range(2):
            conv = layers.Conv2D(width, 3, padding="same", activation="relu")
            parts.append(conv)
        parts.append(layers.MaxPooling2D())
    return keras.Sequential([*parts, layers.Flatten(), layers.Dense(4)])


def unet(layers):
    def twice(x, width):
        for _ in range(2):
            x = layers.Conv2D(width, 3, padding="same")(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
        return x

    image = layers.Input([32, 32, 3])
    across = twice(image, 8)
    x = twice(layers.MaxPooling2D()(across), 16)
    x = layers.UpSampling2D(interpolation="bilinear")(x)
    x = twice(layers.Concatenate()([across, x]), 8)
    return keras.Model(image, layers.Conv2D(1, 1)(x))


def residual(layers):
    image = layers.Input([32, 32, 3])
    x = layers.Conv2D(8, 3, padding="same")(image)
    x = layers.ZeroPadding2D(1)(layers.ReLU(6.0)(layers.BatchNormalization()(x)))
    x = layers.DepthwiseConv2D(3, 2)(x)
    for _ in range(2):
        y = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
        y = layers.Conv2D(8, 3, padding="same")(y)
        x = layers.ReLU()(layers.Add()([x, layers.BatchNormalization()(y)]))
    return keras.Model(image, layers.GlobalAveragePooling2D()(layers.Dropout(0.3)(x)))


NETWORKS = {"vgg": (vgg, 0.85), "unet": (unet, 0.95), "residual": (residual, 1.0)}


def keras_step(name):
    """Return a Keras network, and what is made of a batch by given gradients."""
    keras.utils.set_random_seed(0)
    model = NETWORKS[name][0](keras.layers)
    weights = [v.value for v in model.trainable_variables]

    def traced(take):
        @tf.function(autograph=False)
        def run(x):
            return take(tf.reduce_mean(tf.square(model(x, training=True))), weights)

        return run

    return model, traced


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_hold_less_and_learn_the_same(name):
    _, traced = keras_step(name)
    x = tf.random.stateless_normal([4, 32, 32, 3], (1, 2))

    def compared(loss, weights):
        plain = tf.gradients(loss, weights)
        unordered = gradients(loss, weights, **LOSSLESS, order=False)
        explained = explain(loss, weights, **LOSSLESS)
        recomputed = gradients(loss, weights, **{**LOSSLESS, "checkpoints": "memory"})
        assert explained.encoded
        return plain, unordered, recomputed

    plain, unordered, recomputed = traced(compared)(x)
    assert bits(unordered) == bits(plain)
    for a, b in zip(recomputed, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.max(np.abs(b)) + 1e-7)

    def alone(loss, weights):
        return gradients(loss, weights, **LOSSLESS)

    traced(alone).get_concrete_function(tf.TensorSpec(x.shape))
    report = last_report()
    assert report.peak <= NETWORKS[name][1] * report.plain_peak
    assert 2 * sum(t.kept_bytes for t in report.encoded) < sum(
        t.bytes for t in report.encoded
    )


def v1_step(encode):
    """Return the gradients and the peak of a step that a Session runs."""
    with tf.Graph().as_default():
        weights = [
            v1.get_variable(f"w{i}", initializer=array(*shape, seed=i) / 9)
            for i, shape in enumerate([(3, 3, 3, 16), (3, 3, 16, 16), (3, 3, 16, 8)])
        ]
        x = v1.placeholder(tf.float32, [None, 32, 32, 3], "x")
        y = x
        for w in weights:
            y = tf.nn.relu(tf.nn.conv2d(y, w, 1, "SAME"))
            y = tf.nn.max_pool2d(y, 2, 2, "VALID")
        loss = tf.reduce_mean(y * y)
        slopes = gradients(
            loss, weights, checkpoints=None, encode=encode, shapes={"x": [8, 32, 32, 3]}
        )
        optimizer = v1.train.GradientDescentOptimizer(0.1)
        train = optimizer.apply_gradients(zip(slopes, weights, strict=True))
        report = order_updates(train, loss)
        metadata = v1.RunMetadata()
        options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
        config = v1.ConfigProto(inter_op_parallelism_threads=1)
        with v1.Session(config=config) as session:
            session.run(v1.global_variables_initializer())
            feed = {x: array(8, 32, 32, 3)}
            values = session.run([*slopes, train], feed, options, metadata)[:-1]
            assert np.isfinite(session.run(loss, feed))
    return values, traced_peak(metadata), report


def traced_peak(metadata):
    """Return the most bytes that the allocation records of a run add up to."""
    changes = [
        (record.alloc_micros, record.alloc_bytes)
        for device in metadata.step_stats.dev_stats
        for node in device.node_stats
        for used in node.memory
        for record in used.allocation_records
    ]
    return max(np.cumsum([size for _, size in sorted(changes)]))


def test_a_session_holds_less_and_computes_the_same():
    plain, plain_peak, _ = v1_step(None)
    encoded, peak, report = v1_step("lossless")
    assert {t.keeps for t in report.encoded} == {"places"}
    assert bits(map(tf.constant, encoded)) == bits(map(tf.constant, plain))
    assert peak < 0.85 * plain_peak


@pytest.mark.parametrize("checkpoints", ["memory", "inputs"])
def test_a_checkpointed_model_fits_to_the_same_weights(checkpoints):
    x = np.random.default_rng(0).normal(size=(8, 32, 32, 3)).astype(np.float32)
    trained = []
    for encode in (None, "lossless"):
        model, _ = keras_step("vgg")
        checkpointed(model, checkpoints, encode=encode)
        model.compile("sgd", "mse")
        model.fit(x, np.ones((8, 4), np.float32), batch_size=4, epochs=2, verbose=0)
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
    model, traced = keras_step("vgg")
    x = tf.random.stateless_normal([4, 32, 32, 3], (1, 2))
    peaks = {}

    def of(encode):
        def take(loss, xs):
            explained = explain(loss, xs, checkpoints=None, encode=encode)
            slopes = gradients(loss, xs, checkpoints=None, encode=encode)
            peaks[encode] = last_report().peak
            assert explained.encoded == last_report().encoded
            return slopes

        return traced(take)(x)

    exact, rounded = of("lossless"), of("bfloat16")
    halved = [t for t in last_report().encoded if t.keeps == "bfloat16"]
    assert all(t.kept_bytes * 2 == t.bytes for t in halved)
    assert len(halved) == 3
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
    _, traced = keras_step("vgg")
    x = tf.random.stateless_normal([4, 32, 32, 3], (1, 2))
    options = {"min_checkpoint_size": 1, "checkpoints": by_type("MaxPool")}

    def take(loss, xs):
        encoded = gradients(loss, xs, encode="bfloat16", **options)
        assert last_report().recomputed
        return tf.gradients(loss, xs), encoded

    for a, b in zip(*traced(take)(x), strict=True):
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(a)


def test_what_no_encoding_is_and_what_excludes_one_is_refused():
    with tf.Graph().as_default() as graph:
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


@pytest.mark.parametrize("checkpoints", [None, "memory"])
def test_xla_computes_the_same_and_is_not_trusted_with_bfloat16(checkpoints):
    model, _ = keras_step("vgg")
    weights = [v.value for v in model.trainable_variables]
    x = tf.random.stateless_normal([4, 32, 32, 3], (1, 2))

    def compiled(take):
        def run(x):
            return take(tf.reduce_mean(tf.square(model(x, training=True))), weights)

        return tf.function(run, jit_compile=True, autograph=False)(x)

    plain = compiled(tf.gradients)
    options = {"checkpoints": checkpoints, "encode": "bfloat16"}
    encoded = compiled(lambda loss, xs: gradients(loss, xs, **options))
    if checkpoints is None:
        assert "places" in {t.keeps for t in last_report().encoded}
    assert "bfloat16" not in {t.keeps for t in last_report().encoded}
    assert any("XLA" in w and "halved" in w for w in last_report().warnings)
    for a, b in zip(encoded, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.max(np.abs(b)))


def test_without_being_asked_nothing_is_encoded():
    _, traced = keras_step("vgg")
    traced(lambda loss, xs: gradients(loss, xs, checkpoints=None))(
        tf.ones([2, 32, 32, 3])
    )
    assert last_report().encoded == last_report().not_encoded == ()
