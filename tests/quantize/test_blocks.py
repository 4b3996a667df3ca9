"""Weights in blocks of inputs, against numpy and against what LiteRT computes."""

import functools
import logging
from unittest import mock

import numpy as np
import tensorflow as tf
from parameterized import parameterized

from geutil import model, tflite
from geutil.quantize import (
    Spec,
    calibrate,
    choose_bits,
    least_memory_order,
    quantize,
    to_int8,
    to_tflite,
)
from geutil.quantize.planning.network import quantized_value
from geutil.quantize.spec import Format
from geutil.quantize.tflite.deployment import converted, deployed
from geutil.quantize.tflite.stored_weights import (
    block_matrices,
    check_all_found,
    store_in_blocks,
)
from geutil.tflite import LiteOp
from tests.interpreter import new_interpreter
from tests.quantize.converted import Together, decibels, opened, refused, spec
from tests.quantize.small_networks import normal, prepared
from tests.settings import needs_eager

pytestmark = needs_eager

SCHEME = "dynamic_range_int4"
BLOCK = 32
# Rows that differ tenfold, block by block and within each.
MATRIX = normal(96, 40, seed=1) * np.repeat([1.0, 10.0, 0.1], 32)[:, None]
MATRIX = np.float32(MATRIX * np.tile([1.0, 3.0], 48)[:, None])
X = normal(4, 96, seed=2)


def rounded(matrix, bits=4):
    """Return a matrix [inputs, outputs] in blocks: block by block, from the text.

    A step is the float16 next to a seventh of the largest weight.
    """
    most = 2 ** (bits - 1) - 1
    result = np.empty_like(matrix)
    for start in range(0, len(matrix), BLOCK):
        for column in range(matrix.shape[1]):
            block = matrix[start : start + BLOCK, column]
            step = np.float32(np.float16(np.abs(block).max() / np.float32(most)))
            levels = np.floor(block / step + 0.5) if step else np.zeros_like(block)
            result[start : start + BLOCK, column] = step * np.clip(levels, -most, most)
    return result


def dense(x):
    return {"y": tf.matmul(x, MATRIX, name="dense")}


def stored_in(tensors):
    """Return the matrices [inputs, outputs] in blocks among tensors of a file."""
    found = []
    for tensor in tensors:
        blocks = tensor.quantization
        if tensor.dtype != "int4" or not blocks or not blocks.block:
            continue
        assert blocks.block == BLOCK
        assert blocks.block_scales.dtype == "float16"
        steps = np.float32(blocks.block_scales.value)
        assert (steps > 0).all()
        found.append((np.float32(tensor.value) * np.repeat(steps, BLOCK, 1)).T)
    return found


def in_file(blob):
    """Return the matrices that products of a file read in blocks."""
    ops = tflite.open(blob).ops
    return stored_in(op.inputs[1] for op in ops if op.kind == "FULLY_CONNECTED")


def run(blob, x):
    return new_interpreter(blob).get_signature_runner()(x=x)["y"]


def quantized(function, *shape, **options):
    m = opened(function, spec(*shape, name="x"))
    report = quantize(m, scheme=SCHEME, is_training=False, **options)
    return m, report


@functools.cache
def dense_file():
    """Return the model of one layer, which nothing changes, and its file."""
    m, _ = quantized(dense, 4, 96)
    return m, to_tflite(m)


