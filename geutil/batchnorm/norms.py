"""Finds the batch norms of a graph, in whatever ops they were written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from geutil.batchnorm.origins import Origin, Origins
from geutil.batchnorm.steps import Kind, Step, step_of
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.names import scope_dirname
from geutil.graph.order import topological_sort
from geutil.transform.rewrite.liveness import Liveness


@dataclass(frozen=True, eq=False)
class Norm:
    """A batch norm.

    Attributes:
        steps: the ops that the data runs through, in order.
        training: whether it normalizes by the statistics of the batch.
    """

    steps: tuple[Step, ...]
    training: bool

    @property
    def input(self) -> Tensor:
        """What is normalized."""
        return self.steps[0].data

    @property
    def result(self) -> Tensor:
        """What it is normalized to."""
        return self.steps[-1].result

    @property
    def name(self) -> str:
        """The scope of its ops; of a single op its own name."""
        last = self.steps[-1].op.name
        return last if len(self.steps) == 1 else scope_dirname(last).rstrip("/") or last


def find_norms(graph: Graph, origins: Origins, liveness: Liveness) -> list[Norm]:
    """Return the batch norms of a graph, in topological order.

    A batch norm is a fused op, or a run of steps that multiply by, or divide by, the
    root of a parameter and a small constant, and shift. Steps around those belong to it
    that subtract a mean before, or scale and shift behind. Layer norms are none: they
    divide by the root of what depends on each example.

    Args:
        graph: the graph.
        origins: of its tensors.
        liveness: ops that earlier folds left without readers are left out.

    Cost: linear in ops and edges.
    """
    steps: dict[Operation, Step] = {}
    for op in topological_sort(graph.get_operations()):
        step = None if liveness.is_retired(op) else step_of(op, origins)
        if step is not None:
            steps[op] = step
    groups: list[list[Step]] = []
    group_of: dict[Operation, list[Step]] = {}
    for op, step in steps.items():
        if step.kind is Kind.NORMALIZE:
            groups.append([step])
            continue
        spreads = _spreads(step, origins)
        if not spreads:
            continue
        before = group_of.get(step.data.op)
        if before and spreads & _spreads(before[-1], origins):
            before.append(step)
            group_of[op] = before
        elif not step.adds:
            # A lone sum is the bias of a folded layer.
            group_of[op] = [step]
            groups.append(group_of[op])
    return [_norm(group, steps, origins, liveness) for group in groups]


def _spreads(step: Step, origins: Origins) -> frozenset[Operation]:
    return frozenset() if step.operand is None else origins.spreads(step.operand)


def _norm(
    group: list[Step],
    steps: dict[Operation, Step],
    origins: Origins,
    liveness: Liveness,
) -> Norm:
    first, last = group[0], group[-1]
    if first.kind is Kind.NORMALIZE:
        return Norm((first,), bool(first.op.get_attr("is_training")))
    mean = steps.get(first.data.op)
    if mean is not None and mean.kind is Kind.SUBTRACT and not _spreads(mean, origins):
        group = [mean, *group]
    if not last.adds:
        group = [*group, *_trailing(last, steps, origins, liveness)]
    training = any(
        step.operand is not None and origins.of(step.operand) is Origin.BATCH
        for step in group
    )
    return Norm(tuple(group), training)


def _trailing(
    last: Step, steps: dict[Operation, Step], origins: Origins, liveness: Liveness
) -> Iterable[Step]:
    """Yield a scale, if there is one, and a shift behind the normalization."""
    for wanted in (Kind.MULTIPLY, Kind.ADD):
        readers = liveness.readers(last.op)
        step = steps.get(next(iter(readers))) if len(readers) == 1 else None
        if step is not None and step.kind is wanted and not _spreads(step, origins):
            if step.axis is None and wanted is Kind.MULTIPLY:
                return
            yield step
            last = step
