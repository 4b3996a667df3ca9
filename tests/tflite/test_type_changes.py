"""Tests of types of inputs and outputs: a QUANTIZE computed in numpy."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from geutil import tflite
from geutil.errors import TFLiteError
from tests.tflite.running import drawn, float_file, quantized, run
from tests.tflite_files import SAMPLES

RANDOM = np.random.default_rng(4)
KERNEL = RANDOM.normal(size=(3, 3, 4, 4)).astype(np.float32)
IMAGE = tf.TensorSpec([1, 6, 6, 4], name="x")


def body(x):
    return tf.nn.conv2d(x, KERNEL, 1, "SAME")


@functools.cache
def blob(ends="int8"):
    return quantized(body, IMAGE, 1.0, tf.as_dtype(ends))


def rounded(value, steps, dtype):
    """Return numbers in steps, as the kernel of QUANTIZE does."""
    exact = value.astype(np.float32) / np.float32(steps.scales[0])
    levels = (
        np.trunc(exact + np.copysign(np.float32(0.5), exact)) + steps.zero_points[0]
    )
    info = np.iinfo(dtype)
    return np.clip(levels, info.min, info.max).astype(dtype)


def numbers(value, steps):
    shifted = value.astype(np.int32) - steps.zero_points[0]
    return shifted.astype(np.float32) * np.float32(steps.scales[0])


def ends(file):
    return file.graphs[0].inputs[0], file.graphs[0].outputs[0]


@pytest.mark.parametrize("made", ["int8", "uint8", "int16", "float32"])
@pytest.mark.parametrize("given", ["int8", "uint8", "int16", "float32"])
def test_each_type_of_both_ends(given, made):
    """Kernels compute as before; each end is what numpy makes of it."""
    plain = blob()
    taken, returned = (end.quantization for end in ends(tflite.open(plain)))
    file = tflite.open(plain)
    file.set_io_type(given, made)
    assert [end.dtype for end in ends(file)] == [given, made]
    assert [op.kind for op in file.graphs[0].ops].count("CONV_2D") == 1
    (x,) = drawn(plain)
    new = ends(file)
    if given == "float32":
        own = np.random.default_rng(7).uniform(-1.2, 1.2, x.shape).astype(np.float32)
        x = rounded(own, taken, np.int8)
    elif given == "uint8":
        own = (x.astype(int) + 128).astype(np.uint8)
    elif given == "int16":
        own = rounded(numbers(x, taken), new[0].quantization, np.int16)
    else:
        own = x
    (wanted,) = run(plain, x)
    (result,) = run(file.to_bytes(), own)
    if made == "float32":
        wanted = numbers(wanted, returned)
    elif made == "uint8":
        wanted = (wanted.astype(int) + 128).astype(np.uint8)
    elif made == "int16":
        wanted = rounded(numbers(wanted, returned), new[1].quantization, np.int16)
    # The kernel from int8 to int16 multiplies in fixed point; that of DEQUANTIZE adds
    # the products of the scale with the integer and with the zero point.
    most = {"int16": 1, "float32": 1e-6 * np.abs(wanted).max()}.get(made, 0)
    assert np.abs(result.astype(float) - wanted).max() <= most


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_float_ends_of_integer_files_become_integers(dtype):
    """The file is the one that the converter makes with such ends."""
    file = tflite.open(blob("float32"))
    assert [op.kind for op in file.graphs[0].ops] == [
        "QUANTIZE",
        "CONV_2D",
        "DEQUANTIZE",
    ]
    file.set_io_type(dtype, dtype)
    wanted = tflite.open(blob(dtype))
    assert [op.kind for op in file.graphs[0].ops] == [
        op.kind for op in wanted.graphs[0].ops
    ]
    for mine, theirs in zip(ends(file), ends(wanted), strict=True):
        assert (mine.dtype, mine.quantization) == (theirs.dtype, theirs.quantization)
    (x,) = drawn(blob(dtype))
    np.testing.assert_array_equal(
        run(file.to_bytes(), x)[0], run(wanted.to_bytes(), x)[0]
    )


def test_types_that_are_set_and_taken_back_leave_no_ops():
    file = tflite.open(blob())
    for dtype in ("uint8", "float32", "int16", "int8"):
        file.set_io_type(dtype, dtype)
    assert [op.kind for op in file.graphs[0].ops] == ["CONV_2D"]
    (x,) = drawn(blob())
    np.testing.assert_array_equal(run(file.to_bytes(), x)[0], run(blob(), x)[0])


def test_names_and_signatures_stay():
    """An end keeps its name and its entry in the signature."""
    plain = tflite.open(SAMPLES["int8"]().blob)
    file = tflite.open(plain.to_bytes())
    file.set_io_type(inputs={"image": "uint8"})
    signature, old = (f.signatures["serving_default"] for f in (file, plain))
    assert [*signature.inputs] == [*old.inputs]
    assert signature.inputs["image"] is file.graphs[0].inputs[0]
    assert signature.inputs["image"].name == old.inputs["image"].name
    names = [t.name for t in file.graphs[0].tensors]
    assert len({*names}) == len(names)
    assert [end.dtype for end in signature.outputs.values()] == ["int8"]


def test_float_kernels_get_integers_in_steps_that_are_passed():
    plain = float_file(body, IMAGE)
    steps = tflite.Quantization((0.01,), (3,))
    file = tflite.open(plain)
    (x,), (y,) = file.graphs[0].inputs, file.graphs[0].outputs
    file.set_io_type(
        {x.name: "int8"}, {y.name: "uint8"}, steps={x.name: steps, y.name: steps}
    )
    given = np.random.default_rng(7).integers(-128, 128, (1, 6, 6, 4)).astype(np.int8)
    (wanted,) = run(plain, numbers(given, steps))
    np.testing.assert_array_equal(
        run(file.to_bytes(), given)[0], rounded(wanted, steps, np.uint8)
    )


def with_steps(dtype, scales, zeros=(0,)):
    steps = tflite.Quantization(scales, zeros)

    def edit(f):
        (x,) = f.graphs[0].inputs
        f.set_io_type({x.name: dtype}, steps={x.name: steps})

    return edit


REFUSED = {
    "no scale": (with_steps("int8", (0.0,)), "needs one positive scale"),
    "zero point": (with_steps("int8", (0.5,), (300,)), "zero point from -128 to 127"),
    "int16": (with_steps("int16", (0.5,), (5,)), "zero point from 0 to 0"),
    "scales": (with_steps("int8", (0.5, 0.5), (0, 0)), "needs one positive scale"),
    "float steps": (
        with_steps("float32", (0.5,)),
        "is to be float32, which has no steps",
    ),
    "idle": (
        lambda f: f.set_io_type(steps={"x": tflite.Quantization((0.5,))}),
        r"steps for \['x'\], whose types are not to change",
    ),
    "type": (lambda f: f.set_io_type("int7"), "no type 'int7' of inputs"),
    "name": (lambda f: f.set_io_type({"z": "int8"}), "no input 'z' .* inputs are"),
    "float": (
        lambda f: f.set_io_type({f.graphs[0].inputs[0].name: "int8"}),
        "cannot be int8: it is left in float; leave it out",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_types_that_cannot_be_are_refused(name):
    edit, message = REFUSED[name]
    file = tflite.open(float_file(body, IMAGE))
    before = file.to_bytes()
    with pytest.raises(TFLiteError, match=message):
        edit(file)
    assert file.to_bytes() == before


def test_ends_of_subgraphs_that_are_called_keep_their_types():
    file = tflite.open(SAMPLES["flow"]().blob)
    with pytest.raises(TFLiteError, match=r"another type: .* is called by <LiteOp IF"):
        file.set_io_type("int8", graph=1)
