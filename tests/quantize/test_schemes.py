"""Files of every scheme against what is simulated, and against the float network."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from geutil import model, tflite
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import (
    Spec,
    arena_bytes,
    calibrate,
    compare_int8,
    least_memory_order,
    quantize,
    to_int8,
    to_tflite,
)
from tests.batchnorm.calibrated import with_calibrated_norms
from tests.quantize.converted import (
    Together,
    alternate,
    both_results,
    decibels,
    opened,
    refused,
    spec,
    stored_weights,
)
from tests.quantize.kernelwise import kernels_apart
from tests.quantize.small_networks import branch_weights, normal, separable
from tests.quantize.small_networks import two_branches as branches
from tests.settings import needs_eager

pytestmark = needs_eager

ACTIVATION_BITS = {
    "int8": 8,
    "int8x4": 8,
    "int16x8": 16,
    "dynamic_range": None,
    "dynamic_range_int4": None,
    "weight_only_int8": None,
    "weight_only_int4": None,
}
"""The schemes that store integers; None where activations are floats in a file."""
WEIGHTS_ONLY = [name for name, bits in ACTIVATION_BITS.items() if bits is None]
AT_RUN_TIME = ("dynamic_range", "dynamic_range_int4")
PIXELS = 32
KERNEL = normal(3, 3, 3, 8)


def attention(x):
    """Two heads that attend to rows, layer norm, GELU and a table of positions."""
    rows = x + normal(6, 16, seed=9)
    mean = tf.reduce_mean(rows, -1, keepdims=True)
    spread = tf.reduce_mean(tf.math.squared_difference(rows, mean), -1, keepdims=True)
    rows = (rows - mean) * tf.math.rsqrt(spread + 1e-3) * 1.1 + 0.1
    made = [tf.einsum("abc,cd->abd", rows, normal(16, 16, seed=s)) for s in (1, 2, 3)]
    query, key, value = (
        tf.transpose(tf.reshape(t, [-1, 6, 2, 8]), [0, 2, 1, 3]) for t in made
    )
    shares = tf.nn.softmax(tf.matmul(query, key, transpose_b=True) * 0.1)
    heads = tf.transpose(tf.matmul(shares, value), [0, 2, 1, 3])
    mixed = tf.reshape(heads, [-1, 6, 16])
    hidden = tf.nn.gelu(tf.einsum("abc,cd->abd", mixed, normal(16, 32, seed=4)))
    return {"y": tf.einsum("abc,cd->abd", hidden, normal(32, 16, seed=5))}


def branching():
    weights = branch_weights()
    m = opened(lambda x: branches(x, weights), spec(1, 8, 8, 3, name="x"))
    return m, [{"x": normal(1, 8, 8, 3, seed=20 + i)} for i in range(6)]


@pytest.fixture(scope="module")
def mobile():
    """A network like a MobileNet."""
    tf.keras.utils.set_random_seed(0)
    images = normal(16, PIXELS, PIXELS, 3, seed=5)
    m = model.open(with_calibrated_norms(separable(images, 32), images))
    fold_batch_norms(m)
    return m


def types_of_weights(blob):
    """Return by type of op the types of its second input, where that is constant."""
    found = {}
    for kind, tensor in stored_weights(blob):
        found.setdefault(kind, set()).add(tensor.dtype)
    return found


def sharing(layer, *weights):
    """Return a network of three layers that read the same weights, or equal ones."""
    variables = [tf.Variable(value) for value in weights]

    def network(x):
        first = tf.nn.relu(layer(x, variables[0]) * 0.3)
        return tf.tanh(layer(first, variables[-1])) + layer(x[:, ::-1], variables[-1])

    return network, (spec(1, 8, 8, 4),), {"low": -2.0, "high": 2.0}


def conv(x, w):
    return tf.nn.conv2d(x, w, 1, "SAME")


def shared_weights():
    return {
        "shared": sharing(conv, normal(3, 3, 4, 4)),
        "equal": sharing(conv, *[normal(3, 3, 4, 4, seed=3)] * 2),
        "dense": sharing(lambda x, w: tf.tensordot(x, w, 1), normal(4, 4, seed=1)),
        "depthwise": sharing(
            lambda x, w: tf.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], "SAME"),
            normal(3, 3, 4, 1, seed=2),
        ),
        "transposed": sharing(
            lambda x, w: tf.nn.conv2d_transpose(x, w, tf.shape(x), 1),
            normal(3, 3, 4, 4, seed=4),
        ),
    }


def convolved(x, kernel):
    return tf.nn.conv2d(x, kernel[:, :, : x.shape[-1]], 1, "VALID")


FACTOR_LAYERS = {
    "conv": lambda f, k: lambda x: convolved(f(x), k),
    "depthwise": lambda f, k: (
        lambda x: tf.nn.depthwise_conv2d(f(x), k[..., :1], [1, 1, 1, 1], "VALID")
    ),
    "padded": lambda f, k: (
        lambda x: convolved(tf.pad(f(x), [[0, 0], [1, 1], [1, 1], [0, 0]]), k)
    ),
    "one channel": lambda f, k: lambda x: convolved(f(x[..., :1]), k),
    "two layers": lambda f, k: (
        lambda x: convolved(f(convolved(x, k))[..., :3], k[::-1])
    ),
    "behind": lambda f, k: lambda x: f(convolved(x, k)),
}
FACTORS = {
    "small": lambda x: x * (1 / 255),
    "large": lambda x: 100.0 * x,
    "quotient": lambda x: x / 127.5,
    "several axes": lambda x: x * tf.fill([1, 1, 1, 1], 0.003),
    "sum": lambda x: (x + 1.0) * 0.003,
    "between": lambda x: x / 127.5 - 1.0,
}
FACTOR_SCHEMES = ("weight_only_int8", "weight_only_int4", "dynamic_range")


def scaled_data(scheme):
    """Return layers before or behind which a number scales the data.

    The converter takes it for weights: behind images that are scaled by 1/255 it made
    weights of zeros, which it multiplied, and stored in the steps that they had before.
    Each has weights of its own.
    """
    rows = alternate(FACTOR_SCHEMES, FACTOR_LAYERS, FACTORS, every=len(FACTOR_SCHEMES))
    return {
        f"{layer}, {factor}": (
            FACTOR_LAYERS[layer](FACTORS[factor], KERNEL * np.float32(1 + 0.01 * n)),
            (spec(1, 8, 8, 3),),
        )
        for n, (of, layer, factor) in enumerate(rows)
        if of == scheme
    }


@pytest.mark.parametrize("scheme", ACTIVATION_BITS)
def test_files_compute_what_is_simulated(scheme, caplog):
    """And the weights that layers share are stored once.

    The converter stores what several ops read of a FakeQuant op in float.
    """
    ends = {"low": -2.0, "high": 2.0}
    networks = {
        "branching": (
            lambda x: branches(x, branch_weights()),
            (spec(6, 8, 8, 3),),
            ends,
        ),
        "attention": (attention, (spec(6, 6, 16),), ends),
    }
    shared, scaled = shared_weights(), scaled_data(scheme)
    # An override is for small layers, too, which the scheme leaves in float.
    all_layers = {".": Spec(symmetric_weights=True)}
    made = Together(
        {**networks, **shared, **scaled}, scheme=scheme, overrides=all_layers
    )
    told = [r.message for r in caplog.records if "computes in float" in r.message]
    may_be_float = ["transposed"] if scheme in AT_RUN_TIME else []
    # Of 8 bits a step is 1/255 of what they span, of 16 1/65535.
    bits = ACTIVATION_BITS[scheme]
    wrong = {}
    for case, ((simulated, found),) in made.results().items():
        if case in scaled:
            (given,) = (v for n, v in made.data.items() if made.is_of(n, case))
            exact = scaled[case][0](tf.constant(given)).numpy()
            span = np.abs(exact).max()
            off = np.abs(found - simulated).max(), np.abs(found - exact).max()
            if off[0] > 1e-5 * span or off[1] >= 0.2 * span:
                wrong[case] = off
            continue
        if case in shared:
            wanted = {8: 25.0, 16: 60.0, None: 80.0}[bits]
            weights = [
                t
                for t in made.tensors(case)
                if t.dtype in ("int8", "int4") and t.stored_bytes
                if np.prod(t.shape) >= 16
            ]
            assert len({id(t.buffer) for t in weights}) == 1, case
            if case not in may_be_float:
                assert not any(f"'{case}/" in line for line in told), case
        else:
            wanted = {8: 20.0, 16: 45.0, None: 80.0}[bits]
            wanted = 25.0 if scheme in AT_RUN_TIME else wanted
        assert decibels(simulated, found) > wanted, case
    assert wrong == {}


@pytest.mark.parametrize("scheme", WEIGHTS_ONLY)
def test_weights_are_rounded_to_nearest_without_data(scheme, mobile):
    """A file of a float model is that of one whose weights were quantized."""
    m = mobile.cut()
    before = len(m.graph.get_operations())
    blob = to_tflite(m, scheme=scheme)
    assert len(m.graph.get_operations()) == before
    quantized = mobile.cut()
    report = quantize(quantized, scheme=scheme, is_training=False)
    assert report.coverage == 1.0
    assert all(entry.result is None for entry in report.quantized)
    assert to_tflite(quantized, scheme=scheme) == blob
    kinds = types_of_weights(blob)
    fewer = {"int4" if scheme == "weight_only_int4" else "int8"}
    if scheme in AT_RUN_TIME:
        # The layers have fewer than 1,024 weights.
        fewer = {"float32"}
    assert kinds["CONV_2D"] == fewer
    in_blocks = scheme == "dynamic_range_int4"
    assert kinds["FULLY_CONNECTED"] == ({"int4"} if in_blocks else fewer)


def test_stored_weights_are_the_rounded_ones():
    """By the formula: w = step * q, with the largest of a channel at 127 steps."""
    matrix = normal(24, 10, seed=7)
    m = opened(lambda x: {"y": tf.matmul(x, matrix)}, spec(1, 24, name="x"))
    blob = to_tflite(m, scheme="weight_only_int8")
    steps = np.abs(matrix).max(0) / 127
    rounded = np.round(matrix / steps) * steps
    data = [{"x": np.eye(24, dtype=np.float32)[i : i + 1]} for i in range(24)]
    _, found = both_results(m, blob, data)["y"]
    np.testing.assert_allclose(found, rounded, rtol=1e-5, atol=1e-6)


def test_half_floats_are_half_the_size():
    matrix = normal(128, 128, seed=7)
    m = opened(lambda x: {"y": tf.matmul(x, matrix)}, spec(4, 128, name="x"))
    plain = tf.lite.TFLiteConverter.from_concrete_functions([m.concrete_function()])
    blob = to_tflite(m, scheme="float16")
    assert len(blob) < 0.6 * len(plain.convert())
    # Weights have 11 bits: 66 dB.
    data = [{"x": normal(4, 128, seed=8)}]
    assert decibels(*both_results(m, blob, data)["y"]) > 60


def test_fewer_bits_are_stored_on_their_levels_in_one_file_too():
    cases, overrides = {}, {}
    for bits in (2, 3, 4, 5, 6, 7):
        weights = {
            name: normal(*value.shape, seed=10 * bits + n)
            for n, (name, value) in enumerate(branch_weights().items())
        }
        function = functools.partial(branches, weights=weights)
        cases[f"bits {bits}"] = function, (spec(1, 8, 8, 3),)
        layers = f"^bits_{bits}/(left/conv|right/depthwise|dense/product)$"
        overrides[layers] = Spec(weight_bits=bits)
    made = Together(cases, overrides=overrides)
    wrong = {}
    for case, part in made.parts().items():
        stored = {
            t.shape: t.dtype
            for t in made.tensors(case)
            if t.stored_bytes and len(t.shape) > 1
        }
        few = "int4" if case < "bits 5" else "int8"
        wanted = {(4, 3, 3, 3): few, (1, 3, 3, 6): "int8", (5, 10): few}
        # Each of the three layers may round the other way.
        if part.most > 2 or stored != wanted:
            wrong[case] = stored, part
    assert wrong == {}


def test_ranges_wider_than_the_weights_are_stored_as_they_are():
    """The converter would find steps of its own, from the largest weight."""
    matrix = normal(16, 8, seed=3)
    m = opened(
        lambda x: {"y": tf.nn.bias_add(tf.matmul(x, matrix), normal(8, seed=4))},
        spec(4, 16, name="x"),
    )
    report = quantize(m, is_training=False)
    data = [{"x": normal(4, 16, seed=i)} for i in range(4)]
    calibrate(m, data, "min_max")
    for name, variable in report.variables.items():
        if name.startswith("MatMul/weights_quant"):
            variable.assign(variable * np.linspace(1.0, 1.7, 8).astype(np.float32))
    blob = to_int8(m)
    assert compare_int8(m, blob, data).most <= 1
    (op,) = tflite.open(blob).ops
    steps = op.inputs[1].quantization.scales
    wider = np.abs(matrix).max(0) * np.linspace(1.0, 1.7, 8) / 127
    np.testing.assert_allclose(steps, wider, rtol=1e-5)


def test_refusals():
    m, data = branching()
    refused(lambda: quantize(m, scheme="int5"), "no scheme 'int5'", "int16x8")
    refused(lambda: quantize(m, scheme="float16"), "quantizes nothing", "to_tflite")
    refused(lambda: quantize(m, scheme="int8", weight_bits=4), "weight_bits=4 is given")
    refused(lambda: to_tflite(m), "no FakeQuant op", "scheme=")
    refused(lambda: to_tflite(m, scheme="int16x8"), "simulates no activations")
    quantize(m, scheme="int16x8", is_training=False)
    refused(lambda: to_tflite(m), "as they were initialized")
    refused(lambda: to_tflite(m, scheme="int8"), "simulates 16")
    refused(lambda: to_tflite(m, scheme="weight_only_int8"), "leaves activations")
    refused(lambda: to_tflite(m, scheme="float16"), "holds FakeQuant ops")
    calibrate(m, data, "min_max")
    assert to_tflite(m) == to_tflite(m, scheme="int16x8")


def test_training_learns_ranges_of_weights_alone():
    m, data = branching()
    report = quantize(m, scheme="weight_only_int8")
    assert {name.rpartition("/")[0] for name in report.variables} == {
        "left/weights_quant",
        "right/weights_quant",
        "dense/weights_quant",
    }
    m.run(**data[0])
    assert decibels(*both_results(m, to_tflite(m), data)["y"]) > 80


def test_grouped_convolutions_keep_bytes():
    """TFLite's kernels of 4 bits for them unpack the weights each time."""
    grouped, plain = normal(3, 3, 2, 8), normal(3, 3, 8, 8, seed=1)

    def network(x):
        x = tf.nn.relu(tf.nn.conv2d(x, grouped, 1, "SAME"))
        return {"y": tf.nn.conv2d(x, plain, 1, "SAME")}

    m = opened(network, spec(1, 8, 8, 4, name="x"))
    report = quantize(m, scheme="int8x4", is_training=False)
    assert [q.weights.bits for q in report.quantized if q.weights] == [8, 4]
    data = [{"x": normal(1, 8, 8, 4, seed=5)}]
    calibrate(m, data, "min_max")
    assert types_of_weights(to_tflite(m))["CONV_2D"] == {"int8", "int4"}
    few = opened(network, spec(1, 8, 8, 4, name="x"))
    quantize(few, weight_bits=4, is_training=False)
    calibrate(few, data, "min_max")
    blob = to_int8(few)
    assert types_of_weights(blob)["CONV_2D"] == {"int8", "int4"}
    assert max(kernel.most for kernel in kernels_apart(few, blob, data[0])) <= 1


