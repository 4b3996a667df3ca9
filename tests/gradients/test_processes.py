"""Starts processes for the tests that depend on how TensorFlow was set up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import settings
from tests.gradients.apart import VARIABLE

HERE = Path(__file__).parent
# What is run with which environment.
PROCESSES = {
    "two_devices": (
        ["apart/test_two_devices.py", "apart/test_two_devices_wrapped.py"],
        {VARIABLE: "two_devices"},
    ),
    "determinism": (["apart/test_determinism.py"], {VARIABLE: "determinism"}),
    "oneDNN off": (["test_optimizers.py"], {"TF_ENABLE_ONEDNN_OPTS": "0"}),
    "version 1": (
        [
            "test_forms.py",
            "test_state.py",
            "test_sparse.py",
            "test_custom_gradients.py",
            "test_refusals.py",
            "test_selection.py",
            "test_replacing.py",
        ],
        {settings.V1_VARIABLE: "1"},
    ),
}


@pytest.mark.skipif(settings.V1, reason="this is such a process")
@pytest.mark.parametrize("name", PROCESSES)
def test_the_tests_pass(name):
    files, variables = PROCESSES[name]
    paths = [str(HERE / file) for file in files]
    command = [sys.executable, "-m", "pytest", *paths, "-q", "-p", "no:cacheprovider"]
    environment = {
        name: value
        for name, value in os.environ.items()
        # A worker of pytest-xdist would take the child for another worker.
        if not name.startswith("PYTEST_")
    }
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "3"} | variables
    done = subprocess.run(
        command,
        cwd=HERE.parents[1],
        env=environment,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
