"""What is read of TFLite files, against the interpreter's account; and broken files."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from geutil import tflite
from geutil.tflite.op_names import UniqueNames, file_names, op_names, spellings
from geutil.tflite.precision import has_floats, precision_of, stored_bytes
from tests import tflite_files
from tests.interpreter import new_interpreter, schema
from tests.settings import needs_eager
from tests.tflite_files import packed, unpacked

pytestmark = needs_eager


@pytest.mark.parametrize("name", tflite_files.SAMPLES)
def test_tensors_ops_and_signatures_are_those_that_the_interpreter_tells(name):
    blob = tflite_files.SAMPLES[name]().blob
    file = tflite.open(blob)
    for graph in file.graphs:
        own = op_names(graph)
        assert len(set(own)) == len(own) == len(graph.ops)
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
    place = {tensor: i for i, tensor in enumerate(main.tensors)} | {None: -1}
    ops = interpreter._get_ops_details()[: len(main.ops)]
    assert [op.kind for op in main.ops] == [op["op_name"] for op in ops]
    for role in ("inputs", "outputs"):
        ours = [[place[t] for t in getattr(op, role)] for op in main.ops]
        assert ours == [list(op[role]) for op in ops]
    given = [detail["index"] for detail in interpreter.get_input_details()]
    assert [place[t] for t in main.inputs] == given
    assert {
        one.key: {"inputs": sorted(one.inputs), "outputs": sorted(one.outputs)}
        for one in file.signatures.values()
    } == {
        key: {role: sorted(names) for role, names in ends.items()}
        for key, ends in interpreter.get_signature_list().items()
    }


def test_which_ops_compute_in_floats():
    of_mixed = tflite.open(tflite_files.mixed().blob).ops
    assert [has_floats(op) for op in of_mixed] == [False, True, True, True, False]


def test_weights_of_four_bits_and_activations_of_sixteen():
    op = next(tflite.open(tflite_files.int8().blob).ops)
    op.inputs[1].dtype = "int4"
    assert precision_of(op) == "int8 with int4 weights"
    for tensor in (op.inputs[0], *op.outputs):
        tensor.dtype = "int16"
    op.inputs[1].dtype = "int8"
    assert precision_of(op) == "int16 with int8 weights"


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
        assert sum(stored_bytes(tflite.open(blob)).values()) == sum(sizes)


def test_the_subgraphs_that_ops_run():
    file = tflite.open(tflite_files.flow().blob)
    called = {op.kind: op.subgraphs for op in file.graphs[0].ops if op.subgraphs}
    kinds = {
        kind: [{op.kind for op in graph.ops} for graph in graphs]
        for kind, graphs in called.items()
    }
    assert kinds == {
        "WHILE": [{"LESS"}, {"RELU", "SUB", "ADD"}],
        "IF": [{"TANH"}, {"EXP"}],
    }


def test_options_are_words_where_the_schema_has_some():
    first = next(tflite.open(tflite_files.floats().blob).ops)
    assert first.options["padding"] == "SAME"
    assert first.options["fused_activation_function"] == "RELU6"
    assert first.options["stride_h"] == 2


def test_spellings_and_unique_names():
    assert list(spellings("a/mul_11")) == ["a/mul_11", "a/mul_1", "a/mul_"]
    assert list(spellings("12")) == ["12", "1"]
    unique = UniqueNames()
    given_names = [unique.name(name) for name in ("a", "a_1", "a", "a", "b")]
    assert given_names == ["a", "a_1", "a_2", "a_3", "b"]


# Broken files: each a refusal that says so, and nothing else.


@pytest.mark.parametrize("blob", [b"", b"TFL3", b"some other file altogether"])
def test_other_bytes_are_refused(blob):
    with pytest.raises(tflite.BrokenFileError, match="no TFLite file"):
        tflite.open(blob)


def test_a_file_that_is_cut_off_is_refused():
    blob = tflite_files.int8().blob
    for share in range(1, 50):
        with pytest.raises(tflite.BrokenFileError, match="TFLite file"):
            tflite.open(blob[: len(blob) * share // 50])


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
        with pytest.raises(tflite.BrokenFileError, match=message):
            tflite.open(broken(change))
    model = schema.ModelT()
    model.subgraphs = []
    with pytest.raises(tflite.BrokenFileError, match="no subgraph"):
        tflite.open(packed(model))


def survives(blob):
    """Read a file; a refusal is as good as a result."""
    try:
        file = tflite.open(blob)
    except tflite.BrokenFileError:
        return
    for graph in file.graphs:
        op_names(graph)
        assert all(map(precision_of, graph.ops))
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


def test_names_in_files():
    names = ["a", "in", "x/y", "x_y", "x:y", "1st", "ä"]
    found = file_names(names)
    assert len(set(found.values())) == len(names)
    assert found["a"] == "a"
    assert found["x_y"] == "x_y"
    assert all(name.isidentifier() for name in found.values())
