"""The driver: rules applied until none applies, unless they undo each other.

Each op that a rule made remembers the application it was made in, and each application
those that made the ops it matched. If a rule is about to be applied to ops that compute
the same as those it replaced in one of these ancestors (same types, attributes and
inputs), the rules go in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import tensorflow as tf

from geutil.errors import ArgumentTypeError, SelectionError, TransformError
from geutil.graph import creation, types
from geutil.graph.adjacency import topological_sort
from geutil.graph.edits import Liveness, Territory, undone_on_error
from geutil.graph.invariants import verify
from geutil.graph.types import Graph, MutableIdentityMap, Operation, Tensor
from geutil.rewrite import applying, matching
from geutil.rewrite.applying import Applied, Worklist
from geutil.rewrite.matching import Finder, Match
from geutil.rewrite.rule import Refused, RewriteReport, Rewritten, Rule

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
    within = None if ops is None else matching.require_one_graph(ops, graph)
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
        producers = matching.producer_types(op)
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
        applied = applying.apply_replacement(
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
            tuple(self._rewritten), tuple(refused), applying.resolved(self._replaced)
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
