"""The fold of batch norms in training: planned and carried out.

A tensor that nobody reads yet is kept by the caller, who will build a loss on it or
fetch it; an output of a function is held by the function. Where the norm ends in a sum,
that op can read the folded layer and its bias. No other op can stand in for a fused
norm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import tensorflow as tf

from geutil.batchnorm import batch_statistics, build, one_pass, training_build
from geutil.batchnorm.norm_path import Obstacle, Path, Ways, outside_readers
from geutil.batchnorm.norm_runs import Norm, find_norms, is_correction
from geutil.batchnorm.report import Folded
from geutil.batchnorm.training_build import Built, Freeze, TrainingFold
from geutil.errors import ArgumentTypeError, FoldError
from geutil.graph import creation, op_types, replicas, types
from geutil.graph.types import Graph, Operation, Tensor, type_name
from geutil.rewrite.applying import replace_each
from geutil.rewrite.liveness import Liveness
from geutil.select.networks.provenance import Origins
from geutil.transform.step_counter import (
    STEP_NAME,
    check_step_variable,
    counter_of,
    step_counter,
)


@dataclass(frozen=True, eq=False)
class TrainingPlan:
    """The planned folds, and the batch norms in training that are left."""

    folds: list[TrainingFold] = field(default_factory=list)
    # For the last op of each norm that is left, the norm and the obstacle.
    refused: dict[Operation, tuple[Norm, Obstacle]] = field(default_factory=dict)


EXACT, ONE_PASS = "exact", "one_pass"


def plan_training(
    graph: Graph,
    scope: tuple[str, ...] | None,
    *,
    freezes: bool,
    one_pass: bool = False,
) -> TrainingPlan:
    """Plan to fold a graph's batch norms in training into the layers before them."""
    planner = _Planner(graph, scope, freezes, one_pass)
    plan = TrainingPlan()
    for norm in find_norms(graph, planner.origins, planner.liveness):
        if not norm.training or is_correction(norm, planner.origins):
            continue
        fold = planner.fold_of(norm)
        if isinstance(fold, Obstacle):
            plan.refused[norm.result.op] = norm, fold
        else:
            plan.folds.append(fold)
    return plan


class _Planner:
    def __init__(
        self, graph: Graph, scope: tuple[str, ...] | None, freezes: bool, one_pass: bool
    ) -> None:
        self.origins = Origins(graph)
        self.liveness = Liveness(graph)
        self._scope = scope
        self._freezes = freezes
        self._one_pass = one_pass

    def fold_of(self, norm: Norm) -> TrainingFold | Obstacle:
        if not types.is_in_scope(norm.name, self._scope):
            reason = f"is outside of scope {types.quoted(self._scope)}"
            return Obstacle(reason, norm.result.op)
        # The old layer stays for whoever else reads it, its statistics perhaps.
        path = Ways(self.origins, self.liveness).path_to(norm)
        if isinstance(path, Obstacle):
            return path
        objection = self._objection(norm, path)
        if objection is not None:
            return objection
        statistics = batch_statistics.statistics_of(
            norm, self.origins, with_mean=self._freezes
        )
        if isinstance(statistics, Obstacle):
            return statistics
        if self._one_pass:
            objection = batch_statistics.not_of_input(statistics)
            if objection is not None:
                reason = f"{objection.reason}; pass statistics='{EXACT}'"
                return Obstacle(reason, objection.op)
        return TrainingFold((norm,), path.layer, path.links, statistics=statistics)

    def _objection(self, norm: Norm, path: Path) -> Obstacle | None:
        layer = path.layer
        if layer.sizes(layer.outputs) is None:
            return Obstacle("has weights of a shape that is not known", layer.op)
        members = {step.op for step in norm.steps}
        for link in path.links:
            step = link.step
            if step is None or step.op in members:
                continue
            # Of other steps `path_to` says so.
            if step.operand is None and step.op.get_attr("is_training"):
                return Obstacle(
                    "depends on the batch and stands between the layer and the norm",
                    step.op,
                )
        inside = [step.result for step in norm.steps[:-1]]
        readers = outside_readers(inside, members, self.liveness)
        if readers:
            return Obstacle("reads what is computed within the norm", readers[0])
        return None


def can_stay(fold: TrainingFold) -> bool:
    """Tell whether the end adds each channel's number to its input."""
    step = fold.statistics.norm.steps[-1]
    if fold.end.type not in op_types.ADDITIONS or step.operand is None:
        return False
    layer, shape = fold.layer, step.operand.shape
    count = prod(layer.sizes(layer.outputs) or [0])
    return bool(shape.is_fully_defined() and shape.num_elements() == count)


def stay(fold: TrainingFold, built: Built) -> None:
    """Let the end of a fold read the folded layer and its bias."""
    last, sum_op = fold.links[-1], built.result.op
    with creation.surroundings_of(last.op):
        # TensorFlow lets an op read another tensor only if that has the same shape.
        bias = tf.reshape(sum_op.inputs[1], last.op.inputs[1 - last.index].shape)
    inside = [step.op for step in fold.statistics.norm.steps[:-1]]
    build.let_stay(last, sum_op, bias, inside)


