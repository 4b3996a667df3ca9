"""The way from a layer to a batch norm, or from a batch norm to a layer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from geutil.batchnorm.layers import LAYERS, Layer, layer_of
from geutil.batchnorm.norms import Norm
from geutil.batchnorm.origins import Origins
from geutil.batchnorm.passing import axis_after
from geutil.batchnorm.steps import Step, step_of
from geutil.graph.kinds import Operation, Tensor
from geutil.transform.rewrite.liveness import Liveness

_SHAPES = frozenset(("Rank", "Shape", "ShapeN", "Size"))


@dataclass(frozen=True, eq=False)
class Link:
    """An op between a layer and the end of a batch norm, or the other way round.

    Attributes:
        op: the op.
        index: which of its inputs is the data.
        step: the op as a step; None if it only hands channels on.
    """

    op: Operation
    index: int
    step: Step | None


@dataclass(frozen=True, eq=False)
class Obstacle:
    """Why there is no way: a reason, and the op that stands in it."""

    reason: str
    op: Operation


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
    norm: Norm, origins: Origins, liveness: Liveness, kept: Collection[int]
) -> Path | Obstacle:
    """Return the way from the layer before a batch norm to its end.

    Args:
        norm: the norm.
        origins: of the tensors of its graph.
        liveness: who reads what.
        kept: the ids of tensors that are read from outside, such as outputs.

    Cost: linear in the ops between the two.
    """
    links = [Link(step.op, step.index, step) for step in norm.steps]
    tensor = norm.input
    while (layer := layer_of(tensor.op, origins)) is None:
        link = link_of(tensor.op, origins)
        if link is None:
            return _no_layer(tensor.op)
        links.insert(0, link)
        tensor = link.op.inputs[link.index]
    objection = _across(layer.axis, links)
    if objection is not None:
        return objection
    on_the_way = [layer.result, *(link.op.outputs[0] for link in links[:-1])]
    members = {link.op for link in links}
    shared = outside_readers(on_the_way, members, liveness)
    for t in on_the_way:
        if id(t) in kept:
            return Obstacle(f"'{t.name}' is asked for as it is", t.op)
    return Path(layer, tuple(links), tuple(shared))


def outside_readers(
    tensors: Sequence[Tensor], members: Collection[Operation], liveness: Liveness
) -> list[Operation]:
    """Return the ops that read tensors, members and ops that ask for shapes apart."""
    return [
        reader
        for t in tensors
        for reader in t.consumers()
        if reader not in members
        and reader.type not in _SHAPES
        and not liveness.is_retired(reader)
    ]


def link_of(op: Operation, origins: Origins) -> Link | None:
    """Return an op that may stand between a layer and a norm as a link, or None."""
    step = step_of(op, origins)
    if step is not None:
        return Link(op, step.index, step)
    # Where channels go is checked on the way back.
    if op.type in _PASSING and op.inputs and origins.of(op.outputs[0]) is None:
        return Link(op, 0, None)
    return None


_PASSING = frozenset(
    (
        "BatchToSpaceND",
        "Cast",
        "CheckNumerics",
        "ExpandDims",
        "Identity",
        "PreventGradient",
        "Reshape",
        "Snapshot",
        "Squeeze",
        "StopGradient",
        "Transpose",
    )
)


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
        after = axis_after(link.op, axis)
        if after is None:
            return Obstacle("does not hand on each channel as it is", link.op)
        axis = after
    return None


def _no_layer(op: Operation) -> Obstacle:
    if op.type in LAYERS:
        return Obstacle("a layer whose weights depend on the data", op)
    return Obstacle("no layer: nothing to fold into", op)
