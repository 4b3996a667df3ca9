"""Rewrites: one replacement at a time, by rules until none applies, or of known ops.

`apply_replacement` is one step: new ops are built beside the root of a match, and read
in its place. The driver takes such steps where rules match; `replace_each` takes one
for each op of a list, and needs neither rules nor patterns.

Each op that a rule made remembers the application it was made in, and each application
those that made the ops it matched. If a rule is about to be applied to ops that compute
the same as those it replaced in one of these ancestors (same types, attributes and
inputs), the rules go in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import tensorflow as tf

from geutil.errors import (
    ArgumentTypeError,
    CycleError,
    RerouteError,
    SelectionError,
    TransformError,
)
from geutil.graph import adjacency, creation, state, types
from geutil.graph.adjacency import topological_sort
from geutil.graph.edits import Liveness, Territory, undone_on_error
from geutil.graph.invariants import verify
from geutil.graph.types import Graph, IdentityMap, MutableIdentityMap, Operation, Tensor
from geutil.reroute.tensors import ReroutePlan, redirection
from geutil.rewrite import matcher
from geutil.rewrite.matcher import Finder, Match
from geutil.rewrite.patterns import TypeSet
from geutil.rewrite.rule import Refused, Replaced, RewriteReport, Rewritten, Rule


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
        """Refuse an application that undoes one of the last 100 before it."""
        again = self._replaced_by.get((id(rule), match.root))
        # The rule has retired this root before, so another application has revived it.
        if again is not None:
            reviver = self._made_by.get(match.root, again)
            raise _circle([again, reviver], match)
        parents = self._parents(match)
        # A match of ops that were there from the start undoes nothing.
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
        """Note an application that was carried out."""
        parents = self._parents(match)
        # The signature is taken while the ops of the match read what they read now.
        signature = _signature(match) if parents else None
        application = _Application(rule, match, parents, signature)
        self._made_by.update(dict.fromkeys((*new_ops, *revived), application))
        if is_gone:
            self._replaced_by[id(rule), match.root] = application

    def _parents(self, match: Match) -> list[_Application]:
        application_by_id = {
            id(self._made_by[op]): self._made_by[op]
            for op in match.ops
            if op in self._made_by
        }
        return list(application_by_id.values())


def _signature(match: Match) -> Signature:
    """Return a key of the matched ops: types, attributes and sources of inputs."""
    # An input from within the match is (place of its op, output), another (-1, id).
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


@tf.autograph.experimental.do_not_convert
def rewrite(
    graph: Graph,
    rules: Rule | Iterable[Any],
    *,
    limit: int | None = None,
    debug: bool = False,
    ops: Iterable[Operation] | None = None,
    keep: Iterable[Operation | Tensor] = (),
) -> RewriteReport:
    """Apply rules to a graph until none applies.

    Ops are visited consumers first, and at each op the rules are tried in their order.
    After a rewrite the ops that it may concern are visited again: the new ones, those
    that read something else now, and those downstream of them as far as the deepest
    pattern reaches. A rule that wraps its root, so that the root is still read
    afterwards, is applied to that root once.

    It stops: each visit tries each rule once, and a search is bounded by the pattern. A
    visit is asked for once for each op at the start, and after a rewrite for a finite
    number of ops. Rewrites are at most `limit`; so visits are finite in number. Rules
    that undo each other are found before that, when a rule is about to repeat a
    replacement that it made in an ancestor of the match.

    Replaced ops stay in the graph, because TensorFlow cannot delete an op; they have no
    readers left, are not matched again, and do not count as readers. Ops that waited
    for them wait for their replacements. In the body of a function that is being
    traced, TensorFlow runs stateful ops that nobody reads too.

    Bodies of functions are graphs of their own: rewrite them separately.

    Args:
        graph: the graph; the FuncGraph of a function only while it is traced.
        rules: a rule, or rules; groups of rules may be nested.
        limit: how many rewrites there may be; None is 100 and two for each op.
        debug: whether to check the whole graph with `geutil.verify` after each rewrite.
        ops: the ops that matches may be made of, besides those that rewrites make; None
            is all.
        keep: ops and tensors that must survive, such as fetches; outputs of a FuncGraph
            do in any case. They are not replaced, and count as read. An output that
            nobody reads and that is not kept may be replaced: the report names the
            replacement.

    Returns:
        The rewrites that were made, and every candidate that was refused, with the
        reason.

    Raises:
        ArgumentTypeError: an argument is of another type.
        SelectionError: an op or tensor is of another graph, or a search takes too long.
        TransformError: there are more rewrites than `limit`, rules undo each other, or
            a replacement returned tensors that cannot replace the outputs of its root.
        StaleGraphError, FinalizedGraphError: an edit would have no effect, or is
            forbidden.
        VerificationError: in debug mode, a rewrite broke an invariant.
        After an error, also one of a rule's own, all edges are as they were; ops that
        were made stay, unconnected.

    Cost: linear in ops and edges, plus for each rule and op of an anchor type one
    search, which the types of the producers end early where they do not fit; and for
    each rewrite the size of the neighbourhood that it touches.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.rewrite import Any, Op, Rule, rewrite
        >>> with tf.Graph().as_default() as graph:
        ...     y = tf.negative(tf.nn.relu6(tf.zeros([2]), name="r"), name="y")
        >>> rule = Rule(Op("Relu6", Any("x")), lambda m: tf.nn.relu(m["x"]), name="r6")
        >>> print(rewrite(graph, rule))
        1 rewritten, 0 refused
          r6: 1 rewritten, 0 refused
        rewritten:
          r6: 'r' -> 'Relu'
        >>> y.op.inputs[0].name
        'Relu:0'
    """
    types.require_graph(graph)
    listed = _rules(rules)
    within = None if ops is None else matcher.require_one_graph(ops, graph)
    protected = _kept(keep, graph)
    roots = graph.get_operations() if within is None else within
    if limit is None:
        limit = 100 + 2 * len(roots)
    liveness = Liveness(graph)
    territory = Territory(graph, liveness, within, protected)
    driver = _Driver(graph, listed, territory, limit, debug)
    with undone_on_error(graph, liveness), creation.neutral(graph):
        driver.run(topological_sort(roots))
    return driver.report()


class _Driver:
    """The state of one call of `rewrite`."""

    def __init__(
        self,
        graph: Graph,
        rules: list[Rule],
        territory: Territory,
        limit: int,
        debug: bool,
    ) -> None:
        self._graph = graph
        self._finders = [(r, Finder(r.compiled, territory)) for r in rules]
        self._by_type: dict[str, list[tuple[int, Rule, Finder]]] = {}
        self._territory = territory
        self._liveness = territory.liveness
        self._limit = limit
        self._debug = debug
        self._worklist = Worklist(rules, self._liveness)
        self._history = History()
        # Roots that their replacement reads: the rule would match them for ever.
        self._wrapped: set[tuple[int, Operation]] = set()
        self._rewritten: list[Rewritten] = []
        self._refused: dict[tuple[int, Operation], str] = {}
        self._replaced: MutableIdentityMap[Tensor] = MutableIdentityMap()

    def run(self, ops: list[Operation]) -> None:
        """Visit `ops`, the last first, and the ops that rewrites add to them."""
        self._worklist.fill(ops)
        for op in self._worklist:
            rules = self._rules_for(op.type)
            if rules and not self._liveness.is_retired(op):
                self._visit(op, rules)

    def _rules_for(self, kind: str) -> list[tuple[int, Rule, Finder]]:
        """Return the rules whose root may be of a type, in order."""
        rules = self._by_type.get(kind)
        if rules is None:
            rules = self._by_type[kind] = [
                (index, rule, finder)
                for index, (rule, finder) in enumerate(self._finders)
                if rule.compiled.types is None or kind in rule.compiled.types
            ]
        return rules

    def _visit(self, op: Operation, rules: list[tuple[int, Rule, Finder]]) -> None:
        """Apply the first rule that applies to `op`; note why others do not."""
        producers = matcher.producer_types(op)
        for index, rule, finder in rules:
            candidate = finder.find(op, producers)
            if candidate is None:
                # The op changed since it was refused: it is no match now.
                if self._refused:
                    self._refused.pop((index, op), None)
                continue
            if (index, op) in self._wrapped:
                continue
            applied = (
                candidate if isinstance(candidate, str) else self._try(rule, candidate)
            )
            if isinstance(applied, str):
                self._refused[index, op] = applied
                continue
            self._refused.pop((index, op), None)
            if not self._liveness.is_retired(op):
                self._wrapped.add((index, op))
            # One rule at a visit: the op, if it lives, is on the worklist again.
            return

    def _try(self, rule: Rule, match: Match) -> Applied | str:
        """Apply a rule to a match, or return why not."""
        reason = self._territory.protection(match.root) or rule.objection(match)
        if reason is not None:
            return reason
        # A circle would reach the limit, whose message names no rule that is at fault.
        self._history.check(rule, match)
        if len(self._rewritten) >= self._limit:
            raise TransformError(self._over_limit(rule, match))
        applied = apply_replacement(
            rule.name,
            match.root,
            match.ops,
            partial(rule.replacement, match),
            self._territory,
        )
        if isinstance(applied, str):
            return applied
        if self._debug:
            verify(self._graph)
        self._take_note(rule, match, applied)
        return applied

    def _take_note(self, rule: Rule, match: Match, applied: Applied) -> None:
        """Note a rewrite for the report and the history; queue the ops around it."""
        is_gone = self._liveness.is_retired(match.root)
        self._history.add(
            rule, match, applied.new_ops, applied.revived, is_gone=is_gone
        )
        self._rewritten.append(
            Rewritten(
                rule.name,
                match.root.name,
                tuple(op.name for op in match.ops),
                tuple(op.name for op in applied.new_ops),
            )
        )
        for old, new in applied.pairs:
            self._replaced[old] = new
        # New ops may be matched wherever the ops that they replace may be.
        if self._territory.within is not None:
            self._territory.within.update(applied.new_ops)
        self._worklist.add_around(match.root, applied)

    def _over_limit(self, rule: Rule, match: Match) -> str:
        counts: dict[str, int] = {}
        for entry in self._rewritten:
            counts[entry.rule] = counts.get(entry.rule, 0) + 1
        done = ", ".join(f"'{name}' {count}x" for name, count in counts.items())
        return (
            f"there are more than {self._limit} rewrites ({done or 'none so far'}), "
            f"and rule '{rule.name}' applies at '{match.root.name}'; give the rules a "
            "check that ends them, or pass a higher limit="
        )

    def report(self) -> RewriteReport:
        """Return the report of rewrites and refusals."""
        live = [k for k in self._refused if not self._liveness.is_retired(k[1])]
        place = {op: i for i, op in enumerate(self._graph.get_operations())}
        refused = (
            Refused(self._finders[index][0].name, op.name, self._refused[index, op])
            for index, op in sorted(live, key=lambda k: (place[k[1]], k[0]))
        )
        return RewriteReport(
            tuple(self._rewritten), tuple(refused), resolved(self._replaced)
        )


def _rules(rules: Any) -> list[Rule]:
    listed = types.flatten(rules)
    for rule in listed:
        if not isinstance(rule, Rule):
            raise ArgumentTypeError(f"expected a Rule, got {types.type_name(rule)}")
    return listed


def _kept(keep: Any, graph: Graph) -> list[Any]:
    elements = types.as_list(keep)
    for element in elements:
        if not types.is_op(element) and not types.is_tensor(element):
            raise ArgumentTypeError(
                f"keep holds ops and tensors of a graph, not {types.type_name(element)}"
            )
        if element.graph is not graph:
            raise SelectionError(
                f"'{element.name}' in keep belongs to another graph than the one to "
                "rewrite"
            )
    return elements
