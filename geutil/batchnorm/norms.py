"""Batch norms as runs of ops on the channels, and the ways between them and layers.

An op on the way scales, shifts or passes on channels; `axis_after` follows their axis.
Nothing here says whether a batch norm may be folded: `fold_plan` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import tensorflow as tf

from geutil.graph import adjacency, op_types, replicas, types
from geutil.graph.edits import Liveness, apply_edits, reader_edits
from geutil.graph.op_types import types_in
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import walk
from geutil.select.networks import layers
from geutil.select.networks.batch_norms import FusedNorm, fused_norm, is_layer_norm
from geutil.select.networks.layers import Layer, Origin, Origins, layer_of

_SAME = frozenset(
    ("CheckNumerics", "Identity", "PreventGradient", "Snapshot", "StopGradient")
)
_POOLS = frozenset(("AvgPool", "AvgPool3D"))
_RESIZES = frozenset(("ResizeBilinear", "ResizeNearestNeighbor"))
_PASSING = (_SAME | _POOLS | _RESIZES).union(
    ["BatchToSpaceND", "Cast", "ExpandDims", "Mean", "MirrorPad", "Reshape", "Squeeze"],
    ("StridedSlice", "Transpose"),
)
"""Types of ops that commute with a scale and a shift of each channel.

They move values, or average some of the same channel with weights whose sum is 1:
padding counts in no average of TensorFlow's.
"""


JOINS = frozenset(("Add", "AddN", "AddV2", "ConcatV2", "Pack"))
"""Types of ops that a scale and a shift may be moved in front of, to all inputs."""


def axis_after(op: Operation, axis: int, last: int | None = None) -> int | None:
    """Return where the channels are behind an op, if it hands them on."""
    # `last`: the size of the last axis of the output, where that is not in its static
    # shape.
    # Returns the axis of the channels in the op's output, counted from the end; None if
    # the op does something else, or if that is not known from static shapes.
    kind = op.type
    if kind in _SAME:
        return axis
    if kind == "Cast":
        floating = op.inputs[0].dtype.is_floating and op.outputs[0].dtype.is_floating
        return axis if floating else None
    if kind == "BatchToSpaceND":
        return axis if axis == -1 and _is_spatial(op) else None
    if kind == "Squeeze":
        return _after_squeeze(op, axis)
    if kind == "ExpandDims":
        return _after_expansion(op, axis)
    if kind == "Reshape":
        keeps_last_axis = (
            axis == -1 and last is not None and op.inputs[0].shape[-1:] == [last]
        )
        return axis if keeps_last_axis else _after_reshape(op, axis)
    if kind == "Transpose":
        return _after_transpose(op, axis)
    if kind in _POOLS:
        return axis if op.get_attr("ksize")[axis] == 1 else None
    if kind in _RESIZES:
        return axis if axis == -1 else None
    if kind == "Mean":
        return _after_mean(op, axis)
    if kind == "MirrorPad":
        paddings = tf.get_static_value(op.inputs[1])
        return None if paddings is None or paddings[axis].any() else axis
    if kind == "StridedSlice":
        return _after_slice(op, axis)
    return _after_join(op, axis)


def _is_spatial(op: Operation) -> bool:
    """Return whether batches become positions along other axes than the last."""
    rank, block = op.inputs[0].shape.rank, op.inputs[1].shape
    return rank is not None and block.rank == 1 and (block[0] or rank) < rank - 1


def _after_squeeze(op: Operation, axis: int) -> int | None:
    rank = op.inputs[0].shape.rank
    gone = op.get_attr("squeeze_dims")
    if rank is None or not gone:
        return _after_reshape(op, axis)
    left = [i - rank for i in range(rank) if i not in {g % rank for g in gone}]
    return left.index(axis) - len(left) if axis in left else None


def _after_mean(op: Operation, axis: int) -> int | None:
    rank, axes = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[1])
    if rank is None or axes is None:
        return None
    gone = {int(i) % rank for i in np.reshape(axes, -1)}
    if axis + rank in gone:
        return None
    if op.get_attr("keep_dims"):
        return axis
    return axis + sum(i > axis + rank for i in gone)


def _after_slice(op: Operation, axis: int) -> int | None:
    """Return the last axis if that is the channels' and a slice takes all of it."""
    rank, strides = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[3])
    if axis != -1 or rank is None or strides is None or not strides.size:
        return None
    masks = {name: op.get_attr(f"{name}_mask") for name in _MASKS}
    added = bin(masks["new_axis"] & ~masks["ellipsis"]).count("1")
    last, named = 1 << strides.size - 1, strides.size - added
    # An ellipsis may be no axes at all.
    if masks["ellipsis"] & last:
        return -1 if named <= rank else None
    if not masks["ellipsis"] and named < rank:
        return -1
    whole = masks["begin"] & masks["end"] & last and strides[-1] == 1
    changed = (masks["new_axis"] | masks["shrink_axis"]) & last
    return -1 if whole and not changed else None


