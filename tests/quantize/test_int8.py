"""Conversion to int8: what is made, what is mended for the converter, and refusals."""

import functools
import warnings

import numpy as np
import pytest
import tensorflow as tf

from geutil import model, tflite
from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.quantize import Spec, calibrate, compare_int8, quantize, to_int8
from tests.interpreter import new_interpreter, run_on_values
from tests.quantize.converted import Together, opened, spec, types_of
from tests.quantize.small_networks import convolved, normal, prepared
from tests.settings import needs_eager

pytestmark = needs_eager

IMAGE = spec(None, 8, 8, 3, name="x")
X = normal(4, 8, 8, 3, seed=9)
WEIGHTS = normal(3, 3, 3, 8)
BIAS = normal(8, seed=1)
NEXT = normal(1, 1, 8, 5, seed=2)
SQUARE = normal(4, 4, seed=3)


def network(weights=WEIGHTS, bias=BIAS, second=None, **options):
    """Return a convolution with a bias and a Relu, and perhaps another one."""

    def compute(x):
        y = tf.nn.relu(convolved(x, weights, bias, "first"))
        if second is not None:
            y = tf.nn.conv2d(y, second, 1, "SAME", name="second")
        return {"y": y}

    return prepared(opened(compute, IMAGE), **options)


def calibrated(*arguments, data=X, **options):
    m = network(*arguments, **options)
    calibrate(m, {"x": data}, "min_max")
    return m


def steps(m, blob, data=X):
    return compare_int8(m, blob, {"x": data}).most


@pytest.fixture(scope="module")
def two_layers():
    """Return a model of two layers, and its file."""
    m = calibrated(second=NEXT)
    return m, to_int8(m)


def test_the_file_is_int8_from_end_to_end(two_layers):
    m, blob = two_layers
    assert [op.kind for op in tflite.open(blob).ops] == ["CONV_2D", "CONV_2D"]
    for op in tflite.open(blob).ops:
        assert set(types_of(op)) == {"int8", "int32"}
    # Of batches of any size.
    for count in (1, 3):
        comparison = compare_int8(m, blob, {"x": X[:count]})
        assert (comparison.samples, comparison.float_ops) == (count, ())
        assert comparison.most <= 1


def test_data_may_be_given_at_once():
    m, other = network(second=NEXT), network(second=NEXT)
    calibrate(other, [{"x": X}])
    assert to_int8(m, [{"x": X}]) == to_int8(other)


@pytest.mark.parametrize("delay", [None, 5])
def test_models_for_training_are_converted_as_they_are_deployed(two_layers, delay):
    m = calibrated(second=NEXT, is_training=True, quant_delay=delay)
    before = {name: v.numpy() for name, v in m.variables.items()}
    blob = to_int8(m)
    assert steps(m, blob) <= 1
    for name, value in before.items():
        np.testing.assert_array_equal(m.variables[name].numpy(), value)
    # As the same model for inference is; the files themselves have other names inside.
    ours, theirs = (run_on_values(file, [{"x": X}]) for file in (blob, two_layers[1]))
    np.testing.assert_array_equal(ours[0]["y"], theirs[0]["y"])


def test_variables_and_the_model_stay_as_they_are(tmp_path):
    weights, bias = tf.Variable(WEIGHTS), tf.Variable(BIAS * 0 + 0.5)
    m = calibrated(weights, bias)
    before = m.graph.as_graph_def()
    assert steps(m, to_int8(m)) <= 1
    assert m.graph.as_graph_def() == before
    np.testing.assert_array_equal(bias.numpy(), BIAS * 0 + 0.5)
    weights.assign(weights * 2)
    calibrate(m, {"x": X}, "min_max")
    assert steps(m, to_int8(m)) <= 1
    # As they are saved.
    reopened = model.open(m.save(tmp_path / "saved"))
    assert steps(reopened, to_int8(reopened)) <= 1


