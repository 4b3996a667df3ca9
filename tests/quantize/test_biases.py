"""What is added to a layer, and matrices with a range for each column, in int8 files.

The forms are those that people write; the reference is the simulated model. Each layer
has weights of its own, and all numbers differ.
"""

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import tflite
from geutil.quantize import Spec, calibrate, compare_int8, quantize, to_int8
from tests.interpreter import has_floats, new_interpreter
from tests.quantize.converted import (
    Together,
    alternate,
    opened,
    samples,
    spec,
    stored_weights,
)
from tests.quantize.small_networks import normal, prepared
from tests.settings import needs_eager
from tests.thorough import crossed

pytestmark = needs_eager

IMAGE, ANY_BATCH = spec(4, 8, 8, 3), spec(None, 8, 8, 3)
SIZES = np.geomspace(0.1, 3.0, 6, dtype=np.float32)


def kernel_of(seed):
    """Return weights that no other layer has, not even by a factor.

    Of proportional ones in one file, all products but the first are up to 3 steps off.
    """
    return normal(3, 3, 3, 6, seed=seed) * SIZES


LAYERS = {
    "conv": lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"),
    "depthwise": lambda x, k: tf.nn.depthwise_conv2d(
        x, k[..., 4:], [1, 1, 1, 1], "SAME"
    ),
    "transposed": lambda x, k: tf.nn.conv2d_transpose(
        x, k.transpose(0, 1, 3, 2), [4, 8, 8, 6], 1
    ),
    "conv1d": lambda x, k: tf.nn.conv1d(tf.reshape(x, [-1, 64, 3]), k[0], 1, "SAME"),
    "dense": lambda x, k: tf.matmul(tf.reshape(x, [-1, 3]), k[0, 0]),
    "einsum": lambda x, k: tf.einsum("abcd,de->abce", x, k[0, 0]),
    "matmul": lambda x, k: tf.matmul(
        tf.reshape(x, [4, 192]), np.tile(k.reshape(27, 6), (8, 1))[:192]
    ),
}


def far_off(cases, most, *, in_float=True):
    """Return what is more steps off than its case may be, or in float."""
    return {
        case: (part.most, part.floats)
        for case, part in Together(cases).parts().items()
        if (in_float and part.floats) or part.most > most(case)
    }


def cases_of(layers, kinds, make, *, known=False):
    """Return a case for each layer and kind, or half of them, with its own kernel."""
    return {
        f"{layer}, {kind}": (
            make(LAYERS[layer], kinds[kind], kernel_of(n)),
            (IMAGE if known or layer == "transposed" else ANY_BATCH,),
        )
        for n, (layer, kind) in enumerate(alternate(layers, kinds))
    }


ONE_NUMBER = {
    "sum": lambda y, c: y + c,
    "first": lambda y, c: c + y,
    "vector of one": lambda y, c: y + tf.constant([c]),
    "difference": lambda y, c: y - c,
    "relu": lambda y, c: tf.nn.relu(y + c),
    "relu6": lambda y, c: tf.nn.relu6(y + (c + 1.0)),
}


def test_one_number_for_all_channels_is_added_to_each():
    """The converter stores it with the steps of the first channel."""

    def adding(layer, form, kernel):
        number = float(np.abs(kernel).max() / 4)
        return lambda x: (form(layer(x, kernel), number), x + number)

    cases = cases_of(list(LAYERS)[:5], ONE_NUMBER, adding)
    assert far_off(cases, lambda _: 1, in_float=False) == {}


def test_a_constant_behind_a_bias_is_part_of_it():
    """A hard sigmoid adds 3, and its range is that of its Relu6: not twice as wide."""

    def network(layer, kernel):
        def compute(x):
            y = layer(x, kernel)
            y = y + tf.constant(normal(y.shape[-1], seed=3) / 3)
            return tf.nn.relu6(y + 3.0) / 6.0

        return compute

    cases = {
        layer: (network(function, kernel_of(n)), (IMAGE,))
        for n, (layer, function) in enumerate(LAYERS.items())
    }
    parts = Together(cases).parts()
    assert {case: (part.most <= 1, part.floats) for case, part in parts.items()} == {
        case: (True, []) for case in cases
    }
    m = opened(network(LAYERS["conv"], kernel_of(0)), ANY_BATCH)
    quantize(m, is_training=False)
    calibrate(m, [samples(m.inputs)])
    kinds = [op.kind for op in tflite.open(to_int8(m)).ops]
    assert kinds == ["CONV_2D", "MUL"]