HEADS, JOINED = normal(64, 4, 12, seed=3), normal(4, 16, 24, seed=4)
SQUARE = normal(64, 64, seed=5)
LAYOUTS = [
    ("matrix", [4, 96], MATRIX, tf.matmul),
    ("scaled", [4, 96], MATRIX, lambda x, w: tf.matmul(x, w) * normal(40, seed=6)),
    (
        "transposed",
        [4, 96],
        MATRIX,
        lambda x, w: tf.matmul(x, tf.constant(w.T), transpose_b=True),
    ),
    ("batches", [2, 3, 96], MATRIX, tf.matmul),
    ("any batch", [None, 3, 96], MATRIX, lambda x, w: tf.tensordot(x, w, 1)),
    ("biased", [2, 3, 96], MATRIX, lambda x, w: tf.matmul(x, w) + normal(40, seed=7)),
    ("einsum", [2, 3, 96], MATRIX, lambda x, w: tf.einsum("abc,cd->abd", x, w)),
    (
        "einsum, transposed",
        [2, 3, 96],
        MATRIX,
        lambda x, w: tf.einsum("abc,dc->abd", x, tf.constant(w.T)),
    ),
    (
        "into heads",
        [2, 3, 64],
        HEADS.reshape(64, 48),
        lambda x, w: tf.einsum("abc,cde->abde", x, w.reshape(64, 4, 12)),
    ),
    (
        "into heads, transposed",
        [2, 3, 64],
        HEADS.reshape(64, 48),
        lambda x, w: tf.einsum("abc,dec->abde", x, w.T.reshape(4, 12, 64)),
    ),
    (
        "out of heads",
        [2, 3, 4, 16],
        JOINED.reshape(64, 24),
        lambda x, w: tf.einsum("abcd,cde->abe", x, w.reshape(4, 16, 24)),
    ),
    ("relu", [4, 96], MATRIX, lambda x, w: tf.nn.relu(tf.matmul(x, w))),
    ("relu6", [4, 96], 0.02 * MATRIX, lambda x, w: tf.nn.relu6(tf.matmul(x, w))),
    (
        "a block of zeros",
        [4, 96],
        MATRIX * np.repeat(np.float32([1, 0, 1e-5]), 32)[:, None],
        tf.matmul,
    ),
]


FEWER = {"of 2 bits": 2, "of 3 bits": 3}
LAYOUTS += [(name, [4, 96], MATRIX, tf.matmul) for name in FEWER]


def test_layers_compute_with_rounded_blocks():
    """Simulation and file against numpy: weights exactly, results to 8-bit data."""
    layouts = {
        name: (shape, np.float32(1 + 0.01 * n) * matrix, layer)
        for n, (name, shape, matrix, layer) in enumerate(LAYOUTS)
    }
    made = Together(
        {
            name: (lambda x, f=layer, w=matrix: f(x, w), (spec(*shape),))
            for name, (shape, matrix, layer) in layouts.items()
        },
        scheme=SCHEME,
        overrides={f"of_{n}_bits/MatMul": Spec(weight_bits=n) for n in FEWER.values()},
    )
    simulated = made.model.run(**made.data)
    found = [
        new_interpreter(made.blob, delegates=delegates).get_signature_runner()(
            **made.data
        )
        for delegates in (False, True)
    ]
    for name, (_, matrix, layer) in layouts.items():
        (entry,) = (
            e for e in made.report.quantized if e.weights and made.is_of(e.op, name)
        )
        bits = FEWER.get(name, 4)
        assert str(entry.weights) == f"{bits} bits, symmetric, by blocks of 32", name
        assert not entry.note, name
        wanted = rounded(matrix, bits)
        (stored,) = stored_in(made.tensors(name))
        np.testing.assert_array_equal(stored, wanted, name)
        (x,) = (v for n, v in made.data.items() if made.is_of(n, name))
        (end,) = (n for n in simulated if made.is_of(n, name))
        exact = layer(x, wanted).numpy()
        np.testing.assert_allclose(
            simulated[end], exact, rtol=1e-4, atol=1e-4, err_msg=name
        )
        for values in found:
            # Data are rounded to half a step of 255 in their span: 40 dB and more.
            assert decibels(exact, values[end]) > 36, name


def test_results_are_off_by_rounded_data_only():
    """Each result is within half a step of the data, times the sum of its weights."""
    found = run(dense_file()[1], X)
    wanted = rounded(MATRIX)
    spans = np.maximum(X.max(1), 0) - np.minimum(X.min(1), 0)
    bound = spans[:, None] / 255 / 2 * np.abs(wanted).sum(0)
    assert (np.abs(found - X @ wanted) <= 1.05 * bound).all()


