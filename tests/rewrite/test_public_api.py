"""The public surface of `geutil.rewrite`, frozen."""

from geutil import rewrite as rw
from tests.documented import check_surface, missing_parts

OTHERS = """
    Any Const Explanation Match Op Optional Or Output Pattern Refused RewriteReport
    Rewritten Rule Variable Weight rules
"""
SIGNATURES = """
constant_value(tensor: Tensor) -> np.ndarray
explain(graph: Graph, pattern: Pattern, op: Operation) -> Explanation
match(graph_or_ops: Graph | Iterable[Operation], pattern: Pattern, *, overlaps: bool =
    False) -> list[Match]
rewrite(graph: Graph, rules: Rule | Iterable[Any], *, limit: int | None = None, debug:
    bool = False, ops: Iterable[Operation] | None = None, keep: Iterable[Operation |
    Tensor] = ()) -> RewriteReport
"""
RULES = """
    constant_folding dead_branch_folding dropout_removal identity_elimination
    relu6_to_relu swap_op
"""


def test_the_public_surface():
    check_surface(rw, OTHERS, SIGNATURES)
    assert sorted(rw.rules.__all__) == sorted(RULES.split())
    rules = [getattr(rw.rules, name) for name in RULES.split()]
    assert not any(missing_parts(rule, raises=False, cost=False) for rule in rules)
