"""Ops that overrides skip: what files make of them, by each scheme."""

import numpy as np
import pytest
import tensorflow as tf

from geutil import model, tflite
from geutil.quantize import (
    Spec,
    compare_int8,
    insert_quant_op,
    quantize,
    to_int8,
    to_tflite,
)
from tests.interpreter import has_floats
from tests.quantize.converted import (
    Together,
    alternate,
    opened,
    samples,
    spec,
    stored_weights,
    types_of,
)
from tests.quantize.small_networks import normal, prepared
from tests.settings import needs_eager
from tests.thorough import chosen

pytestmark = needs_eager

IMAGE = spec(None, 8, 8, 4)
KERNEL, POINT = normal(3, 3, 4, 4) / 4, normal(1, 1, 4, 4, seed=1) / 2
DEPTH, MATRIX = normal(3, 3, 4, 1, seed=2) / 4, normal(4, 4, seed=3) / 2
BIAS, TABLE = normal(4, seed=4), normal(12, 4, seed=5)


def layer(x, kernel=KERNEL, **more):
    return tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME", **more) + BIAS)


def transposed(x):
    shape = [tf.shape(x)[0], 16, 16, 4]
    return tf.nn.conv2d_transpose(x, KERNEL, shape, 2) + BIAS


def looked_up(x):
    return x + tf.gather(TABLE, tf.cast(tf.abs(x[..., 0]), tf.int32))


ALONE = {
    "conv": layer,
    "conv without a bias": lambda x: tf.nn.conv2d(x, KERNEL, 1, "SAME"),
    "dilated conv": lambda x: layer(x, dilations=2),
    "grouped conv": lambda x: layer(x, KERNEL[:, :, :2]),
    "depthwise": lambda x: tf.nn.depthwise_conv2d(x, DEPTH, [1] * 4, "SAME") + BIAS,
    "transposed": transposed,
    "dense": lambda x: tf.reshape(
        tf.nn.relu(tf.reshape(x, [-1, 4]) @ MATRIX + BIAS), [-1, 8, 8, 4]
    ),
    "dense of rank 4": lambda x: tf.nn.bias_add(tf.tensordot(x, MATRIX, 1), BIAS),
    "einsum": lambda x: tf.einsum("abcd,de->abce", x, MATRIX) + BIAS,
    "product": lambda x: tf.matmul(x, x, transpose_b=True)[..., :4],
    "several": lambda x: layer(tf.nn.max_pool2d(layer(layer(x)), 2, 1, "SAME")),
    "branches": lambda x: layer(x) + layer(x, POINT),
    "a bias that two read": lambda x: tf.add(*[tf.nn.conv2d(x, POINT, 1, "SAME")] * 2),
    "add": lambda x: x + tf.nn.relu(x),
    "add of a vector": lambda x: x + BIAS,
    "product with a vector": lambda x: x * BIAS,
    "product with a number": lambda x: x * 0.37,
    "mask": lambda x: x - normal(8, 8, 1),
    "concat": lambda x: tf.concat([x, x * x], 3)[..., 2:6],
    "pack": lambda x: tf.stack([x, -x], 1)[:, 1],
    "max pool": lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"),
    "average pool": lambda x: tf.nn.avg_pool2d(x, 2, 2, "SAME"),
    "mean": lambda x: tf.reduce_mean(x, [1, 2], keepdims=True),
    "relu": tf.nn.relu,
    "relu6": tf.nn.relu6,
    "leaky relu": lambda x: tf.nn.leaky_relu(x, 0.1),
    "prelu": lambda x: tf.nn.relu(x) - np.abs(BIAS) * tf.nn.relu(-x),
    "sigmoid": tf.sigmoid,
    "softmax": tf.nn.softmax,
    "tanh": tf.tanh,
    "gelu": tf.nn.gelu,
    "hard swish": lambda x: x * tf.nn.relu6(x + 3.0) / 6.0,
    "maximum": lambda x: tf.maximum(x, BIAS),
    "pad": lambda x: tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]]),
    "transpose": lambda x: tf.transpose(x, [0, 2, 1, 3]),
    "slice": lambda x: x[:, 1:5],
    "split": lambda x: tf.split(x, 2, 1)[1],
    "resize": lambda x: tf.image.resize(x, [16, 16]),
    "lookup": looked_up,
}


def first(function):
    return lambda x: layer(skipped(function, x))


def middle(function):
    return lambda x: layer(skipped(function, layer(x)))


def last(function):
    return lambda x: (skipped(function, x), layer(x))


def skipped(function, x):
    with tf.name_scope("skipped"):
        return function(x)


def in_blocks(x):
    return skipped(tf.nn.relu, tf.reshape(x, [-1, 2, 4, 2, 4, 4])), layer(x)


PLACES = {"first": first, "middle": middle, "last": last}
FLOAT, CASTS = "float32", ("QUANTIZE", "DEQUANTIZE")
ON_INTEGERS = ("SHAPE", "STRIDED_SLICE", "PACK")
MOST = {"int8": 0.01, "int8x4": 0.01, "int16x8": 5e-4}


