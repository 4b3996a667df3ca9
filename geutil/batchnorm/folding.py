"""Folding the batch norms of a graph or model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from geutil.batchnorm.ending import build_in_place, can_stay
from geutil.batchnorm.folds import Fold, build
from geutil.batchnorm.norms import Norm
from geutil.batchnorm.paths import Obstacle
from geutil.batchnorm.places import Place, Places
from geutil.batchnorm.planning import Choices, Plan, Planner
from geutil.batchnorm.report import Folded, FoldReport, Refused
from geutil.batchnorm.sinking import constants_passed, raise_constants, sink_constants
from geutil.errors import ArgumentTypeError, FoldError, SelectionError
from geutil.graph.edits import transaction
from geutil.graph.function_results import results_of, set_results
from geutil.graph.identity import IdentitySet
from geutil.graph.importing import neutral
from geutil.graph.kinds import Operation, Tensor, is_op, is_tensor, type_name
from geutil.select.lists import as_list
from geutil.transform.rewrite.driver import rewrite
from geutil.transform.rewrite.liveness import Liveness
from geutil.transform.rewrite.matching import Match
from geutil.transform.rewrite.patterns import Op
from geutil.transform.rewrite.rule import Rule


def fold_batch_norms(
    graph_or_model: Any,
    *,
    scope: str | None = None,
    strict: bool = False,
    assume_inference: bool = False,
    clone_shared: bool = False,
    keep: Iterable[Operation | Tensor] = (),
) -> FoldReport:
    """Fold batch normalization into the layers before it, or behind it.

    A batch norm at inference multiplies each channel by a number and adds another. A
    layer that is linear in its weights takes both in: what is left is the layer with
    other weights, and one bias. Constants are folded in float64; of variables, new ops
    compute the weights, and the variables are left as they are. The old ops stay in the
    graph, and nothing reads them any more.

    Norms in the bodies of loops, of conditionals and of functions that are called are
    folded there, if their layer is in the same body and its weights reach the body as
    constants or variables. Of a model, all signatures are folded.

    A norm that nothing reads, such as one that is fetched, or returned by a function
    that is being traced, is folded too. Where it ends in a sum that op stays, and
    computes the folded layer's; a fused norm stays as it was, and the report's `into`
    names what to fetch instead.

    Args:
        graph_or_model: a graph, or a `geutil.model.Model`.
        scope: only norms whose names begin with it; None is all.
        strict: raise if a norm was refused.
        assume_inference: fold norms that normalize by the statistics of the batch as
            well, with their moving ones.
        clone_shared: where something else reads the layer too, compute it twice.
        keep: ops and tensors that go on computing what they do, since they are fetched
            by name. Norms that cannot be folded without changing them are refused.

    Returns:
        Every batch norm, folded or refused with the reason.

    Raises:
        ArgumentTypeError: the first argument is no graph and no model, or keep holds
            something else than ops and tensors.
        SelectionError: what is in keep is of another graph.
        FoldError: with `strict`, a norm in the scope was refused; nothing is changed.
        StaleGraphError, FinalizedGraphError: an edit would have no effect, or is
            forbidden.

    Cost: linear in ops and edges, and some 3 ms for each fold.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.batchnorm import fold_batch_norms
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.compat.v1.placeholder(tf.float32, [None, 8, 8, 3])
        ...     y = tf.nn.conv2d(x, tf.ones([1, 1, 3, 2]), 1, "SAME", name="conv")
        ...     two = tf.constant([2.0, 2.0])
        ...     z = tf.nn.batch_normalization(y, two, two, two, two, 1e-3, name="norm")
        >>> print(fold_batch_norms(graph))
        1 of 1 batch norm(s) folded, 0 refused
        folded:
          norm  into Conv2D 'conv'
    """
    places = Places(graph_or_model)
    kept = _kept(keep, places)
    choices = Choices(scope, clone_shared, assume_inference)
    folders = [_Folder(place, choices, kept) for place in places.listed]
    passed = constants_passed(places.listed)
    settled = [f for f, constants in zip(folders, passed, strict=True) if not constants]
    if strict:
        # Before anything is touched: functions of a model need not be made anew.
        refusals = [r for f in settled for r in f.refusals()]
        _check_none(FoldReport((), (*refusals, *places.unopened)), scope)
    with ExitStack() as stack:
        for place in places.listed:
            stack.enter_context(transaction(place.graph))
        sunk = list(map(sink_constants, places.listed, passed))
        reports = [folder.run() for folder in folders]
        edited = []
        for place, constants, report in zip(places.listed, sunk, reports, strict=True):
            if report.folded:
                edited.append(place)
            else:
                raise_constants(constants)
        places.write_back(edited)
        whole = FoldReport(
            tuple(entry for r in reports for entry in r.folded),
            (*(entry for r in reports for entry in r.refused), *places.unopened),
        )
        if strict:
            _check_none(whole, scope)
    return whole


def _check_none(report: FoldReport, scope: str | None) -> None:
    """Raise if a norm in the scope was refused."""
    refused = [r for r in report.refused if r.norm.startswith(scope or "")]
    if refused:
        raise FoldError(
            f"{len(refused)} batch norm(s) cannot be folded; nothing was "
            f"changed:\n{FoldReport((), tuple(refused))}"
        )


def _kept(keep: Any, places: Places) -> IdentitySet:
    """Return the tensors to keep, those of ops among them."""
    graphs = [place.graph for place in places.listed]
    kept: IdentitySet = IdentitySet()
    for element in as_list(keep):
        if not is_op(element) and not is_tensor(element):
            raise ArgumentTypeError(
                f"keep holds ops and tensors of a graph, not {type_name(element)}"
            )
        if not any(element.graph is graph for graph in graphs):
            raise SelectionError(
                f"'{element.name}' in keep belongs to another graph than the one to "
                "fold in"
            )
        for t in element.outputs if is_op(element) else [element]:
            kept.add(t)
    return kept


class _Folder:
    """Folds the norms of one graph."""

    def __init__(self, place: Place, choices: Choices, kept: IdentitySet) -> None:
        self._place = place
        self._graph = place.graph
        self._kept = [t for t in kept if t.graph is place.graph]
        self._choices, self._fixed = _choices_in(place, choices)
        self._folded: list[Folded] = []

    def run(self) -> FoldReport:
        """Fold what can be folded."""
        with neutral(self._graph):
            refused = self._apply(self._planner().behind_layers())
            norms = [norm for norm, _ in refused]
            left = self._apply(self._planner().before_layers(norms))
        return FoldReport(tuple(self._folded), self._report(refused, left))

    def refusals(self) -> tuple[Refused, ...]:
        """Return what will be refused, as far as that can be told beforehand."""
        planner = self._planner()
        refused = self._refused(planner.behind_layers())
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
            if reason.reason.startswith("no layer"):
                reason = obstacle
            entries.append(
                Refused(
                    prefix + norm.name,
                    reason.reason,
                    prefix + reason.op.name,
                    signature,
                )
            )
        return tuple(entries)

    def _planner(self) -> Planner:
        kept = frozenset(id(t) for t in (*results_of(self._graph), *self._kept))
        return Planner(self._graph, kept, self._choices)

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
        if any(t.op is fold.end for t in self._kept) and not can_stay(fold):
            return Obstacle(
                "is in keep, and an op of this type cannot read the folded layer; "
                "take it out, and fetch what the report names",
                fold.end,
            )
        return None

    def _apply(self, plan: Plan) -> list[tuple[Norm, Obstacle]]:
        """Carry out a plan; return what is refused, then or now."""
        refused = self._refused(plan)
        held = self._held(plan.folds)
        replaced: dict[Operation, Fold] = {}
        for fold in plan.folds:
            if self._objection(fold) is not None:
                continue
            end = build_in_place(fold) if fold.end in held else None
            if end is None:
                replaced[fold.end] = fold
            else:
                self._note(fold, end)
        return refused + self._replace(replaced)

    def _held(self, folds: Collection[Fold]) -> frozenset[Operation]:
        """Return the ends that somebody holds, and that can stay."""
        liveness = Liveness(self._graph)
        named = {t.op for t in (*results_of(self._graph), *self._kept)}
        return frozenset(
            fold.end
            for fold in folds
            if can_stay(fold) and (fold.end in named or not liveness.readers(fold.end))
        )

    def _replace(self, folds: dict[Operation, Fold]) -> list[tuple[Norm, Obstacle]]:
        """Let what reads the ends of folds read what is built instead."""
        if not folds:
            return []
        made: dict[Operation, Operation] = {}

        def is_end(op: Operation) -> bool:
            return op in folds

        def fold_batch_norm(match: Match) -> Any:
            result = build(folds[match.root])
            made[match.root] = result.op
            # A fused norm has outputs besides, which are left alone.
            return [result, *([None] * (len(match.root.outputs) - 1))]

        results = results_of(self._graph)
        keep = [t for t in (*results, *self._kept) if t.op not in folds]
        rule = Rule(Op(is_end), fold_batch_norm)
        # Results of a function are kept by rules; here they are replaced too.
        set_results(self._graph, [])
        report = rewrite(self._graph, rule, keep=keep)
        set_results(self._graph, [report.current(t) for t in results])
        reasons = {entry.op: entry.reason for entry in report.refused}
        refused: list[tuple[Norm, Obstacle]] = []
        for end, fold in folds.items():
            if end.name in reasons:
                obstacle = Obstacle(reasons[end.name], end)
                refused += [(norm, obstacle) for norm in fold.norms]
            else:
                self._note(fold, made[end])
        return refused

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


def _choices_in(place: Place, choices: Choices) -> tuple[Choices, str]:
    """Return the choices for a place, and why nothing is folded in it, or nothing."""
    scope, prefix = choices.scope, place.prefix
    if scope is None or scope.startswith(prefix):
        scope = scope and scope.removeprefix(prefix)
        return replace(choices, scope=scope), place.fixed
    if prefix.startswith(scope):
        return replace(choices, scope=None), place.fixed
    return replace(choices, scope=None), f"is outside of scope '{scope}'"
