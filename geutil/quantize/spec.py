"""How values are quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from geutil.errors import QuantizeError
from geutil.quantize.arithmetic import check_bits


@dataclass(frozen=True)
class Spec:
    """How an op is quantized where that differs from the rest; None is like the rest.

    Attributes:
        weight_bits: bits of its weights, 2 to 16.
        activation_bits: bits of its result.
        symmetric_weights: whether the range of its weights is symmetric about zero.
        per_channel: whether each output channel of its weights has a range of its own.
        range: the fixed range of its result, as (low, high); it is not learnt then.
        ema_decay: how much of a range is kept in each training step.

    Example:
        >>> from geutil.quantize import Spec
        >>> Spec(weight_bits=4).weight_bits
        4
    """

    weight_bits: int | None = None
    activation_bits: int | None = None
    symmetric_weights: bool | None = None
    per_channel: bool | None = None
    range: Sequence[float] | None = None
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        """Refuse what FakeQuant ops do not take."""
        for name in ("weight_bits", "activation_bits"):
            if getattr(self, name) is not None:
                check_bits(getattr(self, name), name)
        if self.range is not None and not _is_range(self.range):
            raise QuantizeError(
                f"range={self.range!r} is no range; pass (low, high) with "
                "low <= 0 <= high and low < high"
            )
        if self.ema_decay is not None:
            check_decay(self.ema_decay)


def check_decay(decay: float) -> None:
    """Raise QuantizeError unless a moving average can be made with a decay."""
    if not 0.0 <= decay < 1.0:
        raise QuantizeError(f"ema_decay={decay} is out of range: pass 0 <= decay < 1")


def checked_ends(
    low: float, high: float, *, stays: bool = False
) -> tuple[float, float]:
    """Return the range to start with.

    Args:
        low: its low end.
        high: its high end.
        stays: it is not learnt. Else it may be empty: before anything was learnt, all
            values are quantized to zero.

    Raises:
        QuantizeError: it does not hold zero, or is empty and stays so.
    """
    if not low <= 0.0 <= high or (stays and low == high):
        more = ", and not both 0" if stays else ""
        raise QuantizeError(
            f"init_min={low} and init_max={high} are no range: pass "
            f"init_min <= 0 <= init_max{more}"
        )
    return float(low), float(high)


def _is_range(given: Sequence[float]) -> bool:
    return len(given) == 2 and given[0] <= 0.0 <= given[1] and given[0] < given[1]


@dataclass(frozen=True)
class Format:
    """How one tensor is stored.

    Attributes:
        bits: the number of bits.
        symmetric: whether the range is symmetric about zero.
        narrow_range: whether the lowest integer is left out.
        axes: the axes that together count the channels that have a range each; none if
            the whole tensor has one.
    """

    bits: int = 8
    symmetric: bool = False
    narrow_range: bool = False
    axes: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.bits} bits"]
        if self.symmetric:
            parts.append("symmetric")
        if self.axes:
            parts.append("per channel")
        return ", ".join(parts)