@pytest.mark.parametrize("scheme", chosen(MOST, "int8", "int16x8"))
def test_what_is_skipped_computes_in_float(scheme):
    """As the model has it, to within a float32 rounding error where that shows."""
    cases = {
        f"{name}, {place}": (PLACES[place](ALONE[name]), (IMAGE,))
        for name, place in alternate(ALONE, PLACES, every=len(PLACES))
    }
    cases["six dimensions, last"] = in_blocks, (IMAGE,)
    made = Together(cases, scheme=scheme, overrides={"/skipped/": "skip"})
    wrong = {}
    for name, ((exact, file), *_) in made.results().items():
        skips = [e.op for e in made.report.skipped if made.is_of(e.op, name)]
        named = [op for op in made.ops(name) if "/skipped/" in op.result]
        integers = [
            op
            for op in named
            if op.kind not in (*CASTS, *ON_INTEGERS)
            and {"int8", "int16", "int4"}.intersection(types_of(op))
        ]
        apart = np.abs(exact - file).max() / np.abs(exact).max()
        near = apart < (1e-5 if name.endswith("last") else MOST[scheme])
        if not skips or integers or not near:
            wrong[name] = skips, integers, apart
    assert wrong == {}


def three(x):
    """Three convolutions, a sigmoid behind the second, a weight that two share."""
    for name, kernel in (("one", KERNEL), ("two", POINT), ("three", POINT)):
        with tf.name_scope(name):
            x = layer(x, kernel)
            x = tf.sigmoid(x) if name == "two" else x
    return {"y": x}


def opened_three(**choices):
    m = opened(three, IMAGE)
    return prepared(m, samples(m.inputs), **choices)


def by_scopes(*scopes):
    m = opened(three, IMAGE)
    for scope in scopes[:-1]:
        quantize(m, is_training=False, scope=scope)
    return prepared(m, samples(m.inputs), scope=scopes[-1])


def saved(m, path):
    m.save(str(path / "net"))
    return model.open(str(path / "net"))


B_FLOAT = ["DEQUANTIZE", "CONV_2D", "LOGISTIC", "QUANTIZE"]
WAYS = {
    "an override": (lambda path: opened_three(overrides={"^two/": "skip"}), B_FLOAT),
    "scopes around it": (lambda path: by_scopes("one", "three"), B_FLOAT),
    "a scope before, without it": (lambda path: by_scopes("two", "one", "three"), []),
    "a scope again": (lambda path: by_scopes(None, "one"), []),
    "a scope later": (lambda path: by_scopes("one", None), []),
    "no such activation": (
        lambda path: opened_three(activations=["relu"]),
        ["DEQUANTIZE", "LOGISTIC", "QUANTIZE"],
    ),
    "an override, trained": (
        lambda path: opened_three(overrides={"^two/": "skip"}, is_training=True),
        B_FLOAT,
    ),
    "an override, saved": (
        lambda path: saved(opened_three(overrides={"^two/": "skip"}), path),
        B_FLOAT,
    ),
    "an input": (
        lambda path: opened_three(overrides={"^a$": "skip"}),
        ["QUANTIZE"],
    ),
    "all but one": (
        lambda path: opened_three(overrides={"^three/": Spec(), ".": "skip"}),
        ["CONV_2D", "CONV_2D", "LOGISTIC", "QUANTIZE"],
    ),
}


def test_ways_to_leave_an_op_in_float(tmp_path):
    wrong = {}
    for way, (make, expected) in WAYS.items():
        m = make(tmp_path)
        blob = to_int8(m)
        kinds = [op.kind for op in tflite.open(blob).ops if has_floats(op)]
        comparison = compare_int8(m, blob, samples(m.inputs, seed=1))
        if kinds != expected or comparison.missed or comparison.most > 2:
            wrong[way] = kinds, comparison
    assert wrong == {}


@pytest.mark.parametrize("scheme", ["dynamic_range", "weight_only_int4"])
def test_what_is_skipped_keeps_its_weights(scheme):
    # An override is for small layers, too, which dynamic ranges leave in float.
    others = Spec(symmetric_weights=True)
    m = opened_three(scheme=scheme, overrides={"^two/": "skip", ".": others})
    types = [tensor.dtype for _, tensor in stored_weights(to_tflite(m))]
    assert types.count(FLOAT) == 1


def test_a_layer_between_ranges_put_there_by_hand_stays_in_float(caplog):
    m = opened(lambda a: tf.exp(tf.matmul(a, MATRIX, name="product")), spec(None, 4))
    get = m.graph.get_operation_by_name
    for name, reader in (("a", "product"), ("product", "Exp")):
        edge = get(name), [get(reader)]
        insert_quant_op(None, "q", *edge, is_training=False, init_min=-3.0)
    (product,) = [
        op for op in tflite.open(to_int8(m)).ops if op.kind == "FULLY_CONNECTED"
    ]
    assert {t.dtype for t in (*product.reads, *product.outputs)} == {"float32"}
    told = [line for line in caplog.messages if "FULLY_CONNECTED" in line]
    assert any("its weights are not quantized in 8 bits" in line for line in told)