_MASKS = ("begin", "ellipsis", "end", "new_axis", "shrink_axis")


def _after_join(op: Operation, axis: int) -> int | None:
    if op.type == "Pack":
        rank = op.outputs[0].shape.rank
        if rank is None:
            return None
        return axis - (op.get_attr("axis") % rank - rank >= axis)
    return axis if op.type in JOINS else None


def joined_axis(op: Operation) -> int | None:
    """Return the axis along which a ConcatV2 joins, counted from the end, if known."""
    rank, axis = op.outputs[0].shape.rank, tf.get_static_value(op.inputs[-1])
    return None if rank is None or axis is None else int(axis) % rank - rank


def joined(op: Operation) -> tuple[Tensor, ...]:
    """Return the tensors of data that an op of `JOINS` joins."""
    return tuple(op.inputs[:-1] if op.type == "ConcatV2" else op.inputs)


def stacked_item(op: Operation) -> Tensor | None:
    """Return the tensor that a slice takes out of a stack, as it was before."""
    if op.type != "StridedSlice" or op.get_attr("shrink_axis_mask") != 1:
        return None
    index, step = (tf.get_static_value(op.inputs[i]) for i in (1, 3))
    others = (op.get_attr(f"{name}_mask") for name in ("ellipsis", "new_axis"))
    if index is None or step is None or index.size != 1 or any(others):
        return None
    place, before, orders = 0, op.inputs[0].op, []
    while before.type in ("Identity", "Transpose"):
        if before.type == "Transpose":
            order = tf.get_static_value(before.inputs[1])
            if order is None:
                return None
            orders.append(order % order.size)
            place = int(orders[-1][place])
        before = before.inputs[0].op
    rank = before.outputs[0].shape.rank if before.type == "Pack" else None
    if rank is None or before.get_attr("axis") % rank != place:
        return None
    left = np.arange(rank)
    for order in reversed(orders):
        left = left[order]
    # The other axes must come in the order in which they were stacked.
    if list(left[left != place]) != [i for i in range(rank) if i != place]:
        return None
    return before.inputs[int(index[0])]


def _after_expansion(op: Operation, axis: int) -> int | None:
    rank = op.inputs[0].shape.rank
    where = tf.get_static_value(op.inputs[1])
    if rank is None or where is None:
        return None
    added = int(where.reshape(())) % (rank + 1)
    place = axis + rank
    return axis if added <= place else axis - 1


def _after_reshape(op: Operation, axis: int) -> int | None:
    """The channels and all axes behind them have to stay."""
    before, after = op.inputs[0].shape, op.outputs[0].shape
    if before.rank is None or after.rank is None or after.rank < -axis:
        return None
    tail = before.as_list()[axis:]
    return axis if None not in tail and tail == after.as_list()[axis:] else None


def _after_transpose(op: Operation, axis: int) -> int | None:
    order = tf.get_static_value(op.inputs[1])
    if order is None:
        return None
    listed = [int(i) % len(order) for i in order]
    return listed.index(axis + len(listed)) - len(listed)


class AffineKind(Enum):
    """The effect of a step on x, with its operand v."""

    MULTIPLY = "x * v"
    DIVIDE = "x / v"
    ADD = "x + v"
    SUBTRACT = "x - v"
    SUBTRACT_FROM = "v - x"
    NORMALIZE = "a fused batch norm"


_KINDS = {
    ("Mul", 0): AffineKind.MULTIPLY,
    ("Mul", 1): AffineKind.MULTIPLY,
    ("RealDiv", 0): AffineKind.DIVIDE,
    ("Add", 0): AffineKind.ADD,
    ("Add", 1): AffineKind.ADD,
    ("AddV2", 0): AffineKind.ADD,
    ("AddV2", 1): AffineKind.ADD,
    ("BiasAdd", 0): AffineKind.ADD,
    ("BiasAddV1", 0): AffineKind.ADD,
    ("Sub", 0): AffineKind.SUBTRACT,
    ("Sub", 1): AffineKind.SUBTRACT_FROM,
}
_ADDITIONS = (AffineKind.ADD, AffineKind.SUBTRACT, AffineKind.SUBTRACT_FROM)


