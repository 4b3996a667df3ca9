"""Ops that ask for the shapes of tensors, and for nothing else."""

from __future__ import annotations

from geutil.graph.edits import InputEdit, apply_edits
from geutil.graph.kinds import Tensor

SHAPES = frozenset(("Rank", "Shape", "ShapeN", "Size"))


def hand_over_shapes(old: Tensor, new: Tensor) -> None:
    """Have those who ask for the shape of one tensor ask another one of that shape.

    Otherwise a layer that is folded would still be computed, for its shape.
    """
    if old is new or old.dtype != new.dtype:
        return
    edits = [
        InputEdit(reader, index, new)
        for reader in dict.fromkeys(old.consumers())
        if reader.type in SHAPES
        for index, t in enumerate(reader.inputs)
        if t is old
    ]
    if edits:
        apply_edits(old.graph, edits)
