"""The compatible surface once more, in a process without TensorFlow 2 behaviour."""

import pytest

from tests import settings
from tests.processes import ROOT, check_in_a_process
from tests.thorough import chosen

FOLDERS = ("tests/select", "tests/reroute", "tests/transform", "tests/quantize")


@pytest.mark.parametrize("folder", chosen(FOLDERS, "tests/reroute"))
def test_the_tests_pass_after_disable_v2_behavior(folder):
    if settings.V1:
        # This is that process.
        return
    assert any((ROOT / folder).glob("test_*.py"))
    check_in_a_process([folder], {settings.V1_VARIABLE: "1"})
