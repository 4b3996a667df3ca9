"""The public surface of `geutil.transform.rewrite`, frozen."""

from __future__ import annotations

import inspect

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


def test_the_public_surface():
    assert sorted(rw.__all__) == sorted(NAMES.split())
    assert sorted(rw.rules.__all__) == sorted(RULES.split())
    assert {n: signature(getattr(rw, n)) for n in SIGNATURES} == SIGNATURES
    missing = {
        name: missing_parts(getattr(rw, name), raises=True, cost=True)
        for name in SIGNATURES
    }
    for name in RULES.split():
        rule = getattr(rw.rules, name)
        missing[name] = missing_parts(rule, raises=False, cost=False)
    assert not any(missing.values()), missing
    assert all(inspect.getdoc(getattr(rw, name)) for name in rw.__all__)
