"""One application of a rule, and the ops to visit after it.

`apply_replacement` is one step: new ops are built beside the root of a match, and read
in its place. The driver takes such steps where rules match; `replace_each` takes one
for each op of a list, and needs neither rules nor patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from geutil.errors import CycleError, RerouteError, SelectionError, TransformError
from geutil.graph import adjacency, creation, state, types
from geutil.graph.edits import Liveness, Territory, undone_on_error
from geutil.graph.types import Graph, IdentityMap, MutableIdentityMap, Operation, Tensor
from geutil.reroute.tensors import ReroutePlan, redirection
from geutil.rewrite.patterns import TypeSet
from geutil.rewrite.rule import Replaced, Rule


@dataclass(frozen=True, eq=False)
class Applied:
    """The changes of one application."""

    # (old, new) for each output of the root that was replaced.
    pairs: tuple[tuple[Tensor, Tensor], ...]
    new_ops: tuple[Operation, ...]
    # The ops that read new tensors or wait for other ops, in graph order.
    rewired: tuple[Operation, ...]
    retired: tuple[Operation, ...]  # The ops that nobody reads any more.
    revived: tuple[Operation, ...]  # Retired ops that are read again.


def apply_replacement(
    name: str,
    root: Operation,
    ops: Sequence[Operation],
    build: Callable[[], Replaced],
    territory: Territory,
) -> Applied | str:
    """Replace the outputs of an op."""
    liveness = territory.liveness
    graph, where = root.graph, f"rule '{name}' at '{root.name}'"
    # A refusal has to come before `build` makes ops, which TensorFlow cannot delete.
    state.check_editable(graph, [*ops, *liveness.readers(root)])
    count = state.count_ops(graph)
    awaited = _awaited(ops)
    with creation.surroundings_of(root, awaited):
        result = build()
        if not isinstance(result, str):
            # A root without outputs is only waited for: its stand-in is an op.
            stand_in = [result] if not root.outputs and types.is_op(result) else []
            pairs = _pairs(where, root, None if stand_in else result)
            pairs = _ordered(pairs, frozenset(state.ops_since(graph, count)), awaited)
    new_ops = state.ops_since(graph, count)
    if isinstance(result, str):
        # Ops of a `build` that gave up stay in the graph: they are no readers.
        liveness.abandon(new_ops)
        return result
    if not pairs and root.outputs:
        liveness.abandon(new_ops)
        return "the replacement replaces no output"
    try:
        return _move(root, ops, pairs, new_ops, stand_in or awaited, territory)
    except CycleError as error:
        # A cycle refuses this match alone; any other error is a fault of the rule.
        liveness.forget(t.op for op in new_ops for t in op.inputs)
        liveness.abandon(new_ops)
        return str(error)
    except RerouteError as error:
        raise TransformError(f"{where}: {error}") from error


def _awaited(ops: Sequence[Operation]) -> list[Operation]:
    """Return the control inputs of the replaced ops, each once."""
    members = frozenset(ops)
    control_inputs = dict.fromkeys(
        c for op in ops for c in adjacency.control_inputs(op)
    )
    return [op for op in control_inputs if op not in members]


def _pairs(where: str, root: Operation, result: Any) -> list[tuple[Tensor, Tensor]]:
    """Return (old, new) for the outputs that the result of a replacement replaces."""
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
        if not types.is_tensor(new) or new.graph is not root.graph:
            hint = "; return its output" if types.is_op(new) else ""
            raise TransformError(
                f"{where} returned {types.type_name(new)} for '{old.name}', not a "
                f"tensor of the same graph{hint}"
            )
        pairs.append((old, new))
    return pairs


def _ordered(
    pairs: list[tuple[Tensor, Tensor]],
    new_ops: frozenset[Operation],
    awaited: list[Operation],
) -> list[tuple[Tensor, Tensor]]:
    """Let readers of an older tensor wait for the root's control inputs."""
    if not awaited:
        return pairs
    return [
        (old, new)
        if new.op in new_ops
        else (old, tf.identity(new, name=types.scope_basename(old.op.name)))
        for old, new in pairs
    ]


def _move(
    root: Operation,
    ops: Sequence[Operation],
    pairs: list[tuple[Tensor, Tensor]],
    new_ops: list[Operation],
    stand_ins: list[Operation],
    territory: Territory,
) -> Applied:
    """Move readers from the root to its replacement; retire ops that nobody reads."""
    liveness = territory.liveness
    replacement_ops = frozenset(new_ops)
    liveness.take_in(new_ops)
    replaced = {id(old) for old, _ in pairs}
    moving = [
        op
        for op in liveness.readers(root)
        if op not in replacement_ops and any(id(t) in replaced for t in op.inputs)
    ]
    dead = _dead(root, ops, replaced, replacement_ops, territory)
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
    # A replacement may read ops that an earlier rewrite retired.
    sources = dict.fromkeys(
        [new.op for _, new in pairs] + [t.op for op in new_ops for t in op.inputs]
    )
    revived = liveness.revive(sources)
    retired = liveness.retire(
        [op for op in ops if op is not root or dead],
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
    root: Operation,
    ops: Sequence[Operation],
    replaced: set[int],
    replacement_ops: frozenset[Operation],
    territory: Territory,
) -> list[Operation]:
    """Return the replaced ops that nobody will read, the root first."""
    liveness = territory.liveness
    # A root that its replacement reads, or that keeps a reader, lives on.
    if any(
        op in replacement_ops
        or any(t.op is root and id(t) not in replaced for t in op.inputs)
        for op in liveness.readers(root)
    ):
        return []
    # An op may come before its readers in `ops`, so one pass is not enough.
    dead = {root: None}
    while True:
        newly_dead = [
            op
            for op in ops
            if op not in dead
            and liveness.readers(op) <= dead.keys()
            and territory.protection(op) is None
        ]
        if not newly_dead:
            return list(dead)
        dead.update(dict.fromkeys(newly_dead))


