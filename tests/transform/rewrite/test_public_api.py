"""The public surface of `geutil.transform.rewrite`, frozen."""

from __future__ import annotations

import inspect

import pytest

from geutil.transform import rewrite as rw
from tests.documented import missing_parts, signature

NAMES = """
    Any Const Explanation Match Op Optional Or Output Pattern Refused RewriteReport
    Rewritten Rule Variable Weight constant_value explain match rewrite rules
"""
RULES = """
    constant_folding dead_branch_folding dropout_removal identity_elimination
    relu6_to_relu swap_op
"""
SIGNATURES = {
    "explain": "(graph: Graph, pattern: Pattern, op: Operation) -> Explanation",
    "match": "(graph_or_ops: Graph | Iterable[Operation], pattern: Pattern, *, "
    "overlaps: bool = False) -> list[Match]",
    "rewrite": "(graph: Graph, rules: Rule | Iterable[Any], *, limit: int | None = "
    "None, debug: bool = False, ops: Iterable[Operation] | None = None, keep: "
    "Iterable[Operation | Tensor] = ()) -> RewriteReport",
    "constant_value": "(tensor: Tensor) -> np.ndarray",
}


def test_the_public_names():
    assert sorted(rw.__all__) == sorted(NAMES.split())
    assert sorted(rw.rules.__all__) == sorted(RULES.split())


@pytest.mark.parametrize("name", SIGNATURES)
def test_functions(name):
    assert signature(getattr(rw, name)) == SIGNATURES[name]
    assert missing_parts(getattr(rw, name), raises=True, cost=True) == []


@pytest.mark.parametrize("name", RULES.split())
def test_rules_have_an_example(name):
    assert missing_parts(getattr(rw.rules, name), raises=False, cost=False) == []


def test_every_name_has_a_docstring():
    for name in rw.__all__:
        assert inspect.getdoc(getattr(rw, name)), name
