"""Batch norms as runs of ops on the channels, and the ways between them and layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from geutil.batchnorm import channel_affine
from geutil.batchnorm.channel_affine import (
    JOINS,
    AffineKind,
    AffineStep,
    Link,
    joined,
    link_of,
    step_of,
)
from geutil.graph import adjacency, op_types, replicas, types
from geutil.graph.edits import apply_edits, reader_edits
from geutil.graph.op_types import types_in
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import walk
from geutil.rewrite.liveness import Liveness
from geutil.select.networks.batch_norms import FusedNorm, fused_norm
from geutil.select.networks.layers import DATA_SLOTS, Layer, Origin, Origins, layer_of


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
    """Return whether an apparent norm is the correction of a fold for training."""
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
        # Bare norms were found apart, and reports follow the order of the graph.
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
                # A scope that holds several norms names none of them.
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
    """Return whether only the statistics of a fused norm are read: it was folded."""
    if fused_norm(op) is None or not liveness.readers(op):
        return False
    return all(liveness.is_retired(reader) for reader in op.outputs[0].consumers())


def _scope(steps: list[AffineStep]) -> str:
    last = steps[-1].op.name
    return last if len(steps) == 1 else types.scope_dirname(last).rstrip("/") or last


def measures_only(op: Operation, origins: Origins, liveness: Liveness) -> bool:
    """Return whether an op of data yields nothing but statistics of the batch."""

    def measured(op: Operation) -> bool:
        return bool(op.outputs) and origins.of(op.outputs[0]) is Origin.BATCH

    def readers(op: Operation) -> Collection[Operation]:
        return () if measured(op) else liveness.readers(op)

    return all(
        measured(op) or (op.type in _MEASURING and liveness.readers(op))
        for op in walk([op], readers)
    )


_MEASURING = types_in(
    """
    Cast Identity Mul Square SquaredDifference StopGradient Sub
    """
)


IN_BETWEEN = "depends on the batch and stands between the layer and the norm"


def hand_over_shapes(old: Tensor, new: Tensor) -> None:
    """Make readers of a tensor's shape read that of another tensor of this shape."""
    # Otherwise a layer that is folded would still be computed, for its shape.
    if old is new or old.dtype != new.dtype:
        return
    edits = reader_edits(old, new, op_types.SHAPE_READERS)
    if edits:
        apply_edits(old.graph, edits)


@dataclass(frozen=True, eq=False)
class Obstacle:
    """The reason why there is no path."""

    reason: str
    op: Operation
    no_layer: bool = False  # whether that is because the norm is not behind a layer


@dataclass(frozen=True, eq=False)
class Path:
    """A layer and the ops up to the end of a batch norm, in order."""

    layer: Layer
    links: tuple[Link, ...]  # the ops behind it; the last is the last step of the norm
    shared: tuple[Operation, ...] = ()  # ops outside that read something on the way


@dataclass(frozen=True, eq=False)
class Start:
    """The start of a path."""

    tensor: Tensor
    links: tuple[Link, ...]  # the ops from there on, in order
    layer: Layer | None  # the layer that makes it; None if no layer does


