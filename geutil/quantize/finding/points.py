"""Where FakeQuant ops go, and which of them share a range."""

from __future__ import annotations

from dataclasses import dataclass, field

from geutil.graph.identity import MutableIdentityMap
from geutil.graph.kinds import Operation, Tensor
from geutil.quantize.finding.network import Edge
from geutil.quantize.spec import Format


@dataclass(eq=False)
class RangeGroup:
    """Tensors that one range is for.

    Attributes:
        name: the name of the range, as in `<name>/min`.
        form: how they are stored.
        weights: whether they are weights, whose range is that of their last value.
        decay: how much of the range each training step keeps.
        initial: the range to start with.
        fixed: whether it stays so.
        points: where it is used, in topological order.
    """

    name: str
    form: Format
    weights: bool
    decay: float
    initial: tuple[float, float]
    fixed: bool = False
    points: list[Point] = field(default_factory=list)

    @property
    def sources(self) -> list[Point]:
        """The points whose tensors the range is learnt from."""
        return [point for point in self.points if point.counts]


@dataclass(eq=False)
class Point:
    """A tensor that is quantized.

    Attributes:
        tensor: the tensor.
        name: the scope of the new ops, as in `<name>/FakeQuantWithMinMaxVars`.
        group: its range.
        readers: what shall read it quantized; None is all.
        counts: whether its values count for the range; those of a concat do not, which
            have been counted one by one.
        shapes: tensors of its shape. What reads only the shape of one of them shall
            read that of the quantized one: the converter leaves a kernel in float if
            anything reads what it makes before that is quantized.
    """

    tensor: Tensor
    name: str
    group: RangeGroup
    readers: list[Edge] | None = None
    counts: bool = True
    shapes: tuple[Tensor, ...] = ()

    @property
    def form(self) -> Format:
        """How it is stored."""
        return self.group.form


class SharedRanges:
    """Which tensors share a range: a union-find over tensors.

    Cost: almost constant for each call.
    """

    def __init__(self) -> None:
        self._above: MutableIdentityMap[Tensor] = MutableIdentityMap()
        self._fixed: MutableIdentityMap[tuple[float, float]] = MutableIdentityMap()

    def root(self, tensor: Tensor) -> Tensor:
        """Return the tensor that stands for all those of its range."""
        path = []
        while tensor in self._above:
            path.append(tensor)
            tensor = self._above[tensor]
        for passed in path[:-1]:
            self._above[passed] = tensor
        return tensor

    def join(self, tensor: Tensor, other: Tensor) -> None:
        """Let two tensors share a range; the first one's root stays."""
        first, second = self.root(tensor), self.root(other)
        if first is not second:
            self._above[second] = first

    def fix(self, tensor: Tensor, ends: tuple[float, float]) -> None:
        """Set the range of a tensor for good."""
        self._fixed[self.root(tensor)] = ends

    def fixed(self, tensor: Tensor) -> tuple[float, float] | None:
        """Return the range of a tensor, if it is set."""
        return self._fixed.get(self.root(tensor))


@dataclass(frozen=True, eq=False)
class Skip:
    """An op that is not quantized, and why.

    Attributes:
        op: the op.
        reason: why.
        has_kernel: whether TFLite has an int8 kernel for it.
    """

    op: Operation
    reason: str
    has_kernel: bool
