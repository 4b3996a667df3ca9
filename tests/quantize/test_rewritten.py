"""What the report calls rewritten, and what needs no kernel: forms that are int8."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from geutil.quantize import calibrate, quantize
from tests.interpreter import new_interpreter
from tests.quantize.converted import (
    Together,
    alternate,
    is_simulated,
    opened,
    samples,
    spec,
)
from tests.quantize.small_networks import normal
from tests.select.layer_norms import fused_layer_norm
from tests.settings import needs_eager

pytestmark = needs_eager

# -- activations that are several ops: told by what they compute -----------------------

IMAGE = spec(2, 8, 8, 4)
ALPHA = np.linspace(0.1, 0.4, 4).astype(np.float32)

ONE_OP = {
    "relu(x + 3) by hand": (lambda x: x * tf.nn.relu6(x + 3) / 6, "HARD_SWISH"),
    "hard_silu of Keras": (tf.keras.activations.hard_silu, "HARD_SWISH"),
    "gelu, erf": (tf.nn.gelu, "GELU"),
    "gelu, tanh": (lambda x: tf.nn.gelu(x, approximate=True), "GELU"),
    "gelu of Keras": (tf.keras.activations.gelu, "GELU"),
    "gelu by hand": (lambda x: 0.5 * x * (1 + tf.math.erf(x / math.sqrt(2))), "GELU"),
    "leaky": (lambda x: tf.nn.leaky_relu(x, 0.1), "LEAKY_RELU"),
}


SILU = {
    "silu of Keras": tf.keras.activations.silu,
    "silu": tf.nn.silu,
    "silu by hand": lambda x: x * tf.sigmoid(x),
}
KNOWN = {
    "sigmoid": (tf.sigmoid, (0.0, 255 / 256)),
    "softmax": (tf.nn.softmax, (0.0, 255 / 256)),
    "tanh": (tf.tanh, (-1.0, 127 / 128)),
}


def read_inside(x):
    inner = tf.nn.relu6(x + 3)
    return {"y": x * inner / 6, "inner": inner * 2.0}


NO_COMPOSITE = {
    "read inside": read_inside,
    "something else": lambda x: x * tf.nn.relu6(x + 2) / 6,
}


def test_activations_are_one_kernel_each():
    functions = {name: function for name, (function, _) in ONE_OP.items()}
    functions |= SILU | NO_COMPOSITE
    functions |= {name: function for name, (function, _) in KNOWN.items()}
    made = Together({name: (f, (IMAGE,)) for name, f in functions.items()})
    simulated = [op for op in made.model.graph.get_operations() if is_simulated(op)]
    wrong = {}
    for name, part in made.parts().items():
        rounded = [op for op in simulated if made.is_of(op.name, name)]
        right = not part.floats and part.most <= 1
        if name in ONE_OP:
            entries = [e for e in made.report.quantized if made.is_of(e.op, name)]
            (end,) = {e.kernel for e in entries if e.op_type != "Placeholder"}
            right &= part.kinds == [ONE_OP[name][1]] and len(rounded) == 2
            right &= end in {e.op for e in entries}
        elif name in SILU:
            right &= part.kinds == ["LOGISTIC", "MUL"]
        elif name in NO_COMPOSITE:
            right &= "HARD_SWISH" not in part.kinds
        else:
            (op,) = [op for op in rounded if op.type.endswith("Args")]
            ends = op.get_attr("min"), op.get_attr("max")
            right &= ends == pytest.approx(KNOWN[name][1])
            right &= sum(made.is_of(n, name) for n in made.report.variables) == 2
        if not right:
            wrong[name] = part
    assert wrong == {}


def prelu(x):
    return tf.nn.relu(x) + -tf.constant(ALPHA) * tf.nn.relu(-x)


def test_layers_over_one_axis_are_in_a_row():
    """No Reshape takes an axis away that the next one adds."""
    kernels = [normal(3, 4, 4, seed=n) for n in range(3)]

    def layers(a):
        for kernel in kernels:
            a = tf.nn.relu(tf.nn.conv1d(a, kernel, 1, "SAME"))
        return a

    sizes = {"known": 2, "unknown": None}
    made = Together({n: (layers, (spec(b, 16, 4),)) for n, b in sizes.items()})
    for name, part in made.parts().items():
        assert part.kinds[1:-1] == ["CONV_2D"] * 3, name
        assert (part.is_int8, part.most <= 1) == (True, True), name


def test_prelus_and_layer_norms_are_written_in_forms_that_are_int8():
    start = tf.keras.initializers.Constant(0.3)
    layer = tf.keras.layers.PReLU(start, shared_axes=[1, 2])
    layer.build(IMAGE.shape)
    norm = tf.keras.layers.LayerNormalization()
    norm.build((2, 6, 8))
    rows = (spec(2, 6, 8),)
    made = Together(
        {
            "prelu": (prelu, (IMAGE,)),
            "prelu of Keras": (layer, (IMAGE,)),
            "norm of Keras": (norm, rows),
            "norm of one op": (lambda x: fused_layer_norm(x)[0], rows),
        }
    )
    parts = made.parts()
    assert {name: part for name, part in parts.items() if not part.is_int8} == {}
    assert sorted(parts["prelu"].kinds) == ["ADD", "MINIMUM", "MUL", "QUANTIZE"]
    assert parts["prelu"].most <= 1
    (line,) = parts["prelu"].rewritten
    assert "a PReLU, computes relu(x) + alpha * min(x, 0)" in line
    assert parts["prelu of Keras"].rewritten
    ends = made.model.outputs.items()
    assert all(is_simulated(t.op) for n, t in ends if made.is_of(n, "norm of Keras"))
    (line,) = parts["norm of one op"].rewritten
    assert "a layer norm and computes (x - mean) * rsqrt(variance + epsilon)" in line


def test_a_prelu_computes_what_it_did():
    m = opened(prelu, IMAGE)
    x = np.random.default_rng(0).normal(size=IMAGE.shape).astype(np.float32)
    want = np.where(x > 0, x, ALPHA * x)
    quantize(m, is_training=False, weight_bits=16, activation_bits=16)
    (y,) = m.run(a=x).values()
    assert np.abs(y - want).max() < 1e-3
    before = m.graph.as_graph_def()
    again = quantize(m, is_training=False, weight_bits=16, activation_bits=16)
    assert not again.rewritten
    assert m.graph.as_graph_def() == before
    # One that is not asked for stays.
    report = quantize(
        opened(prelu, IMAGE), is_training=False, overrides={"Relu_1": "skip"}
    )
    assert not any("PReLU" in line for line in report.rewritten)


def test_a_layer_norm_of_one_op_computes_what_it_did():
    m = opened(lambda x: fused_layer_norm(x, 0.01)[0], spec(None, 6, 8))
    x = np.random.default_rng(0).normal(size=(3, 6, 8)).astype(np.float32)
    layer = tf.keras.layers.LayerNormalization(epsilon=0.01)
    data = dict.fromkeys(m.inputs, x)
    quantize(m, is_training=False, weight_bits=16, activation_bits=16)
    calibrate(m, [data], "min_max")
    (y,) = m.run(**data).values()
    np.testing.assert_allclose(y, layer(x), atol=1e-3)


# -- one-hot vectors that are read by what is quantized --------------------------------

MATRIX = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
IDS = spec(6, dtype=tf.int32)
ROWS = spec(6, 4)


def experts(x):
    """Return a mixture: each row is treated by the expert with the largest share."""
    shares = tf.nn.softmax(x @ MATRIX)
    largest, places = tf.math.top_k(shares, 2)
    mask = tf.reduce_sum(tf.one_hot(places, 5) * largest[..., None], 1)
    outputs = tf.stack([x * float(i + 1) for i in range(5)], 1)
    return tf.reduce_sum(outputs * mask[:, :, None], 1)


CASES = {
    "product": (lambda a: tf.one_hot(a, 4) @ MATRIX, (IDS,)),
    "other values": (lambda a: tf.one_hot(a, 4, 2.5, -0.5) @ MATRIX, (IDS,)),
    "axis": (lambda a: tf.matmul(tf.one_hot(a, 6, axis=0), tf.one_hot(a, 6)), (IDS,)),
    "reshaped": (
        lambda a, b: tf.reshape(tf.one_hot(a, 4)[:, None], [6, 4]) * b,
        (IDS, ROWS),
    ),
    "a result": (lambda a, b: (tf.one_hot(a, 4), b + 1.0), (IDS, ROWS)),
    "any batch": (lambda a: tf.one_hot(a, 4) @ MATRIX, (spec(None, dtype=tf.int32),)),
    "a value of data": (
        lambda a, b: tf.one_hot(a, 4, tf.reduce_max(b)) * b,
        (IDS, ROWS),
    ),
    "experts": (experts, (ROWS,)),
}


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_the_graph_computes_the_same(axis):
    def function(a):
        vectors = tf.one_hot(tf.reshape(a, [2, 3]), 4, 3.0, -1.0, axis)
        return tf.reduce_sum(tf.reshape(vectors, [-1, 4]) @ MATRIX, 0)

    m = opened(function, IDS)
    quantize(m, is_training=False, weight_bits=16, activation_bits=16)
    # Also for what is no index.
    ids = np.int32([0, 3, 4, -1, 1, 2])
    # The ranges of "best" reach twice as far, with steps twice as large.
    calibrate(m, {"a": ids}, "min_max")
    (found,) = m.run(a=ids).values()
    np.testing.assert_allclose(found, function(tf.constant(ids)), atol=1e-3)


def test_gradients_pass():
    weights = tf.Variable(MATRIX)
    m = opened(lambda a: {"y": tf.one_hot(a, 4) @ weights}, IDS)
    # A range that is learnt ends at the largest value, which rounding may put outside.
    quantize(m, is_training=False)
    trained = m.to_function()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(trained(a=tf.constant([0, 1, 1, 2, 3, 3]))["y"])
    (gradient,) = tape.gradient(loss, [weights])
    np.testing.assert_allclose(
        gradient, np.tile([[1.0], [2.0], [1.0], [2.0]], 5), rtol=2e-2
    )


def test_one_hots_that_are_left_alone():
    m = opened(CASES["product"][0], IDS)
    report = quantize(m, is_training=False, overrides={"one_hot": "skip"})
    assert report.rewritten == ()
    kinds = [op.type for op in m.graph.get_operations()]
    assert "SelectV2" not in kinds
    assert samples(m.inputs)["a"].dtype == np.int32


def test_places_of_the_largest_alone_are_found_in_float():
    def best(x):
        scores = x @ MATRIX
        _, places = tf.math.top_k(scores, 2)
        return {"y": tf.nn.relu(scores), "best": places}

    part = Together({"best": (best, (ROWS,))}).part()
    skipped = {entry.op_type: entry.reason for entry in part.skipped}
    assert "places only" in skipped["TopKV2"]
    assert "TOPK_V2" in part.kinds


TYPES = {
    "int32": {"dtype": tf.int32},
    "int64": {"dtype": tf.int64, "on_value": 3},
    "uint8": {"dtype": tf.uint8},
    "bool": {"on_value": True, "off_value": False},
}


def cast(reshaped, **options):
    def function(a, b):
        vectors = tf.one_hot(a, 4, **options)
        if reshaped:
            vectors = tf.reshape(vectors, [6, 4])
        return tf.cast(vectors, tf.float32) @ MATRIX + b

    ids = spec(*([2, 3] if reshaped else [6]), dtype=tf.int32)
    return function, (ids, spec(6, 5))


def test_one_hots_are_int8():
    cases = {kind: cast(False, **options) for kind, options in TYPES.items()}
    cases |= {f"reshaped {k}": cast(True, **options) for k, options in TYPES.items()}
    wrong = {}
    for case, part in Together({**CASES, **cases}).parts().items():
        # What is cast from integers that stand in between is a float for that moment.
        moment = ["CAST", "QUANTIZE"] if case.startswith("reshaped ") else []
        right = "ONE_HOT" in part.kinds and part.floats == moment
        if case in CASES:
            right &= not part.skipped and all(
                "(OneHot) chooses by a mask" in line for line in part.rewritten
            )
        if not right or part.coverage < 1.0 or part.most > 2:
            wrong[case] = part
    assert wrong == {}


# -- sums with zeros and products with ones, which a network may have to be trained ----

ONE_IMAGE = spec(1, 8, 8, 4)
random = np.random.default_rng(0)
FIRST = random.normal(size=(3, 3, 4, 4)).astype(np.float32) * 0.3
SECOND = random.normal(size=(2, 2, 4, 4)).astype(np.float32) * 0.1
LAST = random.normal(size=(3, 3, 8, 4)).astype(np.float32) * 0.3
AROUND, NONE = [[0, 0], [0, 1], [0, 1], [0, 0]], [[0, 0]] * 4


def affine(scale, shift, factor):
    """Return learnable affine blocks that are joined, with weights of their own."""
    scales = [tf.Variable(scale) for _ in range(2)]
    shifts = [tf.Variable(shift) for _ in range(2)]

    def block(a, kernel, index):
        y = tf.nn.relu(tf.nn.conv2d(a, kernel, 1, "VALID"))
        return y * scales[index] + shifts[index]

    def function(a):
        padded = tf.pad(block(a, factor * FIRST, 0), AROUND)
        pooled = tf.nn.max_pool2d(padded, 2, 1, "VALID")
        second = block(tf.pad(padded, NONE), factor * SECOND, 1)
        joined = tf.concat([pooled, second], -1)
        return tf.nn.conv2d(joined, factor * LAST, 1, "SAME")

    return function, (ONE_IMAGE,)


NEUTRAL = {
    "sum": lambda y, zeros, ones: y + zeros,
    "reversed": lambda y, zeros, ones: zeros + y,
    "difference": lambda y, zeros, ones: y - zeros,
    "product": lambda y, zeros, ones: y * ones,
    "quotient": lambda y, zeros, ones: y / ones,
    "both": lambda y, zeros, ones: y * ones + zeros,
}


def unchanged(change, rank, factor):
    zeros, ones = (tf.Variable(np.full([4] * rank, v, np.float32)) for v in (0, 1))

    def function(a):
        y = tf.nn.relu(tf.nn.conv2d(a, factor * FIRST, 1, "SAME"))
        changed = change(y, zeros, ones)
        return tf.concat([tf.nn.max_pool2d(changed, 2, 1, "SAME"), 3.0 * y], -1)

    return function, (ONE_IMAGE,)


def numbered(make, cases):
    """Return functions by name, each made with a factor of its own for its weights."""
    return {
        name: make(*case, np.float32(1 + 0.01 * n))
        for n, (name, case) in enumerate(cases.items())
    }


def test_what_a_network_may_have_to_be_trained():
    blocks = itertools.product([1.0, 1.3], [0.0, 0.2])
    cases = numbered(affine, {f"affine {n}": case for n, case in enumerate(blocks)})
    neutral = alternate(NEUTRAL, (0, 1))
    cases |= numbered(
        unchanged, {f"{n} of rank {rank}": (NEUTRAL[n], rank) for n, rank in neutral}
    )
    parts = Together(cases).parts()
    assert {n: p for n, p in parts.items() if not p.is_int8 or p.most > 1} == {}


CONSTANT = {
    "sum": lambda y: y + 0.0,
    "reversed sum": lambda y: 0.0 + y,
    "difference": lambda y: y - tf.zeros([1]),
    "product": lambda y: y * 1.0,
    "reversed product": lambda y: tf.ones([1, 1]) * y,
    "quotient": lambda y: y / 1.0,
    "both": lambda y: (y * 1.0 + 0.0) * 1.0,
}


def between_layers(change, factor):
    bias = factor * np.float32([1, 2, 3, 4])

    def function(a):
        y = change(tf.nn.conv2d(a, factor * FIRST, 1, "SAME"))
        return tf.nn.conv2d(tf.nn.relu(y + bias), factor * FIRST, 1, "SAME")

    return function, (ONE_IMAGE,)


CHANGING = {
    "reversed difference": lambda y: 0.0 - y,
    "reciprocal": lambda y: 1.0 / (1.0 + tf.abs(y)),
    "more axes": lambda y: tf.ones([2, 1, 8, 8, 4])[:, 0] * y,
}


def test_constants_cost_nothing_where_they_change_nothing():
    cases = numbered(between_layers, {name: (f,) for name, f in CONSTANT.items()})
    cases |= {
        name: (lambda a, f=change: f(tf.nn.conv2d(a, FIRST, 1, "SAME")), (ONE_IMAGE,))
        for name, change in CHANGING.items()
    }
    wrong = {}
    for case, part in Together(cases).parts().items():
        if case in CONSTANT:
            right = part.is_int8 and part.kinds == ["CONV_2D", "CONV_2D"]
        else:
            right = case == "reciprocal" or {"Sub", "Mul"} & set(part.types)
        if not right or part.most > (1 if case in CONSTANT else 2):
            wrong[case] = part
    assert wrong == {}


def test_inputs_outputs_and_other_types():
    def function(a, b):
        words = tf.strings.as_string(b) + tf.constant("")
        return {
            "first": a * 1.0,
            "last": tf.nn.relu(tf.nn.conv2d(a, FIRST, 1, "SAME")) + 0.0,
            "whole": tf.gather(tf.range(9.0), b + 0),
            "words": tf.strings.length(words + tf.constant("")),
        }

    m = opened(function, ONE_IMAGE, spec(3, dtype=tf.int32))
    before = samples(m.inputs)
    expected = m.run(**before)
    report = quantize(m, is_training=False)
    assert report.coverage == 1.0
    found = m.run(**before)
    np.testing.assert_array_equal(found["words"], expected["words"])
    np.testing.assert_allclose(found["first"], expected["first"], atol=0.03)


@pytest.mark.parametrize("training", [False, True])
def test_a_product_with_one_is_passed_in_training_too(training):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [1, 8, 8, 4])
        y = tf.nn.conv2d(x, FIRST, 1, "SAME", name="conv")
        z = tf.multiply(1.0, tf.nn.relu(y), name="same")
        tf.nn.conv2d(z, FIRST, 1, "SAME", name="second")
    report = quantize(graph, is_training=training)
    entries = {entry.op: entry for entry in report.quantized}
    assert entries["same"].result is None
    assert "same" not in " ".join(report.variables)


@pytest.mark.parametrize("layer", [tf.nn.conv2d, tf.nn.depthwise_conv2d])
def test_names_of_what_rounds_weights_take_little_room(layer):
    strides = [1, 1, 1, 1]
    function = lambda a: layer(a, FIRST, strides, "SAME", name="conv") + 1.0  # noqa: E731
    interpreter = new_interpreter(Together({"layer": (function, (ONE_IMAGE,))}).blob)
    names = [d["name"] for d in interpreter.get_tensor_details()]
    assert not any("weights_quant" in name for name in names)
    assert any("conv" in name for name in names)
