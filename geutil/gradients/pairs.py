"""Sums of two at a time, which Grappler leaves alone."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from geutil.graph.importing import neutral
from geutil.graph.kinds import Tensor

_MOST_AT_ONCE = 9
_BLOCK = 8


def additions(count: int) -> list[tuple[int, int]]:
    """Return in what pairs `AddN` adds: it takes up to nine, then eight at a time.

    Args:
        count: how many tensors are added. They are numbered from 0, and the results of
            the pairs from `count` on.

    Example:
        >>> additions(4)
        [(0, 1), (4, 2), (5, 3)]
        >>> additions(11)[:3]
        [(0, 1), (11, 2), (3, 4)]
        >>> additions(11)[-1]
        (12, 19)
    """
    pairs: list[tuple[int, int]] = []

    def add_up(numbers: range) -> int:
        total = numbers[0]
        for number in numbers[1:]:
            pairs.append((total, number))
            total = count + len(pairs) - 1
        return total

    first = count if count <= _MOST_AT_ONCE else count % _BLOCK or _BLOCK
    first = _MOST_AT_ONCE if first == 1 else first
    total = add_up(range(first))
    for start in range(first, count, _BLOCK):
        block = add_up(range(start, start + _BLOCK))
        pairs.append((total, block))
        total = count + len(pairs) - 1
    return pairs


def add_in_pairs(tensors: Sequence[Tensor], scope: str, device: str) -> Tensor:
    """Return the sum of tensors that `AddN` would return, to the last bit.

    Of more than two tensors Grappler makes `AddN`, where memory is short, add to zeros:
    a constant of the sum's size that is never freed, in an order that is left to
    chance. Sums of two it leaves alone, with something between them that keeps it from
    joining them.

    Args:
        tensors: the tensors, of one graph.
        scope: the name scope of the new ops.
        device: their device.

    Cost: linear in the tensors.
    """
    parts = list(tensors)
    graph = parts[0].graph
    with neutral(graph), graph.name_scope(f"{scope}/"), graph.device(device):
        for first, second in additions(len(tensors)):
            ahead = parts[first]
            barrier = tf.raw_ops.PlaceholderWithDefault(
                input=ahead, shape=ahead.shape, name="barrier"
            )
            pair = [barrier, parts[second]]
            parts.append(tf.raw_ops.AddN(inputs=pair, name="sum"))
    return parts[-1]