# The weights and biases of a layer that TFLite's own converter stores wrong.
DIFFICULT = {
    "equal_biases": (WEIGHTS, BIAS * 0 + 3.0),
    "equal_negative_biases": (1.1 * WEIGHTS, BIAS * 0 - 1.5),
    "no_weights": (WEIGHTS * 0, np.abs(BIAS) + 1),
    "hardly_any_weights": (WEIGHTS * 1e-12, np.abs(BIAS) + 2),
    "a_dead_channel": (1.2 * WEIGHTS * (np.arange(8) != 3), np.abs(BIAS) + 3),
}


def test_biases_are_stored_right_whatever_the_weights():
    def compute(x):
        return {
            case: tf.nn.relu(convolved(x, np.float32(w), np.float32(bias), case))
            for case, (w, bias) in DIFFICULT.items()
        }

    m = prepared(opened(compute, IMAGE), {"x": X}, "best")
    off = {o.output: o.most for o in compare_int8(m, to_int8(m), {"x": X}).outputs}
    assert off.keys() == DIFFICULT.keys()
    assert {case: most for case, most in off.items() if most > 1} == {}


def input_range(blob):
    """Return the range that a file stores its input in."""
    (detail,) = new_interpreter(blob).get_input_details()
    scale, zero = detail["quantization"]
    return (-128 - zero) * scale, (127 - zero) * scale


def test_a_zero_point_between_two_integers_is_the_one_of_fake_quant():
    ends = tf.quantization.fake_quant_with_min_max_args([-9.0, 9.0], -1.0, 1.0).numpy()
    m = calibrated(data=np.sign(X))
    np.testing.assert_allclose(input_range(to_int8(m)), ends, rtol=1e-5)


def test_fixed_ranges_are_nudged_too_and_tensors_of_zeros_stay():
    def compute(x):
        zeros = tf.nn.relu(convolved(x, WEIGHTS, BIAS * 0 - 1e4, "zeros"))
        return {
            "behind": tf.nn.conv2d(zeros, NEXT, 1, "SAME"),
            "nothing": tf.nn.relu(convolved(x, WEIGHTS * 0, BIAS * 0, "nothing")),
            "fixed": tf.nn.relu(convolved(x, WEIGHTS * 1.1, BIAS, "fixed")),
        }

    m = opened(compute, IMAGE)
    fixed = {"fixed": Spec(range=(-20.0, 20.0))}
    quantize(m, is_training=False, overrides=fixed)
    calibrate(m, {"x": X}, "min_max")
    comparison = compare_int8(m, to_int8(m), {"x": X})
    off = {output.output: output.most for output in comparison.outputs}
    assert off.pop("fixed") <= 1
    assert off == {"behind": 0, "nothing": 0}


def test_activations_have_eight_bits_and_weights_at_most():
    for bits in (4, 16):
        m = calibrated(activation_bits=bits)
        message = rf"{bits} bits: TFLite.*activation_bits=8"
        with pytest.raises(QuantizeError, match=message):
            to_int8(m)
    with pytest.raises(QuantizeError, match=r"weights_quant.*has 9 bits"):
        to_int8(calibrated(weight_bits=9))


def test_ranges_that_were_never_set_are_named():
    m = network(second=NEXT)
    with pytest.raises(QuantizeError, match=r"3 range\(s\).*'x/input_quant'.*calibr"):
        to_int8(m)


def test_what_is_no_quantized_model_is_refused():
    with pytest.raises(ArgumentTypeError, match=r"geutil\.model\.open"):
        to_int8(tf.Graph())
    m = opened(lambda x: {"y": tf.nn.relu(x)}, IMAGE)
    with pytest.raises(QuantizeError, match="quantize it first"):
        to_int8(m)


def test_what_the_converter_says_is_told():
    def compute(x):
        return {"y": tf.linalg.inv(tf.matmul(x, normal(4, 4), name="dense"))}

    m = prepared(opened(compute, spec(4, 4, name="x")), {"x": normal(4, 4)}, "best")
    with pytest.raises(QuantizeError, match=r"MatrixInverse.*model\.cut") as caught:
        to_int8(m)
    assert len(str(caught.value)) < 2000
    assert "site-packages" not in str(caught.value)


def test_no_warnings_reach_the_caller(capfd, two_layers):
    m, _ = two_layers
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare_int8(m, to_int8(m), {"x": X})
    out, err = capfd.readouterr()
    assert out == ""
    assert "warn" not in err.lower()