def _move_control_outputs(
    plan: ReroutePlan,
    dead: list[Operation],
    producers: list[Operation],
    liveness: Liveness,
) -> list[Operation]:
    """Let ops that wait for a dead op wait for its replacement; return those ops."""
    dead_ops = frozenset(dead)
    waiting = dict.fromkeys(op for d in dead for op in liveness.waiting(d))
    live_ops = [op for op in waiting if op not in dead_ops]
    for op in live_ops:
        live_controls = [c for c in plan.control_inputs(op) if c not in dead_ops]
        plan.set_control_inputs(op, dict.fromkeys([*live_controls, *producers]))
    return live_ops


class Worklist:
    """A stack of ops, each on it at most once."""

    def __init__(self, rules: Iterable[Rule], liveness: Liveness) -> None:
        listed = list(rules)
        self._liveness = liveness
        self._depth = max((rule.depth for rule in listed), default=0)
        # A condition with a reach may look through ops of any type.
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
        # An op with more readers than a match has ops has one outside the match.
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

    def add_around(self, root: Operation, applied: Applied) -> None:
        """Visit again the ops that a rewrite may concern."""
        changed = [*applied.new_ops, *applied.rewired, *applied.revived]
        changed += self._freed(applied.retired)
        self.fill(
            adjacency.graph_order(self._downstream(dict.fromkeys([*changed, root])))
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


@dataclass(frozen=True, eq=False)
class Replacements:
    """The result of `replace_each`."""

    # For each output that was replaced, the tensor that computes it now.
    replaced: IdentityMap[Tensor]
    # For each op that is left as it was, why; in graph order.
    refused: dict[Operation, str]

    def current(self, tensor: Tensor) -> Tensor:
        """Return the replacement of `tensor`; itself, unless it was replaced."""
        return self.replaced.get(tensor, tensor)


def replace_each(
    graph: Graph,
    ops: Iterable[Operation],
    build: Callable[[Operation], Replaced],
    *,
    name: str,
    keep: Iterable[Operation | Tensor] = (),
) -> Replacements:
    """Replace known ops of a graph, each once, consumers first."""
    # It works as `rewrite` with a rule that matches these ops alone: an op that was
    # refused is tried again once it reads something else, and one that nobody reads any
    # more by then is passed over.
    # For each op that is not replaced yet, why it was refused when it was last tried.
    left: dict[Operation, str | None] = dict.fromkeys(ops)
    for op in left:
        if op.graph is not graph:
            raise SelectionError(
                f"'{op.name}' belongs to another graph than the one to edit; pass ops "
                "of that graph"
            )
    liveness = Liveness(graph)
    territory = Territory(graph, liveness, keep=keep)
    worklist = Worklist((), liveness)
    replaced: MutableIdentityMap[Tensor] = MutableIdentityMap()
    # Neutral from here on, so that each replacement has little to set aside.
    with undone_on_error(graph, liveness), creation.neutral(graph):
        worklist.fill(adjacency.topological_sort(graph.get_operations()))
        for op in worklist:
            if op not in left or liveness.is_retired(op):
                continue
            applied = territory.protection(op) or apply_replacement(
                name, op, [op], partial(build, op), territory
            )
            if isinstance(applied, str):
                left[op] = applied
                continue
            del left[op]
            replaced.update(applied.pairs)
            worklist.add_around(op, applied)
    refused = {
        op: reason
        for op in adjacency.graph_order(left)
        if (reason := left[op]) is not None and not liveness.is_retired(op)
    }
    return Replacements(resolved(replaced), refused)


def resolved(replaced: IdentityMap[Tensor]) -> IdentityMap[Tensor]:
    """Return for each replaced tensor the one that was not replaced in turn."""
    last: MutableIdentityMap[Tensor] = MutableIdentityMap()
    for old in replaced:
        path = [old]
        while path[-1] in replaced and path[-1] not in last:
            path.append(replaced[path[-1]])
        end = last.get(path[-1], path[-1])
        last.update((tensor, end) for tensor in path[:-1])
    order: MutableIdentityMap[Tensor] = MutableIdentityMap()
    order.update((old, last[old]) for old in replaced)
    return order
