"""Folding the batch norms of a graph or model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from geutil.batchnorm.folds import Fold, build
from geutil.batchnorm.norms import Norm
from geutil.batchnorm.paths import Obstacle
from geutil.batchnorm.planning import Choices, Plan, Planner
from geutil.batchnorm.report import Folded, FoldReport, Refused
from geutil.batchnorm.training.applying import Training, asked_for, fold_in_training
from geutil.errors import FoldError
from geutil.graph.edits import transaction
from geutil.graph.importing import neutral
from geutil.graph.kinds import Graph, Operation, require_graph
from geutil.transform.rewrite.driver import rewrite
from geutil.transform.rewrite.matching import Match
from geutil.transform.rewrite.patterns import Op
from geutil.transform.rewrite.rule import Rule


@tf.autograph.experimental.do_not_convert
def fold_batch_norms(
    graph_or_model: Any,
    *,
    is_training: bool = False,
    freeze_batch_norm_delay: int | None = None,
    step: Any = None,
    scope: str | None = None,
    strict: bool = False,
    assume_inference: bool = False,
    clone_shared: bool = False,
) -> FoldReport:
    """Fold batch normalization into the layers before it, or behind it.

    A batch norm at inference multiplies each channel by a number and adds another. A
    layer that is linear in its weights takes both in: what is left is the layer with
    other weights, and one bias. Constants are folded in float64; of variables, new ops
    compute the weights, and the variables are left as they are. The old ops stay in the
    graph, and nothing reads them any more.

    With `is_training` norms that normalize by the statistics of the batch are folded,
    too, before gradients are built: in a v1 graph, or in the FuncGraph of a function
    while it is traced (`tf.gradients` sees the fold, a tape that was open before does
    not). Weights take in the moving variance, so that they can be quantized as they
    will be deployed; what the batch's differs by is put right behind the layer
    (Krishnamoorthi 2018, arXiv 1806.08342, section 3.2.2). Values and gradients stay.
    The old layer goes on being computed, for the statistics.

    Args:
        graph_or_model: a graph, or what holds one as its `graph`, such as a
            `geutil.model.Model`.
        is_training: fold norms in training for training. Norms at inference, of
            frozen layers for example, are folded as always.
        freeze_batch_norm_delay: the number of training steps after which norms change
            over to the moving statistics, which stop moving. An int64 variable
            `fake_quantization_step` counts the steps; `tf.where` chooses, so that there
            is no control flow to convert or to optimize. None never changes over, and
            counts nothing.
        step: an int64 variable to count in, for functions that are traced more than
            once; None makes one.
        scope: only norms whose names begin with it; None is all.
        strict: raise if a norm was refused.
        assume_inference: fold norms that normalize by the statistics of the batch as
            well, with their moving ones.
        clone_shared: where something else reads the layer too, compute it twice.

    Returns:
        Every batch norm, folded or refused with the reason.

    Raises:
        ArgumentTypeError: the first argument is no graph and holds none, or another one
            is of another type.
        FoldError: with `strict`, a norm was refused; nothing is changed. Or arguments
            contradict each other.
        TransformError: the graph counts its steps in another variable than `step`.
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
    graph = getattr(graph_or_model, "graph", graph_or_model)
    require_graph(graph)
    training = asked_for(is_training, freeze_batch_norm_delay, step, assume_inference)
    choices = Choices(scope, clone_shared, assume_inference)
    folder = _Folder(graph, choices, training, strict)
    with transaction(graph), neutral(graph):
        report = folder.run()
        if strict:
            _require_all(report)
    return report


def _require_all(report: FoldReport) -> None:
    if report.refused:
        raise FoldError(
            f"{len(report.refused)} batch norm(s) cannot be folded; nothing was "
            f"changed:\n{report}"
        )


class _Folder:
    def __init__(
        self, graph: Graph, choices: Choices, training: Training | None, strict: bool
    ) -> None:
        self._graph = graph
        self._choices = choices
        self._training = training
        self._strict = strict
        self._folded: list[Folded] = []

    def run(self) -> FoldReport:
        in_training = self._train()
        behind = self._planner().behind_layers()
        refused = self._apply(behind)
        norms = [norm for norm, _ in refused]
        before = self._planner().before_layers(norms)
        reasons = {norm.result.op: obstacle for norm, obstacle in refused}
        left = [
            (norm, self._better(reasons.get(norm.result.op, obstacle), obstacle))
            for norm, obstacle in self._apply(before)
        ]
        left = [in_training.get(norm.result.op, (norm, o)) for norm, o in left]
        return FoldReport(
            tuple(self._folded),
            _refusals(left),
            None if self._training is None else self._training.counter(self._graph),
        )

    def _train(self) -> dict[Operation, tuple[Norm, Obstacle]]:
        """Fold the norms in training; return those that are left."""
        if self._training is None:
            return {}
        scope = self._choices.scope
        if self._strict:
            # Before a counter is made that the graph would be left with.
            plan = self._training.plan(self._graph, scope)
            left = [*plan.refused.values(), *self._left_at_inference()]
            _require_all(FoldReport((), _refusals(left)))
        folded, refused = fold_in_training(self._graph, scope, self._training)
        self._folded += folded
        return refused

    def _left_at_inference(self) -> list[tuple[Norm, Obstacle]]:
        """Return what stands in the way of norms that are not in training."""
        planner = self._planner()
        norms = [n for n, _ in planner.behind_layers().refused if not n.training]
        return planner.before_layers(norms).refused

    def _planner(self) -> Planner:
        return Planner(self._graph, self._kept(), self._choices)

    def _kept(self) -> frozenset[int]:
        return frozenset(id(t) for t in getattr(self._graph, "outputs", ()))

    def _better(self, behind: Obstacle, before: Obstacle) -> Obstacle:
        """Return the reason that tells more: of the layer before, if there is one."""
        return before if behind.reason.startswith("no layer") else behind

    def _apply(self, plan: Plan) -> list[tuple[Norm, Obstacle]]:
        """Carry out a plan; return what is refused, then or now."""
        folds = {fold.end: fold for fold in plan.folds}
        made: dict[Operation, Operation] = {}

        def is_end(op: Operation) -> bool:
            return op in folds

        def fold_batch_norm(match: Match) -> Any:
            result = build(folds[match.root])
            made[match.root] = result.op
            return result

        refused = list(plan.refused)
        if not folds:
            return refused
        report = rewrite(self._graph, Rule(Op(is_end), fold_batch_norm))
        reasons = {entry.op: entry.reason for entry in report.refused}
        for end, fold in folds.items():
            if end.name in reasons:
                obstacle = Obstacle(reasons[end.name], end)
                refused += [(norm, obstacle) for norm in fold.norms]
            else:
                self._folded += _entries(fold, made[end])
        return refused


def _refusals(left: Iterable[tuple[Norm, Obstacle]]) -> tuple[Refused, ...]:
    return tuple(
        Refused(norm.name, obstacle.reason, obstacle.op.name) for norm, obstacle in left
    )


def _entries(fold: Fold, into: Operation) -> Iterable[Folded]:
    layer = fold.layer.op
    for norm in fold.norms:
        yield Folded(norm.name, layer.name, layer.type, into.name, fold.forward)
