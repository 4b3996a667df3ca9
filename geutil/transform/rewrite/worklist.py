"""Which ops to visit, and which to visit again after a rewrite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from geutil.graph.adjacency import graph_order
from geutil.graph.kinds import Operation
from geutil.transform.rewrite.applying import Applied
from geutil.transform.rewrite.compiling import TypeSet
from geutil.transform.rewrite.liveness import Liveness
from geutil.transform.rewrite.matching import Match
from geutil.transform.rewrite.rule import Rule


class Worklist:
    """A stack of ops, each on it at most once.

    Args:
        rules: the rules that visits try.
        liveness: who reads what.
    """

    def __init__(self, rules: Iterable[Rule], liveness: Liveness) -> None:
        listed = list(rules)
        self._liveness = liveness
        self._depth = max((rule.depth for rule in listed), default=0)
        self._interior = _join(
            None if rule.reach else rule.compiled.interior for rule in listed
        )
        shared = [
            (node, len(rule.compiled.ops))
            for rule in listed
            for node in rule.compiled.ops
            if node.only_consumer
        ]
        self._only_consumers = _join(node.types for node, _ in shared)
        self._most_readers = max((count for _, count in shared), default=0)
        self._stack: list[Operation] = []
        self._waiting: set[Operation] = set()

    def fill(self, ops: Iterable[Operation]) -> None:
        """Put ops on the stack, to be visited from the last to the first."""
        for op in ops:
            if op not in self._waiting:
                self._waiting.add(op)
                self._stack.append(op)

    def __iter__(self) -> Iterator[Operation]:
        """Take ops off the stack until it is empty; it may be filled meanwhile."""
        while self._stack:
            op = self._stack.pop()
            self._waiting.discard(op)
            yield op

    def add_around(self, match: Match, applied: Applied) -> None:
        """Visit again what a rewrite may concern.

        Cost: linear in the ops within the depth of the deepest pattern downstream of
        what changed, along ops that some pattern looks at, and their edges.
        """
        changed = [*applied.new_ops, *applied.rewired, *applied.revived]
        changed += self._freed(applied.retired)
        self.fill(graph_order(self._downstream(dict.fromkeys([*changed, match.root]))))

    def _freed(self, retired: Iterable[Operation]) -> list[Operation]:
        """Return ops that lost a reader, where `only_consumer` may hold now."""
        if not self._most_readers:
            return []
        producers = dict.fromkeys(t.op for op in retired for t in op.inputs)
        return [
            op
            for op in producers
            if _has(self._only_consumers, op.type)
            and not self._liveness.is_retired(op)
            and len(self._liveness.readers(op)) <= self._most_readers
        ]

    def _downstream(self, ops: dict[Operation, None]) -> list[Operation]:
        """Return `ops` and the roots that may look at them."""
        frontier = list(ops)
        for _ in range(self._depth):
            reached = []
            for op in frontier:
                if _has(self._interior, op.type):
                    reached += [r for r in self._liveness.readers(op) if r not in ops]
            frontier = list(dict.fromkeys(reached))
            ops.update(dict.fromkeys(frontier))
        return [op for op in ops if not self._liveness.is_retired(op)]


def _has(types: TypeSet, kind: str) -> bool:
    return types is None or kind in types


def _join(sets: Iterable[TypeSet]) -> TypeSet:
    joined: set[str] = set()
    for types in sets:
        if types is None:
            return None
        joined |= types
    return frozenset(joined)
