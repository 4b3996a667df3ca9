"""Files opened and saved, each field compared by the schema's own classes."""

import io
import random
import subprocess
import sys
import zipfile

import flatbuffers
import numpy as np
import pytest

from geutil import tflite
from geutil.errors import GeutilError, ModelError, TFLiteError
from testdata.powers import FILES
from tests.interpreter import schema
from tests.model.mutations import mutate
from tests.processes import ROOT
from tests.tflite.declared import chain, counter, diamond
from tests.tflite.running import runs
from tests.tflite_files import SAMPLES
from tests.thorough import is_quick, thorough


def record(blob):
    return schema.ModelT.InitFromObj(schema.Model.GetRootAs(blob, 0))


def packed(model):
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def contents(blob):
    """Return all fields of a file by name, and the bytes of buffers in their places."""
    model = record(blob)

    def of_buffer(place):
        buffer = model.buffers[place]
        if buffer.offset > 1:
            return bytes(blob[buffer.offset : buffer.offset + buffer.size])
        return b"" if buffer.data is None else bytes(buffer.data)

    def plain(value):
        if isinstance(value, list | tuple | np.ndarray):
            return [plain(one) for one in value]
        if not hasattr(value, "__dict__"):
            return value
        # Absent lists and empty ones mean the same.
        fields = {k: v for k, v in vars(value).items() if v is not None}
        kept = {k: plain(v) for k, v in fields.items()}
        kept = {k: v for k, v in kept.items() if v != []}
        if "opcodeIndex" in kept:
            kept["opcodeIndex"] = plain(model.operatorCodes[value.opcodeIndex])
            if value.largeCustomOptionsOffset > 1:
                start = value.largeCustomOptionsOffset
                end = start + value.largeCustomOptionsSize
                kept["customOptions"] = [*blob[start:end]]
            for field in ("largeCustomOptionsOffset", "largeCustomOptionsSize"):
                kept.pop(field)
        if type(value) in (schema.TensorT, schema.MetadataT):
            kept["buffer"] = of_buffer(value.buffer)
        return kept

    whole = plain(model)
    for field in ("buffers", "operatorCodes"):
        whole.pop(field)
    if model.metadataBuffer is not None:
        whole["metadataBuffer"] = [of_buffer(place) for place in model.metadataBuffer]
    return whole


def with_all_fields(blob):
    """Return a file that has the fields that converters seldom write."""
    model, types = record(blob), schema
    graph = model.subgraphs[0]
    note = types.BufferT()
    note.data = np.arange(9, dtype=np.uint8)
    model.buffers.append(note)
    for name in ("first", "second"):
        entry = types.MetadataT()
        entry.name, entry.buffer = name, len(model.buffers) - 1
        model.metadata = [*(model.metadata or []), entry]
    model.metadataBuffer = np.asarray([len(model.buffers) - 1], np.int32)
    op = graph.operators[0]
    op.intermediates = np.asarray([0, -1, 1], np.int32)
    op.mutatingVariableInputs = np.asarray([False, True])
    code = types.OperatorCodeT()
    code.builtinCode, code.deprecatedBuiltinCode = 32, 32
    code.customCode, code.version = b"Own", 3
    model.operatorCodes.append(code)
    custom = types.OperatorT()
    custom.opcodeIndex = len(model.operatorCodes) - 1
    custom.inputs = graph.outputs
    custom.outputs = np.asarray([], np.int32)
    custom.customOptions = np.arange(5, dtype=np.uint8)
    graph.operators.append(custom)
    graph.tensors[2].isVariable = True
    sparse = types.SparsityParametersT()
    sparse.traversalOrder = np.asarray([0, 1], np.int32)
    sparse.blockMap = np.asarray([1], np.int32)
    axes = []
    for format in (0, 1):
        axis = types.DimensionMetadataT()
        axis.format, axis.denseSize = format, 4
        if format:
            axis.arraySegmentsType = axis.arrayIndicesType = (
                types.SparseIndexVector.Uint8Vector
            )
            for field in ("arraySegments", "arrayIndices"):
                vector = types.Uint8VectorT()
                vector.values = np.asarray([0, 2, 3], np.uint8)
                setattr(axis, field, vector)
        axes.append(axis)
    sparse.dimMetadata = axes
    graph.tensors[1].sparsity = sparse
    steps = types.QuantizationParametersT()
    steps.min, steps.max = np.float32([-1, -2]), np.float32([1, 2])
    graph.tensors[1].quantization = steps
    blocks = types.QuantizationParametersT()
    blocks.detailsType = types.QuantizationDetails.BlockwiseQuantization
    blocks.details = types.BlockwiseQuantizationT()
    blocks.details.scales, blocks.details.zeroPoints = 1, -1
    blocks.details.blockSize = 32
    graph.tensors[0].quantization = blocks
    return packed(model)


