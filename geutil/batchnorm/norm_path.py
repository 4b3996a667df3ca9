"""The way from a layer to a batch norm, or from a batch norm to a layer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from geutil.batchnorm import channel_affine
from geutil.batchnorm.channel_affine import Kind, Link, Step
from geutil.batchnorm.norm_finding import Norm, measures_only
from geutil.graph import op_types
from geutil.graph.edits import InputEdit, apply_edits
from geutil.graph.types import Operation, Tensor
from geutil.select.networks.layers import LAYERS, Layer, layer_of
from geutil.select.networks.provenance import Origin, Origins
from geutil.transform.rewrite.liveness import Liveness


def hand_over_shapes(old: Tensor, new: Tensor) -> None:
    """Have those who ask for the shape of one tensor ask another one of that shape.

    Otherwise a layer that is folded would still be computed, for its shape.
    """
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
    """Why there is no way.

    Attributes:
        reason: why.
        op: the op that stands in it.
        no_layer: whether that is because no layer is there.
    """

    reason: str
    op: Operation
    no_layer: bool = False


@dataclass(frozen=True, eq=False)
class Path:
    """A layer and the ops up to the end of a batch norm, in order.

    Attributes:
        layer: the layer.
        links: the ops behind it; the last is the last step of the norm.
        shared: ops outside that read something on the way.
    """

    layer: Layer
    links: tuple[Link, ...]
    shared: tuple[Operation, ...] = ()


def path_to(
    norm: Norm,
    origins: Origins,
    liveness: Liveness,
    kept_ids: Collection[int],
    barred: Mapping[Operation, Norm],
) -> Path | Obstacle:
    """Return the way from the layer before a batch norm to its end.

    Args:
        norm: the norm.
        origins: of the tensors of its graph.
        liveness: who reads what.
        kept_ids: the ids of tensors that are read from outside, such as outputs.
        barred: the steps of norms that may not be folded.

    Cost: linear in the ops between the two, and in what reads them.
    """
    links = channel_affine.as_links(norm.steps)[::-1]
    tensor = norm.input
    while (layer := layer_of(tensor.op, origins)) is None:
        op = tensor.op
        if op in barred:
            return Obstacle(
                f"is part of '{barred[op].name}', which is not folded",
                op,
            )
        link = channel_affine.link_of(op, origins)
        if link is None:
            return _no_layer(op)
        if measures(link, origins):
            return Obstacle(
                "depends on the batch and stands between the layer and the norm", op
            )
        links.append(link)
        tensor = link.data
    links.reverse()
    objection = _across(layer.axis, links)
    if objection is not None:
        return objection
    on_the_way = [layer.result, *(link.op.outputs[0] for link in links[:-1])]
    for t in on_the_way:
        if id(t) in kept_ids:
            return Obstacle(f"'{t.name}' is asked for as it is", t.op)
    members = {link.op for link in links}
    shared = [
        reader
        for reader in outside_readers(on_the_way, members, liveness)
        if not (norm.training and measures_only(reader, origins, liveness))
    ]
    return Path(layer, tuple(links), tuple(shared))


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


def _across(axis: int, links: Sequence[Link]) -> Obstacle | None:
    """Return what loses the channels, or treats another axis as channels."""
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
    """Return what has another number of channels than a layer, or one not known."""
    for link in links:
        if link.step is not None and not _fits(link.step, count):
            return Obstacle(
                f"has not as many values as the layer has channels ({count})",
                link.op,
            )
    return None


def _fits(step: Step, count: int) -> bool:
    if step.kind is Kind.NORMALIZE:
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
    return Obstacle("no layer: nothing to fold into", op, no_layer=True)
