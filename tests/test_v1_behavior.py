"""The compatible surface once more, in a process without TensorFlow 2 behaviour."""

from tests import settings
from tests.processes import ROOT, check_in_a_process

FOLDERS = ("tests/select", "tests/reroute", "tests/transform")


def test_the_tests_pass_after_disable_v2_behavior():
    if settings.V1:
        # This is that process.
        return
    folders = [f for f in FOLDERS if any((ROOT / f).glob("test_*.py"))]
    assert folders
    check_in_a_process(folders, {settings.V1_VARIABLE: "1"})
