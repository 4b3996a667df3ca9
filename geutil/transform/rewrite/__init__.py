"""The names of `geutil.rewrite`, by the path that they had."""

from geutil.rewrite.driver import rewrite
from geutil.rewrite.matcher import Explanation, Match, explain, match
from geutil.rewrite.patterns import (
    Any,
    Const,
    Op,
    Optional,
    Or,
    Output,
    Pattern,
    Variable,
    Weight,
    constant_value,
)
from geutil.rewrite.rule import Refused, RewriteReport, Rewritten, Rule
from geutil.transform.rewrite import rules

__all__ = [
    "Any",
    "Const",
    "Op",
    "Optional",
    "Or",
    "Output",
    "Pattern",
    "Variable",
    "Weight",
    "Explanation",
    "Match",
    "constant_value",
    "explain",
    "match",
    "Refused",
    "RewriteReport",
    "Rewritten",
    "Rule",
    "rewrite",
    "rules",
]
