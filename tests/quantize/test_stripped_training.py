"""Networks folded and quantized for training, stripped for inference, as int8 files."""

import importlib

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.graph import tflite_edits
from geutil.graph.tflite_files import ops_of
from geutil.quantize import compare_int8, quantize, to_int8
from tests.quantize.converted import stored_weights
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
    assert [op.kind for op in ops_of(blob)] == KINDS
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
    file, weights = stored_weights(blob)
    most = 2 ** (bits - 1) - 1
    for kind, tensor in weights:
        if kind != "MEAN":
            few = "INT8" if kind == "DEPTHWISE_CONV_2D" else "INT4"
            assert tflite_edits.type_of(tensor) == few
            assert np.abs(tflite_edits.constant(file, tensor)).max() == most
    assert sorted(kind for kind, _ in weights) == sorted(KINDS)
    # Behind five kernels, each of which may be a step off.
    comparison = compare_int8(deployed, blob, {"image": X})
    assert comparison.most <= 3
    (output,) = comparison.outputs
    assert output.counts[0] + output.counts[1] >= 0.9 * sum(output.counts)
