"""Starts processes for the tests that depend on how TensorFlow was set up."""

from pathlib import Path

import pytest

from tests import settings
from tests.gradients.apart import VARIABLE
from tests.processes import check_in_a_process
from tests.thorough import chosen

HERE = Path(__file__).parent
POOLS = "test_what_a_pool_expands_to_is_not_held_through_the_step"
# Tests and the environment of their process.
PROCESSES = {
    "two_devices": (["apart/test_two_devices.py"], {VARIABLE: "two_devices"}),
    "two_devices, planned and wrapped": (
        ["apart/test_planned_offloading.py", "apart/test_two_devices_wrapped.py"],
        {VARIABLE: "two_devices"},
    ),
    "two_devices, oneDNN off": (
        ["apart/test_two_devices.py"],
        {VARIABLE: "two_devices", "TF_ENABLE_ONEDNN_OPTS": "0"},
    ),
    "scratch, oneDNN off": (
        ["../memory/test_cpu.py"],
        {"TF_ENABLE_ONEDNN_OPTS": "0"},
    ),
    "groups, oneDNN off": (
        ["../batchnorm/test_groups.py"],
        {"TF_ENABLE_ONEDNN_OPTS": "0"},
    ),
    "determinism": (["apart/test_determinism.py"], {VARIABLE: "determinism"}),
    "XLA, wrapped": (
        ["apart/test_peaks_under_xla.py::test_the_peak_falls"],
        {VARIABLE: "xla"},
    ),
    "XLA, pools": (
        [f"apart/test_peaks_under_xla.py::{POOLS}"],
        {VARIABLE: "xla"},
    ),
    "oneDNN off": (["test_optimizers.py"], {"TF_ENABLE_ONEDNN_OPTS": "0"}),
    "version 1": (
        [
            "test_forms.py",
            "test_state.py",
            "test_sparse.py",
            "test_custom_gradients.py",
            "test_refusals.py",
            "test_choices.py",
            "test_replacing.py",
        ],
        {settings.V1_VARIABLE: "1"},
    ),
}


@pytest.mark.skipif(settings.V1, reason="this is such a process")
@pytest.mark.parametrize(
    "name",
    chosen(
        PROCESSES,
        "two_devices",
        "scratch, oneDNN off",
        "groups, oneDNN off",
        "XLA, wrapped",
        "XLA, pools",
    ),
)
def test_the_tests_pass(name):
    files, variables = PROCESSES[name]
    check_in_a_process([HERE / file for file in files], variables)
