"""The main jobs, once each, on a small network."""

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import batchnorm, gradients, memory, model, quantize, report

# What they show, other tests show as well, where geutil is not installed.
pytestmark = [pytest.mark.smoke, pytest.mark.thorough]


@pytest.fixture
def network():
    tf.keras.utils.set_random_seed(0)
    layers = tf.keras.layers
    net = tf.keras.Sequential(
        [
            tf.keras.Input([8, 8, 3], name="image"),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(5),
        ]
    )
    # As after training: the norm does something.
    random = np.random.default_rng(0)
    net.layers[1].set_weights([random.uniform(0.5, 1.5, 4) for _ in range(4)])
    return net


@pytest.fixture
def images():
    return np.random.default_rng(1).normal(size=(4, 8, 8, 3)).astype(np.float32)


def test_an_edit():
    with tf.Graph().as_default() as graph:
        x, y = tf.constant(1.0), tf.constant(2.0)
        z = tf.identity(x)
        assert ge.reroute_ts(y, x) == 1
        ge.verify(graph)
        with tf.compat.v1.Session() as session:
            assert session.run(z) == 2.0


def test_a_model_is_opened_edited_and_saved(network, images, tmp_path):
    opened = model.open(network)
    edited = opened.replace_op("Relu", "Relu6")
    edited.save(tmp_path / "edited")
    assert model.inspect(tmp_path / "edited").bytes_total > 0
    loaded = tf.saved_model.load(str(tmp_path / "edited"))
    (theirs,) = loaded.signatures["serving_default"](image=tf.constant(images)).values()
    (ours,) = edited.run(image=images).values()
    np.testing.assert_allclose(theirs, ours, rtol=1e-5)


def test_batch_norms_are_folded_and_the_result_is_quantized(network, images):
    folded = model.open(network)
    assert len(batchnorm.fold_batch_norms(folded).folded) == 1
    sample = {"image": images}
    assert model.open(network).compare(folded, sample, rtol=1e-4, atol=1e-5).equal
    assert quantize.quantize(folded, is_training=False).coverage == 1.0
    assert quantize.calibrate(folded, [sample]).batches == 1
    blob = quantize.to_int8(folded)
    assert quantize.compare_int8(folded, blob, [sample]).outputs


def test_a_page_is_written(network, tmp_path):
    page = report.view(model.open(network)).save(tmp_path / "page.html")
    text = page.read_text(encoding="utf-8")
    # With the viewer, which is built and not in the tree.
    assert len(text) > 100_000
    assert "Conv2D" in text


def test_memory_is_saved_predicted_and_measured():
    weights = [tf.Variable(tf.eye(64)) for _ in range(8)]

    def loss(x):
        for weight in weights:
            x = tf.tanh(x @ weight)
        return tf.reduce_mean(x)

    @tf.function(autograph=False)
    def step(x):
        return gradients.gradients(loss(x), weights, checkpoints="memory")

    spec = tf.TensorSpec([256, 64], tf.float32)
    concrete = step.get_concrete_function(spec)
    report = gradients.last_report()
    assert report.peak < report.plain_peak
    assert memory.predict(concrete.graph.outputs).peak > 0
    assert memory.measure(step, [tf.ones([256, 64])]).peak > 0
