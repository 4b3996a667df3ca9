"""User-defined match-and-replace: patterns, rules and their application.

A rule is a pattern, a check and a replacement; `rewrite` applies rules to a graph until
none applies. `geutil.transform.rewrite.rules` holds rules that are often wanted.
"""

from geutil.transform.rewrite.driver import rewrite
from geutil.transform.rewrite.explaining import Explanation, explain
from geutil.transform.rewrite.leaves import Const, Variable, Weight, constant_value
from geutil.transform.rewrite.matching import Match, match
from geutil.transform.rewrite.patterns import Any, Op, Optional, Or, Output, Pattern
from geutil.transform.rewrite.report import Refused, RewriteReport, Rewritten
from geutil.transform.rewrite.rule import Rule

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
]
