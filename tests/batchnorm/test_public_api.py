"""The public surface of `geutil.batchnorm`, frozen; see tests/test_public_api.py."""

from __future__ import annotations

import inspect

from geutil import batchnorm
from tests.documented import frozen, missing_parts, signature

NAMES = """
    CheckError CheckResult FoldReport Folded OutputDifference Refused check
    fold_batch_norms
"""
SIGNATURES = """
check(before: Any, after: Any, samples: Mapping[str, Any] | Iterable[Mapping[str,
    Any]]) -> CheckResult
fold_batch_norms(graph_or_model: Any, *, is_training: bool = False,
    freeze_batch_norm_delay: int | None = None, step: Any = None, statistics: str =
    exact, scope: Any = None, strict: bool = False, assume_inference: bool =
    False, clone_shared: bool = False, keep: Iterable[Any] = (), outputs: Any
    = ()) -> FoldReport
"""
FROZEN = frozen(SIGNATURES)


def test_the_public_surface():
    assert sorted(batchnorm.__all__) == sorted(NAMES.split())
    functions = [n for n in NAMES.split() if inspect.isfunction(getattr(batchnorm, n))]
    assert sorted(functions) == sorted(FROZEN)
    found = {n: f"{n}{signature(getattr(batchnorm, n))}" for n in FROZEN}
    assert found == FROZEN
    missing = {
        name: missing_parts(getattr(batchnorm, name), raises=True, cost=True)
        for name in FROZEN
    }
    assert not any(missing.values()), missing
