"""The public surface of `geutil.report`, frozen; see tests/test_public_api.py."""

from __future__ import annotations

import inspect

from geutil import report
from tests.documented import frozen, missing_parts, signature

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
FROZEN = frozen(SIGNATURES)
WHOLE = ["bits", "diff", "memory", "pipeline", "view"]


def test_the_public_names():
    assert sorted(report.__all__) == sorted(NAMES.split())


def test_signatures():
    functions = [n for n in NAMES.split() if inspect.isfunction(getattr(report, n))]
    found = {name: f"{name}{signature(getattr(report, name))}" for name in functions}
    assert found == FROZEN


def test_docstrings():
    assert [
        name for name in report.__all__ if not inspect.getdoc(vars(report)[name])
    ] == []
    for name in WHOLE:
        assert missing_parts(getattr(report, name), raises=True, cost=True) == [], name


def test_the_signature_of_save():
    expected = (
        "(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path"
    )
    assert signature(report.Page.save) == expected