@dataclass(frozen=True, eq=False)
class Ways:
    """The paths from tensors back to the layers before them."""

    origins: Origins  # of the tensors of the graph
    liveness: Liveness
    # The ids of tensors that are read from outside, such as outputs.
    kept_ids: Collection[int] = ()
    # The steps of batch norms that may not be folded.
    barred: Mapping[Operation, Norm] = field(default_factory=dict)

    def path_to(self, norm: Norm) -> Path | Obstacle:
        """Return the path from the layer before a batch norm to its end."""
        start = self.start_of(norm.input)
        if isinstance(start, Obstacle):
            return start
        if start.layer is None:
            return _no_layer(start.tensor.op)
        links = [*start.links, *channel_affine.as_links(norm.steps)]
        return self.path(start.layer, links, training=norm.training)

    def start_of(self, tensor: Tensor) -> Start | Obstacle:
        """Walk back from a tensor to a layer, or as far as there are links."""
        links: list[Link] = []
        taken: Operation | None = None
        while (layer := layer_of(tensor.op, self.origins)) is None:
            op = tensor.op
            if op in self.barred:
                reason = f"is part of '{self.barred[op].name}', which is not folded"
                return Obstacle(reason, op)
            link = channel_affine.link_of(op, self.origins)
            if link is None:
                break
            if measures(link, self.origins):
                return Obstacle(IN_BETWEEN, op)
            links.append(link)
            item = channel_affine.stacked_item(op)
            if item is not None:
                taken = taken or op
            tensor = link.data if item is None else item
        if layer is not None and taken is not None:
            return Obstacle("takes what a layer makes out of a stack", taken)
        return Start(tensor, tuple(links[::-1]), layer)

    def path(
        self, layer: Layer, links: Sequence[Link], *, training: bool = False
    ) -> Path | Obstacle:
        """Return the path of a layer and links behind it, or the obstacle."""
        objection = across(layer.axis, links)
        if objection is not None:
            return objection
        shared = self.readers_between(layer.result, links, training=training)
        if isinstance(shared, Obstacle):
            return shared
        return Path(layer, tuple(links), tuple(shared))

    def readers_between(
        self, start: Tensor, links: Sequence[Link], *, training: bool = False
    ) -> list[Operation] | Obstacle:
        """Return the other readers of the data from a tensor to the last link."""
        on_the_way = [start, *(link.op.outputs[0] for link in links[:-1])]
        for t in on_the_way:
            if id(t) in self.kept_ids:
                return Obstacle(f"'{t.name}' is asked for as it is", t.op)
        members = {link.op for link in links}
        return [
            reader
            for reader in outside_readers(on_the_way, members, self.liveness)
            if not (training and measures_only(reader, self.origins, self.liveness))
        ]


def measures(link: Link, origins: Origins) -> bool:
    """Return whether a step combines the data with statistics of the batch."""
    return link.step is not None and any(
        origins.of(t) is Origin.BATCH for t in link.step.parameters
    )


def outside_readers(
    tensors: Sequence[Tensor], members: Collection[Operation], liveness: Liveness
) -> list[Operation]:
    """Return the ops that read tensors, members and ops that ask for shapes apart."""
    return [
        reader
        for t in tensors
        for reader in t.consumers()
        if reader not in members
        and reader.type not in op_types.SHAPE_READERS
        and not liveness.is_retired(reader)
    ]


def across(axis: int, links: Sequence[Link]) -> Obstacle | None:
    """Return the op that loses the channels, or treats another axis as channels."""
    for link in links:
        if link.step is not None:
            if link.step.axis not in (None, axis):
                return Obstacle(
                    f"works along axis {link.step.axis}, and the channels are on axis "
                    f"{axis} there",
                    link.op,
                )
            continue
        after = channel_affine.axis_after(link.op, axis)
        if after is None:
            return Obstacle("does not hand on each channel as it is", link.op)
        axis = after
    return None


def misfit(links: Iterable[Link], count: int) -> Obstacle | None:
    """Return an op with another number of channels than a layer, or an unknown one."""
    for link in links:
        if link.step is not None and not _fits(link.step, count):
            return Obstacle(
                f"has not as many values as the layer has channels ({count})",
                link.op,
            )
    return None


def _fits(step: AffineStep, count: int) -> bool:
    if step.kind is AffineKind.NORMALIZE:
        return step.op.inputs[1].shape.as_list() in ([count], [None])
    (operand,) = step.parameters
    return step.axis is None or operand.shape.num_elements() == count


def _no_layer(op: Operation) -> Obstacle:
    if op.type in DATA_SLOTS:
        return Obstacle(
            "is no layer to fold into: its weights depend on the data, or its channels "
            "are not the last axis",
            op,
        )
    if not op.inputs:
        return Obstacle("no layer: nothing to fold into", op, no_layer=True)
    reason = f"({op.type}) stands between the norm and any layer before it"
    return Obstacle(reason, op, no_layer=True)
