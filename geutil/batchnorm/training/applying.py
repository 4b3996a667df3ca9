"""Carries out the folds of batch norms in training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import tensorflow as tf

from geutil.batchnorm.ending import held_ends
from geutil.batchnorm.norms import Norm
from geutil.batchnorm.paths import Obstacle
from geutil.batchnorm.report import Folded
from geutil.batchnorm.training.building import (
    Built,
    Freeze,
    TrainingFold,
    build_training,
    settle,
)
from geutil.batchnorm.training.planning import TrainingPlan, plan_training
from geutil.batchnorm.training.staying import can_stay, stay
from geutil.errors import ArgumentTypeError, FoldError
from geutil.graph.importing import neutral
from geutil.graph.kinds import Graph, Operation, Tensor, type_name
from geutil.graph.state import state_of
from geutil.transform.rewrite.driver import rewrite
from geutil.transform.rewrite.matching import Match
from geutil.transform.rewrite.patterns import Op
from geutil.transform.rewrite.rule import Rule
from geutil.transform.step_counter import (
    STEP_NAME,
    check_step_variable,
    step_counter,
)


@dataclass(frozen=True)
class Training:
    """What the caller asks for in training; see `fold_batch_norms`."""

    delay: int | None = None
    step: Any = None

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ArgumentTypeError: an argument is of another type.
            FoldError: the delay is negative, or there is a step without one.
        """
        delay = self.delay
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

    def plan(self, graph: Graph, scope: str | None) -> TrainingPlan:
        """Return what will be folded, and what will not."""
        return plan_training(graph, scope, freezes=self.delay is not None)

    def counter(self, graph: Graph) -> Any:
        """Return the variable in which a graph counts its steps, if it does."""
        counter = state_of(graph).step_counter
        return None if counter is None else counter.variable

    def freeze(self, graph: Graph) -> Freeze:
        """Return what tells whether moving averages have stopped.

        One comparison for all folds, made when the first needs it: a graph without
        folds gets no counter.
        """
        delay = self.delay
        if delay is None:
            return None

        @cache
        def frozen() -> Tensor:
            counter = step_counter(graph, self.step)
            with neutral(graph), tf.name_scope(STEP_NAME + "_freeze"):
                limit = tf.constant(delay, tf.int64)
                return tf.greater_equal(counter.value, limit, name="frozen")

        return frozen


def asked_for(
    is_training: bool, delay: int | None, step: Any, assume_inference: bool
) -> Training | None:
    """Return what the caller asks for in training; None if that is nothing.

    Raises:
        ArgumentTypeError: an argument is of another type.
        FoldError: arguments contradict each other.
    """
    if is_training and assume_inference:
        raise FoldError("is_training=True and assume_inference=True exclude each other")
    training = Training(delay, step)
    if delay is not None and not is_training:
        raise FoldError(
            "freeze_batch_norm_delay is for training; pass is_training=True"
        )
    return training if is_training else None


def fold_in_training(
    graph: Graph, scope: str | None, training: Training
) -> tuple[list[Folded], dict[Operation, tuple[Norm, Obstacle]]]:
    """Fold the norms in training of a graph.

    Returns:
        What was folded; and for the last op of each norm that was refused, the norm
        and what stands in the way.
    """
    plan = training.plan(graph, scope)
    refused = dict(plan.refused)
    if not plan.folds:
        return [], refused
    freeze = training.freeze(graph)
    into: dict[Operation, Operation] = {}
    held = held_ends(graph, [fold for fold in plan.folds if can_stay(fold)])
    for fold in plan.folds:
        if fold.end in held:
            built = build_training(fold, freeze, end_stays=True)
            stay(fold, built)
            settle(fold, built, freeze)
            into[fold.end] = fold.end
    rest = {fold.end: fold for fold in plan.folds if fold.end not in held}
    for end, outcome in _replace(graph, rest, freeze).items():
        if isinstance(outcome, Obstacle):
            refused[end] = rest[end].statistics.norm, outcome
        else:
            into[end] = outcome
    return [_entry(f, into[f.end]) for f in plan.folds if f.end in into], refused


def _replace(
    graph: Graph, folds: dict[Operation, TrainingFold], freeze: Freeze
) -> dict[Operation, Operation | Obstacle]:
    """Let what reads the ends of folds read what is built instead.

    Returns:
        For each end what does its work now, or why nothing does.
    """
    if not folds:
        return {}
    built: dict[Operation, Built] = {}

    def is_end(op: Operation) -> bool:
        return op in folds

    def fold_batch_norm(match: Match) -> Any:
        made = built[match.root] = build_training(folds[match.root], freeze)
        return [made.result, *made.rest]

    report = rewrite(graph, Rule(Op(is_end), fold_batch_norm))
    reasons = {entry.op: entry.reason for entry in report.refused}
    outcomes: dict[Operation, Operation | Obstacle] = {}
    for end, fold in folds.items():
        if end.name in reasons:
            outcomes[end] = Obstacle(reasons[end.name], end)
        else:
            settle(fold, built[end], freeze)
            outcomes[end] = built[end].result.op
    return outcomes


def _entry(fold: TrainingFold, into: Operation) -> Folded:
    layer = fold.layer.op
    return Folded(fold.statistics.norm.name, layer.name, layer.type, into.name)
