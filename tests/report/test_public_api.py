"""The public surface of `geutil.report`, frozen; see tests/test_public_api.py."""

from __future__ import annotations

import inspect

import pytest

from geutil import report
from tests.documented import missing_parts, signature

NAMES = """
    Altered FileDifference FileOpMatch GraphDifference Page Rewired bits diff difference
    memory pipeline view
"""
SIGNATURES = """
bits(plan: BitPlan, *, title: str | None = None) -> Page
diff(before: Any, after: Any, *, title: str | None = None, labels: Sequence[str] =
    (before, after), report: object = None) -> Page
difference(before: Any, after: Any) -> GraphDifference | FileDifference
memory(plain: Any, saving: Any = None, *, title: str | None = None, report: object =
    None, curve: object = None) -> Page
pipeline(stages: object, *, title: str | None = None, noise: Int8Comparison | None =
    None) -> Page
view(subject: Any, *, title: str | None = None, report: object = None) -> Page
"""
WHOLE = ["bits", "diff", "memory", "pipeline", "view"]


def frozen() -> dict[str, str]:
    lines = SIGNATURES.replace("\n    ", " ").strip().splitlines()
    return {line.partition("(")[0]: line for line in lines}


def test_the_public_names():
    assert sorted(report.__all__) == sorted(NAMES.split())


@pytest.mark.parametrize("name", frozen())
def test_signatures(name):
    assert f"{name}{signature(getattr(report, name))}" == frozen()[name]


def test_every_function_is_frozen():
    functions = [n for n in NAMES.split() if inspect.isfunction(getattr(report, n))]
    assert sorted(functions) == sorted(frozen())


@pytest.mark.parametrize("name", WHOLE)
def test_docstrings(name):
    assert missing_parts(getattr(report, name), raises=True, cost=True) == []


@pytest.mark.parametrize("name", sorted(report.__all__))
def test_everything_has_a_docstring(name):
    assert inspect.getdoc(getattr(report, name))


def test_the_signature_of_save():
    expected = (
        "(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path"
    )
    assert signature(report.Page.save) == expected