ADDENDS = {
    "vector": lambda shape: shape[-1:],
    "row": lambda shape: [1, shape[-1]],
    "number with axes": lambda shape: [1] * len(shape),
    "number with two axes": lambda shape: [1, 1],
    "table of positions": lambda shape: shape[1:],
    "table with a batch": lambda shape: [1, *shape[1:]],
    "one for each position": lambda shape: [*shape[1:-1], 1],
    "one for each row": lambda shape: [shape[-2], 1],
}
BIASES = ("vector", "row", "number with axes", "number with two axes")


def test_what_is_added_has_any_shape_that_broadcasts():
    """A table of positions is no bias, and is added by a kernel of its own."""

    def adding(layer, addend, kernel):
        def compute(x):
            y = layer(x, kernel)
            shape = addend(y.shape.as_list())
            factor = np.abs(kernel).max() / 9
            return tf.nn.relu(y + tf.constant(normal(*shape, seed=7) * factor))

        return compute

    def most(case):
        # Where these are two kernels, a step of the first may be two of the second.
        return 1 if case.partition(", ")[2] in BIASES else 3

    layers = [layer for layer in LAYERS if layer != "dense"]
    assert far_off(cases_of(layers, ADDENDS, adding, known=True), most) == {}


BETWEEN = {
    "transpose": lambda y: tf.transpose(y, [0, 3, 1, 2]),
    "pool": lambda y: tf.nn.max_pool2d(y, 2, 2, "SAME"),
    "slice": lambda y: y[:, 1:3],
    "channels": lambda y: y[..., 1:3],
    "pad": lambda y: tf.pad(y, [[0, 0], [1, 1], [1, 1], [0, 0]]),
    "tile": lambda y: tf.tile(y, [1, 1, 1, 2]),
    "gather": lambda y: tf.gather(y, [2, 0, 1, 3], axis=-1),
    "to space": lambda y: tf.nn.depth_to_space(y[..., :4], 2),
    "to depth": lambda y: tf.nn.space_to_depth(y, 2),
    "maximum": lambda y: tf.reduce_max(y, [1, 2]),
    "nearest": lambda y: tf.compat.v1.image.resize_nearest_neighbor(y, [16, 16]),
    "heads": lambda y: tf.reshape(y, [-1, 8, 8, 2, 3]),
    "turned heads": lambda y: tf.transpose(tf.reshape(y, [-1, 64, 2, 3]), [0, 2, 1, 3]),
    "flat": lambda y: tf.reshape(y, [-1, 384]),
    "squeezed": lambda y: tf.squeeze(y[:, :1], 1),
}
SHIFTS = {
    "number": lambda y: y + 2.0,
    "vector": lambda y: y + normal(y.shape[-1], seed=2),
    "relu": tf.nn.relu,
}


def test_a_layer_computes_in_int8_whatever_stands_before_its_bias():
    """The converter moves biases and activations over few ops."""
    # How far two kernels in a row are off depends on the weights: of others, which are
    # no multiples of these, "gather" and "to space" are 4 and 6 steps off, even alone.
    cases = {
        f"{layer}, {between}, {shift}": (
            lambda x, layer=LAYERS[layer], between=BETWEEN[between], n=n, shift=shift: (
                SHIFTS[shift](
                    between(layer(x, kernel_of(0) * np.float32(1 + 0.01 * n)))
                )
            ),
            (ANY_BATCH,),
        )
        for n, (layer, between, shift) in enumerate(
            alternate(["conv", "einsum"], BETWEEN, SHIFTS, every=3)
        )
    }
    assert far_off(cases, lambda _: 3) == {}


# -- behind a Reshape that parts the channels of a layer: heads of an attention --------

POSITIONS = spec(2, 5, 8)
PARTED, HEADS = 0.5 * normal(8, 12, seed=11), 0.5 * normal(3, 4, seed=12)


def parted(a):
    return tf.reshape(tf.matmul(a, PARTED, name="layer"), [2, 5, 3, 4], name="parted")


def to_heads(a):
    return tf.add(parted(a), HEADS, name="sum")


def behind_a_convolution(a):
    image = tf.reshape(a, [2, 5, 1, 8])
    y = tf.nn.conv2d(image, PARTED[None, None], 1, "SAME", name="layer")
    return tf.add(tf.reshape(y, [2, 5, 3, 4], name="parted"), HEADS, name="sum")


