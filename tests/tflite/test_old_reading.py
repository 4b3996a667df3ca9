"""What is read of TFLite files, against the interpreter's account; and broken files."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from geutil.tflite.names import UniqueNames, op_names, spellings
from geutil.tflite.old_files import FileOp, ops_of
from geutil.tflite.old_reading import BrokenFileError, read
from geutil.tflite.precision import precision_of, stored_bytes
from geutil.tflite.run import new_interpreter, packed, schema, unpacked
from tests import tflite_files
from tests.settings import needs_eager

pytestmark = needs_eager


@pytest.mark.parametrize("name", tflite_files.SAMPLES)
def test_tensors_ops_and_signatures_are_those_that_the_interpreter_tells(name):
    blob = tflite_files.SAMPLES[name]().blob
    file = read(blob)
    for graph in file.graphs:
        own = op_names(graph)
        assert len(set(own)) == len(own) == len(graph.ops)
    assert ops_of(blob) == [file_op(op, g) for g in file.graphs for op in g.ops]
    if name == "flex":
        return  # TensorFlow Lite alone cannot run it.
    main = file.graphs[0]
    interpreter = new_interpreter(blob)
    details = {d["index"]: d for d in interpreter.get_tensor_details()}
    # The interpreter has tensors of its own behind those of the file.
    for place, tensor in enumerate(main.tensors):
        detail = details[place]
        assert tensor.name == detail["name"]
        assert np.dtype(tensor.dtype) == detail["dtype"]
        free = [-1 if size is None else size for size in tensor.shape]
        assert free == list(detail["shape_signature"])
        steps = detail["quantization_parameters"]
        scales = () if tensor.quantization is None else tensor.quantization.scales
        assert list(scales) == list(steps["scales"])
        if scales:
            assert list(tensor.quantization.zero_points) == list(steps["zero_points"])
            assert tensor.quantization.axis == steps["quantized_dimension"]
    ops = interpreter._get_ops_details()[: len(main.ops)]
    assert [op.type for op in main.ops] == [op["op_name"] for op in ops]
    assert [list(op.outputs) for op in main.ops] == [list(o["outputs"]) for o in ops]
    assert list(main.inputs) == [d["index"] for d in interpreter.get_input_details()]
    assert {
        one.key: {"inputs": sorted(one.inputs), "outputs": sorted(one.outputs)}
        for one in file.signatures
    } == {
        key: {role: sorted(names) for role, names in ends.items()}
        for key, ends in interpreter.get_signature_list().items()
    }


def file_op(op, graph):
    """Return what the shorter account of a file says of an op."""
    tensors = [graph.tensors[i] for i in (*op.inputs, *op.outputs) if i >= 0]
    result = graph.tensors[op.outputs[0]].name if op.outputs else ""
    held = [() if t.quantization is None else t.quantization.scales for t in tensors]
    steps = tuple(max(scales, default=0.0) for scales in held)
    return FileOp(op.type, result, tuple(t.dtype.upper() for t in tensors), steps)


def test_which_ops_compute_in_floats():
    of_mixed = ops_of(tflite_files.mixed().blob)
    assert [op.is_float for op in of_mixed] == [False, True, True, True, False]


def test_weights_of_four_bits_and_activations_of_sixteen():
    model = unpacked(tflite_files.int8().blob)
    types = schema().TensorType
    tensors = model.subgraphs[0].tensors
    op = model.subgraphs[0].operators[0]
    tensors[op.inputs[1]].type = types.INT4
    first = read(packed(model)).graphs[0]
    assert precision_of(first.ops[0], first) == "int8 with int4 weights"
    for place in (op.inputs[0], *op.outputs):
        tensors[place].type = types.INT16
    tensors[op.inputs[1]].type = types.INT8
    first = read(packed(model)).graphs[0]
    assert precision_of(first.ops[0], first) == "int16 with int8 weights"


def test_bytes_of_constants_are_those_of_the_buffers():
    for name in ("int8", "dynamic_range", "lstm"):
        blob = tflite_files.SAMPLES[name]().blob
        model = unpacked(blob)
        used = {t.buffer for g in model.subgraphs for t in g.tensors}
        sizes = [
            len(model.buffers[i].data)
            for i in used
            if model.buffers[i].data is not None
        ]
        assert sum(stored_bytes(read(blob)).values()) == sum(sizes)


def test_the_subgraphs_that_ops_run():
    file = read(tflite_files.flow().blob)
    called = {op.type: op.subgraphs for op in file.graphs[0].ops if op.subgraphs}
    kinds = {
        kind: [{op.type for op in file.graphs[i].ops} for i in places]
        for kind, places in called.items()
    }
    assert kinds == {
        "WHILE": [{"LESS"}, {"RELU", "SUB", "ADD"}],
        "IF": [{"TANH"}, {"EXP"}],
    }


def test_options_are_words_where_the_schema_has_some():
    first = read(tflite_files.floats().blob).graphs[0].ops[0]
    assert first.options["padding"] == "SAME"
    assert first.options["fusedActivationFunction"] == "RELU6"
    assert first.options["strideH"] == 2


def test_spellings_and_unique_names():
    assert list(spellings("a/mul_11")) == ["a/mul_11", "a/mul_1", "a/mul_"]
    assert list(spellings("12")) == ["12", "1"]
    unique = UniqueNames()
    given_names = [unique.name(name) for name in ("a", "a_1", "a", "a", "b")]
    assert given_names == ["a", "a_1", "a_2", "a_3", "b"]


# Broken files: each a refusal that says so, and nothing else.


@pytest.mark.parametrize("blob", [b"", b"TFL3", b"some other file altogether"])
def test_other_bytes_are_refused(blob):
    for function in (read, ops_of):
        with pytest.raises(ValueError, match="no TFLite file") as caught:
            function(blob)
        assert (function is read) == isinstance(caught.value, BrokenFileError)


def test_a_file_that_is_cut_off_is_refused():
    blob = tflite_files.int8().blob
    for share in range(1, 50):
        with pytest.raises(BrokenFileError, match="TFLite file"):
            read(blob[: len(blob) * share // 50])


def test_indices_beyond_the_lists_and_files_that_say_nothing_are_refused():
    def broken(change):
        model = unpacked(tflite_files.int8().blob)
        change(model)
        return packed(model)

    def tensor_of_op(model):
        model.subgraphs[0].operators[0].inputs = [999]

    def code(model):
        model.subgraphs[0].operators[0].opcodeIndex = 999

    def buffer(model):
        model.subgraphs[0].tensors[0].buffer = 9999

    def signature(model):
        model.signatureDefs[0].subgraphIndex = 7

    def kind(model):
        model.operatorCodes[0].builtinCode = 9999

    expected = {
        tensor_of_op: "names tensor 999",
        code: "names op code 999",
        buffer: "names buffer 9999",
        signature: "names subgraph 7",
        kind: "op of number 9999",
    }
    for change, message in expected.items():
        with pytest.raises(BrokenFileError, match=message):
            read(broken(change))
    model = schema().ModelT()
    model.subgraphs = []
    with pytest.raises(BrokenFileError, match="no subgraph"):
        read(packed(model))


def survives(blob):
    """Read a file; a refusal is as good as a result."""
    try:
        file = read(blob)
    except BrokenFileError:
        return
    for graph in file.graphs:
        op_names(graph)
        assert all(precision_of(op, graph) for op in graph.ops)
    stored_bytes(file)


@pytest.mark.parametrize("name", ["int8", "flow"])
def test_changed_bytes_are_read_or_refused(name):
    blob = tflite_files.SAMPLES[name]().blob
    rng = random.Random(0)
    for _ in range(400):
        changed = bytearray(blob)
        for _ in range(rng.choice((1, 1, 4, 32))):
            place = rng.randrange(8, len(blob))
            changed[place] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
        survives(bytes(changed))


@given(st.data())
@hypothesis_settings(max_examples=60, deadline=None, derandomize=True)
def test_any_number_in_any_place_is_read_or_refused(data):
    blob = bytearray(tflite_files.two_signatures().blob)
    place = data.draw(st.integers(0, len(blob) // 4 - 1)) * 4
    number = data.draw(st.integers(0, 2**32 - 1))
    blob[place : place + 4] = number.to_bytes(4, "little")
    survives(bytes(blob))
