"""The fold of one graph: planned, built and reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from geutil.batchnorm import build, training_build
from geutil.batchnorm.build import Branched, Fold, build_branches
from geutil.batchnorm.fold_plan import Choices, FoldPlan, Planner, Refusal, Training
from geutil.batchnorm.fold_report import Folded, FoldReport, Refused
from geutil.batchnorm.norms import Norm, Obstacle, stacked_item
from geutil.batchnorm.training_build import Built
from geutil.bodies.function_bodies import OpenedFunction
from geutil.graph import creation, edits, state, types
from geutil.graph.edits import Liveness
from geutil.graph.function_calls import Caller
from geutil.graph.resource_variables import step_counter_of
from geutil.graph.runtime import inlined_convolution, is_convolution_call
from geutil.graph.types import Graph, IdentitySet, Operation, Tensor
from geutil.rewrite.driver import replace_each
from geutil.select.selections import LayerNames

_KEPT = (
    "is in keep, and cannot read the folded layer itself; take it out, and fetch what "
    "the report names"
)


@dataclass(frozen=True, eq=False)
class Place:
    """A graph that batch norms are folded in."""

    graph: Graph
    prefix: str = ""  # the prefix of its ops' names in reports
    signature: str = ""  # of a model, the signature that it belongs to
    fixed: str = ""  # why nothing can be changed in it; "" if it can
    # Of the body of a function that a graph calls, the function.
    function: OpenedFunction | None = None
    inputs: tuple[Tensor, ...] = ()
    # Of a body, the ops that read its results, and nothing else.
    sinks: tuple[Operation, ...] = ()
    callers: tuple[Caller, ...] = ()  # of a body, all that calls it


class Folder:
    """Folds the batch norms of one graph."""

    # `training`: how batch norms in training are folded for training; None if they are
    # not. In the bodies of functions they never are.

    def __init__(
        self,
        place: Place,
        choices: Choices,
        kept_tensors: IdentitySet,
        training: Training | None = None,
    ) -> None:
        self._place = place
        self._graph = place.graph
        self._kept = [t for t in kept_tensors if t.graph is place.graph]
        self._choices, self._fixed = _choices_in(place, choices)
        self._training = None if place.prefix else training
        self._folded: list[Folded] = []
        # By the last ops of norms that were moved to several layers: the norms that are
        # in them, and what ends these now.
        self._moved: dict[Operation, tuple[tuple[Norm, ...], Operation]] = {}
        self._stands_for: dict[Operation, Operation] = {}
        self._unmoved: dict[Operation, str] = {}

    def run(self) -> FoldReport:
        """Fold the batch norms that can be folded."""
        before = state.count_ops(self._graph)
        with creation.neutral(self._graph):
            in_training = self._train()
            planner = self._planner()
            behind = planner.behind_layers()
            while not self._fixed and self._clear(behind):
                planner = self._planner()
                behind = planner.behind_layers()
            refused = self._apply(behind)
            left: list[Refusal] = []
            if refused:
                # Folds may have changed what the planner has looked at.
                planner = self._planner() if behind.folds else planner
                norms = [norm for norm, _ in refused]
                left = self._apply(planner.before_layers(norms))
        for op in state.ops_since(self._graph, before):
            creation.set_mark(op, creation.DERIVED)
        counter = None if self._training is None else step_counter_of(self._graph)
        step = None if counter is None else counter.variable
        left = [in_training.get(n.result.op, (n, o)) for n, o in left]
        refused = [(n, o) for n, o in refused if n.result.op not in in_training]
        names = LayerNames(self._graph)
        folded = tuple(names.noted(self._folded, "norm"))
        return FoldReport(folded, self._report(refused, left), step)

    def _train(self) -> dict[Operation, Refusal]:
        """Fold the batch norms in training; return those left, by their ends."""
        training = self._training
        if training is None:
            return {}
        plan = self._planner().for_training(training)
        if self._clear(plan):
            # Clearing rebuilt ops that the first plan names.
            plan = self._planner().for_training(training)
        refused = {norm.result.op: (norm, obstacle) for norm, obstacle in plan.refused}
        freeze = training_build.freeze_of(self._graph, training)
        staying = [fold for fold in plan.folds if build.can_stay(fold)]
        held_ends = build.held_ends(self._graph, staying)
        built: dict[Operation, Built] = {}
        for fold in plan.folds:
            # An end that somebody holds stays, and reads the folded layer.
            if fold.end in held_ends:
                made = training_build.build_training(
                    fold, freeze, training, end_stays=True
                )
                training_build.stay(fold, made)
                training_build.settle(fold, made, freeze)
        rest = {fold.end: fold for fold in plan.folds if fold.end not in held_ends}

        def fold_batch_norm(end: Operation) -> list[Tensor | None]:
            made = training_build.build_training(rest[end], freeze, training)
            built[end] = made
            return [made.result, *made.rest]

        reasons: Mapping[Operation, str] = {}
        if rest:
            reasons = replace_each(
                self._graph, rest, fold_batch_norm, name="fold_batch_norm"
            ).refused
        for fold in plan.folds:
            end = fold.end
            if end in reasons:
                refused[end] = fold.norms[0], Obstacle(reasons[end], end)
                continue
            if end in rest:
                training_build.settle(fold, built[end], freeze)
            self._note(fold, end if end in held_ends else built[end].result.op)
        return refused

    def refusals(self) -> tuple[Refused, ...]:
        """Return the refusals that are known beforehand."""
        planner = self._planner()
        behind = planner.behind_layers()
        refused = self._refused(behind)
        if self._training is not None:
            plan = planner.for_training(self._training)
            training_ends = {fold.end for fold in plan.folds}
            instead = {norm.result.op: (norm, obst) for norm, obst in plan.refused}
            refused = [
                instead.get(n.result.op, (n, o))
                for n, o in refused
                if n.result.op not in training_ends
            ]
        if not self._fixed:
            cleared = _in_the_way(refused)
            refused = [(n, o) for n, o in refused if o.op not in cleared]
        left = self._refused(planner.before_layers([norm for norm, _ in refused]))
        return self._report(refused, left)

    def _report(
        self,
        behind: list[Refusal],
        left: list[Refusal],
    ) -> tuple[Refused, ...]:
        """Return the batch norms that are left, with the reason that tells more."""
        # That is the one about the layer before the norm, if there is such a layer.
        first = {norm.result.op: obstacle for norm, obstacle in behind}
        prefix, signature = self._place.prefix, self._place.signature
        entries = []
        for norm, obstacle in left:
            before = first.get(norm.result.op, obstacle)
            reason, op = before.reason, before.op
            if before.no_layer and before is not obstacle:
                reason, op = f"{obstacle.reason}, and {_stated(before)}", obstacle.op
            norms, _ = self._moved.get(norm.result.op, ((norm,), op))
            entries += [
                Refused(prefix + one.name, reason, prefix + op.name, signature)
                for one in norms
            ]
        return tuple(LayerNames(self._graph).noted(entries, "norm"))

    def _clear(self, plan: FoldPlan) -> bool:
        """Change the ops between batch norms and layers; return whether any did."""
        # Calls of one convolution give way to it, slices of a stack to the stacked
        # tensor, and batch norms of several layers are moved to each of them.
        in_the_way = _in_the_way(plan.refused)
        cleared = 0
        if in_the_way:
            done = replace_each(
                self._graph, in_the_way, _cleared, name="inlined", keep=self._kept
            )
            cleared = len(in_the_way) - len(done.refused)
        branched = [b for b in plan.branched if self._objection_to(b) is None]
        return bool(self._move(branched) or cleared)

    def _move(self, branched: Sequence[Branched]) -> bool:
        """Move batch norms to the layers of their branches; return whether any did."""
        # Those that lie between another one and its layers go along with that.
        inside = {
            op for b in branched for op in b.replaced if op is not b.norm.result.op
        }
        last = [b for b in branched if b.norm.result.op not in inside]
        state.check_editable(self._graph, [b.norm.result.op for b in last])
        norm_by_end = {b.norm.result.op: b.norm for b in branched}
        built: dict[Operation, Tensor] = {}
        for entry in last:
            result, new_ends = build_branches(entry, norm_by_end)
            built[entry.norm.result.op] = result
            for new_end, norms in new_ends:
                self._moved[new_end] = norms, result.op
        into, reasons = self._replace(built)
        for entry in last:
            end = entry.norm.result.op
            if end in into:
                self._stands_for.update(dict.fromkeys(entry.replaced, into[end]))
            else:
                self._unmoved[end] = reasons[end.name]
        return bool(into)

    def _planner(self) -> Planner:
        kept_ids = frozenset(
            id(t) for t in (*edits.results_of(self._graph), *self._kept)
        )
        return Planner(self._graph, kept_ids, self._choices)

    def _refused(self, plan: FoldPlan) -> list[Refusal]:
        """Return the refusals before anything is built."""
        refused = list(plan.refused)
        for entry in plan.branched:
            objection = self._objection_to(entry)
            if objection is not None:
                refused.append((entry.norm, objection))
        for fold in plan.folds:
            objection = self._objection(fold)
            if objection is not None:
                refused += [(norm, objection) for norm in fold.norms]
        return refused

    def _objection(self, fold: Fold) -> Obstacle | None:
        if self._fixed:
            return Obstacle(self._fixed, fold.end)
        if self._is_kept(fold.end) and not build.can_stay(fold):
            return Obstacle(_KEPT, fold.end)
        return None

    def _objection_to(self, branched: Branched) -> Obstacle | None:
        end = branched.norm.result.op
        reason = _KEPT if self._is_kept(end) else self._unmoved.get(end)
        reason = self._fixed or reason
        return Obstacle(reason, end) if reason else None

    def _is_kept(self, op: Operation) -> bool:
        return any(t.op is op for t in self._kept)

    def _apply(self, plan: FoldPlan) -> list[Refusal]:
        """Carry out a plan; return the refusals, then or now."""
        refused = self._refused(plan)
        staying = [fold for fold in plan.folds if build.can_stay(fold)]
        held_ends = build.held_ends(self._graph, staying, self._kept)
        folds = {f.end: f for f in plan.folds if self._objection(f) is None}
        into: dict[Operation, Operation] = {}
        for end, fold in folds.items():
            if end in held_ends and build.build_in_place(fold) is not None:
                into[end] = end
        rest = {end: fold for end, fold in folds.items() if end not in into}
        keep_reasons = {end.name: _KEPT for end in rest if self._is_kept(end)}
        rest = {end: fold for end, fold in rest.items() if end.name not in keep_reasons}
        state.check_editable(self._graph, list(rest))
        # All are built before the first takes its place, so that the topological order
        # needs to be renewed just once.
        built = {end: build.build_waiting(fold) for end, fold in rest.items()}
        replaced_by, reasons = self._replace(built)
        into |= replaced_by
        for end in rest:
            if end not in into and end.name not in reasons:
                into[end] = _standing_in(end, rest, into)
        reasons |= keep_reasons
        for end, fold in folds.items():
            if end.name in reasons:
                obstacle = Obstacle(reasons[end.name], end)
                refused += [(norm, obstacle) for norm in fold.norms]
            else:
                self._note(fold, into[end])
        return refused

    def _replace(
        self, built: Mapping[Operation, Tensor]
    ) -> tuple[dict[Operation, Operation], dict[str, str]]:
        """Let readers of the ends of batch norms read the replacements."""
        # Returns the ops that make that; and for each end that is left, by name, the
        # reason.
        into: dict[Operation, Operation] = {}
        if not built:
            return into, {}

        state.renew_order(self._graph)

        def fold_batch_norm(end: Operation) -> list[Tensor | None]:
            result = built[end]
            into[end] = result.op
            # A fused norm has outputs besides, which are left alone.
            return [result, *([None] * (len(end.outputs) - 1))]

        results = edits.results_of(self._graph)
        keep = [t for t in (*results, *self._kept) if t.op not in built]
        # Results of a function survive replacements; here they are replaced too.
        edits.set_results(self._graph, [])
        done = replace_each(
            self._graph, built, fold_batch_norm, name="fold_batch_norm", keep=keep
        )
        edits.set_results(self._graph, [done.current(t) for t in results])
        reasons = {end.name: reason for end, reason in done.refused.items()}
        # Ops that were built in vain no longer count.
        Liveness(self._graph).retire(
            [t.op for end, t in built.items() if end.name in reasons], lambda op: False
        )
        return {end: op for end, op in into.items() if end.name not in reasons}, reasons

    def _note(self, fold: Fold, into: Operation) -> None:
        """Report each norm of a fold with the op that its scale went into."""
        prefix, layer = self._place.prefix, fold.layer.op
        for built in fold.norms:
            norms, end = self._moved.get(built.result.op, ((built,), into))
            while end in self._stands_for:
                end = self._stands_for[end]
            self._folded += [
                Folded(
                    prefix + norm.name,
                    prefix + layer.name,
                    layer.type,
                    prefix + end.name,
                    fold.forward,
                    self._place.signature,
                )
                for norm in norms
            ]


def _stated(before: Obstacle) -> str:
    """Return the op before a norm as the end of a sentence."""
    if not before.op.inputs:
        return "no layer comes before the norm"
    return f"'{before.op.name}' {before.reason}"


def _in_the_way(refused: Iterable[Refusal]) -> list[Operation]:
    """Return the obstacles that can be replaced by a layer itself, or by its result."""
    ops = dict.fromkeys(obstacle.op for _, obstacle in refused)
    return [op for op in ops if is_convolution_call(op) or stacked_item(op) is not None]


def _cleared(op: Operation) -> Tensor:
    item = stacked_item(op)
    return inlined_convolution(op) if item is None else item


def _standing_in(
    end: Operation, folds: Mapping[Operation, Fold], into: Mapping[Operation, Operation]
) -> Operation:
    """Return the replacement of a fold, or that of a fold that includes it."""
    while end not in into:
        end = next(
            other
            for other, fold in folds.items()
            if other is not end and any(link.op is end for link in fold.links)
        )
    return into[end]


def _choices_in(place: Place, choices: Choices) -> tuple[Choices, str]:
    """Return the choices for a place, and why nothing is folded in it, or nothing."""
    scope, prefix = choices.scope, place.prefix
    if scope is None or types.is_in_scope(prefix, scope):
        return replace(choices, scope=None), place.fixed
    inside = tuple(s.removeprefix(prefix) for s in scope if s.startswith(prefix))
    if inside:
        return replace(choices, scope=inside), place.fixed
    reason = f"is outside of scope {types.quoted(scope)}"
    return replace(choices, scope=None), reason
