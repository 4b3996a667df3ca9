"""Rules: a pattern, a check and a replacement; the report of their rewrites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from geutil.errors import ArgumentTypeError
from geutil.graph.types import IdentityMap, Operation, Tensor, type_name
from geutil.lazy import Shown
from geutil.rewrite.matcher import Match
from geutil.rewrite.patterns import Pattern, compile_pattern

# Entries of a printed report; the rest is counted.
_SHOWN = 20


@dataclass(frozen=True)
class Rewritten:
    """One application of a rule.

    Attributes:
        rule: the name of the rule.
        op: the name of the root that was replaced.
        ops: the names of all matched ops, the root first.
        new_ops: the names of the ops that were made for it.

    Example:
        >>> from geutil.rewrite import Rewritten
        >>> print(Rewritten("relu6", "a/Relu6", ("a/Relu6",), ("a/Relu",)))
        relu6: 'a/Relu6' -> 'a/Relu'
    """

    rule: str
    op: str
    ops: tuple[str, ...]
    new_ops: tuple[str, ...]

    def __str__(self) -> str:
        new = ", ".join(f"'{name}'" for name in self.new_ops) or "no new op"
        return f"{self.rule}: '{self.op}' -> {new}"


@dataclass(frozen=True)
class Refused:
    """A candidate that was left as it was.

    Attributes:
        rule: the name of the rule.
        op: the name of the root.
        reason: the reason.

    Example:
        >>> from geutil.rewrite import Refused
        >>> print(Refused("relu6", "a/Relu6", "'a/Relu6' is in keep"))
        relu6: 'a/Relu6': 'a/Relu6' is in keep
    """

    rule: str
    op: str
    reason: str

    def __str__(self) -> str:
        return f"{self.rule}: '{self.op}': {self.reason}"


@dataclass(frozen=True, eq=False)
class RewriteReport(Shown):
    """The rewrites that were made, and the candidates that were refused.

    A candidate is an op at which the ops of a rule's pattern match, with their types,
    attributes and edges. It is refused when a constraint fails (`where`,
    `only_consumer`, one control-flow context, `ops`, `keep`), when the check says so,
    or when the replacement does. The reason is that of the last time it was tried.

    Attributes:
        rewritten: in the order in which it was done.
        refused: in graph order of the roots, for each root in the order of the rules.
        replaced: for each output of a root that was replaced, the tensor that computes
            it now: the one to fetch instead of the old output.
    """

    rewritten: tuple[Rewritten, ...] = ()
    refused: tuple[Refused, ...] = ()
    replaced: IdentityMap[Tensor] = field(default_factory=IdentityMap)

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """For each rule how often it was applied, and how often refused."""
        counts: dict[str, tuple[int, int]] = {}
        entries: list[Rewritten | Refused] = [*self.rewritten, *self.refused]
        for entry in entries:
            done, refused = counts.get(entry.rule, (0, 0))
            if isinstance(entry, Rewritten):
                counts[entry.rule] = done + 1, refused
            else:
                counts[entry.rule] = done, refused + 1
        return counts

    def current(self, tensor: Tensor) -> Tensor:
        """Return the replacement of `tensor`; itself, unless it was replaced."""
        return self.replaced.get(tensor, tensor)

    def __str__(self) -> str:
        lines = [f"{len(self.rewritten)} rewritten, {len(self.refused)} refused"]
        lines += [
            f"  {rule}: {done} rewritten, {refused} refused"
            for rule, (done, refused) in self.counts.items()
        ]
        lines += _lines("rewritten", self.rewritten)
        lines += _lines("refused", self.refused)
        return "\n".join(lines)


def _lines(title: str, entries: Sequence[Rewritten | Refused]) -> list[str]:
    lines = [f"  {entry}" for entry in entries[:_SHOWN]]
    if len(entries) > _SHOWN:
        lines.append(f"  and {len(entries) - _SHOWN} more, in .{title}")
    return [f"{title}:", *lines] if lines else []


Replaced: TypeAlias = Tensor | Sequence[Tensor | None] | Operation | str | None
Replacement: TypeAlias = Callable[[Match], Replaced]
Check: TypeAlias = Callable[[Match], bool | str | None]


class Rule:
    """A pattern, the checks that refuse a match, and the replacement.

    Args:
        pattern: its root is the op whose outputs are replaced.
        replacement: called with the match; builds new ops and returns the replacements
            of the root's outputs: a tensor if it has one output, else one for each,
            where None leaves an output alone. It may return a tensor that was there
            before, and it may read the root: then the root is wrapped. A str means that
            nothing is replaced after all, and why. For a root without outputs it
            returns the op that ops shall wait for in its place, or None. It is called
            with the graph as the default one, in the name scope, device and
            control-flow context of the root; new ops wait for the control inputs of the
            matched ops. It only builds: the edges of ops that exist are for `rewrite`
            to change.
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
        >>> from geutil.rewrite import Any, Op, Rule
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
            # The check alone may be None.
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
        # A check that returns reasons may return None where it has none.
        if result is None or result:
            return None
        return f"{getattr(self.check, '__name__', 'check')}() is false"

    def __repr__(self) -> str:
        return f"Rule({self.name!r}, {self.pattern!r})"