MADE = {
    "all_fields": lambda: with_all_fields(SAMPLES["int8"]().blob),
    "variables": lambda: counter().to_bytes(),
    "float16": lambda: diamond().to_bytes(),
    "int4": lambda: of_four_bits().to_bytes(),
}


def of_four_bits():
    m = tflite.LiteFile()
    m.add_input("x", "float32", [1, 3])
    steps = tflite.Quantization((0.5, 0.25), (0, 0), 0)
    w = [[1, -8, 7], [-1, 0, 2]]
    w = m.add_constant("w", np.int8(w), dtype="int4", quantization=steps)
    m.set_outputs([m.add("FULLY_CONNECTED", ["x", w, None], name="y", dtype="float32")])
    return m


@pytest.mark.parametrize("name", [*SAMPLES, *MADE])
def test_each_field_is_as_it_was(name):
    blob = MADE[name]() if name in MADE else SAMPLES[name]().blob
    m = tflite.open(blob)
    expected = contents(blob)
    assert contents(m.to_bytes()) == expected
    # With the weights behind the flatbuffer, too, as in large files.
    m.is_split = True
    split = m.to_bytes()
    assert all(buffer.data is None for buffer in record(split).buffers[1:])
    assert contents(split) == expected
    assert tflite.open(split).is_split
    assert tflite.open(split).to_bytes() == split


@pytest.mark.parametrize("name", sorted({*SAMPLES} - {"flex"}))
def test_a_saved_file_computes_what_it_did(name, tmp_path):
    blob = SAMPLES[name]().blob
    expected = runs(blob)
    m = tflite.open(blob)
    saved = m.save(tmp_path / "m.tflite").read_bytes()
    m.is_split = True
    for new in (saved, m.to_bytes()):
        for run, want in zip(runs(new), expected, strict=True):
            for end, value in want.outputs.items():
                np.testing.assert_array_equal(run.outputs[end], value)


