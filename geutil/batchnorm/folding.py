"""Folding the batch norms of a graph or model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from geutil.batchnorm.calls import inlined, is_convolution_call
from geutil.batchnorm.folds import Fold, build
from geutil.batchnorm.norms import Norm
from geutil.batchnorm.paths import Obstacle
from geutil.batchnorm.planning import Choices, Plan, Planner
from geutil.batchnorm.report import Folded, FoldReport, Refused
from geutil.batchnorm.training.applying import Training, asked_for, fold_in_training
from geutil.errors import FoldError
from geutil.graph.edits import transaction
from geutil.graph.importing import neutral
from geutil.graph.kinds import Graph, Operation, Tensor, require_graph
from geutil.graph.reordering import renew_order
from geutil.graph.surroundings import count_ops, ops_since
from geutil.transform.rewrite.driver import rewrite
from geutil.transform.rewrite.liveness import Liveness
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
            well, with their moving ones: those that a fused norm reads, or variables
            that the graph updates. Ops that update them stay, and are run if somebody
            asks for them; the fold reads the values from before.
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
    count = count_ops(graph)
    try:
        with transaction(graph), neutral(graph):
            report = folder.run()
            if strict:
                _require_all(report)
    except BaseException:
        Liveness(graph).abandon(ops_since(graph, count))
        raise
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
        if self._inline({obstacle.op for _, obstacle in behind.refused}):
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
        plan = self._training.plan(self._graph, scope)
        if self._inline({obstacle.op for _, obstacle in plan.refused.values()}):
            plan = self._training.plan(self._graph, scope)
        if self._strict:
            # Before a counter is made that the graph would be left with.
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

    def _inline(self, obstacles: Iterable[Operation]) -> bool:
        """Put convolutions in the place of calls that are nothing else."""
        calls = {op for op in obstacles if is_convolution_call(op)}
        if calls:
            rewrite(
                self._graph, Rule(Op(lambda op: op in calls), lambda m: inlined(m.root))
            )
        return bool(calls)

    def _planner(self) -> Planner:
        return Planner(self._graph, self._kept(), self._choices)

    def _kept(self) -> frozenset[int]:
        return frozenset(id(t) for t in getattr(self._graph, "outputs", ()))

    def _better(self, behind: Obstacle, before: Obstacle) -> Obstacle:
        """Return the reason that tells more: of the layer before, if there is one."""
        return before if behind.reason.startswith("no layer") else behind

    def _apply(self, plan: Plan) -> list[tuple[Norm, Obstacle]]:
        """Carry out a plan; return what is refused, then or now."""
        refused = list(plan.refused)
        if not plan.folds:
            return refused
        folds = {fold.end: fold for fold in plan.folds}
        # All are built before the first takes its place, so that the topological order
        # needs to be renewed just once.
        built = _Built(self._graph, plan.folds)
        renew_order(self._graph)
        made: dict[Operation, Operation] = {}

        def is_end(op: Operation) -> bool:
            return op in folds

        def fold_batch_norm(match: Match) -> Any:
            result = built.results[match.root]
            made[match.root] = result.op
            # A fused norm has more outputs: statistics, which stay as they are.
            return [result, *[None] * (len(match.root.outputs) - 1)]

        report = rewrite(self._graph, Rule(Op(is_end), fold_batch_norm))
        built.abandon(end for end in folds if end not in made)
        reasons = {entry.op: entry.reason for entry in report.refused}
        for end, fold in folds.items():
            if end.name in reasons:
                obstacle = Obstacle(reasons[end.name], end)
                refused += [(norm, obstacle) for norm in fold.norms]
            else:
                self._folded += _entries(fold, _standing_in(end, folds, made))
        return refused


def _refusals(left: Iterable[tuple[Norm, Obstacle]]) -> tuple[Refused, ...]:
    return tuple(
        Refused(norm.name, obstacle.reason, obstacle.op.name) for norm, obstacle in left
    )


class _Built:
    """What is built for folds, by the ops whose results it stands for."""

    def __init__(self, graph: Graph, folds: Iterable[Fold]) -> None:
        self.results: dict[Operation, Tensor] = {}
        self._graph = graph
        self._ops: dict[Operation, list[Operation]] = {}
        for fold in folds:
            count = count_ops(graph)
            self.results[fold.end] = build(fold)
            self._ops[fold.end] = ops_since(graph, count)

    def abandon(self, ends: Iterable[Operation]) -> None:
        """Let what was built for some count no more."""
        Liveness(self._graph).abandon(op for end in ends for op in self._ops[end])


def _standing_in(
    end: Operation, folds: Mapping[Operation, Fold], made: Mapping[Operation, Operation]
) -> Operation:
    """Return what does the work of a fold: where others took it along, one of them."""
    while end not in made:
        end = next(
            other
            for other, fold in folds.items()
            if other is not end and any(link.op is end for link in fold.links)
        )
    return made[end]


def _entries(fold: Fold, into: Operation) -> Iterable[Folded]:
    layer = fold.layer.op
    for norm in fold.norms:
        yield Folded(norm.name, layer.name, layer.type, into.name, fold.forward)
