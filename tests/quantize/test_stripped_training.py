"""Networks folded and quantized for training, stripped for inference, as int8 files."""

import importlib

import numpy as np
import pytest
import tensorflow as tf

from geutil import model, tflite
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import compare_int8, quantize, to_int8
from tests.quantize.converted import decibels, stored_weights
from tests.settings import needs_eager
from tests.thorough import crossed

pytestmark = needs_eager

STATISTICS = ["exact", "one_pass"]
X = np.random.default_rng(0).normal(size=(16, 8, 8, 3)).astype(np.float32)
SPEC = tf.TensorSpec([None, 8, 8, 3], name="image")
KERAS = ["keras", "tf_keras"]
KINDS = ["CONV_2D", "DEPTHWISE_CONV_2D", "CONV_2D", "MEAN", "FULLY_CONNECTED"]


@pytest.fixture
def keras(request):
    return importlib.import_module(request.param)


def _network(keras):
    layers = keras.layers
    keras.utils.set_random_seed(0)
    x = y = keras.Input((8, 8, 3))
    for make in (
        lambda: layers.Conv2D(6, 3, strides=2, bias_initializer="random_normal"),
        lambda: layers.DepthwiseConv2D(3, padding="same", use_bias=False),
        lambda: layers.Conv2D(8, 1),
    ):
        y = layers.BatchNormalization(momentum=0.8, epsilon=0.1)(make()(y))
        y = layers.ReLU()(y)
    y = layers.Dense(4)(layers.GlobalAveragePooling2D()(y))
    net = keras.Model(x, y)
    random = np.random.default_rng(1)
    net.set_weights(
        [w + random.uniform(0.0, 0.3, w.shape).astype("f") for w in net.get_weights()]
    )
    return net


def _stripped(net, statistics, **options):
    """Return a network after a few steps of training, and then as it is deployed."""

    @tf.function(input_signature=[SPEC], autograph=False)
    def call(image):
        return {"y": net(image, training=True)}

    m = model.open(call)
    report = fold_batch_norms(m, is_training=True, statistics=statistics, **options)
    assert len(report.folded) == 3
    return m


