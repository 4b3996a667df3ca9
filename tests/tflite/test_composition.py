"""Tests of joined files: bit-equal to the whole, or to one file run behind another."""

import functools
import re

import numpy as np
import pytest
import tensorflow as tf

from geutil import tflite
from geutil.errors import ArgumentTypeError, TFLiteError
from tests.interpreter import new_interpreter
from tests.tflite.running import drawn, float_file, quantized, run
from tests.tflite_files import SAMPLES

RANDOM = np.random.default_rng(2)
KERNELS = RANDOM.normal(size=(2, 3, 3, 4, 4)).astype(np.float32)
IMAGE = tf.TensorSpec([1, 6, 6, 4], name="x")


def first(x):
    return tf.nn.relu(tf.nn.conv2d(x, KERNELS[0], 1, "SAME"))


def second(x):
    return tf.nn.conv2d(x, KERNELS[1], 2, "SAME")


@functools.cache
def blob(body=first, reach=0.0, spec=IMAGE, ends="int8"):
    if reach:
        return quantized(body, spec, reach, tf.as_dtype(ends))
    return float_file(body, spec)


def opened(*what, **options):
    return tflite.open(blob(*what, **options))


def kinds(file):
    return [op.kind for op in file.graphs[0].ops]


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("floats", [r"stem_1/conv"]),
        ("int8", [r"first_bn3.*sub1$", r"stem_1/conv"]),
        ("attention", [r"attention_1/Softmax$", r"norm1_1/add_2", r"rows_1/Resh"]),
        ("mixed", [r"between/sine"]),
        ("flow", [r"Greater$"]),
    ],
)
def test_halves_that_are_joined_are_the_whole(name, ends):
    """Both ways, the file gives bit by bit the results of the one that was split."""
    whole = SAMPLES[name]().blob
    plain = tflite.open(whole).graphs[0]
    tensors = [op.outputs[0].name for op in plain.ops]
    cut = [next(t for t in tensors if re.search(end, t)) for end in ends]
    feeds = drawn(whole) if name != "flow" else [np.ones((3, 4), "f4"), np.int32(3)]
    wanted = run(whole, *feeds)
    one, two = tflite.open(whole).split(cut)
    one.append(two)
    other, behind = tflite.open(whole).split(cut)
    behind.prepend(other)
    for joined in (one, behind):
        ends = [t.name for t in joined.graphs[0].inputs]
        fed = dict(zip([t.name for t in plain.inputs], feeds, strict=True))
        made = run(joined.to_bytes(), *(fed[name] for name in ends))
        np.testing.assert_array_equal(made, wanted)
        assert kinds(joined) == kinds(tflite.open(whole))
        joined.verify()
        (signature,) = joined.signatures.values()
        assert [*signature.inputs.values()] == [*joined.graphs[0].inputs]
        assert [*signature.outputs.values()] == [*joined.graphs[0].outputs]


CASES = {
    "alike": ((first, 0.0), (second, 0.0), ["CONV_2D", "CONV_2D"]),
    "to integers": ((first, 0.0), (second, 1.0), ["CONV_2D", "QUANTIZE", "CONV_2D"]),
    "to floats": ((first, 1.0), (second, 0.0), ["CONV_2D", "DEQUANTIZE", "CONV_2D"]),
    "steps": ((first, 1.0), (second, 2.0), ["CONV_2D", "QUANTIZE", "CONV_2D"]),
}


@pytest.mark.parametrize("name", CASES)
def test_types_and_steps_are_bridged(name):
    """The result is that of the second file, fed with numbers of the first one."""
    ours, theirs, wanted = CASES[name]
    (x,) = drawn(blob(*ours))
    (between,) = run(blob(*ours), x)
    (given,), (taken,) = (
        opened(*ours).graphs[0].outputs,
        opened(*theirs).graphs[0].inputs,
    )
    if given.quantization is not None:
        steps = given.quantization
        between = (between.astype(np.int32) - steps.zero_points[0]).astype(np.float32)
        between *= np.float32(steps.scales[0])
    if taken.quantization is not None:
        steps = taken.quantization
        between = np.round(between / np.float32(steps.scales[0])) + steps.zero_points[0]
        between = np.clip(between, -128, 127).astype(np.int8)
    (expected,) = run(blob(*theirs), between)
    made = []
    for file, other, edit in (
        (opened(*ours), opened(*theirs), "append"),
        (opened(*theirs), opened(*ours), "prepend"),
    ):
        before = other.to_bytes()
        getattr(file, edit)(other)
        assert other.to_bytes() == before
        assert kinds(file) == wanted
        made.append(run(file.to_bytes(), x)[0])
        names = [t.name for t in file.graphs[0].tensors]
        assert len({*names}) == len(names)
    np.testing.assert_array_equal(*made)
    # The kernel of QUANTIZE multiplies in fixed point: one step before the convolution.
    most = {"steps": 2, "to floats": 1e-5}.get(name, 0)
    assert np.abs(made[0].astype(float) - expected).max() <= most