def lowered(report):
    return [line for line in report.rewritten if "before a Reshape" in line]


ADDED = {
    "heads": to_heads,
    "of one more axis": lambda a: parted(a) + HEADS[None, None],
    "behind a convolution": behind_a_convolution,
}


def test_the_kernel_of_the_layer_adds_it():
    made = Together(
        {
            n: (lambda a, f=f: tf.nn.sigmoid(f(a)), (POSITIONS,))
            for n, f in ADDED.items()
        }
    )
    for name, part in made.parts().items():
        assert len(lowered(part)) == 1, name
        assert "ADD" not in part.kinds, name
        assert not part.floats, name
        assert part.most <= 1, name
        assert "AddV2" not in made.rounded(name), name


def test_the_sum_is_what_it_was():
    """To float32: with ranges that nothing is rounded in, but for 16 bits."""
    m = opened(to_heads, POSITIONS)
    data = samples(m.inputs)
    exact = to_heads(data["a"]).numpy()
    report = quantize(m, is_training=False, weight_bits=16, activation_bits=16)
    assert lowered(report)
    ge.verify(m.graph)
    calibrate(m, [data], "min_max")
    found = next(iter(m.run(**data).values()))
    assert np.abs(found - exact).max() < 1e-3 * np.abs(exact).max()
    assert not np.array_equal(found, exact)


LEFT_ALONE = {
    "two readers": lambda a: [(y := parted(a)) + HEADS, tf.nn.sigmoid(y)],
    "also a result": lambda a: [(y := parted(a)) + HEADS, y],
    "of data": lambda a: parted(a) + tf.reshape(a[0, 0, :4], [1, 4]) * tf.ones([3, 1]),
    # A table of places and channels is no bias.
    "of places": lambda a: tf.reshape(a @ PARTED, [2, 5, 12]) + normal(5, 12),
    "of a part": lambda a: parted(a) + HEADS[0],
    "turned before": lambda a: tf.transpose(parted(a), [0, 2, 1, 3]) + HEADS[:, None],
    "no layer": lambda a: (
        tf.reshape(tf.nn.sigmoid(tf.tile(a, [1, 1, 3])), [2, 5, 3, 8]) + normal(3, 8)
    ),
}


def test_others_stay():
    cases = {name: (f, (POSITIONS,)) for name, f in LEFT_ALONE.items()}
    report = Together(cases).report
    assert not lowered(report)
    assert report.coverage == 1.0


@pytest.mark.parametrize("key", ["^sum$", "^layer$", "^parted$"])
def test_what_is_skipped_stays(key):
    m = opened(to_heads, POSITIONS)
    assert not lowered(quantize(m, is_training=False, overrides={key: "skip"}))


def test_an_override_for_the_sum_is_obeyed():
    m = opened(to_heads, POSITIONS)
    total = m.graph.get_operation_by_name("sum")
    report = quantize(m, is_training=False, overrides={total: Spec(activation_bits=16)})
    assert lowered(report)
    (layer,) = [entry for entry in report.quantized if entry.op_type == "BatchMatMulV2"]
    assert layer.result.bits == 16


# -- matrices with a range for each column ---------------------------------------------

VECTOR = spec(None, 8, name="x")
X = normal(16, 8, seed=4)
ROWS = normal(4, 4, 8, seed=6)
# Columns of which the last is thirty times as large as the first.
MATRIX = normal(8, 6) * SIZES
BIAS = normal(6, seed=1)


def dense(matrix=MATRIX, bias=BIAS):
    def compute(x):
        y = tf.matmul(x, tf.constant(matrix), name="dense")
        return {"y": tf.nn.relu(y + bias)}

    return opened(compute, VECTOR)


def quantized(m, data=X, **options):
    return prepared(m, {"x": data}, "best", **options)


PRODUCTS = {
    "batches": lambda x, m, name: tf.raw_ops.BatchMatMulV2(x=x, y=m, name=name),
    "einsum": lambda x, m, name: tf.einsum("abc,cd->abd", x, m, name=name),
    "tensordot": lambda x, m, name: tf.tensordot(x, m, 1, name=name),
    "matmul": lambda x, m, name: tf.matmul(x, m, name=name),
}