def _check_in_float(net, m):
    function = m.to_function()
    for _ in range(4):
        function(image=X)
    made = m.strip_training().to_function()(image=X)["y"].numpy()
    expected = np.asarray(net(X, training=False))
    np.testing.assert_allclose(made, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("statistics", STATISTICS)
def test_in_float_frozen_norms_are_the_network_at_inference(statistics):
    net = _network(tf.keras)
    _check_in_float(net, _stripped(net, statistics, freeze_batch_norm_delay=3))


@pytest.mark.parametrize(
    ("keras", "statistics"), crossed(KERAS, STATISTICS, together=1), indirect=["keras"]
)
def test_in_float_it_is_the_network_at_inference_and_a_file_of_its_layers(
    keras, statistics
):
    net = _network(keras)
    _check_in_float(net, _stripped(net, statistics))
    m = _stripped(_network(keras), statistics)
    quantize(m)
    function = m.to_function()
    for _ in range(4):
        function(image=X)
    deployed = m.strip_training()
    blob = to_int8(deployed)
    assert [op.kind for op in tflite.open(blob).ops] == KINDS
    comparison = compare_int8(deployed, blob, {"image": X})
    assert comparison.float_ops == ()
    assert comparison.outputs[0].share(1) >= 0.99


@pytest.mark.parametrize(
    ("statistics", "bits"), crossed(STATISTICS, [4, 3], together=1)
)
def test_trained_weights_of_few_bits_are_stored_in_them(statistics, bits):
    """Their ranges are computed from the weights of each step, and no variables."""
    m = _stripped(_network(tf.keras), statistics, strict=True)
    quantize(m, weight_bits=bits, ema_decay=0.5)
    for _ in range(4):
        m.run(image=X)
    deployed = m.strip_training()
    blob = to_int8(deployed)
    weights = stored_weights(blob)
    most = 2 ** (bits - 1) - 1
    for kind, tensor in weights:
        if kind != "MEAN":
            few = "int8" if kind == "DEPTHWISE_CONV_2D" else "int4"
            assert tensor.dtype == few
            assert np.abs(tensor.value).max() == most
    assert sorted(kind for kind, _ in weights) == sorted(KINDS)
    # Behind five kernels, each of which may be a step off.
    comparison = compare_int8(deployed, blob, {"image": X})
    assert comparison.most <= 3
    (output,) = comparison.outputs
    assert output.counts[0] + output.counts[1] >= 0.9 * sum(output.counts)


def _rows(x, draw=tf.random.uniform):
    return draw([tf.shape(x)[0], 1, 1, 1])


def _stateless(shape):
    return tf.random.stateless_uniform(shape, [1, 2])


def _read_elsewhere(x):
    scaled = x / 0.8
    return 0.4 * scaled + 0.5 * (scaled * tf.floor(0.8 + _rows(x)))


RANDOM_LAYERS = {
    "Dropout": tf.keras.layers.Dropout(0.3),
    "SpatialDropout": tf.keras.layers.SpatialDropout2D(0.3),
    "GaussianNoise": tf.keras.layers.GaussianNoise(0.1),
    "GaussianDropout": tf.keras.layers.GaussianDropout(0.1),
    "AlphaDropout": tf.keras.layers.AlphaDropout(0.1),
    "tf.nn": lambda x: tf.nn.dropout(x, 0.3),
    "a constant mask": lambda x: tf.nn.experimental.stateless_dropout(
        x, 0.05, [1, 2], noise_shape=[1, 1, 1, 4]
    ),
    "v1": lambda x: tf.compat.v1.nn.dropout(x, keep_prob=0.7),
    "depth, floor": lambda x: x / 0.8 * tf.floor(0.8 + _rows(x)),
    "depth, stateless": lambda x: x / 0.8 * tf.floor(0.8 + _rows(x, _stateless)),
    "depth, where": lambda x: tf.where(_rows(x, _stateless) < 0.8, x / 0.8, 0.0),
    "depth, read": _read_elsewhere,
}


def _with_random_layers():
    """Return a function of networks in which random layers follow convolutions."""
    tf.keras.utils.set_random_seed(0)
    layers = [tf.keras.layers.Conv2D(4, 3, activation="relu") for _ in RANDOM_LAYERS]
    for layer in layers:
        layer.build(X.shape)

    def call(image, training=True):
        outputs = {}
        for index, (name, layer) in enumerate(RANDOM_LAYERS.items()):
            keras = {"training": True} if isinstance(layer, tf.keras.Layer) else {}
            with tf.name_scope(f"case_{index}"):
                x = layers[index](image)
                y = layer(x, **keras) if training else x
                y = x + y if name.startswith("depth") else y
                outputs[f"y{index}"] = tf.matmul(y, tf.ones([4, 2]))
        return outputs

    return call


def test_random_layers_forward_what_is_rounded_and_none_is_in_a_file():
    call = _with_random_layers()
    m = model.open(tf.function(call, input_signature=[SPEC], autograph=False))
    report = quantize(m)
    assert report.coverage == 1.0
    function = m.to_function()
    for _ in range(2):
        function(image=X)
    deployed = m.strip_training()
    blob = to_int8(deployed)
    comparison = compare_int8(deployed, blob, {"image": X})
    found, expected = deployed.run(image=X), call(X, training=False)
    wrong = {}
    for index, name in enumerate(RANDOM_LAYERS):
        skipped = [e for e in report.skipped if e.op.startswith(f"case_{index}/")]
        told = len(skipped) == 1 and "forwards its input" in skipped[0].reason
        (output,) = (o for o in comparison.outputs if o.output == f"y{index}")
        noise = decibels(expected[f"y{index}"].numpy(), found[f"y{index}"])
        if not told or noise < 30 or output.share(1) < 0.99:
            wrong[name] = len(skipped), noise, output.share(1)
    assert wrong == {}
    kinds = {op.kind for op in tflite.open(blob).ops}
    assert kinds == {"ADD", "CONV_2D", "FULLY_CONNECTED", "MUL"}
    assert comparison.float_ops == ()
