"""User-defined match-and-replace: patterns, rules and their application.

A rule is a pattern, a check and a replacement; `rewrite` applies rules to a graph until
none applies. `geutil.rewrite.rules` holds rules that are often wanted.
"""

from geutil.rewrite import rules
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

__all__ = [
    # patterns
    "Any",
    "Const",
    "Op",
    "Optional",
    "Or",
    "Output",
    "Pattern",
    "Variable",
    "Weight",
    # looking
    "Explanation",
    "Match",
    "constant_value",
    "explain",
    "match",
    # rewriting
    "Refused",
    "RewriteReport",
    "Rewritten",
    "Rule",
    "rewrite",
    "rules",
]
