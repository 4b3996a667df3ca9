"""The fold of one graph: planned, built and reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from geutil.batchnorm import build
from geutil.batchnorm.build import Fold
from geutil.batchnorm.fold_plan import Choices, Plan, Planner
from geutil.batchnorm.norm_finding import Norm
from geutil.batchnorm.norm_path import Obstacle
from geutil.batchnorm.report import Folded, FoldReport, Refused
from geutil.batchnorm.targets import Place, inlined, is_convolution_call
from geutil.batchnorm.training_fold import Training, fold_in_training
from geutil.graph import creation, edits, state, types
from geutil.graph.types import IdentitySet, Operation, Tensor
from geutil.select.names import LayerNames
from geutil.transform.rewrite.applying import replace_each
from geutil.transform.rewrite.liveness import Liveness

_KEPT = (
    "is in keep, and cannot read the folded layer itself; take it out, and fetch what "
    "the report names"
)


class Folder:
    """Folds the norms of one graph.

    Args:
        place: the graph.
        choices: what the caller asks for.
        kept_tensors: tensors that go on computing what they do.
        training: how norms in training are folded for training; None if they are not.
            In the bodies of functions they never are.
    """

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

    def run(self) -> FoldReport:
        """Fold what can be folded."""
        with creation.neutral(self._graph):
            in_training = self._train()
            planner = self._planner()
            behind = planner.behind_layers()
            if not self._fixed and self._inline(behind.refused):
                planner = self._planner()
                behind = planner.behind_layers()
            refused = self._apply(behind)
            left: list[tuple[Norm, Obstacle]] = []
            if refused:
                # Folds may have changed what the planner has looked at.
                planner = self._planner() if behind.folds else planner
                norms = [norm for norm, _ in refused]
                left = self._apply(planner.before_layers(norms))
        counter = None
        if self._training is not None:
            counter = self._training.counter(self._graph)
        left = [in_training.get(n.result.op, (n, o)) for n, o in left]
        refused = [(n, o) for n, o in refused if n.result.op not in in_training]
        names = LayerNames(self._graph)
        folded = tuple(names.noted(self._folded, "norm"))
        return FoldReport(folded, self._report(refused, left), counter)

    def _train(self) -> dict[Operation, tuple[Norm, Obstacle]]:
        """Fold the norms in training; return those that are left."""
        if self._training is None:
            return {}
        scope = self._choices.scope
        plan = self._training.plan(self._graph, scope)
        self._inline(plan.refused.values())
        folded, refused = fold_in_training(self._graph, scope, self._training)
        signature = self._place.signature
        self._folded += [replace(entry, signature=signature) for entry in folded]
        return refused

    def refusals(self) -> tuple[Refused, ...]:
        """Return what will be refused, as far as that can be told beforehand."""
        planner = self._planner()
        behind = planner.behind_layers()
        refused = self._refused(behind)
        if self._training is not None:
            plan = self._training.plan(self._graph, self._choices.scope)
            training_ends = {fold.end for fold in plan.folds}
            refused = [
                plan.refused.get(n.result.op, (n, o))
                for n, o in refused
                if n.result.op not in training_ends
            ]
        if not self._fixed:
            calls = _convolution_calls(refused)
            refused = [(n, o) for n, o in refused if o.op not in calls]
        left = self._refused(planner.before_layers([norm for norm, _ in refused]))
        return self._report(refused, left)

    def _report(
        self,
        behind: list[tuple[Norm, Obstacle]],
        left: list[tuple[Norm, Obstacle]],
    ) -> tuple[Refused, ...]:
        """Return what is left, with the reason that tells more.

        That is the one about the layer before the norm, if there is such a layer.
        """
        first = {norm.result.op: obstacle for norm, obstacle in behind}
        prefix, signature = self._place.prefix, self._place.signature
        entries = []
        for norm, obstacle in left:
            reason = first.get(norm.result.op, obstacle)
            if reason.no_layer:
                reason = obstacle
            entries.append(
                Refused(
                    prefix + norm.name,
                    reason.reason,
                    prefix + reason.op.name,
                    signature,
                )
            )
        return tuple(LayerNames(self._graph).noted(entries, "norm"))

    def _inline(self, refused: Iterable[tuple[Norm, Obstacle]]) -> bool:
        """Put convolutions in the place of calls that are nothing else."""
        calls = _convolution_calls(refused)
        if calls:
            replace_each(self._graph, calls, inlined, name="inlined", keep=self._kept)
        return bool(calls)

    def _planner(self) -> Planner:
        kept_ids = frozenset(
            id(t) for t in (*edits.results_of(self._graph), *self._kept)
        )
        return Planner(self._graph, kept_ids, self._choices)

    def _refused(self, plan: Plan) -> list[tuple[Norm, Obstacle]]:
        """Return what is refused before anything is built."""
        refused = list(plan.refused)
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

    def _is_kept(self, op: Operation) -> bool:
        return any(t.op is op for t in self._kept)

    def _apply(self, plan: Plan) -> list[tuple[Norm, Obstacle]]:
        """Carry out a plan; return what is refused, then or now."""
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
        reasons = keep_reasons | self._replace(rest, into)
        for end, fold in folds.items():
            if end.name in reasons:
                obstacle = Obstacle(reasons[end.name], end)
                refused += [(norm, obstacle) for norm in fold.norms]
            else:
                self._note(fold, into[end])
        return refused

    def _replace(
        self, folds: dict[Operation, Fold], into: dict[Operation, Operation]
    ) -> dict[str, str]:
        """Let what reads the ends of folds read what is built instead.

        Args:
            folds: the folds by their ends.
            into: gets what is built for each end.

        Returns:
            For each end that is left as it is, by name, why.
        """
        if not folds:
            return {}

        state.check_editable(self._graph, list(folds))
        # All are built before the first takes its place, so that the topological order
        # needs to be renewed just once.
        built = {end: build.build_waiting(fold) for end, fold in folds.items()}
        state.renew_order(self._graph)

        def fold_batch_norm(end: Operation) -> list[Tensor | None]:
            result = built[end]
            into[end] = result.op
            # A fused norm has outputs besides, which are left alone.
            return [result, *([None] * (len(end.outputs) - 1))]

        results = edits.results_of(self._graph)
        keep = [t for t in (*results, *self._kept) if t.op not in folds]
        # Results of a function survive replacements; here they are replaced too.
        edits.set_results(self._graph, [])
        done = replace_each(
            self._graph, folds, fold_batch_norm, name="fold_batch_norm", keep=keep
        )
        edits.set_results(self._graph, [done.current(t) for t in results])
        reasons = {end.name: reason for end, reason in done.refused.items()}
        for end in folds:
            if end not in into and end.name not in reasons:
                into[end] = _standing_in(end, folds, into)
        # What was built in vain counts no more.
        Liveness(self._graph).retire(
            [t.op for end, t in built.items() if end.name in reasons], lambda op: False
        )
        return reasons

    def _note(self, fold: Fold, into: Operation) -> None:
        prefix, layer = self._place.prefix, fold.layer.op
        self._folded += [
            Folded(
                prefix + norm.name,
                prefix + layer.name,
                layer.type,
                prefix + into.name,
                fold.forward,
                self._place.signature,
            )
            for norm in fold.norms
        ]


def _convolution_calls(refused: Iterable[tuple[Norm, Obstacle]]) -> set[Operation]:
    """Return the calls in the way of norms that do nothing but one convolution."""
    obstacles = (obstacle.op for _, obstacle in refused)
    return {op for op in obstacles if is_convolution_call(op)}


def _standing_in(
    end: Operation, folds: Mapping[Operation, Fold], into: Mapping[Operation, Operation]
) -> Operation:
    """Return what does the work of a fold: where others took it along, one of them."""
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
