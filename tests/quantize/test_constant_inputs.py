"""Networks that are fed nothing: quantized as if a placeholder stood there."""

import numpy as np
import pytest
import tensorflow as tf

from geutil.graph import verify
from geutil.quantize import calibrate, create_training_graph, quantize
from tests.quantize.converted import opened
from tests.quantize.tiny import check_fake_quant, session
from tests.settings import needs_eager
from tests.thorough import crossed

v1 = tf.compat.v1
SHAPE = [2, 12, 12, 3]
random = np.random.default_rng(0)
IMAGES = random.normal(size=SHAPE).astype(np.float32)


def _variable(name, *shape, resource=True):
    value = np.random.default_rng(1).uniform(0.5, 1.5, shape).astype(np.float32)
    return v1.get_variable(name, initializer=value, use_resource=resource)


def _read(resource):
    return v1.get_variable("x", initializer=IMAGES, use_resource=resource)


INPUTS = {
    "constant": lambda: tf.constant(IMAGES, name="x"),
    "small zeros": lambda: tf.zeros([1, 4, 4, 3], name="x"),
    "zeros": lambda: tf.zeros(SHAPE, name="x"),
    "ones": lambda: tf.ones(SHAPE, name="x"),
    "resource": lambda: tf.identity(_read(True), name="x"),
    "ref": lambda: tf.identity(_read(False), name="x"),
}

SOURCES = {"Const", "Fill", "Identity", "Placeholder", "ReadVariableOp"}


def convolutional(x):
    """A bypass, a norm written out, a pool, products and a layer behind another."""
    y = tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]], name="pad")
    y = tf.nn.conv2d(y, _variable("k", 3, 3, 3, 3), 1, "VALID", name="one/conv")
    y = tf.nn.relu(tf.nn.bias_add(y, _variable("b", 3)), name="one/relu")
    y = tf.add(y, x, name="two/add")
    y = tf.multiply(_variable("scale", 3), y, name="two/scaled")
    y = tf.nn.relu6(tf.reduce_mean(y, [1, 2], name="two/mean"), name="two/relu6")
    weights = tf.matmul(_variable("left", 3, 2), _variable("right", 2, 4))
    return tf.matmul(y, weights, name="three/product")


def attentive(x):
    """Queries and keys that meet in a product of data."""
    x = tf.reshape(x, [-1, 4, 3], name="rows")
    for block in "ab":
        query, key, value = (
            tf.matmul(x, _variable(f"{block}{name}", 3, 3), name=f"{block}/{name}")
            for name in "qkv"
        )
        shares = tf.nn.softmax(tf.matmul(query, key, transpose_b=True))
        x = tf.add(x, tf.matmul(shares, value), name=f"{block}/sum")
    return tf.matmul(x, _variable("last", 3, 2), name="logits")


NETWORKS = {"convolutional": convolutional, "attentive": attentive}


def _planned(make, network):
    with tf.Graph().as_default() as graph:
        x = make()
        network(x)
    report = quantize(graph, is_training=False)
    verify(graph)
    assert not report.skipped
    inputs = [e for e in report.quantized if e.op_type in SOURCES]
    assert [e.result.bits for e in inputs if e.result] == [8]
    others = [e for e in report.quantized if e not in inputs]
    return sorted((e.op, e.kernel, str(e.weights), str(e.result)) for e in others)


@pytest.mark.parametrize(("name", "network"), crossed(INPUTS, NETWORKS, together=1))
def test_what_stands_for_an_input_is_quantized_as_one(name, network):
    function = NETWORKS[network]
    expected = _planned(lambda: v1.placeholder(tf.float32, SHAPE, "x"), function)
    assert _planned(INPUTS[name], function) == expected


def test_every_read_of_a_variable_is_the_input():
    with tf.Graph().as_default() as graph:
        x = _read(True)
        y = tf.matmul(tf.reshape(x, [-1, 3]), _variable("w", 3, 3))
        y = tf.nn.relu(y) + tf.reshape(x, [-1, 3])
        # Noise is no input.
        y += tf.random.normal([3])
        tf.matmul(y, _variable("v", 3, 2), name="last")
    report = quantize(graph, is_training=False)
    reads = [e for e in report.quantized if e.op_type == "ReadVariableOp"]
    assert len(reads) == 2
    assert all(e.result is not None and e.weights is None for e in reads)


