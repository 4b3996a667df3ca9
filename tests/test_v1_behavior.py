"""The compatible surface once more, in a process without TensorFlow 2 behaviour."""

import os
import subprocess
import sys
from pathlib import Path

from tests import settings

ROOT = Path(__file__).parents[1]
FOLDERS = ("tests/select", "tests/reroute", "tests/transform")


def test_the_tests_pass_after_disable_v2_behavior():
    if settings.V1:
        # This is that process.
        return
    folders = [f for f in FOLDERS if any((ROOT / f).glob("test_*.py"))]
    assert folders
    command = [sys.executable, "-m", "pytest", *folders, "-q", "-p", "no:cacheprovider"]
    environment = {
        name: value
        for name, value in os.environ.items()
        # A worker of pytest-xdist would take the child for another worker.
        if not name.startswith("PYTEST_")
    }
    environment |= {settings.V1_VARIABLE: "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
