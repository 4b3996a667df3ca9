"""The command on TFLite files: inspected, drawn, compared with their graph."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import tflite_files
from tests.settings import needs_eager

pytestmark = needs_eager


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "net.tflite"
    path.write_bytes(tflite_files.mixed().blob)
    return path


@pytest.fixture
def source(tmp_path):
    return tflite_files.mixed().model.save(tmp_path / "net", "saved_model")


def test_inspect(geutil, file):
    said = geutil("inspect", file)
    assert said.code == 0
    assert "ops in float32: 1 (1 SIN)" in said.out
    found = json.loads(geutil("inspect", file, "--json").out)
    assert found["kind"] == "TFLite"
    assert found["precisions"]["int8"] == {"CONV_2D": 2}
    signature = found["signatures"]["serving_default"]
    assert signature["inputs"]["x"]["quantization"]["zero_points"] == [-128]


def test_inspect_starts_no_tensorflow(file):
    code = (
        "import sys\n"
        "from geutil.cli.main import main\n"
        f"sys.argv = ['geutil', 'inspect', {str(file)!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('tensorflow' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


def test_view(geutil, file, tmp_path):
    page = tmp_path / "page.html"
    assert geutil("view", file, "-o", page).code == 0
    assert "between/sine" in page.read_text()


def test_diff_with_the_model(geutil, file, source, tmp_path):
    page = tmp_path / "page.html"
    said = geutil("diff", source, file, "--html", page)
    assert said.code == 0
    assert "! between/sine (SIN) computes in float32" in said.out
    assert "partners" in page.read_text()
    found = json.loads(geutil("diff", file, source, "--json").out)
    assert [op["op_type"] for op in found["ops"]].count("CONV_2D") == 2
    assert found["missing"] == []


def test_diff_with_another_file(geutil, file, tmp_path):
    other = tmp_path / "other.tflite"
    other.write_bytes(tflite_files.floats().blob)
    assert geutil("diff", file, file).code == 0
    assert geutil("diff", file, other).code == 1