def test_a_file_is_saved_over_itself_or_not_at_all(tmp_path):
    path = chain("NEG").save(tmp_path / "m.tflite")
    m = tflite.open(path)
    with pytest.raises(ModelError, match="exists; pass overwrite=True"):
        m.save(path)
    m.rename({"x": "image"})
    m.save(path, overwrite=True)
    assert tflite.open(path).graphs[0].inputs[0].name == "image"
    m.op("t0").options["typo"] = 1
    before = path.read_bytes()
    with pytest.raises(TFLiteError, match="has no option 'typo'"):
        m.save(path, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m.tflite"]
    assert path.read_bytes() == before


def test_a_directory_is_not_replaced_by_a_file(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "other").write_text("kept")
    with pytest.raises(ModelError, match="is a directory, which a file does not"):
        chain("NEG").save(folder, overwrite=True)
    assert (folder / "other").read_text() == "kept"
    assert [*tmp_path.iterdir()] == [folder]


def test_a_field_that_the_schema_lacks_is_not_lost(monkeypatch, tmp_path):
    types, count = schema, [0]
    start, end = types.SubGraphStart, types.SubGraphEnd

    def longer(builder):
        start(builder)
        count[0] = len(builder.current_vtable)
        builder.current_vtable.append(0)

    def ended(builder):
        builder.PrependInt32Slot(count[0], 7, 0)
        return end(builder)

    monkeypatch.setattr(types, "SubGraphStart", longer)
    monkeypatch.setattr(types, "SubGraphEnd", ended)
    blob = packed(record(SAMPLES["int8"]().blob))
    monkeypatch.undo()
    m = tflite.open(blob)
    for part in (m, m.cut(), m.keep_subgraphs(0)):
        with pytest.raises(
            TFLiteError, match=r"field \d+ of a table SubGraph, which the"
        ):
            part.to_bytes()
    with pytest.raises(TFLiteError, match="install a newer ai-edge-litert"):
        m.save(tmp_path / "m.tflite")
    assert not [*tmp_path.iterdir()]


def test_the_archive_behind_a_file_is_kept():
    m = chain("NEG")
    there = io.BytesIO(m.to_bytes())
    with zipfile.ZipFile(there, "a") as archive:
        archive.writestr("labels.txt", "cat\ndog\n")
        archive.writestr("empty.txt", "")
    # Counted from the start of the archive, as other writers do.
    alone = io.BytesIO()
    with zipfile.ZipFile(alone, "w") as archive:
        archive.writestr("labels.txt", "cat\ndog\n")
    for blob in (there.getvalue(), m.to_bytes() + alone.getvalue()):
        opened = tflite.open(blob)
        # The file gets longer, so the archive has another place.
        opened.expose({"an output with a name that takes room": "x"})
        saved = opened.to_bytes()
        assert len(saved) > len(blob)
        with zipfile.ZipFile(io.BytesIO(saved)) as archive:
            assert archive.testzip() is None
            assert archive.read("labels.txt") == b"cat\ndog\n"
        # zipfile finds archives that are misplaced, too; strict readers do not.
        at = int.from_bytes(saved[-6:-2], "little")
        assert saved[at : at + 4] == b"PK\x01\x02"
        first = int.from_bytes(saved[at + 42 : at + 46], "little")
        assert saved[first : first + 4] == b"PK\x03\x04"
    # Bytes that only look like the end of one are weights.
    looks = m.to_bytes() + b"PK\x05\x06" + bytes([255]) * 18
    assert tflite.open(looks).archive is None


def test_damaged_files_are_read_saved_and_edited_or_refused():
    sources = [SAMPLES[name]().blob for name in ("int8", "flow", "two_signatures")]
    sources += [make() for make in MADE.values()]
    rng = random.Random(7)
    saved = 0
    for i in range(200 if is_quick() else 20_000):
        _, blob = mutate(sources[i % len(sources)], rng)
        try:
            m = tflite.open(blob)
        except tflite.BrokenFileError:
            continue
        for look in (
            lambda m=m: m.verify(),
            lambda m=m: m.to_bytes(),
            lambda m=m: m.cut(outputs=m.graphs[0].tensors[-1:]),
            lambda m=m: m.strip(metadata=True),
            lambda m=m: m.to_bytes(),
        ):
            try:
                look()
            except GeutilError:
                continue
            saved += 1
    assert saved > 100


def test_files_of_strangers_are_read(tmp_path):
    read = 0
    for name, sample in FILES.items():
        if "tflite" in name.lower() or "flex" in name.lower():
            (tmp_path / name).mkdir()
            path = sample.write(tmp_path / name, tmp_path / "marker")
            blob = path.read_bytes()
            assert contents(tflite.open(path).to_bytes()) == contents(blob)
            read += 1
    assert read


_MEASURED = """
import resource, sys, time
from geutil import tflite
def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
before = peak()
start = time.process_time()
m = tflite.open(sys.argv[1])
m.rename({"x": "image"})
m.save(sys.argv[2])
print(time.process_time() - start, peak() - before)
"""


def large(path, sizes):
    """Write a file of weights of so many bytes each."""
    m = tflite.LiteFile()
    t = m.add_input("x", "float32", [1, 64])
    for i, size in enumerate(sizes):
        w = m.add_constant(f"w{i}", np.zeros([size // 256, 64], np.float32))
        made = m.add("FULLY_CONNECTED", [t, w, None], name=f"y{i}")
        t = m.add(
            "SLICE", [made, start(m, i), extent(m, i)], name=f"s{i}", shape=[1, 64]
        )
    m.set_outputs([t])
    m.save(path)


def start(m, i):
    return m.add_constant(f"start{i}", np.int32([0, 0]))


def extent(m, i):
    return m.add_constant(f"extent{i}", np.int32([1, 64]))


@thorough
@pytest.mark.parametrize(
    "sizes", [[250 << 20] * 2, [1 << 30] * 3], ids=["500MB", "3GiB"]
)
def test_large_files_are_saved_in_little_time_and_memory(sizes, tmp_path):
    large(tmp_path / "m.tflite", sizes)
    size = (tmp_path / "m.tflite").stat().st_size
    assert tflite.open(tmp_path / "m.tflite").is_split == (size > 2**31)
    command = [sys.executable, "-c", _MEASURED, "m.tflite", "new.tflite"]
    environment = {"PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    seconds, grown = map(float, told.split())
    assert seconds <= 2 * max(1, size / 500e6)
    assert grown <= 1.1 * size
    (tmp_path / "m.tflite").unlink()
    assert tflite.open(tmp_path / "new.tflite").graphs[0].inputs[0].name == "image"
    (tmp_path / "new.tflite").unlink()