def encoder(x):
    """A block of a transformer whose norms scale their channels, as trained ones do."""
    scales = np.float32(10.0 ** np.random.default_rng(9).uniform(-1, 0, 64))

    def norm(rows):
        rows = rows - tf.reduce_mean(rows, -1, keepdims=True)
        spread = tf.reduce_mean(tf.square(rows), -1, keepdims=True)
        return rows * tf.math.rsqrt(spread + 1e-3) * scales

    def kernel(*shape, seed):
        # What reads small channels has large weights.
        size = (1 / scales if shape[0] == 64 else np.ones(shape[0])).reshape(-1, 1)
        return np.float32(normal(*shape, seed=seed) * size / np.sqrt(shape[0]))

    y = norm(x)
    query, key, value = (
        tf.einsum("abc,cde->abde", y, kernel(64, 64, seed=s).reshape(64, 4, 16))
        for s in (11, 12, 13)
    )
    shares = tf.nn.softmax(tf.einsum("aqhd,akhd->ahqk", query, key) * 0.25)
    mixed = tf.einsum("ahqk,akhd->aqhd", shares, value)
    joined = normal(4, 16, 64, seed=14) / 8
    x = x + tf.einsum("abcd,cde->abe", mixed, joined)
    y = tf.nn.relu(tf.matmul(norm(x), kernel(64, 128, seed=15)))
    return {"y": x + tf.matmul(y, kernel(128, 64, seed=16))}


def test_a_transformer_in_blocks():
    exact = opened(encoder, spec(2, 6, 64, name="x"))
    data = [{"x": normal(2, 6, 64, seed=20 + i)} for i in range(4)]
    wanted = np.concatenate([exact.run(**batch)["y"] for batch in data])
    noise, size = {}, {}
    for scheme in ("weight_only_int4", "dynamic_range", SCHEME):
        m = opened(encoder, spec(2, 6, 64, name="x"))
        report = quantize(m, scheme=scheme, is_training=False)
        found = np.concatenate([m.run(**batch)["y"] for batch in data])
        noise[scheme] = decibels(wanted, found)
        blob = to_tflite(m, scheme=scheme)
        size[scheme] = len(blob)
        if scheme == SCHEME:
            assert (
                len(in_file(blob))
                == sum(e.weights is not None for e in report.quantized)
                == 6
            )
            for batch in data:
                stored = run(blob, batch["x"])
                assert decibels(m.run(**batch)["y"], stored) > 30
    assert noise[SCHEME] > noise["weight_only_int4"] + 2
    assert size[SCHEME] < 0.7 * size["dynamic_range"]


NOT_IN_BLOCKS = [
    (
        [4, 100],
        lambda x: tf.matmul(x, normal(100, 8)),
        "its 100 inputs are no multiple",
    ),
    ([3, 4, 64], lambda x: tf.matmul(x, normal(3, 64, 8)), "several matrices"),
    (
        [2, 3, 16, 4],
        lambda x: tf.einsum("abdc,cde->abe", x, JOINED),
        "do not lie in a row",
    ),
    ([2, 3, 64], lambda x: tf.einsum("cd,abc->abd", SQUARE, x), "before the data"),
    ([1, 4, 4, 64], lambda x: tf.nn.conv2d(x, normal(1, 1, 64, 8), 1, "SAME"), ""),
]


def test_other_layers_have_8_bits_and_the_report_says_why():
    made = Together(
        {
            f"layer {n}": (layer, (spec(*shape),))
            for n, (shape, layer, _) in enumerate(NOT_IN_BLOCKS)
        },
        scheme=SCHEME,
        # Else those of few weights are left in float.
        overrides={".": Spec(symmetric_weights=True)},
    )
    assert in_file(made.blob) == []
    for n, (*_, reason) in enumerate(NOT_IN_BLOCKS):
        (entry,) = (e for e in made.report.quantized if made.is_of(e.op, f"layer {n}"))
        assert entry.weights.bits == 8
        assert entry.weights.block is None
        assert reason in entry.note
        assert bool(reason) == bool(entry.note)
        assert entry.note in str(made.report)


def test_weights_that_are_read_along_other_axes_have_one_range():
    def tied(x):
        kernel = tf.Variable(SQUARE) if not kernels else kernels[0]
        kernels[:] = [kernel]
        y = tf.matmul(x, kernel, name="down")
        return {"y": tf.matmul(y, kernel, transpose_b=True, name="up")}

    kernels: list[tf.Variable] = []
    m, report = quantized(tied, 4, 64)
    for entry in report.quantized:
        assert entry.weights == Format(8, True, True)
        assert "others read them along other axes" in entry.note
    exact = m.run(x=normal(4, 64, seed=3))["y"]
    found = run(to_tflite(m, scheme=SCHEME), normal(4, 64, seed=3))
    assert decibels(exact, found) > 30


