"""Points before they have names."""

from __future__ import annotations

from dataclasses import dataclass

from geutil.graph.kinds import Operation, Tensor
from geutil.quantize.finding.network import Edge
from geutil.quantize.spec import Format, Spec


@dataclass(eq=False)
class Draft:
    """A tensor that will be quantized.

    Attributes:
        tensor: the tensor.
        anchor: the op that the point is named after.
        slot: what it is, as in `<scope of the anchor>/<slot>`.
        spec: how its op is quantized.
        form: how it is stored.
        readers: what shall read it quantized; None is all.
        counts: whether the range is learnt from it.
        weights: the source of the weights that it holds; None for activations.
        initial: the range to start with.
        fixed: whether that stays.
        shapes: see `Point`.
    """

    tensor: Tensor
    anchor: Operation
    slot: str
    spec: Spec
    form: Format
    readers: list[Edge] | None = None
    counts: bool = True
    weights: Tensor | None = None
    initial: tuple[float, float] = (-6.0, 6.0)
    fixed: bool = False
    shapes: tuple[Tensor, ...] = ()
