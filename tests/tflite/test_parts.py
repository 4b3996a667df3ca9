"""Ops that read and make other tensors, and tensors that are stored otherwise."""

import numpy as np
import pytest

from geutil import tflite
from geutil.errors import TFLiteError
from geutil.tflite import LiteFile, LiteTensor, Quantization
from tests.interpreter import new_interpreter

X = np.array([1.0, -2.0, 3.0], np.float32)


@pytest.fixture
def summed():
    """A file that adds a constant to its input, and its op."""
    file = LiteFile()
    x = file.add_input("x", "float32", [3])
    c = file.add_constant("c", np.float32([1, 2, 3]))
    file.set_outputs([file.add("ADD", [x, c], name="y")])
    file.add_signature("serving_default")
    return file, file.graphs[0].ops[0]


def run(file):
    (value,) = new_interpreter(file.to_bytes()).get_signature_runner()(x=X).values()
    return value.tolist()


def test_what_an_op_is_to_read_becomes_part_of_its_subgraph(summed):
    file, op = summed
    old = op.inputs[1]
    new = old.like()
    new.value = np.float32([10, 20, 30])
    op.set_input(1, new)
    assert new in file.graphs[0].tensors
    assert (old.consumers, new.consumers) == ((), (op,))
    assert run(file) == [11.0, 18.0, 33.0]


def test_what_an_op_makes_is_made_by_no_other(summed):
    file, op = summed
    old, new = op.outputs[0], op.outputs[0].like()
    op.set_output(0, new)
    assert (old.producer, new.producer) == (None, op)
    file.graphs[0].outputs = (new,)
    file.signatures["serving_default"].outputs["y"] = new
    assert run(file) == [2.0, 0.0, 6.0]


def test_values_of_another_type_are_as_the_interpreter_reads_them(summed):
    file, op = summed
    weights, floats = op.inputs[1], op.inputs[1].like()
    weights.store(np.array([1, -7, 5]), "int4")
    weights.quantization = Quantization.of(0.5)
    op.set_input(1, floats)
    dequantize = tflite.LiteOp("DEQUANTIZE", [weights], [floats], version=6)
    file.graphs[0].add_op(dequantize, at=0)
    assert run(file) == [1.5, -5.5, 5.5]


def test_steps_one_for_all_or_along_an_axis():
    one = Quantization.of(0.1, axis=1, zero=3)
    assert one == Quantization((float(np.float32(0.1)),), (3,), 0)
    several = Quantization.of(np.array([1.0, 2.0]), axis=1)
    assert several == Quantization((1.0, 2.0), (0, 0), 1)
    with pytest.raises(TFLiteError, match="tensor 'x' of the file has no steps"):
        LiteTensor("x", "int8", [3]).in_steps()