OUTPUTS_MADE_BY = {
    "a product": lambda x: x * BIAS[:4],
    "an activation": tf.nn.relu,
    "a sum": lambda x: x + BIAS[:4],
    "a layer": lambda x: tf.nn.relu(x @ SQUARE),
    "a normalization": lambda x: (
        tf.tanh(x)
        * tf.math.rsqrt(tf.reduce_mean(tf.nn.relu(x), -1, keepdims=True) + 0.1)
    ),
}


def test_outputs_whose_shape_is_read_are_made_in_int8():
    def shaped(make):
        def function(x):
            hidden = make(x)
            sizes = tf.shape(hidden)
            rows = tf.reshape(hidden, [-1, 4]) @ SQUARE
            return hidden, tf.reshape(rows, [sizes[0], sizes[1], 4])

        return function, (spec(None, None, 4),)

    cases = {name: shaped(make) for name, make in OUTPUTS_MADE_BY.items()}
    parts = Together(cases).parts()
    # A step of what is hidden is more than one behind the layer.
    assert {n: p for n, p in parts.items() if p.floats or p.most > 2} == {}


# -- Relus as changes of steps, against TFLite's own kernels of Relus ------------------

INTEGERS = np.arange(-128, 128, dtype=np.int8).reshape(1, 4, 8, 8)
RELUS = {"RELU": tf.nn.relu, "RELU6": tf.nn.relu6}


@functools.cache
def file_of(function, low=-3.0, high=9.0):
    """Return the int8 file of a function of data between two numbers."""
    m = opened(function, spec(1, 4, 8, 8))
    quantize(m, is_training=False)
    data = np.linspace(low, high, INTEGERS.size, dtype=np.float32)
    calibrate(m, [{"a": data.reshape(INTEGERS.shape)}], "min_max", progress=False)
    return to_int8(m)


def with_kernel(blob, kind):
    """Return the file with another op in the place of its only one."""
    file = tflite.open(blob)
    (graph,) = file.graphs
    (op,) = graph.ops
    graph.set_ops([tflite.LiteOp(kind, op.inputs, op.outputs, version=2)])
    return file.to_bytes()


def results(blob, delegates):
    run = new_interpreter(blob, delegates=delegates).get_signature_runner()
    (found,) = run(a=INTEGERS).values()
    return found.astype(int)


def kinds(blob):
    return [op.kind for op in tflite.open(blob).ops]


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [("RELU", -3, 9), ("RELU", -0.5, 2), ("RELU6", -1, 4.9)],
)
def test_every_integer_is_the_relu_of_it(kind, low, high):
    """A change of steps to a range from 0 on cuts off what a Relu cuts off."""
    blob = file_of(RELUS[kind], low, high)
    assert kinds(blob) == ["QUANTIZE"]
    expected = results(with_kernel(blob, kind), delegates=False)
    assert len(np.unique(expected)) > 25
    np.testing.assert_array_equal(results(blob, delegates=False), expected)
    assert np.abs(results(blob, delegates=True) - expected).max() <= 1


def test_a_relu6_whose_range_reaches_beyond_it_stays():
    m = opened(tf.nn.relu6, spec(1, 4, 8, 8))
    quantize(m, is_training=False, overrides={"Relu6": Spec(range=(0.0, 12.0))})
    data = np.linspace(-3, 9, 256, dtype=np.float32).reshape(1, 4, 8, 8)
    calibrate(m, [{"a": data}], "min_max")
    assert kinds(to_int8(m)) == ["RELU6"]


def test_relus_are_part_of_the_layer_before_them_or_changes_of_steps():
    kernel = np.ones([1, 1, 8, 8], np.float32)

    def function(a):
        fused = tf.nn.relu(tf.nn.conv2d(a, kernel, 1, "SAME"))
        return tf.nn.relu(tf.concat([fused - 1.0, a], 3)), tf.nn.relu(a + a)

    made = kinds(file_of(function))
    assert made.count("RELU") == 0
    assert made.count("QUANTIZE") >= 1
