"""Unneeded parts left out; the rest computes what it did."""

import numpy as np
import pytest

from geutil import tflite
from geutil.errors import TFLiteError
from tests.interpreter import schema
from tests.tflite.declared import buffer_of, chain, counter, diamond
from tests.tflite.running import runs
from tests.tflite_files import SAMPLES


def buffers(m):
    """Return the bytes of the buffers in the file that is written."""
    model = schema.Model.GetRootAs(m.to_bytes(), 0)
    listed = (model.Buffers(i) for i in range(model.BuffersLength()))
    return [b.DataAsNumpy().tobytes() for b in listed if b.DataLength()]


@pytest.mark.parametrize("name", sorted({*SAMPLES} - {"flex"}))
def test_a_stripped_file_computes_what_it_did(name):
    blob = SAMPLES[name]().blob
    m = tflite.open(blob)
    m.strip(metadata=True)
    m.verify()
    assert len(m.to_bytes()) <= len(tflite.open(blob).to_bytes())
    for run, want in zip(runs(m.to_bytes()), runs(blob), strict=True):
        assert run.outputs.keys() == want.outputs.keys()
        for end, value in want.outputs.items():
            np.testing.assert_array_equal(run.outputs[end], value)


def test_what_nothing_needs_goes():
    m = diamond()
    m.add_graph("uncalled")
    m.add_constant("idle", np.ones(3))
    m.reroute("right", "left")
    m.strip()
    assert [op.outputs[0].name for op in m.ops] == ["stem", "left", "sum"]
    assert [t.name for t in m.tensors] == ["x", "stem", "w", "left", "sum"]
    assert len(m.graphs) == 1
    assert len(buffers(m)) == 1


def test_state_that_nothing_reads_stays():
    m = counter()
    m.reroute("squared", "x")
    m.strip()
    left = [op.kind for op in m.graphs[0].ops]
    assert left == [
        "CALL_ONCE",
        "VAR_HANDLE",
        "READ_VARIABLE",
        "ADD",
        "ASSIGN_VARIABLE",
    ]
    assert len(m.graphs) == 2


def test_equal_bytes_are_stored_once():
    m = diamond()
    same = m.add_constant("same", m.tensor("w").value.copy())
    m.set_outputs(
        [m.add("FULLY_CONNECTED", ["sum" and "stem", same, None], name="y"), "sum"]
    )
    before = buffers(m)
    m.strip(unused=False, buffers=False)
    assert buffers(m) == before
    m.strip(unused=False)
    assert sorted(buffers(m)) == sorted({*before})
    assert len(before) == len(buffers(m)) + 1


def test_codes_of_kernels_that_no_op_has_any_more_go():
    m = tflite.open(chain("NEG", "EXP").to_bytes())
    (op,) = m.find(kind="EXP")
    op.version = 2
    m.strip()
    codes = schema.ModelT.InitFromPackedBuf(bytearray(m.to_bytes()), 0).operatorCodes
    kinds = schema.BuiltinOperator
    assert [(code.builtinCode, code.version) for code in codes] == [
        (kinds.NEG, 1),
        (kinds.EXP, 2),
    ]


def test_names_inside_go():
    m = chain("NEG", "EXP")
    m.strip(names=True)
    assert [t.name for t in m.tensors] == ["x", "", "t1"]
    assert m.signatures["serve"].outputs == {"scores": m.tensor("t1")}


def test_metadata_go_by_name_or_all():
    def made():
        m = chain("NEG", "EXP")
        names = ("min_runtime_version", "TFLITE_METADATA", "notes")
        m.metadata = {name: buffer_of(b"2.0") for name in names}
        m.description = "converted"
        return m

    m = made()
    m.strip(metadata="notes")
    assert [*m.metadata] == ["min_runtime_version", "TFLITE_METADATA"]
    m = made()
    m.strip(metadata=True)
    again = tflite.open(m.to_bytes())
    assert ([*again.metadata], again.description) == (["min_runtime_version"], "")
    assert again.runtime == "2.0"
    with pytest.raises(TFLiteError, match="no metadata 'note'; there are"):
        made().strip(metadata=["note"])


def test_ops_that_metadata_name_by_place_stay():
    m = chain("NEG", "EXP")
    m.metadata["model_control_dependencies"] = buffer_of(bytes(4))
    m.strip()
    m.add("ABS", ["x"], name="dead")
    before = m.to_bytes()
    with pytest.raises(
        TFLiteError, match=r"ties ops by their places.* leave it out, too"
    ):
        m.strip()
    assert m.to_bytes() == before
    m.strip(unused=False)
    m.strip(metadata=["model_control_dependencies"])
    assert len([*m.ops]) == 2
