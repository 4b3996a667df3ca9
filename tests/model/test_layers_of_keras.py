"""Layers of Keras by name, against what Keras itself computes in them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.errors import ModelError, QuantizeError, SelectionError
from geutil.gradients import gradients, last_report
from geutil.quantize import quantize
from tests.settings import needs_eager

pytestmark = needs_eager

layers = keras.layers
RANDOM = np.random.default_rng(0)


def nested():
    """A Sequential and a shared layer inside a functional model; names like a path."""
    image = keras.Input([8, 8, 3], name="image")
    encoder = keras.Sequential(
        [
            layers.Conv2D(4, 3, padding="same", name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(name="act"),
        ],
        name="encoder",
    )
    x = layers.Conv2D(4, 3, padding="same", name="conv")(encoder(image))
    shared = layers.Dense(4, name="shared")
    x = shared(shared(x))
    x = layers.Dropout(0.5, name="drop")(x)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(image, layers.Dense(2, name="conv_1")(x), name="net")


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="subclassed")
        self.first = layers.Dense(5, activation="relu", name="first")
        self.second = layers.Dense(2, name="second")

    def call(self, x):
        return self.second(self.first(x))


def subclassed():
    network = Subclassed()
    network(np.zeros([1, 8, 8, 3], np.float32))
    return network


def attention():
    tokens = keras.Input([6, 8], name="tokens")
    attended = layers.MultiHeadAttention(2, 4, name="attention")(tokens, tokens)
    x = layers.Add(name="sum")([tokens, attended])
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(tokens, layers.Dense(3, name="scores")(x), name="transformer")


NETWORKS = {"nested": nested, "attention": attention}


@pytest.fixture(scope="module")
def in_memory():
    """A network and the model of it; nobody changes them."""
    network = nested()
    return network, model.open(network)


def sample(network):
    return RANDOM.normal(size=(2, *network.input_shape[1:])).astype(np.float32)


def called_once(network):
    """Return the layers of a functional model that it calls once, in order."""
    return [
        layer
        for layer in network.layers
        if len(layer._inbound_nodes) == 1
        and isinstance(layer.output, keras.KerasTensor)
        and type(layer).__name__ not in ("InputLayer", "Sequential")
    ]


@pytest.mark.parametrize("name", NETWORKS)
def test_what_a_layer_gives_is_what_keras_computes(name, tmp_path):
    """Of every layer, as it was opened in memory, from an archive and a SavedModel."""
    keras.utils.set_random_seed(0)
    network = NETWORKS[name]()
    for v in network.variables:
        if "moving" in v.path:
            v.assign(RANDOM.uniform(0.5, 1.5, v.shape))
    x = sample(network)
    layers = called_once(network)
    probe = keras.Model(network.input, {layer.name: layer.output for layer in layers})
    expected = probe(x, training=False)
    network.save(tmp_path / "net.keras")
    network.export(tmp_path / "net", verbose=False)
    for source in (network, str(tmp_path / "net.keras"), str(tmp_path / "net")):
        opened = model.open(source)
        known = {layer.path for layer in opened.layers}
        wanted = [layer.name for layer in layers if layer.name in known]
        # A file holds no ops of layers that do nothing at inference.
        assert len(wanted) >= len(layers) - 2
        found = opened.cut(outputs={name: name for name in wanted}).run(x)
        for name in wanted:
            np.testing.assert_allclose(
                found[name], expected[name], rtol=1e-4, atol=1e-4, err_msg=name
            )


def test_layers_are_told_by_name_object_tensor_and_record(in_memory):
    network, m = in_memory
    x = sample(network)
    pool = network.get_layer("pool")
    (record,) = (layer for layer in m.layers if layer.path == "pool")
    expected = m.cut(outputs={"y": "pool"}).run(x)["y"]
    for given in (pool, pool.output, record, "pool"):
        np.testing.assert_array_equal(m.cut(outputs={"y": given}).run(x)["y"], expected)
    assert list(m.cut(outputs=pool).outputs) == ["pool"]
    assert record.class_name == "GlobalAveragePooling2D"


def test_paths_of_nested_layers(in_memory):
    _, m = in_memory
    by_path = [(layer.path, layer.class_name) for layer in m.layers]
    assert ("encoder/conv", "Conv2D") in by_path
    assert ("encoder", "Sequential") in by_path
    assert [path for path, _ in by_path].count("shared") == 2
    # A whole path comes before a part of one: `conv` is not the encoder's.
    outer, inner = (m.cut(outputs={"y": name}) for name in ("conv", "encoder/conv"))
    counts = [
        sum(op.type == "Conv2D" for op in cut.graph.get_operations())
        for cut in (outer, inner)
    ]
    assert counts == [2, 1]
    # Edits leave out layers that are gone.
    paths = {layer.path for layer in m.cut(outputs="encoder").layers}
    assert "encoder/conv" in paths
    assert not paths & {"pool", "conv_1"}


def test_names_that_fit_several_layers_are_listed():
    x = image = keras.Input([4], name="x")
    for name in ("a", "b"):
        x = keras.Sequential([layers.Dense(4, name="dense")], name=name)(x)
    m = model.open(keras.Model(image, x, name="net"))
    with pytest.raises(ModelError, match=r"2 layers are called 'dense'.*'a/dense'"):
        m.cut(outputs="dense")


def test_names_of_no_layer_or_of_two_tensors_are_refused(in_memory):
    _, m = in_memory
    with pytest.raises(ModelError, match="'shared' fits 2 tensors; pass one of"):
        m.cut(outputs="shared")
    with pytest.raises(ModelError, match=r"similar are \['pool'"):
        m.cut(outputs="pooll")
    other = keras.Sequential([layers.Dense(2, name="elsewhere")])
    other.build([None, 3])
    with pytest.raises(ModelError, match="not made from the Keras layer 'elsewhere'"):
        m.cut(outputs=other.layers[0])


def test_a_subclassed_model():
    network = subclassed()
    m = model.open(network)
    x = RANDOM.normal(size=(2, 8, 8, 3)).astype(np.float32)
    assert [layer.path for layer in m.layers] == ["first", "second"]
    found = m.cut(outputs={"y": "first"}).run(x)["y"]
    np.testing.assert_allclose(found, network.first(x), rtol=1e-5, atol=1e-5)


def test_overrides_are_for_layers():
    network = nested()
    m = model.open(network)
    with pytest.raises(QuantizeError, match="similar are"):
        quantize(m, is_training=False, overrides={"encodr/conv": "skip"})
    report = quantize(
        m,
        is_training=False,
        overrides={network.get_layer("conv_1"): "skip", "encoder/conv": "skip"},
    )
    skipped = {e.op for e in report.skipped if e.reason == "is skipped by an override"}
    assert any(op.endswith("encoder_1/conv_1/convolution") for op in skipped)
    assert any("MatMul" in op for op in skipped)
    assert sum("convolution" in entry.op for entry in report.quantized) == 1


def test_checkpoints_are_layers():
    network = nested()
    x = RANDOM.normal(size=(2, 8, 8, 3)).astype(np.float32)
    held, plain = model.open(network), model.open(network)
    (held_y,), (plain_y,) = held.outputs.values(), plain.outputs.values()
    with held.graph.as_default():
        given = ["encoder/act", network.get_layer("pool")]
        (slope,) = gradients(held_y, [held.inputs["image"]], checkpoints=given)
        report = last_report()
    with plain.graph.as_default():
        (expected,) = tf.gradients(plain_y, [plain.inputs["image"]])
    kept = [tensor.name for tensor in report.kept]
    assert "encoder/act" in {tensor.keras_layer for tensor in report.kept}
    assert "encoder/act: net_" in str(report)
    assert any("/act_" in name for name in kept)
    assert any("/pool_" in name for name in kept)
    np.testing.assert_allclose(
        held.cut(outputs={"g": slope}).run(x)["g"],
        plain.cut(outputs={"g": expected}).run(x)["g"],
        rtol=1e-5,
        atol=1e-6,
    )


def two_norms():
    inner = [
        layers.Conv2D(4, 3, name="conv"),
        layers.BatchNormalization(name="norm"),
        layers.ReLU(name="act"),
    ]
    return keras.Sequential(
        [
            layers.Input([8, 8, 3], name="image"),
            keras.Sequential(inner, name="block"),
            layers.Conv2D(4, 3, name="last"),
            layers.BatchNormalization(name="norm_1"),
        ],
        name="net",
    )


def test_a_scope_may_be_a_layer():
    network = two_norms()
    m = model.open(network)
    with pytest.raises(SelectionError, match="was not made from the Keras layer"):
        fold_batch_norms(m, scope=layers.Dense(3, name="elsewhere"))
    report = fold_batch_norms(m, scope="block")
    assert [entry.keras_layer for entry in report.folded] == ["block/norm"]
    assert [entry.keras_layer for entry in report.refused] == ["norm_1"]
    assert "is outside of scope" in report.refused[0].reason
    assert "block/norm: " in str(report)
    report = quantize(m, scope=network.get_layer("block"))
    kept = {e.keras_layer.partition("/")[0] for e in report.quantized}
    # The input of the network is quantized for the layer that reads it.
    assert kept == {"", "block"}
    assert {e.keras_layer for e in report.skipped} == {"last", "norm_1"}


def test_a_name_is_that_of_a_layer_unless_it_ends_in_a_slash():
    network = two_norms()
    # So is the end called that reads its result.
    assert model.open(network).graph.get_operation_by_name("norm_1")
    folded = {}
    for scope in ("norm_1", "norm_1/", "net_1/norm_1_1", "nothing", None):
        report = fold_batch_norms(model.open(network), scope=scope)
        assert len(report.folded) + len(report.refused) == 2
        folded[scope] = [entry.keras_layer for entry in report.folded]
    assert folded == {
        "norm_1": ["norm_1"],
        "norm_1/": [],
        "net_1/norm_1_1": ["norm_1"],
        "nothing": [],
        None: ["block/norm", "norm_1"],
    }


def test_what_a_fold_keeps_may_be_a_layer():
    network = two_norms()
    m = model.open(network)
    for kept in ("last", network.get_layer("last"), m.layers[-2]):
        report = fold_batch_norms(m, keep=kept, scope="norm_1")
        assert "is asked for as it is" in report.refused[1].reason
    assert len(fold_batch_norms(m, scope="norm_1").folded) == 1
    with pytest.raises(SelectionError, match="similar are"):
        fold_batch_norms(m, keep="lats")


class Checked(layers.Layer):
    def call(self, x):
        return tf.debugging.check_numerics(x, "is finite")


def test_what_strip_keeps_may_be_a_layer():
    block = keras.Sequential([layers.Conv2D(4, 3), Checked(name="check")], name="block")
    image, last = layers.Input([8, 8, 3], name="image"), Checked(name="last")
    m = model.open(keras.Sequential([image, block, last], name="net"))
    report = m.strip_training(keep="block").strip_report
    found = {e.name: (e.action, e.keras_layer) for e in report.entries}
    assert found == {
        "net_1/block_1/check_1/CheckNumerics": ("kept", "block/check"),
        "net_1/last_1/CheckNumerics": ("removed", "last"),
    }
    (kept,) = (entry for entry in report.entries if entry.action == "kept")
    assert f"'{kept.name}' of layer 'block/check'" in str(kept)
    with pytest.raises(ModelError, match="layer with ops, 'blokc'; similar are"):
        m.strip_training(keep="blokc")
