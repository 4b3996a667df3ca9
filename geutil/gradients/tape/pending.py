"""Gradients that have arrived and are not used up yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from geutil.errors import ArgumentTypeError, TapeError
from geutil.gradients.tape.spaces import VSpace

MIN_AGGREGATE_COUNT = 4
MIN_AGGREGATE_BYTES = 128 * 1024 * 1024


class Pending:
    """The gradients of tensors, added up ahead of time where they are many.

    Args:
        vspace: the space that they are in.
        count: how many gradients of a tensor have to wait for that.
        size: how many bytes they have to hold together: more than this.
        summed: is told each sum that was made ahead of time.

    Raises:
        TapeError: `count` is less than 2.
    """

    def __init__(
        self,
        vspace: VSpace,
        count: int = MIN_AGGREGATE_COUNT,
        size: int = MIN_AGGREGATE_BYTES,
        summed: Callable[[Any], None] | None = None,
    ) -> None:
        require_sum(count)
        self._space = vspace
        self._count, self._size = count, size
        self._summed = summed
        self._arrived: dict[int, _Arrived] = {}

    def add(self, number: int, gradient: Any) -> None:
        """Let a gradient of the tensor of that id arrive."""
        arrived = self._arrived.setdefault(number, _Arrived())
        arrived.gradients.append(gradient)
        arrived.size += self._bytes(gradient)
        if len(arrived.gradients) >= self._count and arrived.size > self._size:
            total = self._space.aggregate_fn(arrived.gradients)
            self._arrived[number] = _Arrived([total], self._bytes(total))
            if self._summed is not None:
                self._summed(total)

    def take(self, number: int) -> Any:
        """Hand over the sum of the gradients of a tensor; None if none arrived."""
        arrived = self._arrived.pop(number, None)
        return None if arrived is None else self._space.aggregate_fn(arrived.gradients)

    def _bytes(self, gradient: Any) -> int:
        return self._space.num_elements_fn(gradient) * _item_size(gradient.dtype)


def require_sum(count: Any) -> None:
    """Raise an error unless that many gradients can be added up."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise ArgumentTypeError(f"min_aggregate_count is a number, got {count!r}")
    if count < 2:
        raise TapeError(
            f"min_aggregate_count is {count}; pass 2 or more, since one gradient is no "
            "sum"
        )


@dataclass
class _Arrived:
    """Gradients of one tensor, and the bytes that they hold together."""

    gradients: list[Any] = field(default_factory=list)
    size: int = 0


def _item_size(dtype: Any) -> int:
    """Return the bytes of an element."""
    return int(getattr(dtype, "size", 0) or np.dtype(dtype).itemsize)
