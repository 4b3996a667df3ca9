"""What is read of TFLite files, against the interpreter's account; and broken files."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from geutil import model, quantize, report, tflite
from tests import tflite_files
from tests.interpreter import new_interpreter, schema
from tests.settings import needs_eager
from tests.tflite_files import packed, unpacked

pytestmark = needs_eager


@pytest.mark.parametrize("name", tflite_files.SAMPLES)
def test_tensors_ops_and_signatures_are_those_that_the_interpreter_tells(name):
    blob = tflite_files.SAMPLES[name]().blob
    file = tflite.open(blob)
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
    sample = tflite_files.mixed()
    ends = sample.model.inputs.items()
    data = {n: np.zeros([1, *t.shape[1:]], np.float32) for n, t in ends}
    told = quantize.compare_int8(sample.model, sample.blob, [data]).float_ops
    kinds = [op.kind for op in tflite.open(sample.blob).ops]
    assert len(kinds) == 5
    assert [line.partition(" ")[0] for line in told] == kinds[1:4]


def inspected(file, folder):
    """Return the inspection of a file."""
    return model.inspect(file.save(folder / "m.tflite", overwrite=True))


def test_weights_of_four_bits_and_activations_of_sixteen(tmp_path):
    file = tflite.open(tflite_files.int8().blob)
    op = next(file.ops)
    before = inspected(file, tmp_path).precisions
    assert "int8 with int4 weights" not in before
    op.inputs[1].dtype = "int4"
    found = inspected(file, tmp_path).precisions
    assert found["int8 with int4 weights"] == {op.kind: 1}
    for tensor in (op.inputs[0], *op.outputs):
        tensor.dtype = "int16"
    op.inputs[1].dtype = "int8"
    found = inspected(file, tmp_path).precisions
    readers = [one for one in op.outputs[0].consumers if one.kind == op.kind]
    assert found["int16 with int8 weights"][op.kind] == 1 + len(readers)


def test_bytes_of_constants_are_those_of_the_buffers(tmp_path):
    for name in ("int8", "dynamic_range", "lstm"):
        blob = tflite_files.SAMPLES[name]().blob
        read = unpacked(blob)
        used = {t.buffer for g in read.subgraphs for t in g.tensors}
        sizes = [
            len(read.buffers[i].data) for i in used if read.buffers[i].data is not None
        ]
        found = inspected(tflite.open(blob), tmp_path)
        assert sum(found.weights.values()) == found.bytes_constants == sum(sizes)


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
    """Read and draw a file; a refusal is as good as a result."""
    try:
        tflite.open(blob)
    except tflite.BrokenFileError:
        return
    report.view(blob)


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
