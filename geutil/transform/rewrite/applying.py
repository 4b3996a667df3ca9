"""One application of a rule, and the ops to visit after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.errors import CycleError, RerouteError, TransformError
from geutil.graph import adjacency, creation, run_hooks, types
from geutil.graph.types import Operation, Tensor, is_op, is_tensor, type_name
from geutil.reroute.tensors import ReroutePlan, redirection
from geutil.transform.rewrite.compiling import TypeSet
from geutil.transform.rewrite.liveness import Liveness
from geutil.transform.rewrite.matching import Match
from geutil.transform.rewrite.rule import Rule
from geutil.transform.rewrite.search import Territory


@dataclass(frozen=True, eq=False)
class Applied:
    """What one application changed.

    Attributes:
        pairs: (old, new) for each output of the root that was replaced.
        new_ops: the ops that were made.
        rewired: the ops that read new tensors or wait for other ops, in graph order.
        retired: the ops that nobody reads any more.
        revived: retired ops that are read again.
    """

    pairs: tuple[tuple[Tensor, Tensor], ...]
    new_ops: tuple[Operation, ...]
    rewired: tuple[Operation, ...]
    retired: tuple[Operation, ...]
    revived: tuple[Operation, ...]


def apply_rule(rule: Rule, match: Match, territory: Territory) -> Applied | str:
    """Replace the outputs of a match's root.

    Returns:
        What changed, or why nothing did.

    Raises:
        TransformError: the replacement returned what cannot stand in for the outputs.
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.
    """
    root, liveness = match.root, territory.liveness
    graph = root.graph
    run_hooks.check_editable(graph, [*match.ops, *liveness.readers(root)])
    count = creation.count_ops(graph)
    awaited = _awaited(match)
    with creation.surroundings_of(root, awaited):
        result = rule.replacement(match)
        if not isinstance(result, str):
            stand_in = [result] if not root.outputs and is_op(result) else []
            pairs = _pairs(rule, root, None if stand_in else result)
            pairs = _ordered(
                pairs, frozenset(creation.ops_since(graph, count)), awaited
            )
    new_ops = creation.ops_since(graph, count)
    if isinstance(result, str):
        liveness.abandon(new_ops)
        return result
    if not pairs and root.outputs:
        liveness.abandon(new_ops)
        return "the replacement replaces no output"
    try:
        return _move(match, pairs, new_ops, stand_in or awaited, territory)
    except CycleError as error:
        liveness.forget(t.op for op in new_ops for t in op.inputs)
        liveness.abandon(new_ops)
        return str(error)
    except RerouteError as error:
        raise TransformError(f"rule '{rule.name}' at '{root.name}': {error}") from error


def _awaited(match: Match) -> list[Operation]:
    """Return what the matched ops wait for, each once."""
    members = frozenset(match.ops)
    found = dict.fromkeys(c for op in match.ops for c in adjacency.control_inputs(op))
    return [op for op in found if op not in members]


def _pairs(rule: Rule, root: Operation, result: Any) -> list[tuple[Tensor, Tensor]]:
    """Return (old, new) for the outputs that the result of a replacement replaces."""
    where = f"rule '{rule.name}' at '{root.name}'"
    listed = list(result) if isinstance(result, list | tuple) else [result]
    if result is None and not root.outputs:
        listed = []
    if len(listed) != len(root.outputs):
        raise TransformError(
            f"{where} returned {len(listed)} tensor(s) for {len(root.outputs)} "
            "output(s); return one for each, or None for those to leave alone"
        )
    pairs = []
    for old, new in zip(root.outputs, listed, strict=True):
        if new is None or new is old:
            continue
        if not is_tensor(new) or new.graph is not root.graph:
            hint = "; return its output" if is_op(new) else ""
            raise TransformError(
                f"{where} returned {type_name(new)} for '{old.name}', not a tensor of "
                f"the same graph{hint}"
            )
        pairs.append((old, new))
    return pairs


def _ordered(
    pairs: list[tuple[Tensor, Tensor]],
    new_ops: frozenset[Operation],
    awaited: list[Operation],
) -> list[tuple[Tensor, Tensor]]:
    """Let readers of a tensor that was there before wait for what the root awaited."""
    if not awaited:
        return pairs
    return [
        (old, new)
        if new.op in new_ops
        else (old, tf.identity(new, name=types.scope_basename(old.op.name)))
        for old, new in pairs
    ]


def _move(
    match: Match,
    pairs: list[tuple[Tensor, Tensor]],
    new_ops: list[Operation],
    stand_ins: list[Operation],
    territory: Territory,
) -> Applied:
    root, liveness = match.root, territory.liveness
    made = frozenset(new_ops)
    liveness.take_in(new_ops)
    replaced = {id(old) for old, _ in pairs}
    moving = [
        op
        for op in liveness.readers(root)
        if op not in made and any(id(t) in replaced for t in op.inputs)
    ]
    dead = _dead(match, replaced, made, territory)
    plan = ReroutePlan(root.graph)
    plan.redirect(
        redirection(
            [old for old, _ in pairs],
            [new for _, new in pairs],
            frozenset(moving).__contains__,
        )
    )
    waiting = _move_control_outputs(
        plan, dead, [new.op for _, new in pairs] or stand_ins, liveness
    )
    plan.apply()
    liveness.forget([root])
    liveness.take_in(moving)
    sources = dict.fromkeys(
        [new.op for _, new in pairs] + [t.op for op in new_ops for t in op.inputs]
    )
    revived = liveness.revive(sources)
    retired = liveness.retire(
        [op for op in match.ops if op is not root or dead],
        lambda op: territory.protection(op) is not None,
    )
    return Applied(
        tuple(pairs),
        tuple(new_ops),
        tuple(adjacency.graph_order(dict.fromkeys([*moving, *waiting]))),
        tuple(retired),
        tuple(revived),
    )


def _dead(
    match: Match, replaced: set[int], made: frozenset[Operation], territory: Territory
) -> list[Operation]:
    """Return the matched ops that nobody will read, the root first."""
    root, liveness = match.root, territory.liveness
    if any(
        op in made or any(t.op is root and id(t) not in replaced for t in op.inputs)
        for op in liveness.readers(root)
    ):
        return []
    dead = {root: None}
    while True:
        found = [
            op
            for op in match.ops
            if op not in dead
            and liveness.readers(op) <= dead.keys()
            and territory.protection(op) is None
        ]
        if not found:
            return list(dead)
        dead.update(dict.fromkeys(found))


def _move_control_outputs(
    plan: ReroutePlan,
    dead: list[Operation],
    producers: list[Operation],
    liveness: Liveness,
) -> list[Operation]:
    """Let whoever waits for a dead op wait for what replaces it; return those ops."""
    gone = frozenset(dead)
    waiting = dict.fromkeys(op for d in dead for op in liveness.waiting(d))
    moved = [op for op in waiting if op not in gone]
    for op in moved:
        kept = [c for c in plan.control_inputs(op) if c not in gone]
        plan.set_control_inputs(op, dict.fromkeys([*kept, *producers]))
    return moved


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
        self.fill(
            adjacency.graph_order(
                self._downstream(dict.fromkeys([*changed, match.root]))
            )
        )

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


def _has(kinds: TypeSet, kind: str) -> bool:
    return kinds is None or kind in kinds


def _join(sets: Iterable[TypeSet]) -> TypeSet:
    joined: set[str] = set()
    for kinds in sets:
        if kinds is None:
            return None
        joined |= kinds
    return frozenset(joined)
