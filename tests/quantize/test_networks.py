"""Networks of Keras in int8: nothing stays float, and their answers stay.

Rounding differs in TFLite's kernels, by one step in some of a thousand values. What a
layer makes of that is rounded again, so that after fifty layers the logits are as far
apart as two quantized networks are: some steps, whatever the placement. TFLite's own
sets of kernels are some steps from each other, too, since XNNPACK is one of them; it
left int8 to the others, which round alike, before TensorFlow 2.19. So kernels are
compared one by one, each with what it was given, and of the whole network what it is
asked for, the shares of the classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import calibrate, compare_int8, quantize, to_int8
from geutil.quantize.planning.int8_kernels import version_of
from tests.quantize.kernelwise import kernels_among_each_other, kernels_apart
from tests.quantize.networks import classifier, encoder, images, sequences
from tests.settings import needs_eager, slow
from tests.thorough import chosen

pytestmark = [needs_eager, slow]

applications = tf.keras.applications
CENTRED, BYTES = (1.0, 0.0), (127.5, 127.5)
SAMPLES = 20
XNNPACK_SINCE = (2, 19)


@dataclass
class Network:
    """A network, its size, and the range of its inputs."""

    make: object
    pixels: int
    inputs: tuple[float, float] = CENTRED

    def build(self):
        return classifier(self.make, self.pixels, *self.inputs)

    def data(self, seed):
        scale, offset = self.inputs
        x, kinds = images(self.pixels, SAMPLES, seed)
        return x * scale + offset, kinds


@dataclass
class Encoder:
    """A transformer encoder of one block."""

    def build(self):
        return encoder(depth=1)

    def data(self, seed):
        return sequences(SAMPLES, seed=seed)


NETWORKS = {
    "MobileNetV2": Network(applications.MobileNetV2, 64),
    "MobileNetV3Small": Network(applications.MobileNetV3Small, 64, BYTES),
    "ResNet50": Network(applications.ResNet50, 64),
    "EfficientNetB0": Network(applications.EfficientNetB0, 64, BYTES),
    "InceptionV3": Network(applications.InceptionV3, 75),
    "DenseNet121": Network(applications.DenseNet121, 64),
    "encoder": Encoder(),
}


class Case:
    """A network quantized, calibrated and converted."""

    def __init__(self, network):
        keras_model = network.build()
        x, self.kinds = network.data(seed=5)
        self.float = keras_model(x, training=False)["shares"].numpy()
        self.model = model.open(keras_model)
        fold_batch_norms(self.model)
        self.report = quantize(self.model, is_training=False)
        ge.verify(self.model.graph)
        (name,) = self.model.inputs
        calibrate(self.model, {name: network.data(seed=6)[0]}, "min_max")
        self.blob = to_int8(self.model)
        self.sample = {name: x}
        self.comparison = compare_int8(self.model, self.blob, self.sample)


@pytest.fixture(params=chosen(NETWORKS, "encoder"), scope="module")
def case(request):
    return Case(NETWORKS[request.param])


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


def test_where_the_graph_is_steps_off_kernels_are_so_from_each_other(case):
    among = kernels_among_each_other(case.blob, case.sample)
    for output in case.comparison.outputs:
        if output.share(1) < 0.999:
            apart = min(among[output.output]) < 0.999
            assert apart == (version_of(tf.__version__) >= XNNPACK_SINCE)
