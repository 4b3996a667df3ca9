"""Constants as numbers: those stored in few bytes, and those in steps."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from geutil import tflite
from geutil.errors import TFLiteError
from geutil.tflite import LiteTensor
from tests.interpreter import new_interpreter, schema
from tests.tflite.running import drawn, quantized, run
from tests.tflite_files import SAMPLES

RANDOM = np.random.default_rng(8)
KERNEL = RANDOM.normal(size=(3, 3, 4, 4)).astype(np.float32)
BIAS = RANDOM.normal(size=4).astype(np.float32)
IMAGE = tf.TensorSpec([1, 6, 6, 4], name="x")


def convolution(x):
    return tf.nn.bias_add(tf.nn.conv2d(x, KERNEL, 1, "SAME"), BIAS)


def reshaped(x):
    """Compute with tensors of one scale: those of reshapes, a pad, a concatenation."""
    y = convolution(x)
    z = tf.reshape(tf.concat([y, y * 0.5], -1), [1, 36, 8])
    return tf.pad(z, [[0, 0], [1, 0], [0, 0]])[:, 1:] * 2.0


@functools.cache
def converted(body=convolution, reach=1.0):
    """Return a file of int8 whose input reaches from -reach to reach."""
    return quantized(body, IMAGE, reach)


def the_op(file, kind):
    return next(op for op in file.graphs[0].ops if op.kind == kind)


def test_constants_are_read_as_numbers():
    """The weights are those of the source, within half a step; the bias, too."""
    file = tflite.open(converted())
    _, weights, bias = the_op(file, "CONV_2D").inputs
    scales = np.asarray(weights.quantization.scales)
    stored = file.constants[weights.name].transpose(1, 2, 3, 0)
    assert np.all(np.abs(stored - KERNEL) <= scales / 2 * 1.0001)
    np.testing.assert_allclose(file.constants[bias.name], BIAS, atol=1e-3)
    assert {weights.name, bias.name} <= {*file.constants}
    assert len(file.constants) == len([*file.constants])


def test_numbers_are_stored_in_the_steps_of_the_file():
    file = tflite.open(converted())
    weights = the_op(file, "CONV_2D").inputs[1]
    scales = np.asarray(weights.quantization.scales)[:, None, None, None]
    wanted = np.array([-3, 5, 0, 100])[:, None, None, None] * np.ones((4, 3, 3, 4))
    file.constants[weights.name] = wanted * scales
    np.testing.assert_array_equal(
        tflite.open(file.to_bytes()).constants[weights.name],
        np.float32(wanted * scales),
    )
    np.testing.assert_array_equal(weights.value, wanted)


def test_numbers_out_of_range_are_clipped_and_reported():
    file = tflite.open(converted())
    weights = the_op(file, "CONV_2D").inputs[1]
    value = file.constants[weights.name].copy()
    value[1, 0, 0, :3] = 1e3
    report = file.constants.write(weights.name, value)
    assert dict(report.clipped) == {weights.name: 3}
    assert weights.value.max() == 127
    with pytest.warns(UserWarning, match="clipped: 3 of"):
        file.constants[weights.name] = value


def test_constants_of_other_files_keep_their_type():
    """Float16 is read as float32; integers that stand for themselves are themselves."""
    file = tflite.LiteFile()
    file.graphs.append(tflite.LiteGraph("main"))
    for name, dtype in (("half", "float16"), ("places", "int32")):
        tensor = tflite.LiteTensor(name, dtype, [2])
        tensor.value = np.array([1, 2], dtype)
        file.graphs[0].add_tensor(tensor)
    assert file.constants["half"].dtype == np.float32
    file.constants["half"] = np.array([0.1, 3.0])
    assert file.constants["half"][0] == np.float32(np.float16(0.1))
    assert file.constants["places"].dtype == np.int32
    with pytest.raises(TFLiteError, match="stand for themselves"):
        file.constants["places"] = np.array([0.5, 1])


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (lambda c, n: c.write(n, np.zeros(3)), TFLiteError, r"shape \[4, 3, 3, 4\]"),
        (lambda c, n: c.write(n, np.full((4, 3, 3, 4), np.nan)), TFLiteError, "finite"),
        (lambda c, n: c.__delitem__(n), TFLiteError, "remove its op"),
        (lambda c, n: c[n + "x"], KeyError, "near names"),
    ],
)
def test_numbers_that_cannot_be_stored_are_refused(write, error, message):
    file = tflite.open(converted())
    before = file.to_bytes()
    with pytest.raises(error, match=message):
        write(file.constants, the_op(file, "CONV_2D").inputs[1].name)
    assert file.to_bytes() == before


def test_steps_are_those_of_a_file_converted_for_other_ranges():
    """With the scales of another file, one is this other file: bias and results."""
    file, wanted = tflite.open(converted()), tflite.open(converted(reach=3.0))
    conv, other = the_op(file, "CONV_2D"), the_op(wanted, "CONV_2D")
    for mine, theirs in (
        (conv.inputs[0], other.inputs[0]),
        (conv.outputs[0], other.outputs[0]),
    ):
        steps = theirs.quantization
        file.set_quantization(mine, steps.scales[0], steps.zero_points[0])
    np.testing.assert_allclose(
        conv.inputs[2].quantization.scales, other.inputs[2].quantization.scales, 1e-6
    )
    assert np.abs(conv.inputs[2].value - other.inputs[2].value).max() <= 1
    # The other file rounded the bias of the source, and this one the rounded one.
    conv.inputs[2].value = other.inputs[2].value
    (x,) = drawn(file.to_bytes())
    np.testing.assert_array_equal(
        run(file.to_bytes(), x)[0], run(wanted.to_bytes(), x)[0]
    )


def test_tensors_of_one_scale_follow():
    """Kernels that rescale nothing get one scale; results stay, in other steps."""
    file = tflite.open(converted(reshaped))
    before = file.to_bytes()
    joined = the_op(file, "CONCATENATION").outputs[0]
    old = joined.quantization
    report = file.set_quantization(joined, old.scales[0] * 2, old.zero_points[0] // 2)
    ends = {
        op.kind: [t.quantization for t in (*op.inputs, *op.outputs) if t.quantization]
        for op in file.graphs[0].ops
        if op.kind in ("CONCATENATION", "RESHAPE", "PAD", "STRIDED_SLICE")
    }
    assert len(ends) > 2
    assert len({str(steps) for own in ends.values() for steps in own}) == 1
    assert len(report.tensors) > 4
    # Half of the range: the old scale clips what the new one does not.
    x = (drawn(before)[0] // 2).astype(np.int8)
    (made,), (wanted,) = run(file.to_bytes(), x), run(before, x)
    (end,) = file.graphs[0].outputs
    steps = old.scales[0] * 2 / end.quantization.scales[0] * 2.0
    assert np.abs(made.astype(int) - wanted).max() <= np.ceil(steps)


def test_constants_in_a_class_are_stored_in_the_new_steps():
    """The value that a pad puts in is the same number before and after."""

    def padded(x):
        return tf.pad(
            tf.nn.relu(x), [[0, 0], [1, 1], [0, 0], [0, 0]], constant_values=0.5
        )

    file = tflite.open(converted(padded))
    pad = the_op(file, "PADV2")
    name, old = pad.inputs[2].name, pad.outputs[0].quantization
    value = file.constants[name]
    file.set_quantization(pad.outputs[0], old.scales[0] * 2, -100)
    assert abs(file.constants[name] - value) <= old.scales[0]
    assert pad.inputs[2].quantization.zero_points == (-100,)


def ran(m, *feeds):
    """Return the only output of a file that is fed its inputs in their order."""
    interpreter = new_interpreter(m.to_bytes())
    interpreter.allocate_tensors()
    for end, feed in zip(interpreter.get_input_details(), feeds, strict=True):
        interpreter.set_tensor(end["index"], feed)
    interpreter.invoke()
    (end,) = interpreter.get_output_details()
    return interpreter.get_tensor(end["index"])


@pytest.mark.parametrize("kind", ["FILL", "NEG"])
def test_kernels_that_move_integers_alone_keep_one_scale(kind):
    """The numbers behind are the same when their integers are in steps half as long."""
    half, m = tflite.Quantization((0.5,)), tflite.LiteFile()
    x = m.add_input("x", "int8", [], quantization=half)
    read = [m.add_constant("to", np.int32([3])), x] if kind == "FILL" else [x]
    y = m.add(kind, read, name="y", dtype="int8", quantization=half)
    m.set_outputs(m.add("DEQUANTIZE", y, dtype="float32"))
    wanted = ran(m, np.int8(4))
    m.set_quantization("x", 0.25)
    m.verify()
    np.testing.assert_array_equal(ran(m, np.int8(8)), wanted)


def test_a_bias_without_steps_has_those_that_its_kernel_expects():
    half, m = tflite.Quantization((0.5,)), tflite.LiteFile()
    x = m.add_input("x", "int8", [1, 1, 1, 4], quantization=half)
    each = tflite.Quantization((0.5, 0.25), (0, 0))
    w = m.add_constant("w", np.ones([2, 1, 1, 4], np.int8), quantization=each)
    b = m.add_constant("b", np.int32([8, 12]))
    strides = dict.fromkeys(("stride_w", "stride_h"), 1)
    m.set_outputs(m.add("CONV_2D", [x, w, b], name="y", quantization=half, **strides))
    wanted = ran(m, np.full([1, 1, 1, 4], 2, np.int8))
    m.set_quantization("x", 0.25)
    m.verify()
    np.testing.assert_array_equal(ran(m, np.full([1, 1, 1, 4], 4, np.int8)), wanted)


def test_weights_can_have_other_scales():
    file = tflite.open(converted())
    before = file.to_bytes()
    x, weights, bias = the_op(file, "CONV_2D").inputs
    scales = np.asarray(weights.quantization.scales) * 2
    values = file.constants[bias.name]
    file.set_quantization(weights.name, scales)
    np.testing.assert_allclose(
        bias.quantization.scales, np.float32(x.quantization.scales[0]) * scales, 1e-6
    )
    steps = np.asarray(bias.quantization.scales)
    assert np.all(np.abs(file.constants[bias.name] - values) <= steps)
    (given,) = drawn(before)
    difference = run(file.to_bytes(), given)[0].astype(int) - run(before, given)[0]
    assert 0 < np.abs(difference).max() < 12


REFUSED = {
    "bias": (lambda f: the_op(f, "CONV_2D").inputs[2], (0.1,), "is the bias of"),
    "scale": (lambda f: f.graphs[0].inputs[0], (0.0,), "positive numbers"),
    "zero point": (lambda f: f.graphs[0].inputs[0], (0.1, 300), "from -128 to 127"),
    "weights": (lambda f: the_op(f, "CONV_2D").inputs[1], (0.1, 3), "is 0 in the"),
    "several": (lambda f: f.graphs[0].inputs[0], ([0.1, 0.2],), r"1 scale\(s\), not 2"),
    "overflow": (lambda f: f.graphs[0].inputs[0], (1e-9,), "does not fit int32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_steps_that_cannot_be_are_refused(name):
    tensor, steps, message = REFUSED[name]
    file = tflite.open(converted())
    before = file.to_bytes()
    with pytest.raises(TFLiteError, match=message):
        file.set_quantization(tensor(file), *steps)
    assert file.to_bytes() == before


def test_scales_that_a_kernel_has_built_in_are_refused():
    file = tflite.open(SAMPLES["int8"]().blob)
    with pytest.raises(TFLiteError, match=r"SOFTMAX .*built in; put a QUANTIZE"):
        file.set_quantization(file.graphs[0].outputs[0], 0.01, 0)


def test_floats_have_no_steps():
    file = tflite.open(SAMPLES["floats"]().blob)
    with pytest.raises(TFLiteError, match="stands for itself"):
        file.set_quantization(file.graphs[0].outputs[0], 0.01)


@pytest.mark.parametrize("name", ["int8", "mixed", "attention", "lstm", "flow"])
def test_versions_are_those_that_the_converter_writes(name):
    _check_versions(SAMPLES[name]().blob)


def _check_versions(blob):
    """Ops that are put in the place of their like have the versions of before."""
    file, made = tflite.open(blob), tflite.open(blob)
    for graph in made.graphs:
        for op in graph.ops:
            made.replace(op, op.kind, graph=graph, **op.options)
    assert _newest(made) == _newest(file)


def _newest(file):
    """Return versions by kind: the converter writes one code for all ops of a kind."""
    found = {}
    for op in file.ops:
        found[op.kind] = max(found.get(op.kind, 0), op.version)
    return found


def test_versions_of_integers_are_those_that_the_converter_writes():
    _check_versions(converted(reshaped))


@pytest.mark.parametrize(
    ("dtype", "value", "said"),
    [
        ("float16", [1e6, -1e6], "clipped: 2 of 'w'"),
        ("float32", [1e300, 1.0], "clipped: 1 of 'w'"),
        ("float32", [np.inf, 1.0], "not all finite"),
        ("float16", [np.nan, 1.0], "not all finite"),
        ("int64", [1e30, 0.0], "int64 cannot be"),
        ("int32", [2**31, 0], "int32 cannot be"),
        ("int32", [0.5, 0], "int32 cannot be"),
        ("bool", [2, 0], "bool cannot be"),
        ("int32", ["a", "b"], "pass numbers"),
    ],
)
def test_numbers_that_a_constant_cannot_be_are_told(dtype, value, said):
    m = tflite.LiteFile()
    m.add_input("x", "int8", [2])
    w = m.add_constant("w", np.ones(2), dtype=dtype)
    try:
        assert said in str(m.constants.write("w", np.array(value)))
        assert np.isfinite(w.value).all()
    except (TypeError, ValueError) as error:
        assert said in str(error)
        assert w.value.tolist() == [1, 1]


def test_masks_of_infinities_are_written_back():
    m = tflite.LiteFile()
    m.add_input("x", "int8", [2])
    w = m.add_constant("w", np.array([-np.inf, 0], np.float32))
    m.constants["w"] = m.constants["w"] + 1
    assert w.value.tolist() == [-np.inf, 1]
    with pytest.raises(TFLiteError, match="numbers that float16 cannot be"):
        m.add_constant("v", [1e6], dtype="float16")


def dense(tensor):
    """Return the array of a constant of a file, as its numbers."""
    file = tflite.LiteFile()
    file.add_input("x", "float32", [1])
    file.graphs[0].add_tensor(tensor)
    return file.constants[tensor.name]


def _sparse(shape, order, blocks, levels, values):
    """Return a sparse tensor: of each level the size, or where its rows end and lie."""
    names = schema
    tensor = LiteTensor("sparse", "float32", shape)
    tensor.value = np.zeros(shape, np.float32)
    tensor.buffer = type(tensor.buffer)(np.float32(values).view(np.uint8))
    record = names.SparsityParametersT()
    record.traversalOrder = np.int32(order)
    record.blockMap = np.int32(blocks) if blocks else None
    record.dimMetadata = []
    for level in levels:
        entry = names.DimensionMetadataT()
        if isinstance(level, int):
            entry.format, entry.denseSize = names.DimensionType.DENSE, level
        else:
            entry.format = names.DimensionType.SPARSE_CSR
            kind = names.SparseIndexVector.Int32Vector
            for name, numbers in zip(("Segments", "Indices"), level, strict=True):
                vector = names.Int32VectorT()
                vector.values = np.int32(numbers)
                setattr(entry, f"array{name}", vector)
                setattr(entry, f"array{name}Type", kind)
        record.dimMetadata.append(entry)
    tensor.record.sparsity = record
    return tensor


# The examples of the format's definition: the matrix has 1 to 4 where they are.
MATRIX = np.float32([[1, 0, 2, 3], [0, 4, 0, 0], [0, 0, 5, 0], [0, 0, 0, 6]])


@pytest.mark.parametrize("is_read", [False, True], ids=["made", "read"])
@pytest.mark.parametrize(
    ("order", "levels", "values"),
    [
        ([0, 1], [4, ([0, 3, 4, 5, 6], [0, 2, 3, 1, 2, 3])], [1, 2, 3, 4, 5, 6]),
        ([1, 0], [4, ([0, 1, 2, 4, 6], [0, 1, 0, 2, 0, 3])], [1, 4, 2, 5, 3, 6]),
    ],
    ids=["rows", "columns"],
)
def test_rows_or_columns_are_filled_in(order, levels, values, is_read):
    tensor = _sparse([4, 4], order, [], levels, values)
    if is_read:
        file = tflite.LiteFile()
        graph = tflite.LiteGraph("main")
        file.graphs.append(graph)
        graph.add_tensor(tensor)
        (tensor,) = tflite.open(file.to_bytes()).tensors
    np.testing.assert_array_equal(dense(tensor), MATRIX)


def test_blocks_are_filled_in():
    levels = [2, ([0, 2, 3], [0, 1, 1]), 2, 2]
    values = [1, 0, 0, 4, 2, 3, 0, 0, 5, 0, 0, 6]
    tensor = _sparse([4, 4], [0, 1, 2, 3], [0, 1], levels, values)
    np.testing.assert_array_equal(dense(tensor), MATRIX)


def test_what_does_not_fit_together_is_refused():
    rows = [4, ([0, 3, 4, 5, 6], [0, 2, 3, 1, 2, 3])]
    with pytest.raises(TFLiteError, match="has 5 values for 6 places"):
        dense(_sparse([4, 4], [0, 1], [], rows, [1, 2, 3, 4, 5]))
    with pytest.raises(TFLiteError, match="outside its shape"):
        dense(_sparse([4, 3], [0, 1], [], rows, [1, 2, 3, 4, 5, 6]))
    with pytest.raises(TFLiteError, match="sparse in 1 dimensions, and has 2"):
        dense(_sparse([4, 4], [0], [], [4], [1, 2, 3, 4]))


def test_strings_and_constants_without_elements_are_those_of_the_model():
    words = LiteTensor("words", "string", [2])
    ends = np.int32([2, 16, 19, 20]).tobytes()
    words.buffer = type(words.buffer)(np.frombuffer(ends + b"onet", np.uint8))
    file = tflite.LiteFile()
    place = file.add_input("place", "int32", [1])
    file.graphs[0].add_tensor(words)
    file.graphs[0].add_tensor(nothing := LiteTensor("shape", "int32", [0]))
    word = file.add("GATHER", [words, place], name="word")
    one = file.add("RESHAPE", [place, nothing], name="one", shape=())
    file.set_outputs([word, one])
    found = file.to_model().run(place=[1])
    assert found["word"].tolist() == [b"t"]
    assert found["one"].shape == ()


def test_a_constant_that_a_kernel_fills_in_is_not_written():
    rows = [4, ([0, 3, 4, 5, 6], [0, 2, 3, 1, 2, 3])]
    tensor = _sparse([4, 4], [0, 1], [], rows, [1, 2, 3, 4, 5, 6])
    file = tflite.LiteFile()
    x = file.add_input("x", "float32", [4, 4])
    file.graphs[0].add_tensor(tensor)
    whole = file.add("DENSIFY", tensor, name="whole", dtype="float32", shape=[4, 4])
    file.set_outputs(file.add("ADD", [x, whole], name="y"))
    with pytest.raises(TFLiteError, match="without its zeros, which <LiteOp DENSIFY"):
        file.constants["sparse"] = MATRIX
    assert tensor.is_sparse
