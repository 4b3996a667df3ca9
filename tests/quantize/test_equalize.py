"""Cross-layer equalization: the same function, and equal ranges."""

import re

import numpy as np
import pytest
import tensorflow as tf

import geutil
from geutil import model
from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.quantize import calibrate, equalize, quantize
from tests.quantize.converted import decibels, opened, spec
from tests.quantize.small_networks import normal, prepared
from tests.settings import needs_eager

pytestmark = needs_eager

IMAGE = spec(None, 8, 8, 3, name="x")
X = normal(4, 8, 8, 3, seed=9)


def uneven(*shape, seed, axis=-1):
    """Return weights whose channels differ in size by some orders of magnitude."""
    generator = np.random.default_rng(seed)
    sizes = [1] * len(shape)
    sizes[axis] = shape[axis]
    factors = np.exp(generator.uniform(-4, 4, shape[axis])).reshape(sizes)
    return (generator.normal(size=shape) * factors).astype(np.float32)


CONV = uneven(3, 3, 3, 6, seed=0)
BIAS = normal(6, seed=1)
DEPTHWISE = uneven(3, 3, 6, 1, seed=2, axis=2)
POINT = uneven(1, 1, 6, 8, seed=3)
DENSE = uneven(8, 5, seed=4, axis=0)


def prelu(x):
    return tf.nn.relu(x) + normal(6, seed=5) * -tf.nn.relu(-x)


def chain(x, activation=tf.nn.relu, weights=(CONV, BIAS, DEPTHWISE, POINT, DENSE)):
    """Return a convolution, a depthwise one, a pointwise one and a dense layer."""
    conv, bias, depthwise, point, dense = weights
    y = activation(tf.nn.conv2d(x, conv, 1, "SAME", name="conv") + bias)
    y = tf.nn.depthwise_conv2d(y, depthwise, [1, 1, 1, 1], "SAME", name="depthwise")
    y = tf.nn.max_pool2d(tf.nn.relu(y), 2, 2, "SAME")
    y = tf.nn.leaky_relu(tf.nn.conv2d(y, point, 1, "SAME", name="point"))
    return {"y": tf.matmul(tf.reduce_mean(y, [1, 2]), dense, name="dense")}


def plain(x):
    return chain(x)


def layers(m):
    """Return the weights of each layer by the last part of its name."""
    found = {}
    kinds = ("Conv2D", "DepthwiseConv2dNative", "MatMul")
    for op in m.graph.get_operations():
        if op.type in kinds:
            found[op.name.rpartition("/")[2]] = op.inputs[1]
    return m.cut(outputs=found).run()


def magnitudes(values, axis):
    others = tuple(i for i in range(values.ndim) if i != axis % values.ndim)
    return np.abs(values).max(others)


def near(found, wanted):
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


ACTIVATIONS = {
    "relu": tf.nn.relu,
    "leaky": tf.nn.leaky_relu,
    "none": tf.identity,
    "prelu": prelu,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_function_stays_and_ranges_become_equal(activation):
    def compute(x):
        return chain(x, ACTIVATIONS[activation])

    m = opened(compute, IMAGE)
    wanted = m.run(x=X)["y"]
    report = equalize(m)
    geutil.verify(m.graph)
    near(m.run(x=X)["y"], wanted)
    assert [(e.first, e.seconds) for e in report.equalized] == [
        ("conv", ("depthwise",)),
        ("depthwise", ("point",)),
        ("point", ("dense",)),
    ]
    assert [(e.layer, e.reason) for e in report.refused] == [
        ("dense", "makes an output of the model")
    ]
    found = layers(m)
    pairs = [
        (found["conv"], -1, found["depthwise"], 2),
        (found["depthwise"], 2, found["point"], 2),
        (found["point"], -1, found["dense"], 0),
    ]
    for first, output, second, into in pairs:
        np.testing.assert_allclose(
            magnitudes(first, output), magnitudes(second, into), rtol=1e-4
        )


def test_one_pair_by_the_formula():
    first, second = normal(5, 4, seed=1), normal(4, 3, seed=2)
    bias = normal(4, seed=3)

    def compute(x):
        hidden = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, first, name="a"), bias))
        return {"y": tf.matmul(hidden, second, name="b")}

    m = opened(compute, spec(None, 5, name="x"))
    (entry,) = equalize(m).equalized
    read = {"a": "a", "b": "b", "bias": "BiasAdd"}
    ops = {name: m.graph.get_operation_by_name(op) for name, op in read.items()}
    found = m.cut(outputs={name: op.inputs[1] for name, op in ops.items()}).run()
    r1, r2 = np.abs(first).max(0), np.abs(second).max(1)
    s = np.sqrt(r1 * r2) / r2
    np.testing.assert_allclose(found["a"], first / s, rtol=1e-5)
    np.testing.assert_allclose(found["b"], second * s[:, None], rtol=1e-5)
    np.testing.assert_allclose(found["bias"], bias / s, rtol=1e-5)
    assert entry.before == pytest.approx(r1.max() / r1.min(), rel=1e-5)
    assert entry.after == pytest.approx((r1 / s).max() / (r1 / s).min(), rel=1e-5)