@dataclass(frozen=True)
class Training:
    """The caller's choices in training; see `fold_batch_norms`."""

    delay: int | None = None
    step: Any = None
    statistics: str = EXACT

    def __post_init__(self) -> None:
        """Refuse impossible choices."""
        delay = self.delay
        if not isinstance(self.statistics, str):
            raise ArgumentTypeError(
                f"statistics is '{EXACT}' or '{ONE_PASS}', not "
                f"{type_name(self.statistics)}"
            )
        if self.statistics not in (EXACT, ONE_PASS):
            raise FoldError(
                f"statistics is '{self.statistics}'; pass '{EXACT}' or '{ONE_PASS}'"
            )
        if delay is None:
            if self.step is not None:
                raise FoldError(
                    "step counts towards a freeze, and there is none; pass "
                    "freeze_batch_norm_delay= as well"
                )
            return
        if isinstance(delay, bool) or not isinstance(delay, int):
            raise ArgumentTypeError(
                "freeze_batch_norm_delay is a number of steps or None, not "
                f"{type_name(delay)}"
            )
        if delay < 0:
            raise FoldError(f"freeze_batch_norm_delay is {delay}; pass 0 or more")
        if self.step is not None:
            check_step_variable(self.step)

    def plan(self, graph: Graph, scope: tuple[str, ...] | None) -> TrainingPlan:
        """Return the plan: folds, and batch norms that are left."""
        return plan_training(
            graph,
            scope,
            freezes=self.delay is not None,
            one_pass=self.statistics == ONE_PASS,
        )

    def build(
        self, fold: TrainingFold, freeze: Freeze, *, end_stays: bool = False
    ) -> Built:
        """Build the replacement of a norm and its layer."""
        if self.statistics == ONE_PASS:
            return one_pass.build_one_pass(fold, freeze, end_stays=end_stays)
        return training_build.build_training(fold, freeze, end_stays=end_stays)

    def settle(self, fold: TrainingFold, built: Built, freeze: Freeze) -> None:
        """Settle the updates of the averages, once the norm is replaced."""
        if self.statistics == ONE_PASS:
            one_pass.settle_statistics(fold, built)
        training_build.settle(fold, built, freeze)

    def counter(self, graph: Graph) -> Any:
        """Return the variable in which a graph counts its steps, if it does."""
        counter = counter_of(graph)
        return None if counter is None else counter.variable

    def freeze(self, graph: Graph) -> Freeze:
        """Return the condition that moving averages have stopped."""
        # One comparison for all folds, made when the first needs it: a graph without
        # folds gets no counter.
        delay = self.delay
        if delay is None:
            return None

        @cache
        def frozen() -> Tensor:
            counter = step_counter(graph, self.step)
            scope = STEP_NAME + "_freeze"
            with creation.neutral(graph), replicas.device(), tf.name_scope(scope):
                limit = tf.constant(delay, tf.int64)
                return tf.greater_equal(counter.value, limit, name="frozen")

        return frozen


def fold_in_training(
    graph: Graph, scope: tuple[str, ...] | None, training: Training
) -> tuple[list[Folded], dict[Operation, tuple[Norm, Obstacle]]]:
    """Fold the batch norms in training of a graph."""
    # Returns the folds; and for the last op of each norm that was refused, the norm and
    # the obstacle.
    plan = training.plan(graph, scope)
    refused = dict(plan.refused)
    if not plan.folds:
        return [], refused
    freeze = training.freeze(graph)
    into: dict[Operation, Operation] = {}
    held_ends = build.held_ends(graph, [fold for fold in plan.folds if can_stay(fold)])
    for fold in plan.folds:
        if fold.end in held_ends:
            built = training.build(fold, freeze, end_stays=True)
            stay(fold, built)
            training.settle(fold, built, freeze)
            into[fold.end] = fold.end
    rest = {fold.end: fold for fold in plan.folds if fold.end not in held_ends}
    for end, outcome in _replace(graph, rest, training, freeze).items():
        if isinstance(outcome, Obstacle):
            refused[end] = rest[end].statistics.norm, outcome
        else:
            into[end] = outcome
    return [_entry(f, into[f.end]) for f in plan.folds if f.end in into], refused


def _replace(
    graph: Graph,
    folds: dict[Operation, TrainingFold],
    training: Training,
    freeze: Freeze,
) -> dict[Operation, Operation | Obstacle]:
    """Let readers of the ends of folds read the replacements."""
    if not folds:
        return {}
    built: dict[Operation, Built] = {}

    def fold_batch_norm(end: Operation) -> list[Tensor | None]:
        built_fold = built[end] = training.build(folds[end], freeze)
        return [built_fold.result, *built_fold.rest]

    done = replace_each(graph, folds, fold_batch_norm, name="fold_batch_norm")
    outcomes: dict[Operation, Operation | Obstacle] = {}
    for end, fold in folds.items():
        if end in done.refused:
            outcomes[end] = Obstacle(done.refused[end], end)
        else:
            training.settle(fold, built[end], freeze)
            outcomes[end] = built[end].result.op
    return outcomes


def _entry(fold: TrainingFold, into: Operation) -> Folded:
    layer = fold.layer.op
    return Folded(fold.statistics.norm.name, layer.name, layer.type, into.name)