def test_a_file_is_put_between_a_tensor_and_its_readers():
    whole = float_file(lambda x: second(first(x)), IMAGE)
    file, part = tflite.open(whole), opened(lambda x: tf.sin(x) * 2.0)
    at = file.graphs[0].ops[0].outputs[0]
    file.splice(part, at)
    (x,) = drawn(whole)
    wanted = float_file(lambda x: second(tf.sin(first(x)) * 2.0), IMAGE)
    np.testing.assert_array_equal(run(file.to_bytes(), x), run(wanted, x))
    assert kinds(file) == ["CONV_2D", "SIN", "MUL", "CONV_2D"]
    file.verify()


def test_a_float_part_is_put_into_integers():
    file, part = opened(second, 1.0), opened(tf.sin)
    (x,) = file.graphs[0].inputs
    file.splice(part, x.name)
    assert kinds(file) == ["DEQUANTIZE", "SIN", "QUANTIZE", "CONV_2D"]
    (given,) = drawn(blob(second, 1.0))
    steps = x.quantization
    numbers = (given.astype(int) - steps.zero_points[0]) * steps.scales[0]
    levels = np.round(np.sin(numbers) / steps.scales[0]) + steps.zero_points[0]
    (wanted,) = run(blob(second, 1.0), np.clip(levels, -128, 127).astype(np.int8))
    np.testing.assert_array_equal(run(file.to_bytes(), given)[0], wanted)


def test_a_part_at_an_output_becomes_the_output():
    file, part = opened(first), opened(tf.sin)
    (end,) = file.graphs[0].outputs
    file.splice(part, end)
    (x,) = drawn(blob(first))
    np.testing.assert_array_equal(
        run(file.to_bytes(), x)[0], run(blob(tf.sin), run(blob(first), x)[0])[0]
    )


def several(x, y):
    return {"sum": x + y, "product": x * y}


VECTORS = [tf.TensorSpec([3], name=name) for name in "xy"]


def test_ends_that_are_not_connected_stay():
    """Inputs and outputs are those of both files, in order."""
    body = float_file(several, *VECTORS)
    file, other = tflite.open(body), tflite.open(body)
    names = [t.name for t in file.graphs[0].outputs]
    inputs = [t.name for t in file.graphs[0].inputs]
    file.append(other, {inputs[0]: names[0]})
    assert len(file.graphs[0].inputs) == len(file.graphs[0].outputs) == 3
    feeds = [
        np.random.default_rng(i).normal(size=3).astype(np.float32) for i in range(3)
    ]
    old = dict(zip(names, run(body, *feeds[:2]), strict=True))
    new = run(body, old[names[0]], feeds[2])
    made = run(file.to_bytes(), *feeds)
    for one, wanted in zip(made, [*new, old[names[1]]], strict=True):
        np.testing.assert_array_equal(one, wanted)


def test_a_free_batch_goes_through():
    """A file of one row behind one of any number takes any number."""
    free = float_file(first, tf.TensorSpec([None, 6, 6, 4], name="x"))
    file = tflite.open(free)
    file.append(opened(second))
    assert file.graphs[0].outputs[0].shape[0] is None
    x = np.random.default_rng(7).normal(size=(3, 6, 6, 4)).astype(np.float32)
    rows = [run(blob(second), run(free, x[i : i + 1])[0])[0] for i in range(3)]
    np.testing.assert_allclose(
        run(file.to_bytes(), x)[0], np.concatenate(rows), 1e-5, 1e-5
    )


class Streaming(tf.Module):
    """A network with a state: the sum of what it was given."""

    def __init__(self):
        super().__init__()
        self.state = tf.Variable(tf.zeros([2]), name="state")

    @tf.function(input_signature=[tf.TensorSpec([2], name="x")])
    def __call__(self, x):
        return self.state.assign_add(x) * 0.5


@functools.cache
def streaming():
    module = Streaming()
    traced = module.__call__.get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([traced], module)
    converter.experimental_enable_resource_variables = True
    return converter.convert()


