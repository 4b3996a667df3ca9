"""The public surface of `geutil.batchnorm`, frozen; see tests/test_public_api.py."""

from __future__ import annotations

import inspect

import pytest

from geutil import batchnorm
from tests.documented import missing_parts, signature

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


def frozen() -> dict[str, str]:
    lines = SIGNATURES.replace("\n    ", " ").strip().splitlines()
    return {line.partition("(")[0]: line for line in lines}


def test_the_public_names():
    assert sorted(batchnorm.__all__) == sorted(NAMES.split())


@pytest.mark.parametrize("name", frozen())
def test_signatures(name):
    assert f"{name}{signature(getattr(batchnorm, name))}" == frozen()[name]


def test_every_function_is_frozen():
    functions = [n for n in NAMES.split() if inspect.isfunction(getattr(batchnorm, n))]
    assert sorted(functions) == sorted(frozen())


@pytest.mark.parametrize("name", frozen())
def test_docstrings_are_whole(name):
    member = getattr(batchnorm, name)
    assert missing_parts(member, raises=True, cost=True) == []