def test_variables_stay_and_so_do_other_models():
    weights = [tf.Variable(w) for w in (CONV, BIAS, DEPTHWISE, POINT, DENSE)]
    f = tf.function(lambda x: chain(x, weights=weights), input_signature=[IMAGE])
    m, other = model.open(f), model.open(f)
    before = [w.numpy() for w in weights]
    wanted = m.run(x=X)["y"]
    assert len(equalize(m).equalized) == 3
    near(m.run(x=X)["y"], wanted)
    np.testing.assert_array_equal(other.run(x=X)["y"], wanted)
    for w, value in zip(weights, before, strict=True):
        np.testing.assert_array_equal(w.numpy(), value)
    with tf.GradientTape() as tape:
        y = m.to_function()(x=X)["y"]
    assert all(g is not None for g in tape.gradient(y, weights))


def test_a_layer_that_several_read():
    def compute(x):
        y = tf.nn.relu(tf.nn.conv2d(x, CONV, 1, "SAME", name="conv"))
        left = tf.nn.conv2d(y, POINT, 1, "SAME", name="left")
        right = tf.nn.conv2d(y, uneven(1, 1, 6, 8, seed=7), 1, "SAME", name="right")
        return {"y": left + right}

    m = opened(compute, IMAGE)
    wanted = m.run(x=X)["y"]
    (entry,) = equalize(m).equalized
    assert entry.seconds == ("left", "right")
    near(m.run(x=X)["y"], wanted)
    found = layers(m)
    both = np.maximum(magnitudes(found["left"], 2), magnitudes(found["right"], 2))
    np.testing.assert_allclose(magnitudes(found["conv"], -1), both, rtol=1e-5)


def test_channels_of_zeros_are_left():
    weights = [w.copy() for w in (CONV, BIAS, DEPTHWISE, POINT, DENSE)]
    weights[0][..., 2] = 0
    weights[2][:, :, 4] = 0
    m = opened(lambda x: chain(x, weights=weights), IMAGE)
    wanted = m.run(x=X)["y"]
    equalize(m)
    near(m.run(x=X)["y"], wanted)


def between(x, ops):
    y = ops(tf.nn.conv2d(x, CONV, 1, "SAME", name="first"))
    return {"y": tf.nn.conv2d(y, POINT, 1, "SAME", name="second")}


OTHER = normal(3, 3, 3, 6, seed=8)
OBSTACLES = {
    "relu6": (tf.nn.relu6, "Relu6", "clips at 6.*replace_relu6=True"),
    "sigmoid": (tf.sigmoid, "Sigmoid", "does not keep the scale"),
    "square": (lambda y: y * y, "Mul", "does not keep the scale"),
    "softmax": (tf.nn.softmax, "Softmax", "does not keep the scale"),
    "norm": (
        lambda y: tf.compat.v1.nn.fused_batch_norm(
            y, BIAS, BIAS, BIAS, BIAS**2, is_training=False
        )[0],
        "FusedBatchNorm",
        "fold it first",
    ),
    "positions": (lambda y: y + normal(8, 8, 6), "Add", "something else than a bias"),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_what_stands_in_the_way_is_named(case):
    ops, kind, reason = OBSTACLES[case]
    m = opened(lambda x: between(x, ops), IMAGE)
    before = m.graph.as_graph_def()
    report = equalize(m)
    assert not report.equalized
    (first,) = [entry for entry in report.refused if entry.layer == "first"]
    assert m.graph.get_operation_by_name(first.op).type.startswith(kind)
    assert re.search(reason, first.reason)
    assert first.reason in str(report)
    assert m.graph.as_graph_def() == before


def test_sums_with_other_data_results_and_grouped_layers_are_refused():
    def compute(x):
        y = tf.nn.conv2d(x, CONV, 1, "SAME", name="first")
        y = tf.nn.relu(y + tf.nn.conv2d(x, OTHER, 1, "SAME", name="other"))
        y = tf.nn.conv2d(y, POINT, 1, "SAME", name="second")
        grouped = normal(1, 1, 4, 4)
        return {"y": tf.nn.conv2d(tf.nn.relu(y), grouped, 1, "SAME", name="grouped")}

    report = equalize(opened(compute, IMAGE))
    reasons = {entry.layer: entry.reason for entry in report.refused}
    assert "comes from elsewhere" in reasons["first"]
    assert "comes from elsewhere" in reasons["other"]
    assert "4 input channels in its weights, and there are 8" in reasons["second"]
    m = opened(plain, IMAGE)
    m.outputs["inner"] = m.graph.get_operation_by_name("point").outputs[0]
    assert {e.layer for e in equalize(m).refused} == {"point", "dense"}


def test_relu6_is_replaced_when_asked():
    m = opened(lambda x: between(x, tf.nn.relu6), IMAGE)
    plain = opened(lambda x: between(x, tf.nn.relu), IMAGE).run(x=X)["y"]
    (entry,) = equalize(m, replace_relu6=True).equalized
    assert len(entry.replaced) == 1
    near(m.run(x=X)["y"], plain)


def test_what_cannot_be_equalized_is_refused():
    with pytest.raises(ArgumentTypeError, match=r"geutil\.model\.open"):
        equalize(tf.Graph())
    m = prepared(opened(plain, IMAGE))
    before = m.graph.as_graph_def()
    with pytest.raises(QuantizeError, match="call equalize before"):
        equalize(m)
    assert m.graph.as_graph_def() == before


def test_less_noise_per_tensor_where_channels_differ_in_size():
    noise = {}
    for way in ("plain", "equalized"):
        m = opened(plain, IMAGE)
        exact = m.run(x=X)["y"]
        if way == "equalized":
            equalize(m)
        quantize(m, is_training=False, per_channel=False)
        calibrate(m, {"x": X}, "min_max")
        noise[way] = decibels(exact, m.run(x=X)["y"])
    assert noise["equalized"] > noise["plain"] + 6.0, noise
