"""Batch norms of sums, concatenations and stacks of layers.

The scale and shift of each channel are moved before the joining op, to each tensor that
it reads: norm(a + b) = (scale * a + offset) + scale * b; for concatenated channels,
each tensor gets its part. There they are batch norms after a single layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import tensorflow as tf

from geutil.batchnorm import build
from geutil.batchnorm.build import SUFFIX, Affine, copy_op
from geutil.batchnorm.norms import (
    JOINS,
    Link,
    Norm,
    Obstacle,
    Path,
    Start,
    Ways,
    across,
    as_links,
    axis_after,
    joined,
    joined_axis,
    misfit,
)
from geutil.graph import creation
from geutil.graph.types import Operation, Tensor


@dataclass(eq=False)
class Branch:
    """The path from a layer, or from an op that joins branches, to the next such op."""

    start: Start
    # The ops behind that, in order; the last is the op that joins, or the last step of
    # the norm.
    links: tuple[Link, ...]
    end: Tensor  # the tensor that is joined with others, or the result of the norm
    branches: list[Branch]  # the branches joined where it begins; none at a layer
    axis: int = -1  # the axis of the channels in `end`, counted from the end
    channels: int = 0

    @property
    def join(self) -> Operation:
        """The op that joins the branches."""
        return self.start.tensor.op


@dataclass(frozen=True, eq=False)
class Branched:
    """A batch norm whose branches all end in layers."""

    norm: Norm
    tree: tuple[Branch, ...]  # its branches, each before those that it joins
    bare: bool  # whether the norm is a multiplication and an addition of constants

    @property
    def replaced(self) -> list[Operation]:
        """The ops between the branches and the end of the norm, joins included."""
        inner = [branch for branch in self.tree if branch.branches]
        return [op for b in inner for op in (b.join, *(link.op for link in b.links))]


def branches_of(
    norm: Norm,
    ways: Ways,
    objection_to: Callable[[Path], Obstacle | None],
) -> Branched | Obstacle:
    """Return the branches that a batch norm can be moved to, or the obstacle."""
    # `norm`: a norm at inference that no single layer comes before.
    # `objection_to`: tells why a norm may not be folded along a path.
    tree: list[Branch] = []
    ends = as_links(norm.steps)
    waiting: list[tuple[Tensor, list[Link], Branch | None]] = [(norm.input, ends, None)]
    while waiting:
        tensor, behind, parent = waiting.pop()
        start = ways.start_of(tensor)
        if isinstance(start, Obstacle):
            return start
        end = tensor if parent else norm.result
        branch = Branch(start, (*start.links, *behind), end, [])
        tree.append(branch)
        if parent is not None:
            parent.branches.append(branch)
        if start.layer is not None:
            continue
        op = start.tensor.op
        objection = _objection_to_join(op, ways, parent) or _shared(branch, ways)
        if objection is not None:
            return objection
        reads = list(enumerate(joined(op)))
        waiting += [(t, [Link(op, i, None)], branch) for i, t in reversed(reads)]
    for branch in reversed(tree):
        objection = _settled(branch, ways, objection_to)
        if objection is not None:
            return objection
    bare = norm.fused is None and not any(map(ways.origins.spreads, norm.parameters))
    return Branched(norm, tuple(tree), bare)


def _objection_to_join(
    op: Operation, ways: Ways, parent: Branch | None
) -> Obstacle | None:
    """Return why a norm cannot be moved before an op, or None."""
    if op.type not in JOINS:
        return Obstacle(
            f"reads '{op.name}' ({op.type}), and the norm would have to be folded into "
            "a layer there, too",
            parent.join if parent else op,
        )
    reads = joined(op)
    if len({id(t) for t in reads}) < len(reads):
        return Obstacle("joins a tensor with itself", op)
    for t in reads:
        if ways.origins.of(t) is not None:
            return Obstacle(f"joins '{t.name}', which no layer makes", op)
    return None


def _shared(branch: Branch, ways: Ways) -> Obstacle | None:
    """Return another reader of the data between a join and the next, if any."""
    readers = ways.readers_between(branch.start.tensor, branch.links)
    if isinstance(readers, Obstacle):
        return readers
    for reader in readers:
        return Obstacle("also reads what lies between the layers and the norm", reader)
    return None


def _settled(
    branch: Branch, ways: Ways, objection_to: Callable[[Path], Obstacle | None]
) -> Obstacle | None:
    """Note the channels of a branch whose own branches are settled; or say why not."""
    layer = branch.start.layer
    if layer is not None:
        path = ways.path(layer, branch.links)
        if isinstance(path, Obstacle):
            return path
        branch.axis = _axis_at_end(layer.axis, branch.links[:-1])
        branch.channels = prod(layer.sizes(layer.outputs) or [0])
        return objection_to(path)
    join = branch.join
    axes = {axis_after(join, b.axis) for b in branch.branches}
    counts = [b.channels for b in branch.branches]
    axis = axes.pop() if len(axes) == 1 else None
    if axis is None or (join.type == "ConcatV2" and joined_axis(join) is None):
        return Obstacle("does not hand on each channel as it is", join)
    if _joins_channels(join, axis):
        branch.channels = sum(counts)
    elif len({*counts}) == 1:
        branch.channels = counts[0]
    else:
        return Obstacle("joins different numbers of channels", join)
    objection = across(axis, branch.links)
    if objection is not None:
        return objection
    branch.axis = _axis_at_end(axis, branch.links[:-1])
    return misfit(branch.links, branch.channels)


def _axis_at_end(axis: int, links: Sequence[Link]) -> int:
    for link in links:
        if link.step is None:
            axis = axis_after(link.op, axis) or axis
    return axis


def _joins_channels(join: Operation, axis: int) -> bool:
    return join.type == "ConcatV2" and joined_axis(join) == axis


def build_branches(
    branched: Branched, norm_by_end: Mapping[Operation, Norm]
) -> tuple[Tensor, list[tuple[Operation, tuple[Norm, ...]]]]:
    """Build a norm behind the layer of each branch, and join these."""
    # Batch norms that branches join on the way are taken along.
    # Returns the tensor that replaces the norm's; and the last op of each norm that was
    # built, with those that are in it.
    tree = branched.tree
    affine_by_branch: dict[int, Affine] = {id(tree[0]): Affine()}
    norms_by_branch: dict[int, tuple[Norm, ...]] = {id(tree[0]): ()}
    for branch in tree:
        if branch.branches:
            _spread(branch, affine_by_branch)
            found = (norm_by_end.get(link.op) for link in branch.links)
            inside = tuple(norm for norm in found if norm is not None)
            inside = (*inside, *norms_by_branch[id(branch)])
            norms_by_branch |= {id(part): inside for part in branch.branches}
    ends: list[tuple[Operation, tuple[Norm, ...]]] = []
    new: dict[int, Tensor] = {}
    for branch in reversed(tree):
        with creation.surroundings_of(branch.end.op):
            if branch.branches:
                parts = enumerate(branch.branches)
                join = copy_op(branch.join, {i: new[id(b)] for i, b in parts})
                tensor = _through(join.outputs[0], branch)
            else:
                affine = affine_by_branch[id(branch)]
                tensor = _applied(affine, branch, shifts=branched.bare)
                ends.append((tensor.op, norms_by_branch[id(branch)]))
        new[id(branch)] = tensor
    return new[id(tree[0])], ends


def _spread(branch: Branch, affine_by_branch: dict[int, Affine]) -> None:
    """Note the affine map of each branch that is joined where this one starts."""
    steps = [link.step for link in branch.links if link.step]
    with creation.surroundings_of(branch.end.op):
        affine = build.computed(steps)
        behind = affine_by_branch[id(branch)]
        if behind.scale is not None:
            affine = affine.times(behind.scale)
        if behind.offset is not None:
            affine = affine.plus(behind.offset)
        axis = axis_after(branch.join, branch.branches[0].axis)
        by_parts = axis is not None and _joins_channels(branch.join, axis)
        sums = branch.join.type.startswith("Add")
        start = 0
        for i, part in enumerate(branch.branches):
            scale, offset = affine.scale, affine.offset
            if by_parts:
                scale, offset = (
                    _slice(v, start, part.channels) for v in (scale, offset)
                )
            start += part.channels
            # The terms of a sum are added up: the first one alone brings the offset.
            affine_by_branch[id(part)] = Affine(scale, None if sums and i else offset)


def _slice(value: Tensor | None, start: int, size: int) -> Tensor | None:
    if value is None or not value.shape.rank:
        return value
    return tf.slice(value, [start], [size])


def _applied(affine: Affine, branch: Branch, *, shifts: bool) -> Tensor:
    """Scale and shift the end of a branch."""
    tensor, offset = branch.end, affine.offset
    if affine.scale is not None:
        tensor = tf.multiply(tensor, _along(affine.scale, branch), name=f"mul{SUFFIX}")
        if offset is None and shifts:
            # Without a root, its shift tells a batch norm.
            offset = tf.zeros_like(affine.scale)
    if offset is not None:
        tensor = tf.add(tensor, _along(offset, branch), name=f"add{SUFFIX}")
    return tensor


def _along(value: Tensor, branch: Branch) -> Tensor:
    value = tf.cast(value, branch.end.dtype)
    if not value.shape.rank or branch.axis == -1:
        return value
    return tf.reshape(value, [-1] + [1] * (-1 - branch.axis))


def _through(tensor: Tensor, branch: Branch) -> Tensor:
    """Apply the ops of a branch that only forward channels to a new tensor."""
    for link in branch.start.links:
        if link.step is None:
            tensor = copy_op(link.op, {link.index: tensor}).outputs[0]
    return tensor
