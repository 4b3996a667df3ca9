"""How large a batch fits into memory, by predicted peaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from geutil.errors import ArgumentTypeError
from geutil.graph.types import type_name
from geutil.memory.predicting import predict
from geutil.memory.sizes import byte_count, megabytes
from geutil.memory.timeline import Timeline

MOST = 1 << 20
"""The largest batch size that is of interest."""
FIRST = 32
"""The batch size that is tried first."""
_SLOW = 3
"""After so many tries that do not halve what is left, it is halved."""


@dataclass(frozen=True)
class BatchFit:
    """The largest batch whose step fits.

    Attributes:
        batch: the batch size; 0 if not even one row fits.
        bytes: what the step holds at its peak then, variables and constants included.
        memory: the bytes that it has to fit into.
        tried: the batch sizes that were predicted, and their bytes, in order.
    """

    batch: int
    bytes: int
    memory: int
    tried: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        of = megabytes(self.memory)
        if self.batch:
            return f"batch size {self.batch}: {megabytes(self.bytes)} of {of}"
        if not self.tried:
            return f"no batch fits into {of}: there is no such step"
        rows, size = min(self.tried)
        take = "one row takes" if rows == 1 else f"{rows} rows take"
        return f"no batch fits: {take} {megabytes(size)} of {of}"


def largest_batch(
    step: Callable[[int], Any],
    memory: int | str,
    *,
    most: int = MOST,
    resident: bool = False,
) -> BatchFit:
    """Return the largest batch size with which a step fits into memory.

    The step is built for several batch sizes, and its peak predicted; nothing runs.
    Peaks are taken to grow with the batch, and as they do between sizes that were
    tried where these leave room for less than a row.

    Args:
        step: builds the step for a batch size, in a graph of its own, and returns what
            `predict` takes, or a ConcreteFunction; None where there is no step that
            fits, say because it would take too long.
        memory: in bytes, or a text such as "8GB"; variables and constants have to fit
            into it, too. A step that nothing holds to an order may take more under
            another schedule (`worst_case`). What TensorFlow itself takes, a fragmented
            heap and slots that an optimizer makes later are no part of the prediction.
        most: the largest batch size that is of interest.
        resident: count what kernels of the CPU take beside TensorFlow's allocator, too
            (`Timeline.resident`), as the limit of a container does.

    Raises:
        ArgumentTypeError: `memory` is no number of bytes, or `most` is below 1.
        PredictionError: the step's sizes are not known.

    Cost: that of building and predicting the step, two to five times where bytes grow
        in proportion to the batch.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.memory import largest_batch
        >>> def step(batch):
        ...     with tf.Graph().as_default():
        ...         x = tf.compat.v1.placeholder(tf.float32, [batch, 1000])
        ...         return tf.tanh(x @ tf.ones([1000, 1000]))
        >>> print(largest_batch(step, "10MB"))
        batch size 1500: 10.0 MB of 10.0 MB
    """
    limit = checked_limit(memory)
    if most < 1:
        raise ArgumentTypeError(f"most is a number from 1 up, got {most!r}")
    return fit_batch(
        lambda batch: _held(step(batch), resident=resident), limit, most=most
    )


def checked_limit(memory: int | str) -> int:
    """Return a limit in bytes; raise ArgumentTypeError if it is none."""
    limit = byte_count(memory)
    if limit is None:
        raise ArgumentTypeError(
            f"memory is a number of bytes or a text such as '8GB', got {memory!r} "
            f"({type_name(memory)})"
        )
    return limit


class Held(NamedTuple):
    """The bytes of a step at its peak, and those that do not depend on the batch."""

    peak: int
    fixed: int


def held_by(timeline: Timeline, *, resident: bool = False) -> Held:
    """Return the bytes of a step, variables and constants included."""
    fixed = timeline.variable_bytes + timeline.constant_bytes
    peak = max(timeline.peak, (timeline.resident or 0) if resident else 0)
    return Held(peak + fixed, fixed)


def fit_batch(
    held: Callable[[int], Held | None],
    limit: int,
    *,
    first: int = FIRST,
    most: int = MOST,
) -> BatchFit:
    """Return the largest batch size within a limit in bytes.

    `held` returns the bytes for a batch size, None if there is no such step; it is
    called two to five times where bytes grow in proportion. `first` is tried first.
    """
    search = _Search(limit, most)
    batch = min(first, most)
    while not search.is_settled():
        search.add(batch, held(batch))
        batch = search.next_batch()
    fits, tried = search.fits, search.tried
    return BatchFit(fits, tried.get(fits, 0), limit, tuple(tried.items()))


class _Search:
    """A search by secants that halves what is left where these are slow.

    Attributes:
        fits: the largest batch size that fits, or 0.
        too_large: the smallest that does not, or one more than is of interest.
    """

    def __init__(self, limit: int, most: int) -> None:
        self._limit, self._most = limit, most
        self.fits, self.too_large = 0, most + 1
        self.tried: dict[int, int] = {}
        self._points: dict[int, int] = {}
        self._widths: list[int] = []

    def add(self, batch: int, held: Held | None) -> None:
        """Add the bytes of a batch size."""
        if held is not None:
            self.tried[batch] = held.peak
            # No rows, the first end of a line.
            self._points.setdefault(0, held.fixed)
            self._points[batch] = held.peak
        if held is not None and held.peak <= self._limit:
            self.fits = batch
        else:
            self.too_large = batch

    def is_settled(self) -> bool:
        """Tell whether no larger batch fits, by all lines that are known."""
        fits, points = self.fits, self._points
        if self.too_large - fits <= 1:
            return True
        others = [batch for batch in points if batch != fits]
        if not fits or len(others) < 2:
            return False
        lines = [self._meets_limit([batch, fits]) for batch in others]
        return all(line is not None and line < fits + 1 for line in lines)

    def next_batch(self) -> int:
        """Return the next batch size to try."""
        fits, too_large = self.fits, self.too_large
        is_open = too_large > self._most
        if not is_open:
            self._widths.append(too_large - fits)
            if len(self._widths) > _SLOW and 2 * self._widths[-1] > self._widths[0]:
                self._widths.clear()
                return (fits + too_large) // 2
            del self._widths[:-_SLOW]
        limit, points = self._limit, self._points
        nearest = sorted(points, key=lambda batch: abs(points[batch] - limit))[:2]
        for ends in (nearest, [fits, too_large]):
            line = self._meets_limit(ends)
            if line is not None and (line >= fits or not fits) and line < too_large:
                return min(max(int(line), fits + 1), too_large - 1)
        return too_large - 1 if is_open else (fits + too_large) // 2

    def _meets_limit(self, ends: list[int]) -> float | None:
        """Return where the line through two batch sizes meets the limit."""
        known = [(b, self._points[b]) for b in ends if b in self._points]
        if len(known) < 2 or known[0][1] == known[1][1]:
            return None
        (b0, h0), (b1, h1) = known
        return b0 + (self._limit - h0) * (b1 - b0) / (h1 - h0)


def _held(step: Any, *, resident: bool) -> Held | None:
    if step is None:
        return None
    graph = getattr(step, "graph", None)
    if hasattr(step, "structured_outputs") and graph is not None:
        step = [*graph.outputs, *graph.control_outputs]
    return held_by(predict(step), resident=resident)