def test_a_matrix_has_a_range_for_each_column_unless_it_is_turned():
    def transposed(x, m, name):
        return tf.matmul(x, m.T, transpose_b=True, name=name)

    def biased(x, m, name):
        return tf.nn.relu(tf.matmul(x, m, name=name) + BIAS)

    rows = {name: (spec(None, 4, 8), f) for name, f in PRODUCTS.items()}
    for name, f in {"bias": biased, "one range": biased, "turned": transposed}.items():
        rows[name] = spec(None, 8), f
    made = Together(
        {
            name: (lambda x, f=f: f(x, MATRIX, "dense"), (shape,))
            for name, (shape, f) in rows.items()
        },
        overrides={"^one_range/dense$": Spec(per_channel=False)},
    )
    most = np.abs(MATRIX).max(0)
    for name, part in made.parts().items():
        (stored,) = [t for t in made.tensors(name) if list(t.shape) == [6, 8]]
        steps, axis = stored.quantization.scales, stored.quantization.axis
        wanted = [most.max()] if name in ("one range", "turned") else most
        np.testing.assert_allclose(steps, wanted / np.float32(127), 1e-6, err_msg=name)
        assert (axis, part.floats) == (0, []), name
        assert name in PRODUCTS or part.kinds == ["FULLY_CONNECTED"], name
        assert part.most <= 1, name


def test_a_constant_is_multiplied_by_data_in_int8():
    rows = normal(4, 2, seed=3)
    part = Together({"rows": (lambda x: tf.matmul(rows, x), (spec(2, 8),))}).part()
    assert (part.is_int8, part.most <= 1) == (True, True)


@pytest.mark.parametrize("size", [0.0, 1e-9])
def test_columns_of_next_to_nothing_keep_their_bias(size):
    matrix = MATRIX.copy()
    matrix[:, 3] *= size
    m = quantized(dense(matrix, BIAS + 5.0))
    blob = to_int8(m)
    assert compare_int8(m, blob, {"x": X}).most <= 1


def test_a_bias_outweighs_weights_of_4_bits_with_delegates_too():
    """XNNPACK multiplies it by 16, which must not overflow."""
    m = quantized(dense(np.zeros_like(MATRIX), BIAS + 5.0))
    blob = to_int8(m)
    assert [tensor.dtype for _, tensor in stored_weights(blob)] == ["int4"]
    interpreter = new_interpreter(blob, delegates=True)
    (data,), (result,) = (
        interpreter.get_input_details(),
        interpreter.get_output_details(),
    )
    interpreter.resize_tensor_input(data["index"], X.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(data["index"], np.zeros(X.shape, np.int8))
    interpreter.invoke()
    step, zero = result["quantization"]
    made = (interpreter.get_tensor(result["index"]).astype(float) - zero) * step
    assert np.all(np.abs(made - (BIAS + 5.0)) <= step)


PARTLY = {
    "the first layer": {"scope": "a"},
    "the second layer": {"scope": "b"},
    "all but the first": {"overrides": {"a/dense": "skip"}},
    "all but the second": {"overrides": {"b/dense": "skip"}},
    "all but the last": {"overrides": {"c/dense": "skip"}},
}


@pytest.mark.parametrize(("product", "part"), crossed(PRODUCTS, PARTLY, together=1))
def test_a_part_of_a_network_of_dense_layers_is_quantized(product, part, caplog):
    """A product of batches in float is given data of 8 bits by the converter."""
    matrices = [normal(8, 6), normal(6, 5, seed=1), normal(5, 4, seed=2)]
    data = X if product == "matmul" else ROWS

    def compute(x):
        multiply = PRODUCTS[product]
        with tf.name_scope("a"):
            hidden = tf.nn.relu(multiply(x, matrices[0], "dense"))
        with tf.name_scope("b"):
            hidden = tf.sin(multiply(hidden, matrices[1], "dense"))
        with tf.name_scope("c"):
            return {"hidden": hidden, "y": multiply(hidden, matrices[2], "dense")}

    m = quantized(
        opened(compute, spec(None, *data.shape[1:], name="x")), data, **PARTLY[part]
    )
    blob = to_int8(m)
    assert {
        has_floats(op) for op in tflite.open(blob).ops if op.kind == "FULLY_CONNECTED"
    }
    assert not any("not quantized in the model" in line for line in caplog.messages)
    assert compare_int8(m, blob, {"x": data}).most <= 3