def test_weights_that_are_read_twice_alike_are_in_blocks():
    kernel = normal(128, 128, seed=5)

    def twice(x):
        return {"y": tf.matmul(tf.nn.tanh(tf.matmul(x, kernel)), kernel)}

    m, _ = quantized(twice, 4, 128)
    blob = to_tflite(m)
    first, second = in_file(blob)
    np.testing.assert_array_equal(first, rounded(kernel))
    np.testing.assert_array_equal(second, first)
    # Once in the file: 4 bits each, and 2 bytes for each 32.
    assert len(blob) < 1.5 * kernel.size * (4 / 8 + 2 / 32)


def test_matrices_of_zeros_and_square_ones_of_equal_levels_are_told_apart():
    zeros = np.zeros((64, 64), np.float32)
    alike = np.float32(np.broadcast_to(np.linspace(0.5, 2.0, 64), (64, 64)))

    def network(x):
        y = tf.matmul(tf.matmul(x, zeros), zeros)
        return {"y": y + tf.matmul(x, SQUARE), "z": tf.matmul(x, alike)}

    m, _ = quantized(network, 4, 64)
    matrices = in_file(to_tflite(m))
    assert len(matrices) == 4
    for wanted, count in ((zeros, 2), (SQUARE, 1), (alike, 1)):
        found = [np.array_equal(each, rounded(wanted)) for each in matrices]
        assert sum(found) == count


@parameterized.expand(
    [
        (Spec(weight_bits=8), Format(8, True, True, (1,)), "no kernel for blocks of 8"),
        (Spec(per_channel=False), Format(8, True, True), "parts of channels"),
        (Spec(symmetric_weights=False), Format(8), "blocks are symmetric"),
    ]
)
def test_overrides_keep_layers_out_of_blocks(override, form, reason):
    _, report = quantized(dense, 4, 96, overrides={"dense": override})
    assert report.quantized[0].weights == form
    assert reason in report.quantized[0].note


@parameterized.expand([("gptq",), ("adaround",)])
def test_weights_are_rounded_by_data_within_their_blocks(rounding):
    data = [
        {"x": normal(64, 96, seed=30 + i) @ normal(96, 96, seed=29)} for i in range(2)
    ]
    m = prepared(opened(dense, spec(None, 96, name="x")), scheme=SCHEME)
    exact = [batch["x"] @ MATRIX for batch in data]
    nearest = [m.run(**batch)["y"] for batch in data]
    report = calibrate(m, data, rounding=rounding)
    found = [m.run(**batch)["y"] for batch in data]
    assert decibels(np.array(exact), np.array(found)) > decibels(
        np.array(exact), np.array(nearest)
    )
    assert [layer.op for layer in report.layers] == ["dense"]
    assert "120 blocks" in str(report)
    # Ranges are clipped, and still have steps that a file stores.
    (stored,) = in_file(to_tflite(m))
    for batch, made in zip(data, found, strict=True):
        np.testing.assert_allclose(batch["x"] @ stored, made, rtol=1e-4, atol=1e-2)


def test_training_moves_blocks_along():
    kernel = tf.Variable(MATRIX)
    m = opened(
        lambda x: {"y": tf.matmul(x, kernel, name="dense")}, spec(4, 96, name="x")
    )
    report = quantize(m, scheme=SCHEME, quant_delay=2)
    assert set(report.variables) == {
        "dense/weights_quant/min",
        "dense/weights_quant/max",
    }
    assert report.variables["dense/weights_quant/max"].shape == [3 * 40]
    # The report tells what the variable is quantized to.
    reads = [op for op in m.graph.get_operations() if op.type == "ReadVariableOp"]
    (read,) = [op for op in reads if op.outputs[0].shape == MATRIX.shape]
    product = m.graph.get_operation_by_name("dense")
    assert report.tensor(read.outputs[0]) is product.inputs[1]
    function = m.concrete_function()
    results = []
    for _ in range(3):
        before = kernel.numpy()
        with tf.GradientTape() as tape:
            y = function(x=tf.constant(X))["y"]
            loss = tf.reduce_mean(tf.square(y))
        results.append((before, y.numpy()))
        kernel.assign_sub(1e-3 * tape.gradient(loss, kernel))
    np.testing.assert_allclose(results[0][1], X @ MATRIX, rtol=1e-4, atol=1e-4)
    for before, y in results[1:]:
        assert not np.array_equal(before, MATRIX)
        np.testing.assert_allclose(y, X @ rounded(before), rtol=1e-4, atol=1e-3)
    # The ranges are those of the last step.
    kernel.assign(results[-1][0])
    (stored,) = in_file(to_tflite(m))
    np.testing.assert_array_equal(stored, rounded(results[-1][0]))


