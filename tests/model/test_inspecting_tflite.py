"""Inspections of TFLite files."""

import pytest

from geutil import model, tflite
from geutil.model import ModelError, TFLiteInspection, inspect
from tests import tflite_files
from tests.interpreter import schema
from tests.settings import needs_eager

pytestmark = needs_eager


@pytest.fixture
def inspected(tmp_path):
    def found(name):
        path = tmp_path / f"{name}.tflite"
        path.write_bytes(tflite_files.SAMPLES[name]().blob)
        return inspect(path)

    return found


def test_an_int8_file(inspected):
    found = inspected("int8")
    assert isinstance(found, TFLiteInspection)
    assert found.kind == "TFLite"
    assert found.bytes_total == len(tflite_files.int8().blob)
    (signature,) = found.signatures.values()
    image = signature.inputs["image"]
    assert (image.dtype, image.shape) == ("int8", (None, 16, 16, 3))
    assert image.quantization.zero_points == (-128,)
    assert image.quantization.scales[0] == pytest.approx(1 / 255, rel=1e-2)
    assert found.ops == {
        "CONV_2D": 5,
        "DEPTHWISE_CONV_2D": 2,
        "ADD": 1,
        "FULLY_CONNECTED": 1,
        "MEAN": 1,
        "SOFTMAX": 1,
    }
    assert found.precisions == {"int8": found.ops}
    assert found.bytes_constants == sum(found.weights.values())
    # 8 bits a weight, 32 a bias.
    kernels = 27 * 8 + 8 * 24 * 2 + 9 * 24 * 2 + 8 * 24 + 24 * 12 + 12 * 10
    assert found.weights["int8"] == kernels
    assert not (found.custom_ops or found.flex_ops or found.functions)
    text = str(found)
    assert "signature serving_default\n  in  image: int8 [n,16,16,3], scale" in text
    assert "zero point -128" in text
    assert "ops in int8: 11 (5 CONV_2D, 2 DEPTHWISE_CONV_2D" in text
    assert "int8 1." in text  # kilobytes of weights


def test_floats_among_integers_are_told(inspected):
    found = inspected("mixed")
    assert found.precisions == {
        "int8": {"CONV_2D": 2},
        "int8 to float32": {"DEQUANTIZE": 1},
        "float32": {"SIN": 1},
        "float32 to int8": {"QUANTIZE": 1},
    }
    assert "ops in float32: 1 (1 SIN)" in str(found)
    assert set(inspected("floats").precisions) == {"float32"}
    assert inspected("flow").precisions["int32"]["LESS"] == 1


def test_dynamic_range_subgraphs_and_signatures(inspected):
    found = inspected("dynamic_range")
    assert found.precisions == {
        "float32 with int8 weights (hybrid)": {"FULLY_CONNECTED": 1},
        "float32": {"FULLY_CONNECTED": 1},
    }
    assert found.weights["int8"] == 64 * 64
    found = inspected("lstm")
    assert [f.ops for f in found.functions] == [3, 19]
    assert found.function_ops["LOGISTIC"] == 3
    assert found.ops["WHILE"] == 1
    assert "subgraphs behind the main one: 2" in str(found)
    found = inspected("two_signatures")
    assert list(found.signatures) == ["decode", "encode"]
    assert found.signatures["encode"].inputs["x"].shape == (None, 3)
    assert found.signatures["decode"].outputs["x"].shape == (None, 3)


def test_ops_of_tensorflow(inspected):
    found = inspected("flex")
    assert found.flex_ops == {"FlexCholesky": 1}
    assert "ops of TensorFlow (flex): 1 (1 FlexCholesky)" in str(found)


def edited(blob, change, path):
    """Return the inspection of a file with something changed."""
    file = tflite_files.unpacked(blob)
    change(file)
    path.write_bytes(tflite_files.packed(file))
    return inspect(path)


def test_custom_ops_and_files_without_signatures(tmp_path):
    def rename_sine(file):
        codes = schema.BuiltinOperator
        (sine,) = [c for c in file.operatorCodes if c.builtinCode == codes.SIN]
        sine.builtinCode = sine.deprecatedBuiltinCode = codes.CUSTOM
        sine.customCode = "MySine"

    def drop_signatures(file):
        file.signatureDefs = []

    found = edited(tflite_files.mixed().blob, rename_sine, tmp_path / "m.tflite")
    assert found.custom_ops == {"MySine": 1}
    assert not found.flex_ops
    assert "custom ops: 1 (1 MySine)" in str(found)
    found = edited(tflite_files.int8().blob, drop_signatures, tmp_path / "m.tflite")
    assert not found.signatures
    # Its ends are told all the same.
    (shape,) = [tensor.shape for tensor in found.ends.inputs.values()]
    assert shape == (None, 16, 16, 3)
    assert "no signature\n  in  " in str(found)


def test_a_file_is_told_by_its_first_bytes_and_opened_as_what_it_is(tmp_path):
    blob = tflite_files.flex().blob
    (tmp_path / "model.lite").write_bytes(blob)
    assert inspect(tmp_path / "model.lite").kind == "TFLite"
    assert isinstance(model.open(tmp_path / "model.lite"), tflite.LiteFile)
    path = tmp_path / "m.tflite"
    path.write_bytes(blob)
    opened = model.open(str(path))
    assert opened.to_bytes() == tflite.open(path).to_bytes()
    for options in ({"signature": "x"}, {"inline": False}, {"outputs": ["y"]}):
        with pytest.raises(
            ModelError, match=r"has options of its own.*keep_signatures"
        ):
            model.open(path, **options)
    for broken, message in (
        (b"", "no TFLite file"),
        (b"PK\x03\x04 a zip archive", "no TFLite file"),
        (tflite_files.int8().blob[:3000], "cut off|damaged"),
    ):
        path.write_bytes(broken)
        with pytest.raises(
            ModelError, match=rf"m.tflite' cannot be opened: .*{message}"
        ):
            model.open(path)
        with pytest.raises(ModelError, match=message) as refusal:
            inspect(path)
        assert "m.tflite" in str(refusal.value)
        assert "convert" in str(refusal.value)
