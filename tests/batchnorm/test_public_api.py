"""The public surface of `geutil.batchnorm`, frozen; see tests/test_public_api.py."""

from geutil import batchnorm
from tests.documented import check_surface

OTHERS = "CheckError CheckResult FoldReport Folded OutputDifference Refused"
SIGNATURES = """
check(before: Any, after: Any, samples: Mapping[str, Any] | Iterable[Mapping[str,
    Any]]) -> CheckResult
fold_batch_norms(graph_or_model: Any, *, is_training: bool = False,
    freeze_batch_norm_delay: int | None = None, step: Any = None, statistics: str =
    exact, scope: Any = None, strict: bool = False, assume_inference: bool =
    False, clone_shared: bool = False, keep: Iterable[Any] = (), outputs: Any
    = ()) -> FoldReport
"""


def test_the_public_surface():
    check_surface(batchnorm, OTHERS, SIGNATURES)