def test_blocks_survive_saving_and_reordering(tmp_path):
    m, blob = dense_file()
    m.save(str(tmp_path / "saved"))
    assert to_tflite(model.open(str(tmp_path / "saved"))) == blob
    m = prepared(opened(encoder, spec(2, 6, 64, name="x")), scheme=SCHEME)
    blob, x = to_tflite(m), normal(2, 6, 64, seed=20)
    reordered = least_memory_order(blob).blob
    np.testing.assert_array_equal(run(reordered, x), run(blob, x))


def test_moved_activations_are_other_tensors():
    def moved(x):
        rows = tf.reshape(tf.transpose(tf.reshape(x, [2, 4, 8]), [1, 0, 2]), [8, 8])
        return {"y": tf.quantization.fake_quant_with_min_max_args(rows, -3.0, 3.0)}

    m = opened(moved, spec(8, 8, name="x"))
    assert quantized_value(m.inputs["x"]) is None


def test_refusals():
    m, report = quantized(dense, 4, 96)
    refused(lambda: to_int8(m), "dense/weights_quant", "blocks", SCHEME)
    high = report.variables["dense/weights_quant/max"]
    high.assign(high * 1.001)
    refused(lambda: to_tflite(m), "dense/weights_quant", "float16", "calibrate")
    m, _ = dense_file()
    for scheme in ("dynamic_range", "weight_only_int4", "int8", "int16x8"):
        refused(lambda s=scheme: to_tflite(m, scheme=s), scheme, SCHEME)
    plain = opened(dense, spec(4, 96, name="x"))
    refused(
        lambda: choose_bits(plain, [{"x": X}], size=0.9, scheme=SCHEME),
        "int8 and weight_only_int8",
        SCHEME,
    )
    refused(lambda: quantize(plain, scheme=SCHEME, weight_bits=4), "weight_bits=4")


def test_runtimes_that_do_not_know_blocks_or_compute_wrong_numbers():
    m, _ = dense_file()
    place = "geutil.quantize.tflite.stored_weights"
    for name, version in (("LiteRT", (2, 0)), ("TensorFlow Lite", (2, 20))):
        with (
            mock.patch(f"{place}.runtime_name", lambda name=name: name),
            mock.patch(f"{place}.runtime_version", lambda v=version: v),
            mock.patch.object(logging.getLogger("geutil"), "warning") as warning,
        ):
            to_tflite(m)
        (call,) = warning.call_args_list
        told = call.args[0] % call.args[1:]
        assert "may make wrong numbers of weights in blocks" in told
    with mock.patch(f"{place}.knows_blocks", lambda: False):
        refused(lambda: to_tflite(m), "dense/weights_quant", "geutil[litert]")


def test_weights_that_another_kernel_reads_are_refused():
    """Such as TFLite's converter may make one day."""
    m, _ = dense_file()
    matrices = block_matrices(m.graph)
    file = tflite.open(converted(deployed(m, fuse=True)))
    (graph,) = file.graphs
    *others, op = graph.ops
    assert op.kind == "FULLY_CONNECTED"
    graph.set_ops([*others, LiteOp("BATCH_MATMUL", op.inputs, op.outputs)])
    refused(
        lambda: store_in_blocks(graph, matrices),
        "dense/weights_quant",
        "BATCH_MATMUL",
        "Spec(weight_bits=8)",
    )
    refused(lambda: check_all_found(matrices, set()), "dense/weights_quant")
    check_all_found(matrices, {"dense/weights_quant"})


def test_unread_steps_are_kept_with_what_has_them():
    blob = dense_file()[1]
    file = tflite.open(blob)
    file.strip()
    np.testing.assert_array_equal(in_file(file.to_bytes())[0], in_file(blob)[0])
