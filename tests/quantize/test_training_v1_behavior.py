"""Training graphs once more, in a process without TensorFlow 2 behaviour."""

from tests import settings
from tests.processes import ROOT, check_in_a_process
from tests.thorough import thorough

FILES = ("arithmetic", "insert", "quantizers", "refusals", "rewriters", "training")
# One net of each kind: half a minute instead of three.
SINGLE = "test_combinations.py::test_without_a_scope"


@thorough
def test_the_tests_pass_after_disable_v2_behavior():
    if settings.V1:
        # This is that process.
        return
    names = [*(f"test_{name}.py" for name in FILES), SINGLE]
    paths = [f"tests/quantize/{name}" for name in names]
    assert all((ROOT / path.partition("::")[0]).exists() for path in paths)
    check_in_a_process(paths, {settings.V1_VARIABLE: "1"})
