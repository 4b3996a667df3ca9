"""Dilated convolutions, which frameworks write as an ordinary one between two moves.

SpaceToBatch hands on every n-th row and column as an image of its own, an ordinary
convolution follows, and BatchToSpace puts the rows and columns back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from geutil.graph.kinds import Operation, Tensor
from geutil.graph.op_types import CONVOLUTIONS_2D
from geutil.select.networks.layers import data_format
from geutil.transform.rewrite.liveness import Liveness


@dataclass(frozen=True, eq=False)
class Moved:
    """A convolution between two moves, which only such read the inside of.

    Attributes:
        spread: the SpaceToBatchND before it.
        convolution: the convolution.
        gathered: the BatchToSpaceND behind it.
        axis: the axis of size 1 that a convolution along one axis is given in between;
            None for two.
    """

    spread: Operation
    convolution: Operation
    gathered: Operation
    axis: int | None

    @property
    def numbers(self) -> list[Tensor]:
        """Blocks and paddings of the first move, then blocks and crops of the last."""
        return [*list(self.spread.inputs)[1:], *list(self.gathered.inputs)[1:]]


def find_moved(ops: Iterable[Operation], live: Liveness) -> Iterator[Moved]:
    """Yield the convolutions between moves that can be written as dilated ones.

    Args:
        ops: the ops to look at.
        live: tells who reads what.

    Cost: linear in ops.
    """
    for op in ops:
        if op.type == "SpaceToBatchND" and not live.is_retired(op):
            # Folded for training, a layer runs twice on what is spread once.
            found = [_moved_behind(op, reader, live) for reader in live.readers(op)]
            moved = [m for m in found if m is not None and not _crops_data(m)]
            if len(moved) == len(found):
                yield from moved


def _moved_behind(spread: Operation, reader: Operation, live: Liveness) -> Moved | None:
    middle, axis = reader, None
    if middle.type == "ExpandDims":
        axis = _positive(tf.get_static_value(middle.inputs[1]))
        middle = _only_reader(middle, live) if axis in (1, 2) else None
    if middle is None or not _is_plain(middle):
        return None
    end = _only_reader(middle, live)
    if end is not None and axis is not None:
        removed = end.get_attr("squeeze_dims") if end.type == "Squeeze" else []
        removes = [_positive(index) for index in removed] == [axis]
        end = _only_reader(end, live) if removes else None
    if end is None or end.type != "BatchToSpaceND":
        return None
    return Moved(spread, middle, end, axis)


def _positive(axis: int | None) -> int | None:
    """Return an axis of images counted from the first one."""
    return None if axis is None else int(axis) % 4


def _only_reader(op: Operation, live: Liveness) -> Operation | None:
    readers = tuple(live.readers(op))
    return readers[0] if len(readers) == 1 and len(op.outputs) == 1 else None


def _is_plain(op: Operation) -> bool:
    """Tell whether an op is a convolution that looks at each place, without zeros."""
    if op.type not in CONVOLUTIONS_2D or data_format(op) != "NHWC":
        return False
    ones = {*op.get_attr("strides"), *op.get_attr("dilations")} == {1}
    window = op.inputs[1].shape
    known = window.rank == 4 and None not in window.as_list()[:2]
    return ones and known and bool(op.get_attr("padding") == b"VALID")


def _crops_data(moved: Moved) -> bool:
    """Tell whether more is cropped than zeros were added, as far as that is known."""
    before, padding, after, crops = (tf.get_static_value(t) for t in moved.numbers)
    if any(value is None for value in (before, padding, after, crops)):
        return False
    return not np.array_equal(before, after) or bool(np.any(padding < crops))
