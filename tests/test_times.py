"""The plugin that says where the time of a run goes."""

import re
import subprocess
import sys

import pytest

from tests import times
from tests.processes import ROOT

TEST = """
import time
import pytest

@pytest.fixture(scope="module")
def waiting():
    time.sleep(0.3)

def test_first(waiting):
    time.sleep(0.2)

def test_second(waiting):
    pass
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["one", "workers"])
def test_it_prints_and_writes_the_times(tmp_path, workers):
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_waiting.py").write_text(TEST)
    (tmp_path / times.GUIDE).write_text(f"before\n{times.BEGIN}old\n{times.END}after\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.times", "--times"]
    done = subprocess.run(
        [
            *command,
            "-p",
            "no:cacheprovider",
            *workers,
            f"--rootdir={tmp_path}",
            tmp_path,
        ],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "min of processor time; slowest files:" in done.stdout
    rows = [line.split("\t") for line in (tmp_path / times.TABLE).open()]
    seconds = {(kind, name): float(text) for kind, name, text in rows}
    kinds = [kind for kind, _ in seconds]
    assert kinds == ["run", "run", "file", "test", "fixture"]
    # Set-up belongs to the file, and to the test that is the first to ask for it.
    assert seconds["file", "test_waiting.py"] >= 0.5
    assert seconds["test", "test_waiting.py::test_first"] >= 0.5
    assert seconds["fixture", "test_waiting.py::waiting"] >= 0.3
    assert seconds["run", "wall"] >= 0.5
    guide = (tmp_path / times.GUIDE).read_text()
    assert guide.startswith(f"before\n{times.BEGIN}\n| file | seconds | share |\n")
    assert re.search(r"\| `test_waiting.py` \| \d+\.\d \| 100.0 % \|", guide)
    assert guide.endswith(f"{times.END}after\n")
    assert "old" not in guide
