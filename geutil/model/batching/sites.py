"""A site: one op on the walk, as the rules see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph.kinds import Tensor
from geutil.model.batching.edits import (
    Broadcast,
    Dims,
    Edit,
    Grown,
    Plan,
    Problem,
    SetAttribute,
    SetConstant,
    SetDims,
)
from geutil.model.batching.probing import Probing
from geutil.model.batching.scopes import Entry
from geutil.model.batching.sizes import Shape, Sizes, Source, shape_of

_SHOWN = 16


class Site:
    """One op, what it reads, and what is to be changed about it.

    Attributes:
        node: a copy of its definition, which rules may change; the op is tried as it
            stands there.
        written: how the graph or function writes what it reads.
        operands: what it reads, in the probing graph; rules may replace them.
        probing: where shapes are inferred.
        fallback: where the batch can be read if none of the operands shows it.
        producers: the ops that make what it reads, None for an argument.
        readers: (type, index) of each input that reads what it makes.
        replaced: the operands that are not what `written` says any more.
    """

    def __init__(
        self,
        entry: Entry,
        operands: list[Tensor],
        probing: Probing,
        plan: Plan,
        fallback: Source | None,
        producers: Sequence[Entry | None] = (),
        readers: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.node = type(entry.node)()
        self.node.CopyFrom(entry.node)
        self.written = entry.written
        self.operands = operands
        self.probing = probing
        self.fallback = fallback
        self.producers = producers
        self.readers = readers
        self.plan = plan
        self.replaced: frozenset[int] = frozenset()

    def inside(self, source: Source) -> Site:
        """Return the site as a function that it calls sees it: its batch is there."""
        entry = Entry(self.node, (), ())
        return Site(entry, [], self.probing, self.plan, source)

    def attempt(self) -> Site:
        """Return the site as it is, with changes of its own that can be given up."""
        entry = Entry(self.node, (), self.written)
        made = Site(entry, list(self.operands), self.probing, Plan(), self.fallback)
        made.producers, made.readers = self.producers, self.readers
        made.replaced = self.replaced
        return made

    def adopt(self, attempt: Site) -> None:
        """Take the changes of an attempt over."""
        self.node, self.operands = attempt.node, attempt.operands
        self.replaced = attempt.replaced
        self.plan.edits += attempt.plan.edits
        self.plan.problems += attempt.plan.problems

    @property
    def sizes(self) -> Sizes:
        """The batch sizes."""
        return self.probing.sizes

    def shape(self, index: int) -> Shape:
        """Return the shape of an operand."""
        return shape_of(self.operands[index])

    def axis(self, index: int) -> int | None:
        """Return the axis of the batch of an operand."""
        return self.probing.axis(self.operands[index])

    def source(self, index: int | None = None) -> Source | None:
        """Return where the size of the batch can be read, at an operand if it shows."""
        for i in range(len(self.operands)) if index is None else [index]:
            axis = self.axis(i)
            # Under the name of an operand that is replaced, the old one is read.
            if axis is not None and i not in self.replaced:
                return source_at(self.probing, self.operands[i], self.written[i], axis)
        return self.fallback

    def edit(self, edit: Edit) -> None:
        """Plan a change."""
        self.plan.edits.append(edit)

    def problem(self, reason: str, remedy: str) -> None:
        """Note what cannot be mended."""
        self.plan.problems.append(
            Problem(self.node.name, self.node.op, reason, remedy, self._constants())
        )

    def set_constant(self, index: int, value: Sequence[int], probed: Any) -> None:
        """Give the op a constant of its own; `probed` is its value with the probe."""
        dtype = self.operands[index].dtype
        array = np.array(value, dtype.as_numpy_dtype)
        self.edit(SetConstant(self.node.name, index, array))
        self.operands[index] = self.probing.constant(probed, dtype)

    def set_dims(self, index: int, dims: Dims, data: int) -> None:
        """Give the op a vector of dimensions, of which some grow with the batch."""
        source = self.source(data)
        if source is None:
            self.problem(*NO_SOURCE)
            return
        dtype = self.operands[index].dtype
        enum = dtype.as_datatype_enum
        self.edit(SetDims(self.node.name, index, dims, source, enum))
        self.operands[index] = self.probing.constant(self.probed(dims), dtype)

    def set_attribute(self, name: str, value: Any) -> None:
        """Give an attribute a new value."""
        self.edit(SetAttribute(self.node.name, name, value))
        self.node.attr[name].CopyFrom(value)

    def probed(self, dims: Dims) -> list[int]:
        """Return dimensions with the size that stands for the batch."""
        return [
            d.factor * self.sizes.probe if isinstance(d, Grown) else d for d in dims
        ]

    def symbolic(self, shape: Sequence[int]) -> Dims:
        """Return a shape of the probing graph with the batch as such."""
        return tuple(
            Grown(self.sizes.factor(d)) if self.sizes.factor(d) else d for d in shape
        )

    def broadcast(self, index: int, axis: int, factor: int) -> bool:
        """Repeat an operand that is the same for every row, if it is certain to be.

        Returns:
            Whether it could be done; else a problem is noted.
        """
        made = broadcast_for_batch(self, self.operands[index], index, axis, factor)
        if made is None:
            return False
        edit, self.operands[index] = made
        self.replaced |= {index}
        self.edit(edit)
        return True

    def _constants(self) -> tuple[str, ...]:
        shown = []
        for index, (name, t) in enumerate(
            zip(self.written, self.operands, strict=False)
        ):
            value = None if self.probing.grows(t) else self.probing.value(t)
            if value is not None and np.size(value) <= _SHOWN:
                listed = np.asarray(value).tolist()
                shown.append(f"input {index} '{name.partition(':')[0]}' = {listed}")
        return tuple(shown)


NO_SOURCE = (
    "nothing here tells how large the batch is",
    "set a fixed batch size instead of None",
)


def source_at(probing: Probing, tensor: Tensor, written: str, axis: int) -> Source:
    """Return a tensor as what tells the size of the batch."""
    factor = probing.sizes.factor((shape_of(tensor) or ())[axis])
    return Source(written, axis, factor, tensor.dtype.as_datatype_enum)


def broadcast_for_batch(
    site: Site,
    tensor: Tensor,
    index: int,
    axis: int,
    factor: int,
    *,
    result: bool = False,
) -> tuple[Broadcast, Tensor] | None:
    """Return the change that repeats a tensor for the batch, and what results.

    Args:
        site: the op that reads it, or that calls the function which returns it.
        tensor: the tensor, in the probing graph.
        index: the index of the input or result.
        axis: the axis that is to grow.
        factor: how many times the batch it is to be long.
        result: whether it is a result of a function.
    """
    shape = shape_of(tensor)
    if shape is None or None in shape:
        site.problem(
            f"input {index} would have to be repeated for each row, and its shape "
            f"{tensor.shape} is not known",
            "make it depend on the input's shape",
        )
        return None
    if not site.probing.rows_are_equal(tensor, axis):
        site.problem(
            f"input {index} of shape {tensor.shape} has rows of its own for a batch of "
            f"{site.sizes.old}",
            "they cannot be continued; make it depend on the input",
        )
        return None
    source = site.source()
    if source is None:
        site.problem(*NO_SOURCE)
        return None
    known = [d for d in shape if d is not None]
    dims: Dims = (*known[:axis], Grown(factor), *known[axis + 1 :])
    edit = Broadcast(
        None if result else site.node.name,
        index,
        axis,
        known[axis],
        dims,
        source,
        tensor.dtype.as_datatype_enum,
    )
    grown = site.probing.placeholder(tensor.dtype, site.probed(dims))
    site.probing.mark([grown])
    return edit, grown


def attribute_of_shape(shape: Shape) -> Any:
    """Return an attribute that holds a shape."""
    return tf.compat.v1.AttrValue(shape=tf.TensorShape(shape).as_proto())