@dataclass(frozen=True, eq=False)
class AffineStep:
    """An op that treats all examples and positions alike, channel by channel."""

    op: Operation
    kind: AffineKind
    index: int  # which of its inputs is the data
    # The operand that it combines the data with; None for a fused batch norm, which
    # reads scale, offset, mean and variance behind the data.
    operand: Tensor | None
    # The axis of the channels, counted from the end (-1 is the last); None if the
    # operand is the same for all channels.
    axis: int | None

    @property
    def data(self) -> Tensor:
        """The tensor that is scaled or shifted."""
        return self.op.inputs[self.index]

    @property
    def result(self) -> Tensor:
        """The result."""
        return self.op.outputs[0]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The operands; of a fused norm scale, offset, mean and variance."""
        if self.operand is not None:
            return (self.operand,)
        return tuple(self.op.inputs[1:5])

    @property
    def adds(self) -> bool:
        """True if it adds something, and does not multiply."""
        return self.kind in _ADDITIONS


def _step_of(op: Operation, origins: Origins) -> AffineStep | None:
    """Return an op as a step, or None."""
    # The other operand has to be a parameter, or made of statistics of the batch: a
    # residual of batch 1 has the shape of one, but depends on the data.
    fused = fused_norm(op)
    if fused is not None and not is_layer_norm(op):
        return AffineStep(op, AffineKind.NORMALIZE, 0, None, fused.axis)
    if (op.type, 0) not in _KINDS:
        return None
    for index, t in enumerate(op.inputs):
        kind = _KINDS.get((op.type, index))
        other = op.inputs[1 - index]
        if kind and origins.of(t) is None and origins.of(other) is not None:
            axis, fits_one_axis = _axis(op, other, t)
            return AffineStep(op, kind, index, other, axis) if fits_one_axis else None
    return None


def _axis(op: Operation, operand: Tensor, data: Tensor) -> tuple[int | None, bool]:
    """Return the axis that an operand goes along, and whether there is just one."""
    if op.type.startswith("BiasAdd"):
        if op.type == "BiasAdd" and layers.data_format(op).startswith("NC"):
            rank = data.shape.rank
            return (None, False) if rank is None else (1 - rank, True)
        return -1, True
    shape = operand.shape
    # An operand of higher rank than the data would add axes to it.
    least = 1 if data.shape.rank is None else data.shape.rank
    if shape.rank is None or shape.rank > least:
        return None, False
    wide = [i - shape.rank for i, size in enumerate(shape.as_list()) if size != 1]
    if len(wide) > 1:
        return None, False
    if not wide:
        # One channel, or one value for all of them.
        return None, True
    return wide[0], True


@dataclass(frozen=True, eq=False)
class Link:
    """An op between a layer and the end of a batch norm, or the other way round."""

    op: Operation
    index: int  # which of its inputs is the data
    step: AffineStep | None  # the op as a step; None if it only hands channels on

    @property
    def data(self) -> Tensor:
        """The tensor of data that it reads."""
        return self.op.inputs[self.index]


def link_of(op: Operation, origins: Origins) -> Link | None:
    """Return an op that may stand between a layer and a norm as a link, or None."""
    # True if it forwards the channels is for `axis_after` to say.
    step = _step_of(op, origins)
    if step is not None:
        return Link(op, step.index, step)
    if op.type in _PASSING and op.inputs and origins.of(op.outputs[0]) is None:
        return Link(op, 0, None)
    return None


def as_links(steps: tuple[AffineStep, ...]) -> list[Link]:
    """Return steps as links."""
    return [Link(step.op, step.index, step) for step in steps]


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
            step = None if liveness.is_retired(op) else _step_of(op, origins)
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
        links = [*start.links, *as_links(norm.steps)]
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
            link = link_of(op, self.origins)
            if link is None:
                break
            if measures(link, self.origins):
                return Obstacle(IN_BETWEEN, op)
            links.append(link)
            item = stacked_item(op)
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
        after = axis_after(link.op, axis)
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
    if op.type in layers.DATA_SLOTS:
        return Obstacle(
            "is no layer to fold into: its weights depend on the data, or its channels "
            "are not the last axis",
            op,
        )
    if not op.inputs:
        return Obstacle("no layer: nothing to fold into", op, no_layer=True)
    reason = f"({op.type}) stands between the norm and any layer before it"
    return Obstacle(reason, op, no_layer=True)
