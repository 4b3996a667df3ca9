"""A rule: a pattern, a check and a replacement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from geutil.errors import ArgumentTypeError
from geutil.graph.kinds import Operation, Tensor, type_name
from geutil.transform.rewrite.compiling import compile_pattern
from geutil.transform.rewrite.matching import Match
from geutil.transform.rewrite.patterns import Pattern

Replaced: TypeAlias = Tensor | Sequence[Tensor | None] | Operation | str | None
Replacement: TypeAlias = Callable[[Match], Replaced]
Check: TypeAlias = Callable[[Match], bool | str | None]


class Rule:
    """What to look for, when to refuse, and what to put in its place.

    Args:
        pattern: its root is the op whose outputs are replaced.
        replacement: called with the match; builds new ops and returns what stands in
            for the outputs of the root: a tensor if it has one output, else one for
            each, where None leaves an output alone. It may return a tensor that was
            there before, and it may read the root: then the root is wrapped. A str
            means that nothing is replaced after all, and why. For a root without
            outputs it returns the op that ops shall wait for in its place, or None.
            It is called with the graph as the default one, in the name scope, device
            and control-flow context of the root; new ops wait for what the matched
            ops waited for. It only builds: the edges of ops that exist are for
            `rewrite` to change.
        check: called with the match before that; None or True lets it pass, a str says
            why not. Without one every match passes.
        name: stands in reports; None takes the name of `replacement`.
        reach: how many ops above the pattern its conditions look at. `rewrite` looks
            again at ops that a change so far above them may concern.

    Raises:
        ArgumentTypeError: an argument is of another type.
        SelectionError: the pattern cannot be used.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.transform.rewrite import Any, Op, Rule
        >>> Rule(Op("Relu6", Any("x")), lambda m: tf.nn.relu(m["x"]), name="relu6")
        Rule('relu6', Op('Relu6', Any('x')))
    """

    def __init__(
        self,
        pattern: Pattern,
        replacement: Replacement,
        check: Check | None = None,
        name: str | None = None,
        *,
        reach: int = 0,
    ) -> None:
        self.compiled = compile_pattern(pattern)
        for what, function in (("replacement", replacement), ("check", check)):
            if not callable(function) and (what, function) != ("check", None):
                raise ArgumentTypeError(
                    f"{what} is a function of a Match, not {type_name(function)}"
                )
        self.replacement = replacement
        self.check = check
        self.name = str(
            name or getattr(replacement, "__name__", type_name(replacement))
        )
        self.reach = reach

    @property
    def pattern(self) -> Pattern:
        """The pattern."""
        return self.compiled.pattern

    @property
    def depth(self) -> int:
        """How many ops above a root may decide whether the rule applies."""
        return self.compiled.depth + self.reach

    def objection(self, match: Match) -> str | None:
        """Return why the check refuses a match, or None."""
        if self.check is None:
            return None
        result = self.check(match)
        if isinstance(result, str):
            return result
        if result is None or result:
            return None
        return f"{getattr(self.check, '__name__', 'check')}() is false"

    def __repr__(self) -> str:
        return f"Rule({self.name!r}, {self.pattern!r})"
