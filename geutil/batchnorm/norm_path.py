"""The way from a layer to a batch norm, or from a batch norm to a layer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from geutil.batchnorm import channel_affine
from geutil.batchnorm.channel_affine import AffineKind, AffineStep, Link
from geutil.batchnorm.norm_runs import Norm, measures_only
from geutil.graph import op_types
from geutil.graph.edits import InputEdit, apply_edits
from geutil.graph.types import Operation, Tensor
from geutil.rewrite.liveness import Liveness
from geutil.select.networks.layers import LAYERS, Layer, layer_of
from geutil.select.networks.provenance import Origin, Origins

IN_BETWEEN = "depends on the batch and stands between the layer and the norm"


def hand_over_shapes(old: Tensor, new: Tensor) -> None:
    """Have those who ask for the shape of one tensor ask another one of that shape."""
    # Otherwise a layer that is folded would still be computed, for its shape.
    if old is new or old.dtype != new.dtype:
        return
    edits = [
        InputEdit(reader, index, new)
        for reader in dict.fromkeys(old.consumers())
        if reader.type in op_types.SHAPE_READERS
        for index, t in enumerate(reader.inputs)
        if t is old
    ]
    if edits:
        apply_edits(old.graph, edits)


@dataclass(frozen=True, eq=False)
class Obstacle:
    """Why there is no way."""

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
    """Where a way begins."""

    tensor: Tensor
    links: tuple[Link, ...]  # the ops from there on, in order
    layer: Layer | None  # the layer that makes it; None if no layer does


@dataclass(frozen=True, eq=False)
class Ways:
    """The ways from tensors back to the layers before them."""

    origins: Origins  # of the tensors of the graph
    liveness: Liveness
    # The ids of tensors that are read from outside, such as outputs.
    kept_ids: Collection[int] = ()
    # The steps of batch norms that may not be folded.
    barred: Mapping[Operation, Norm] = field(default_factory=dict)

    def path_to(self, norm: Norm) -> Path | Obstacle:
        """Return the way from the layer before a batch norm to its end."""
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
    """Tell whether a step combines the data with statistics of the batch."""
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
    if op.type in LAYERS:
        return Obstacle(
            "is no layer to fold into: its weights depend on the data, or its channels "
            "are not the last axis",
            op,
        )
    if not op.inputs:
        return Obstacle("no layer: nothing to fold into", op, no_layer=True)
    reason = f"({op.type}) stands between the norm and any layer before it"
    return Obstacle(reason, op, no_layer=True)
