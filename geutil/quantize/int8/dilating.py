"""Writes convolutions between two moves as dilated ones, for TFLite's converter.

It makes one kernel of the three ops where the batch is known (TensorFlow 2.21); else it
leaves them, and the convolution computes in float.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.quantize.copying import values_of
from geutil.quantize.finding.dilations import Moved, find_moved
from geutil.transform.rewrite.liveness import Liveness

Array = np.ndarray[Any, Any]

_TRIED_SIZES = (61, 64, 66, 71)
"""Sizes that stand for unknown ones, in images that are large enough."""


@dataclass(frozen=True, eq=False)
class Dilated:
    """A convolution that is the same as a dilated one with what stands around it.

    Attributes:
        spread: the SpaceToBatchND before it.
        convolution: the convolution.
        gathered: the BatchToSpaceND behind it.
        rates: the dilation along the two axes of its images.
        padding: for each of these axes how many zeros are put before and behind.
    """

    spread: Operation
    convolution: Operation
    gathered: Operation
    rates: tuple[int, int]
    padding: tuple[tuple[int, int], ...]

    def amend(self, node: Any) -> None:
        """Let the node of a copy of the convolution be the dilated one."""
        node.attr["dilations"].list.i[:] = [1, *self.rates, 1]
        node.attr["padding"].s = self._name_of_padding()
        if node.attr["padding"].s == b"EXPLICIT":
            ends = [end for pair in self.padding for end in pair]
            node.attr["explicit_paddings"].list.i[:] = [0, 0, *ends, 0, 0]

    def _name_of_padding(self) -> bytes:
        if not np.any(self.padding):
            return b"VALID"
        window = self.convolution.inputs[1].shape.as_list()[:2]
        totals = [(w - 1) * r for w, r in zip(window, self.rates, strict=True)]
        same = tuple((total // 2, total - total // 2) for total in totals)
        return b"SAME" if self.padding == same else b"EXPLICIT"


def find_dilated(graph: Graph) -> list[Dilated]:
    """Return the convolutions of a FuncGraph that are the same as dilated ones.

    Cost: linear in ops and edges; a few runs of what computes paddings, where sizes of
    images are not known.
    """
    found_moved = find_moved(graph.get_operations(), Liveness(graph))
    moved = [each for each in found_moved if _is_computed_from_shapes(each)]
    tried = [_moves(moved, size) for size in _TRIED_SIZES]
    found = (_dilated(each, moves) for each, *moves in zip(moved, *tried, strict=True))
    return [dilated for dilated in found if dilated is not None]


def _is_computed_from_shapes(each: Moved) -> bool:
    waiting = list(dict.fromkeys(t.op for t in each.numbers))
    for op in waiting:
        if op.type.startswith("Placeholder"):
            return False
        if op.type != "Shape":
            waiting += [t.op for t in op.inputs if t.op not in waiting]
    return True


def _moves(moved: Sequence[Moved], size: int) -> list[list[Array]]:
    """Return the numbers of each, for images of a size where that is not known."""

    def replace(op: Operation) -> Array | None:
        if op.type != "Shape" or op.inputs[0].shape.rank is None:
            return None
        sizes = [size if n is None else n for n in op.inputs[0].shape.as_list()]
        return np.asarray(sizes, op.outputs[0].dtype.as_numpy_dtype)

    values = iter(values_of([t for each in moved for t in each.numbers], replace))
    return [[next(values) for _ in each.numbers] for each in moved]


def _dilated(each: Moved, tried: Sequence[Sequence[Array]]) -> Dilated | None:
    """Return the dilated convolution if it is the same one for all sizes."""
    blocks = [b for before, _, after, _ in tried for b in (before, after)]
    paddings = [padding - crops for _, padding, _, crops in tried]
    first, padding = blocks[0].tolist(), paddings[0].tolist()
    same = all(b.tolist() == first for b in blocks)
    same = same and all(p.tolist() == padding for p in paddings)
    # What is cropped beyond the zeros would have to be cropped from the data.
    if not same or np.min(padding) < 0 or len(first) != (2 if each.axis is None else 1):
        return None
    if each.axis is not None:
        first.insert(each.axis - 1, 1)
        padding.insert(each.axis - 1, [0, 0])
    pairs = tuple((int(a), int(b)) for a, b in padding)
    return Dilated(
        each.spread, each.convolution, each.gathered, (first[0], first[1]), pairs
    )


def left_out(found: Sequence[Dilated]) -> Mapping[Operation, Tensor]:
    """Return what stands in for the moves around dilated convolutions."""
    moves = (op for dilated in found for op in (dilated.spread, dilated.gathered))
    return {op: op.inputs[0] for op in moves}
