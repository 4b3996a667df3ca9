"""How large a batch fits into memory, by predicted peaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from geutil.errors import ArgumentTypeError
from geutil.graph.types import type_name
from geutil.memory.predicting import predict
from geutil.memory.sizes import byte_count, megabytes

_FIRST = 8
"""What is tried after a single row."""
_STRAIGHT = 12
"""After so many batch sizes, the rest is halved: peaks are no straight line."""


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
        if not self.batch:
            of = megabytes(self.memory)
            if not self.tried:
                return f"no batch fits into {of}: there is no such step"
            return f"no batch fits: one row takes {megabytes(self.tried[0][1])} of {of}"
        return (
            f"batch size {self.batch}: {megabytes(self.bytes)} of "
            f"{megabytes(self.memory)}"
        )


def largest_batch(
    step: Callable[[int], Any],
    memory: int | str,
    *,
    most: int = 1 << 20,
    resident: bool = False,
) -> BatchFit:
    """Return the largest batch size with which a step fits into memory.

    The step is built for several batch sizes, and its peak predicted; nothing runs.
    Peaks are taken to grow with the batch.

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

    Cost: that of building and predicting the step, some six times.

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
    limit = byte_count(memory)
    if limit is None:
        raise ArgumentTypeError(
            f"memory is a number of bytes or a text such as '8GB', got {memory!r} "
            f"({type_name(memory)})"
        )
    if most < 1:
        raise ArgumentTypeError(f"most is a number from 1 up, got {most!r}")
    known: dict[int, int] = {}
    fits, too_large = 0, most + 1
    guess, tries = 1, 0
    while fits < guess < too_large:
        built = step(guess)
        if built is not None:
            known[guess] = _bytes(built, resident=resident)
        if known.get(guess, limit + 1) <= limit:
            fits = guess
        else:
            too_large = guess
        tries += 1
        straight = built is not None and tries <= _STRAIGHT
        guess = _next(known, fits, too_large, limit, straight=straight)
    return BatchFit(fits, known.get(fits, 0), limit, tuple(known.items()))


def _next(
    known: dict[int, int], fits: int, too_large: int, limit: int, *, straight: bool
) -> int:
    """Return the batch size to try: where a line through two known ones meets.

    Where that is of no use, halfway.
    """
    if too_large - fits <= 1:
        return fits
    if not straight or not known:
        return (fits + too_large) // 2
    if len(known) == 1:
        return min(_FIRST, too_large - 1)
    # The two that are nearest tell the slope.
    near = sorted(known, key=lambda batch: abs(known[batch] - limit))[:2]
    (b0, b1), (h0, h1) = near, (known[near[0]], known[near[1]])
    slope = (h1 - h0) / (b1 - b0)
    line = int(b0 + (limit - h0) / slope) if slope > 0 else 2 * fits
    return min(max(line, fits + 1), too_large - 1)


def _bytes(step: Any, *, resident: bool) -> int:
    graph = getattr(step, "graph", None)
    if hasattr(step, "structured_outputs") and graph is not None:
        step = [*graph.outputs, *graph.control_outputs]
    timeline = predict(step)
    used = timeline.resident if resident else None
    most = max(timeline.peak, used or 0)
    return most + timeline.variable_bytes + timeline.constant_bytes