@pytest.mark.parametrize("fed", ["placeholder", "default", "labels"])
def test_where_something_is_fed_products_of_weights_stay_weights(fed):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 3], "x")
        if fed == "default":
            x = v1.placeholder_with_default(np.float32([[1, 2, 3]]), [None, 3], "y")
        weights = tf.matmul(_variable("a", 3, 2), _variable("b", 2, 3), name="weights")
        if fed != "labels":
            tf.matmul(x, weights, name="product")
        else:
            tf.multiply(x, tf.reshape(weights, [3, 3])[0], name="product")
    report = quantize(graph, is_training=False)
    assert "weights" not in {e.op for e in report.quantized}


@pytest.mark.parametrize("kind", [tf.int32, tf.string], ids=["tokens", "words"])
def test_positions_that_constants_make_are_no_input_of_what_looks_tokens_up(kind):
    with tf.Graph().as_default() as graph:
        tokens = v1.placeholder(kind, [None, 4], "tokens")
        if kind == tf.string:
            tokens = tf.strings.to_hash_bucket_fast(tokens, 9)
        rates = tf.constant([1.0, 0.1, 0.01])
        angles = tf.einsum("i,j->ij", tf.range(4.0), rates, name="angles")
        table = tf.convert_to_tensor(_variable("table", 9, 3))
        x = tf.gather(table, tokens, name="looked_up")
        x = tf.multiply(x, tf.cos(angles, name="turns"), name="turned")
        tf.matmul(x, _variable("w", 3, 2)[None], name="product")
    report = quantize(graph, is_training=False)
    assert {e.op for e in report.quantized} >= {"looked_up", "turned", "product"}
    told = {e.op.split("/")[0] for e in (*report.quantized, *report.skipped)}
    assert not {"angles", "turns"} & told


def test_a_network_that_is_told_from_products_of_weights_by_nothing_is_reported():
    with tf.Graph().as_default() as graph:
        v1.placeholder(tf.float32, [], "fed")
        tf.matmul(tf.zeros([4, 3]), _variable("w", 3, 2), name="product")
    report = quantize(graph)
    assert report.quantized == report.skipped == ()
    (warning,) = report.warnings
    assert "'product' (MatMul) reads constants and variables only" in warning


def test_norms_of_such_a_network_are_folded_and_its_ranges_learnt():
    with tf.Graph().as_default() as graph:
        x = tf.constant(IMAGES, name="x")
        y = tf.nn.conv2d(x, _variable("k", 3, 3, 3, 4), 1, "SAME", name="conv")
        mean, variance = tf.nn.moments(y, [0, 1, 2])
        averages = [_variable(n, 4) for n in ("mean", "variance")]
        for average, batch in zip(averages, (mean, variance), strict=True):
            v1.assign_sub(average, (average - batch) * 0.1)
        y = tf.nn.batch_normalization(
            y, mean, variance, _variable("beta", 4), _variable("gamma", 4), 1e-3
        )
        z = tf.nn.relu(y, name="relu")
    report = create_training_graph(graph)
    assert len(report.folds.folded) == 1
    out = report.tensor(z)
    with session(graph) as opened:
        value, plain, low, high = opened.run([out, z, *out.op.inputs[1:]])
    check_fake_quant(value, value, low, high)
    assert np.abs(value - plain).max() < 0.05 * np.abs(plain).max()


@needs_eager
def test_a_model_of_one():
    weights = tf.Variable(random.normal(size=(3, 4)).astype(np.float32))
    rows = IMAGES.reshape(-1, 3)
    m = opened(lambda: {"y": tf.nn.relu(tf.matmul(tf.constant(rows), weights))})
    report = quantize(m, is_training=False)
    assert report.coverage == 1.0
    assert len(report.quantized) == 3
    calibrate(m, [{}], "min_max")
    expected = np.maximum(rows @ weights.numpy(), 0)
    assert np.abs(m.run()["y"] - expected).max() < 0.03 * expected.max()
