"""Both runtimes of TFLite files: LiteRT, and TensorFlow's where that is missing."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests import tflite_files
from tests.interpreter import new_interpreter
from tests.processes import run_python
from tests.settings import needs_eager

pytestmark = needs_eager

ROADS = {
    "LiteRT": "import sys",
    # The import system raises ImportError for what is None.
    "TensorFlow Lite": "import sys; sys.modules['ai_edge_litert'] = None",
}
RUN = """
import json, warnings
from pathlib import Path
warnings.simplefilter("error")
from geutil.tflite.interpreter import new_interpreter, runtime_name
from geutil.tflite.schema import schema
import numpy as np
blob = Path(sys.argv[1]).read_bytes()
found = {}
for delegates in (False, True):
    run = new_interpreter(blob, delegates=delegates).get_signature_runner()
    (name,) = run.get_input_details()
    (result,) = run(**{name: np.load(sys.argv[2])}).values()
    found[str(delegates)] = result.tolist()
print(json.dumps([runtime_name(), schema().__name__, found]))
"""
READ = """
from geutil import tflite
from geutil.model import inspect
for path in sys.argv[1:]:
    print(len(tflite.open(path).graphs), inspect(path).kind)
print([name for name in ("tensorflow", "keras", "h5py") if name in sys.modules])
"""


def image(detail):
    scale, zero = detail["quantization"]
    value = tflite_files.IMAGE
    levels = np.round(value / np.float32(scale)) + zero if scale else value
    return levels.astype(detail["dtype"])


@pytest.mark.parametrize("name", ["int8", "floats"])
def test_both_roads_compute_the_same_without_a_warning(tmp_path, name):
    blob = tflite_files.SAMPLES[name]().blob
    path, data = tmp_path / "m.tflite", tmp_path / "x.npy"
    path.write_bytes(blob)
    run = new_interpreter(blob).get_signature_runner()
    (detail,) = run.get_input_details().values()
    np.save(data, image(detail))
    results = {}
    for road, start in ROADS.items():
        done = run_python("-c", start + RUN, str(path), str(data))
        assert done.returncode == 0, done.stderr.decode()
        assert "deprecated" not in done.stderr.decode().lower()
        runtime, schema, results[road] = json.loads(done.stdout.splitlines()[-1])
        assert runtime == road
        assert schema.startswith("ai_edge_litert") == (road == "LiteRT")
    ours, theirs = (results[road] for road in ROADS)
    if name == "int8":
        assert ours["False"] == theirs["False"]
    # Sums of floats are compiled differently; a quantized result may be one step off.
    for delegates in ours:
        step = {"int8": 1, "floats": 1e-6}[name]
        np.testing.assert_allclose(ours[delegates], theirs[delegates], 1e-5, step)


@pytest.mark.parametrize("road", ROADS)
def test_a_file_is_read_without_tensorflow(tmp_path, road):
    paths = []
    for name in ("int8", "flow", "flex"):
        paths.append(tmp_path / f"{name}.tflite")
        paths[-1].write_bytes(tflite_files.SAMPLES[name]().blob)
    # Not by the server of processes, which has imported TensorFlow.
    done = subprocess.run(
        [sys.executable, "-c", ROADS[road] + READ, *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1 TFLite", "5 TFLite", "1 TFLite", "[]"]
