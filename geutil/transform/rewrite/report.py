"""What a call of `rewrite` did, and what it refused to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from geutil.graph.identity import IdentityMap
from geutil.graph.kinds import Tensor
from geutil.showing import Shown

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
        >>> from geutil.transform.rewrite import Rewritten
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
        reason: what stood against it.

    Example:
        >>> from geutil.transform.rewrite import Refused
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
    """What was rewritten, and which candidates were refused.

    A candidate is an op at which the ops of a rule's pattern match, with their types,
    attributes and edges. It is refused when a constraint fails (`where`,
    `only_consumer`, one control-flow context, `ops`, `keep`), when the check says so,
    or when the replacement does. The reason is that of the last time it was tried.

    Attributes:
        rewritten: in the order in which it was done.
        refused: in graph order of the roots, for each root in the order of the rules.
        replaced: for each output of a root that was replaced, what computes it now:
            what to fetch where the old output was fetched.
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
        """Return what computes `tensor` now: itself, unless it was replaced."""
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