def test_dynamic_ranges_leave_what_is_faster_in_float(caplog):
    caplog.set_level("INFO", "geutil")
    large, small = normal(3, 3, 16, 16), normal(1, 1, 128, 4, seed=1)
    depthwise = normal(3, 3, 16, 8, seed=2)

    def network(x):
        x = tf.nn.relu(tf.nn.conv2d(x, large, 1, "SAME"))
        x = tf.nn.depthwise_conv2d(x, depthwise, [1, 1, 1, 1], "SAME")
        return {"y": tf.nn.conv2d(x, small, 1, "SAME")}

    m = opened(network, spec(1, 8, 8, 16, name="x"))
    file = tflite.open(to_tflite(m, scheme="dynamic_range"))
    read = [op.inputs[1] for op in file.ops if len(op.inputs) > 1]
    stored = [t.producer.inputs[0] if t.producer else t for t in read]
    assert [(t.shape, t.dtype, u.dtype) for t, u in zip(read, stored, strict=True)] == [
        ((16, 3, 3, 16), "int8", "int8"),
        ((1, 3, 3, 128), "float32", "int8"),
        ((4, 1, 1, 128), "float32", "float32"),
    ]
    (few,) = quantize(m.cut(), scheme="dynamic_range", is_training=False).skipped[-1:]
    why = "with 512 weights, rounding data as it runs takes longer than it saves"
    assert few.reason == why
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    stored_in_8 = m.cut()
    quantize(stored_in_8, scheme="weight_only_int8", is_training=False)
    to_tflite(stored_in_8, scheme="dynamic_range")
    assert why in caplog.text
    assert "DEPTHWISE_CONV_2D 'y" not in caplog.text
    assert "kernel that rounds data as it runs takes longer" in caplog.text


def test_files_in_the_order_of_least_memory(caplog):
    caplog.set_level("INFO", "geutil")
    m, data = branching()
    quantize(m, is_training=False)
    calibrate(m, data, "min_max")
    blob = to_tflite(m)
    ordered = to_tflite(m, order="least_memory")
    assert ordered == least_memory_order(blob).blob
    assert "to_tflite: arena " in caplog.text
    assert arena_bytes(ordered) <= arena_bytes(blob)
    refused(lambda: to_tflite(m, order="random"), "no order 'random'", "least_memory")


def test_layers_whose_weights_are_lost_are_told(monkeypatch, caplog):
    place = "geutil.quantize.tflite.deployment.part_weights"
    monkeypatch.setattr(place, lambda graph: None)
    Together({"shared": sharing(conv, normal(3, 3, 4, 4))}, scheme="weight_only_int8")
    reason = "computes in float: the converter stores its weights in float"
    told = [r.message for r in caplog.records if reason in r.message]
    assert len(told) == 3
    assert all("CONV_2D" in line for line in told)
