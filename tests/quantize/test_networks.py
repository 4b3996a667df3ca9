"""Networks of Keras in int8: nothing stays float, and their answers stay.

Rounding differs in TFLite's kernels, by one step in some of a thousand values. What a
layer makes of that is rounded again, so that after fifty layers the logits are as far
apart as two quantized networks are: some steps, whatever the placement. TFLite's own
sets of kernels are some steps from each other, too, since XNNPACK is one of them; it
left int8 to the others, which round alike, before TensorFlow 2.19. So kernels are
compared one by one, each with what it was given, and of the whole network what it is
asked for, the shares of the classes.

A network at random tells nothing apart, and what rounding changes in it grows from
layer to layer; a trained one is robust. Here kernels blur, norms have statistics of the
data, and the last layer compares features with those of each class, which is what
training arrives at, roughly.
"""

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import calibrate, compare_int8, quantize, to_int8
from tests.batchnorm.calibrated import with_calibrated_norms
from tests.quantize.kernelwise import kernels_apart
from tests.settings import needs_eager, slow
from tests.thorough import chosen

pytestmark = [needs_eager, slow]

CLASSES = 10
LENGTH, WIDTH = 16, 32
_SHARE_OF_BLUR = 0.9
_NOISE = 0.2
_COLOUR = 0.5
_RANGE_OF_LOGITS = 32.0