def test_variables_of_both_files_stay_apart():
    """Each of two networks with a state of the same name keeps its own."""
    file = tflite.open(streaming())
    file.append(tflite.open(streaming()))
    file.append(tflite.open(streaming()))
    joined, (one, two, three) = (
        _session(file.to_bytes()),
        [_session(streaming()) for _ in range(3)],
    )
    for _ in range(3):
        x = np.random.default_rng(7).normal(size=2).astype(np.float32)
        np.testing.assert_array_equal(joined(x), three(two(one(x))))
    names = {op.options["shared_name"] for op in file.ops if op.kind == "VAR_HANDLE"}
    assert len(names) == 3


def _session(file):
    """Return a function that runs a file, and keeps its state."""
    interpreter = new_interpreter(file)
    interpreter.allocate_tensors()
    (taken,), (given,) = (
        interpreter.get_input_details(),
        interpreter.get_output_details(),
    )

    def step(x):
        interpreter.set_tensor(taken["index"], x)
        interpreter.invoke()
        return interpreter.get_tensor(given["index"])

    return step


def test_files_side_by_side_have_a_signature_each():
    """Each signature gives what its own file gives; equal weights are there once."""
    file = tflite.open(SAMPLES["int8"]().blob)
    others = {
        "again": tflite.open(SAMPLES["int8"]().blob),
        "pair": tflite.open(SAMPLES["two_signatures"]().blob),
        "sum": tflite.open(streaming()),
        "other sum": tflite.open(streaming()),
    }
    file.merge(others)
    merged = file.to_bytes()
    assert {*file.signatures} == {
        *("serving_default", "again", "pair_encode", "pair_decode"),
        *("sum", "other sum"),
    }
    stored = {id(t.buffer): t.buffer for t in tflite.open(merged).tensors}
    values = [b.data.tobytes() for b in stored.values() if b.size]
    assert len({*values}) == len(values)
    interpreter = new_interpreter(merged)
    for key, sample in (
        ("serving_default", "int8"),
        ("again", "int8"),
        ("pair_encode", "two_signatures"),
    ):
        plain = new_interpreter(SAMPLES[sample]().blob)
        own = key.removeprefix("pair_") if sample == "two_signatures" else None
        ours, theirs = (
            interpreter.get_signature_runner(key),
            plain.get_signature_runner(own),
        )
        feeds = {
            name: np.ones(end["shape"], end["dtype"])
            for name, end in theirs.get_input_details().items()
        }
        made, wanted = ours(**feeds), theirs(**feeds)
        for name, value in wanted.items():
            np.testing.assert_array_equal(made[name], value)
    sums = [interpreter.get_signature_runner(key) for key in ("sum", "other sum")]
    results = []
    for runner in (sums[0], sums[0], sums[1]):
        ((name, _),) = runner.get_input_details().items()
        (made,) = runner(**{name: np.ones(2, np.float32)}).values()
        results.append(made[0])
    assert results == [0.5, 1.0, 0.5]


def _cast(x):
    return tf.cast(x, tf.float32)


REFUSED = {
    "shapes": (
        lambda f: f.append(opened(tf.sin, spec=tf.TensorSpec([1, 6, 6, 5]))),
        "call set_batch_size or set_input_shape, or put a RESHAPE",
    ),
    "types": (
        lambda f: f.append(opened(_cast, spec=tf.TensorSpec([1, 6, 6, 4], tf.int32))),
        "insert a CAST",
    ),
    "names": (
        lambda f: f.append(opened(first), {"nothing": "x"}),
        "has no input 'nothing'",
    ),
    "count": (
        lambda f: f.splice(tflite.open(float_file(several, *VECTORS)), "x"),
        "this one has 2; cut it, or use append",
    ),
    "signature": (
        lambda f: f.merge({"serving_default": opened(first)}),
        "has a signature 'serving_default' already",
    ),
    "guess": (
        lambda f: f.append(tflite.open(float_file(several, *VECTORS))),
        "pass connect=",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_do_not_fit_are_refused(name):
    edit, message = REFUSED[name]
    file = opened(first)
    before = file.to_bytes()
    with pytest.raises(TFLiteError, match=message):
        edit(file)
    assert file.to_bytes() == before


def test_a_function_is_converted_first():
    with pytest.raises(ArgumentTypeError, match=r"convert a function by geutil\.model"):
        opened(first).append(tf.function(first))


def test_a_refused_join_leaves_no_reader_behind():
    file, other = tflite.LiteFile(), tflite.LiteFile()
    ends = [file.add_input(name, "float32", [4]) for name in "ab"]
    file.set_outputs(file.add("ADD", ends, name="y"))
    a = other.add_input("a", "float32", [4])
    other.set_outputs(other.add("RESHAPE", [a], name="b", new_shape=[2, 2]))
    before = [t.consumers for t in ends]
    with pytest.raises(TFLiteError, match="their shapes are"):
        file.prepend(other)
    assert [t.consumers for t in ends] == before
