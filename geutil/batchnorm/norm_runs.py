"""Batch norms as runs of ops on the channels of the data, in whatever ops they are.

That is the form that can be folded; see `geutil.select.networks.batch_norms`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from geutil.batchnorm.channel_affine import (
    JOINS,
    AffineKind,
    AffineStep,
    joined,
    link_of,
    step_of,
)
from geutil.graph import adjacency, replicas, types
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import walk
from geutil.rewrite.liveness import Liveness
from geutil.select.networks.batch_norms import FusedNorm, fused_norm
from geutil.select.networks.layers import layer_of
from geutil.select.networks.provenance import Origin, Origins


@dataclass(frozen=True, eq=False)
class Norm:
    """A batch norm."""

    steps: tuple[AffineStep, ...]  # the ops that the data runs through, in order
    training: bool  # whether it normalizes by the statistics of the batch
    # The scope of its ops; where another norm has that too, or it is a single op, the
    # name of the last op.
    name: str

    @property
    def input(self) -> Tensor:
        """The tensor that is normalized."""
        return self.steps[0].data

    @property
    def result(self) -> Tensor:
        """The result."""
        return self.steps[-1].result

    @property
    def parameters(self) -> list[Tensor]:
        """The operands that its steps combine the data with."""
        return [t for step in self.steps for t in step.parameters]

    @property
    def fused(self) -> FusedNorm | None:
        """The norm as a single op, if it is one."""
        return fused_norm(self.steps[0].op)


def find_norms(graph: Graph, origins: Origins, liveness: Liveness) -> list[Norm]:
    """Return the batch norms of a graph, in topological order."""
    # A batch norm is a fused op, or a run of steps that multiply by, or divide by, the
    # root of a parameter and a small constant, and shift. Steps around those belong to
    # it that subtract a mean before, or scale and shift behind. Layer norms are none:
    # they divide by the root of a value that depends on each example. Where constants
    # were folded, and in models of TFLite files, no root is left: a layer, and then a
    # multiplication and an addition of parameters that are vectors.
    return _Finder(graph, origins, liveness).find()


def is_correction(norm: Norm, origins: Origins) -> bool:
    """Tell whether an apparent norm is the correction that a fold for training left."""
    # Behind a layer it multiplies by a quotient of two roots, of a moving variance and
    # of the batch's; a norm takes only one.
    for step in norm.steps:
        if step.operand is None:
            continue
        kinds = {
            origins.of(root.outputs[0]) is Origin.BATCH
            for root in origins.spreads(step.operand)
        }
        if len(kinds) > 1:
            return True
    return False


class _Finder:
    def __init__(self, graph: Graph, origins: Origins, liveness: Liveness) -> None:
        self._origins = origins
        self._liveness = liveness
        self._steps: dict[Operation, AffineStep] = {}
        for op in adjacency.topological_sort(replicas.own_operations(graph)):
            step = None if liveness.is_retired(op) else step_of(op, origins)
            if step is not None and not _measures_only(op, liveness):
                self._steps[op] = step

    def find(self) -> list[Norm]:
        """Return the batch norms."""
        norm_steps = [self._whole(group) for group in self._groups()]
        norm_ops = {step.op for steps in norm_steps for step in steps}
        bare = [
            steps
            for op, step in self._steps.items()
            if op not in norm_ops and (steps := self._bare(step, norm_ops))
        ]
        if bare:
            place = {op: i for i, op in enumerate(self._steps)}
            norm_steps = sorted(
                [*norm_steps, *bare], key=lambda steps: place[steps[-1].op]
            )
        scopes = Counter(_scope(steps) for steps in norm_steps)
        return [
            Norm(
                tuple(steps),
                self._trains(steps),
                _scope(steps) if scopes[_scope(steps)] == 1 else steps[-1].op.name,
            )
            for steps in norm_steps
        ]

    def _groups(self) -> Iterable[list[AffineStep]]:
        """Return fused batch norms, and steps that share the root of a variance."""
        groups: list[list[AffineStep]] = []
        group_of: dict[Operation, list[AffineStep]] = {}
        for op, step in self._steps.items():
            if step.kind is AffineKind.NORMALIZE:
                groups.append([step])
                continue
            spreads = self._spreads(step)
            if not spreads:
                continue
            before = group_of.get(step.data.op, [])
            ops = [other.op for other in before]
            shared = before[: ops.index(step.data.op) + 1] if before else []
            if shared and spreads & self._spreads(shared[-1]):
                # One scale may have several shifts.
                group = before if len(shared) == len(before) else shared
                group.append(step)
            elif not step.adds:
                # A bias that was folded before has the root in it, too.
                group = [step]
            else:
                continue
            group_of[op] = group
            if group is not before:
                groups.append(group)
        return groups

    def _spreads(self, step: AffineStep) -> frozenset[Operation]:
        if step.operand is None:
            return frozenset()
        return self._origins.spreads(step.operand)

    def _trains(self, steps: list[AffineStep]) -> bool:
        fused = fused_norm(steps[0].op)
        if fused is not None:
            return fused.trains
        return any(
            self._origins.of(t) is Origin.BATCH for s in steps for t in s.parameters
        )

    def _whole(self, group: list[AffineStep]) -> list[AffineStep]:
        """Return a run with the steps before and behind that belong to it."""
        if group[0].kind is AffineKind.NORMALIZE:
            return group
        group = [*self._leading(group[0]), *group]
        return group if group[-1].adds else [*group, *self._trailing(group[-1])]

    def _leading(self, first: AffineStep) -> list[AffineStep]:
        """Return the subtraction of a mean, with a scale behind it or without."""
        before = self._before(first)
        scale = []
        if (
            before is not None
            and before.kind is AffineKind.MULTIPLY
            and before.axis is not None
        ):
            scale, before = [before], self._before(before)
        if before is not None and before.kind is AffineKind.SUBTRACT:
            return [before, *scale]
        return []

    def _before(self, step: AffineStep) -> AffineStep | None:
        """Return the step before, unless it belongs to another norm."""
        before = self._steps.get(step.data.op)
        if (
            before is None
            or self._spreads(before)
            or before.kind is AffineKind.NORMALIZE
        ):
            return None
        return before

    def _trailing(self, last: AffineStep) -> Iterable[AffineStep]:
        """Yield a scale, if there is one, and a shift behind the normalization."""
        own = self._spreads(last)
        step = self._behind(last)
        if step and step.kind is AffineKind.MULTIPLY and step.axis is not None:
            if self._spreads(step):
                return
            yield step
            step = self._behind(step)
        # A shift by the mean has the root in it, that of another norm another one.
        if step and step.adds and self._spreads(step) <= own:
            yield step

    def _behind(self, step: AffineStep) -> AffineStep | None:
        readers = self._liveness.readers(step.op)
        return self._steps.get(next(iter(readers))) if len(readers) == 1 else None

    def _bare(
        self, scale: AffineStep, norm_ops: Collection[Operation]
    ) -> list[AffineStep]:
        """Return a scale and a shift by parameters, if a layer comes before them."""
        if scale.kind not in (
            AffineKind.MULTIPLY,
            AffineKind.DIVIDE,
        ) or not self._is_by_parameter(scale):
            return []
        shift = self._behind(scale)
        if shift is None or not shift.adds or not self._is_by_parameter(shift):
            return []
        if shift.op in norm_ops:
            return []
        waiting = [scale.data.op]
        for op in waiting:
            if layer_of(op, self._origins) is not None:
                continue
            link = link_of(op, self._origins)
            if link is None and op.type in JOINS:
                waiting += [t.op for t in joined(op)]
                # A join that others read, too, cannot take in a norm.
                if len(self._liveness.readers(op)) == 1:
                    continue
            if link is None or op in norm_ops or (link.step and not link.step.adds):
                return []
            waiting.append(link.data.op)
        return [scale, shift]

    def _is_by_parameter(self, step: AffineStep) -> bool:
        (operand,) = step.parameters
        return step.axis is not None and self._origins.is_parameter(operand)


def _measures_only(op: Operation, liveness: Liveness) -> bool:
    """Tell whether of a fused norm only statistics are read: it was folded before."""
    if fused_norm(op) is None or not liveness.readers(op):
        return False
    return all(liveness.is_retired(reader) for reader in op.outputs[0].consumers())


def _scope(steps: list[AffineStep]) -> str:
    last = steps[-1].op.name
    return last if len(steps) == 1 else types.scope_dirname(last).rstrip("/") or last


def measures_only(op: Operation, origins: Origins, liveness: Liveness) -> bool:
    """Tell whether all that comes of an op of data is statistics of the batch."""

    def measured(op: Operation) -> bool:
        return bool(op.outputs) and origins.of(op.outputs[0]) is Origin.BATCH

    def readers(op: Operation) -> Collection[Operation]:
        return () if measured(op) else liveness.readers(op)

    return all(
        measured(op) or (op.type in _MEASURING and liveness.readers(op))
        for op in walk([op], readers)
    )


_MEASURING = frozenset(
    ("Cast", "Identity", "Mul", "Square", "SquaredDifference", "StopGradient", "Sub")
)