def images(pixels, count, seed=0):
    """Return images between -1 and 1: one of ten patterns of waves each, and noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:pixels, 0:pixels] / pixels
    of_kinds = np.random.default_rng(1)
    rates = of_kinds.uniform(-2, 2, (2, CLASSES, 1, 1, 3))
    waves = np.sin(2 * np.pi * (rates[0] * y[..., None] + rates[1] * x[..., None]))
    colours = of_kinds.uniform(-1, 1, (CLASSES, 1, 1, 3))
    kinds = np.arange(count) % CLASSES
    noise = random.uniform(-1, 1, (count, pixels, pixels, 3))
    plain = _COLOUR * colours + (1 - _COLOUR - _NOISE) * waves
    return (plain[kinds] + _NOISE * noise).astype(np.float32), kinds


def classifier(make, pixels, scale, offset):
    """Return a network of Keras with a last layer that tells images apart."""
    tf.keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    shape = (pixels, pixels, 3)
    body = make(weights=None, include_top=False, pooling="avg", input_shape=shape)
    x, kinds = images(pixels, 4 * CLASSES)
    x = x * scale + offset
    for layer in body._flatten_layers():
        _blur(layer, random)
    with_calibrated_norms(body, x[: 2 * CLASSES])
    return _with_prototypes(body, x, kinds)


def _with_prototypes(body, x, kinds):
    """Return a network with a last layer that compares features with their means."""
    features = body(x, training=False).numpy()
    means = np.stack([features[kinds == kind].mean(0) for kind in range(CLASSES)])
    middle = means.mean(0)
    weights = (means - middle).T
    weights *= _RANGE_OF_LOGITS / np.ptp((features - middle) @ weights)
    last = tf.keras.layers.Dense(CLASSES)
    logits = last(body.output)
    shares = tf.keras.layers.Softmax()(logits)
    network = tf.keras.Model(body.input, {"logits": logits, "shares": shares})
    last.set_weights([weights, -middle @ weights])
    return network


def _blur(layer, random):
    """Let a convolution with a window blur, and give it a bias that is not zero."""
    if not isinstance(layer, tf.keras.layers.Conv2D | tf.keras.layers.DepthwiseConv2D):
        return
    kernel, *rest = layer.get_weights()
    height, width, *channels = kernel.shape
    if height * width > 1:
        mixed = random.normal(size=channels)
        if isinstance(layer, tf.keras.layers.DepthwiseConv2D):
            mixed = np.ones(channels)
        rough = random.normal(size=kernel.shape)
        kernel = _SHARE_OF_BLUR * mixed + (1 - _SHARE_OF_BLUR) * rough
        kernel /= np.sqrt(height * width * channels[0])
    biases = [random.normal(size=bias.shape) * 0.1 for bias in rest]
    layer.set_weights([kernel, *biases])


def encoder():
    """Return a block of a transformer that tells ten kinds of sequences apart."""
    tf.keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    layers = tf.keras.layers
    x = inputs = layers.Input((LENGTH, WIDTH))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 8)(x, x))
    y = layers.Dense(2 * WIDTH, activation="gelu")(x)
    x = layers.LayerNormalization()(x + layers.Dense(WIDTH)(y))
    body = tf.keras.Model(inputs, layers.GlobalAveragePooling1D()(x))
    for variable in body.weights:
        if variable.name in ("bias", "beta"):
            variable.assign(random.normal(size=variable.shape) * 0.1)
        if variable.name == "gamma":
            variable.assign(random.uniform(0.5, 1.5, variable.shape))
    x, kinds = sequences(4 * CLASSES)
    return _with_prototypes(body, x, kinds)


def sequences(count, seed=0):
    """Return sequences of vectors: of one of ten kinds each, and noise."""
    random = np.random.default_rng(seed)
    of_kinds = np.random.default_rng(1).normal(size=(CLASSES, 1, WIDTH))
    kinds = np.arange(count) % CLASSES
    noise = random.normal(size=(count, LENGTH, WIDTH))
    return (of_kinds[kinds] + 0.5 * noise).astype(np.float32), kinds


applications = tf.keras.applications
CENTRED, BYTES = (1.0, 0.0), (127.5, 127.5)
SAMPLES = 20


# How it is made, pixels, and what images are multiplied with and what is added then.
NETWORKS = {
    "MobileNetV2": (applications.MobileNetV2, 64, *CENTRED),
    "MobileNetV3Small": (applications.MobileNetV3Small, 64, *BYTES),
    "ResNet50": (applications.ResNet50, 64, *CENTRED),
    "EfficientNetB0": (applications.EfficientNetB0, 64, *BYTES),
    "InceptionV3": (applications.InceptionV3, 75, *CENTRED),
    "DenseNet121": (applications.DenseNet121, 64, *CENTRED),
    "encoder": None,
}


def data_of(name, seed):
    """Return inputs of a network, and of which kinds they are."""
    if name == "encoder":
        return sequences(SAMPLES, seed)
    _, pixels, scale, offset = NETWORKS[name]
    x, kinds = images(pixels, SAMPLES, seed)
    return x * scale + offset, kinds


class Case:
    """A network quantized, calibrated and converted."""

    def __init__(self, name):
        made = NETWORKS[name]
        keras_model = encoder() if made is None else classifier(*made)
        x, self.kinds = data_of(name, seed=5)
        calibration, _ = data_of(name, seed=6)
        self.float = keras_model(x, training=False)["shares"].numpy()
        self.model = model.open(keras_model)
        fold_batch_norms(self.model)
        self.report = quantize(self.model, is_training=False)
        ge.verify(self.model.graph)
        (name,) = self.model.inputs
        calibrate(self.model, {name: calibration}, "min_max")
        self.blob = to_int8(self.model)
        self.sample = {name: x}
        self.comparison = compare_int8(self.model, self.blob, self.sample)


@pytest.fixture(params=chosen(NETWORKS, "encoder"), scope="module")
def case(request):
    return Case(request.param)


def test_every_op_is_quantized_and_computes_in_int8(case):
    assert case.report.coverage == 1.0
    assert not case.report.skipped
    names = [entry.op for entry in case.report.quantized]
    assert len(names) == len(set(names))
    assert case.comparison.float_ops == ()


def test_kernels_are_within_a_step_of_their_fake_quants(case):
    rows = kernels_apart(case.model, case.blob, case.sample)
    computing = [row for row in rows if row.kind not in ("RESHAPE", "TRANSPOSE")]
    assert len(computing) > 20
    far = {row.name: row.most for row in rows if row.most > 1}
    assert not far
    # Means of few values are often half way between two steps.
    others = [row for row in rows if row.kind not in ("MEAN", "AVERAGE_POOL_2D")]
    assert np.mean([row.differ for row in others]) < 0.01


def test_the_answers_stay(case):
    shares = case.comparison.outputs[list(case.model.outputs).index("shares")]
    assert shares.share(1) >= 0.999
    assert shares.most <= 2
    for output in case.comparison.outputs:
        assert output.clear >= 0.9 * SAMPLES
        assert output.agreement == 1.0


def test_the_answers_are_those_of_the_float_network(case):
    found = case.model.run(**case.sample)["shares"]
    assert (case.float.argmax(-1) == case.kinds).mean() >= 0.95
    assert (found.argmax(-1) == case.float.argmax(-1)).mean() >= 0.95
