"""Tests that need a process of their own; `test_processes.py` starts one for each."""

import os

VARIABLE = "GEUTIL_TEST_APART"


def is_child(name: str) -> bool:
    """Tell whether this process was started for the tests of a file."""
    return os.environ.get(VARIABLE) == name
