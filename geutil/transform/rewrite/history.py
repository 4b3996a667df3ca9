"""What led to what: finds rules that undo each other.

Each op that a rule made remembers the application it was made in, and each
application those that made the ops it matched. If a rule is about to be applied to
ops that compute what it replaced in one of these ancestors (same types, attributes
and inputs), the rules go in a circle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from geutil.errors import TransformError
from geutil.graph.kinds import Operation
from geutil.transform.rewrite.matching import Match
from geutil.transform.rewrite.rule import Rule

MAX_ANCESTORS = 100
"""How many ancestors are compared; a longer circle ends at the limit of rewrites."""

_OpSignature: TypeAlias = tuple[bytes, tuple[tuple[int, int], ...]]
Signature: TypeAlias = tuple[_OpSignature, ...]


@dataclass(eq=False)
class _Application:
    rule: Rule
    match: Match
    parents: list[_Application]
    signature: Signature | None = field(default=None)


class History:
    """The applications of one call of `rewrite`."""

    def __init__(self) -> None:
        self._made_by: dict[Operation, _Application] = {}
        self._replaced_by: dict[tuple[int, Operation], _Application] = {}

    def check(self, rule: Rule, match: Match) -> None:
        """Refuse an application that undoes an earlier one.

        Raises:
            TransformError: it does; names the rules and the op.

        Cost: bounded by 100 ancestors.
        """
        again = self._replaced_by.get((id(rule), match.root))
        if again is not None:
            reviver = self._made_by.get(match.root, again)
            raise _circle([again, reviver], match)
        parents = self._parents(match)
        if not parents:
            return
        signature = _signature(match)
        queue: list[tuple[_Application, tuple[_Application, ...]]] = [
            (parent, (parent,)) for parent in parents
        ]
        seen = set(map(id, parents))
        for application, path in queue:
            if application.rule is rule:
                if application.signature is None:
                    application.signature = _signature(application.match)
                if application.signature == signature:
                    raise _circle(list(path), match)
            for parent in application.parents:
                if id(parent) not in seen and len(seen) < MAX_ANCESTORS:
                    seen.add(id(parent))
                    queue.append((parent, (*path, parent)))

    def add(
        self,
        rule: Rule,
        match: Match,
        new_ops: tuple[Operation, ...],
        revived: tuple[Operation, ...],
        *,
        is_gone: bool,
    ) -> None:
        """Note an application that was carried out.

        Args:
            rule: the rule.
            match: the match.
            new_ops: the ops it made.
            revived: the ops it brought back.
            is_gone: whether nobody reads the root any more.
        """
        parents = self._parents(match)
        # The signature is taken while the ops of the match read what they read now.
        signature = _signature(match) if parents else None
        application = _Application(rule, match, parents, signature)
        self._made_by.update(dict.fromkeys((*new_ops, *revived), application))
        if is_gone:
            self._replaced_by[id(rule), match.root] = application

    def _parents(self, match: Match) -> list[_Application]:
        found = {
            id(self._made_by[op]): self._made_by[op]
            for op in match.ops
            if op in self._made_by
        }
        return list(found.values())


def _signature(match: Match) -> Signature:
    """Return what the matched ops compute: types, attributes and sources of inputs.

    An input from within the match is (place of its op, output), another (-1, id).
    """
    place = {op: i for i, op in enumerate(match.ops)}
    signature = []
    for op in match.ops:
        node = op.node_def
        node.ClearField("name")
        node.ClearField("input")
        inputs = tuple(
            (place[t.op], t.value_index) if t.op in place else (-1, id(t))
            for t in op.inputs
        )
        signature.append((node.SerializeToString(deterministic=True), inputs))
    return tuple(signature)


def _circle(path: list[_Application], match: Match) -> TransformError:
    names = list(dict.fromkeys(f"'{a.rule.name}'" for a in reversed(path)))
    who = (
        f"rules {' and '.join(names)} undo each other"
        if len(names) > 1
        else f"rule {names[0]} undoes itself"
    )
    return TransformError(
        f"{who} at '{match.root.name}': it computes again what was replaced at "
        f"'{path[-1].match.root.name}'; leave one of them out, or give it a check"
    )
