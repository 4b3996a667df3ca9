"""The networks of Keras, frozen and with variables: all norms told, and right."""

from dataclasses import dataclass

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.batchnorm import fold_batch_norms
from tests.batchnorm.calibrated import norms_of, with_calibrated_norms
from tests.batchnorm.checking import needed
from tests.settings import needs_eager, slow
from tests.thorough import chosen

pytestmark = [needs_eager, slow]

applications = tf.keras.applications
LAYERS = {"Conv2D", "DepthwiseConv2dNative", "MatMul"}


@dataclass
class Network:
    """A network, and what its norms are expected to become."""

    make: object
    pixels: int
    norms: int
    refused: int = 0


NETWORKS = {
    "MobileNet": Network(applications.MobileNet, 64, 27),
    "MobileNetV2": Network(applications.MobileNetV2, 64, 52),
    "ResNet50": Network(applications.ResNet50, 64, 53),
    "EfficientNetB0": Network(applications.EfficientNetB0, 64, 49),
    "InceptionV3": Network(applications.InceptionV3, 75, 94),
    "Xception": Network(applications.Xception, 75, 40),
    "MobileNetV3Small": Network(applications.MobileNetV3Small, 64, 34),
    "DenseNet121": Network(applications.DenseNet121, 64, 121, 62),
    "ResNet50V2": Network(applications.ResNet50V2, 64, 49, 17),
}


def built(network, dtype="float32"):
    """Build a network, with results that are not squeezed by a softmax."""
    before = tf.keras.config.dtype_policy()
    tf.keras.config.set_dtype_policy(dtype)
    try:
        shape = (network.pixels, network.pixels, 3)
        return network.make(
            weights=None, include_top=False, pooling="avg", input_shape=shape
        )
    finally:
        tf.keras.config.set_dtype_policy(before)


def is_behind_a_layer(norm):
    """Tell, by what Keras knows, whether a norm is given what a layer makes."""
    kinds = (tf.keras.layers.Conv2D, tf.keras.layers.DepthwiseConv2D)
    kinds += (tf.keras.layers.SeparableConv2D,)
    return isinstance(norm.input._keras_history.operation, kinds)


class Case:
    """A network folded in both forms, and what it computes without folding."""

    def __init__(self, network):
        tf.keras.utils.set_random_seed(1)
        generator = np.random.default_rng(0)
        size = (24, network.pixels, network.pixels, 3)
        images = generator.uniform(-1, 1, size).astype(np.float32)
        keras_model = with_calibrated_norms(built(network), images[:16])
        exact = built(network, "float64")
        exact.set_weights(keras_model.get_weights())
        norms = norms_of(keras_model)
        self.norms = len(norms)
        self.behind_layers = sum(map(is_behind_a_layer, norms))
        x = images[16:]
        self.reference = exact(x, training=False).numpy()
        self.exact = model.open(exact)
        (name,) = self.exact.inputs
        self.exact_sample = {name: x.astype(np.float64)}
        self.models = {"variables": model.open(keras_model)}
        (name,) = self.models["variables"].inputs
        self.sample = {name: x}
        self.models["frozen"] = self.models["variables"].freeze()
        self.reports = {form: fold_batch_norms(m) for form, m in self.models.items()}
        self.exact_report = fold_batch_norms(self.exact)


@pytest.fixture(params=chosen(NETWORKS, "MobileNet"), scope="module")
def named(request):
    return NETWORKS[request.param], Case(NETWORKS[request.param])


FORMS = pytest.mark.parametrize("form", ["variables", "frozen"])


@FORMS
def test_every_norm_is_folded_or_refused_with_a_reason(named, form):
    network, case = named
    report = case.reports[form]
    assert case.norms == network.norms
    assert len(report.folded) == network.norms - network.refused
    assert len(report.refused) == network.refused
    entries = [*report.folded, *report.refused]
    assert len({entry.norm for entry in entries}) == network.norms
    assert len(report.folded) == case.behind_layers
    for entry in report.refused:
        op = case.models[form].graph.get_operation_by_name(entry.op)
        if op.type == "ConcatV2":
            # DenseNet pools what a layer makes, and hands it on beside the norm.
            assert "also reads what lies between 'densenet121" in entry.reason, entry
            continue
        assert op.type == "Relu", entry
        assert "(Relu) stands between the norm and the next layer" in entry.reason


@FORMS
def test_the_outputs_stay(named, form):
    # What the network computes in float64: its own rounding is near 1e-5.
    _, case = named
    (y,) = case.models[form].run(**case.sample).values()
    span = np.ptp(case.reference)
    apart = np.abs(case.reference - case.reference[:1])[1:].max(axis=1)
    assert apart.min() > 0.01 * span, "the result hardly depends on the input"
    assert np.abs(y - case.reference).max() <= 1e-5 * span


def test_in_float64_they_stay_to_the_last_digits(named):
    network, case = named
    assert len(case.exact_report.folded) == network.norms - network.refused
    (y,) = case.exact.run(**case.exact_sample).values()
    span = np.ptp(case.reference)
    assert np.abs(y - case.reference).max() <= 1e-12 * span


@FORMS
def test_a_folded_layer_is_one_product_and_one_sum(named, form):
    network, case = named
    ops = {op.name: op for op in needed(*case.models[form].outputs.values())}
    behind = [entry for entry in case.reports[form].folded if not entry.forward]
    assert len({entry.into for entry in behind}) == len(behind)
    for entry in behind:
        bias = ops[entry.into]
        layer = bias.inputs[0].op
        assert bias.type == "BiasAdd"
        assert layer.type in LAYERS
        assert [op.name for op in layer.outputs[0].consumers() if op.name in ops] == [
            bias.name
        ]
        for reader in bias.outputs[0].consumers():
            if reader.name in ops and reader.type in {"Mul", "Sub", "AddV2"}:
                # Of an activation or a residual, not of channels.
                assert not any(
                    t.op.type == "Const" and t.shape.rank for t in reader.inputs
                )
    if form == "frozen":
        roots = [op for op in ops.values() if op.type == "Rsqrt"]
        assert len(roots) == network.refused
