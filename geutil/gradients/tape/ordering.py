"""Ops that wait for sums of gradients, so that the sums free memory in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from geutil.gradients.pairs import add_in_pairs
from geutil.gradients.stand_ins import make_stand_in
from geutil.gradients.tape.identifiers import tensor_id
from geutil.gradients.tape.tensors import aggregate, num_elements
from geutil.graph.importing import add_control_edges
from geutil.graph.kinds import Operation, Tensor

SCOPE = "tape"


def adding_in_pairs(size: int) -> Callable[[Sequence[Any]], Any]:
    """Return a function that adds up gradients, dense ones of more bytes in pairs.

    Args:
        size: that many bytes.
    """

    def add(gradients: Sequence[Any]) -> Any:
        held = sum(num_elements(g) * g.dtype.size for g in gradients)
        dense = all(isinstance(g, tf.Tensor) for g in gradients)
        if held <= size or len(gradients) < 3 or not dense:
            return aggregate(gradients)
        return add_in_pairs(gradients, SCOPE, gradients[-1].op.device)

    return add


class Order:
    """Lets what is built later wait for sums that free memory.

    Attributes:
        last: the last such sum.
        count: how many there were.
    """

    def __init__(self) -> None:
        self.last: Operation | None = None
        self.count = 0
        # How many sums each gradient has waited for, by the id of its tensor.
        self._waited: dict[int, int] = {}

    def summed(self, total: Any) -> None:
        """Note that gradients were added up ahead of time."""
        values = total.values if isinstance(total, tf.IndexedSlices) else total
        self.last = values.op
        self.count += 1

    def delayed(self, gradients: Sequence[Any]) -> list[Any]:
        """Return gradients that come after the last sum."""
        if self.last is None or self._has_waited(gradients):
            return list(gradients)
        return [self._late(g) if isinstance(g, tf.Tensor) else g for g in gradients]

    def note(self, gradients: Sequence[Any]) -> None:
        """Note that gradients were made of what came after the last sum."""
        if self.last is not None:
            for gradient in gradients:
                if gradient is not None:
                    self._waited[tensor_id(gradient)] = self.count

    def _has_waited(self, gradients: Sequence[Any]) -> bool:
        return any(
            self._waited.get(tensor_id(g), 0) == self.count
            for g in gradients
            if g is not None
        )

    def _late(self, gradient: Tensor) -> Tensor:
        if self.last is None or gradient.dtype == tf.variant:
            return gradient
        late = make_stand_in(gradient, SCOPE, "late")
        add_control_edges(late.op, [self.last])
        return late


class Waiting:
    """A backward function whose ops wait for the last sum."""

    def __init__(self, function: Any, order: Order) -> None:
        self.op_name = function.op_name
        self._function = function
        self._order = order

    def __call__(self, *gradients: Any) -> list[Any]:
        """Return the gradients of the inputs, which come after the last sum."""
        results: list[Any] = self._function(*self._order.delayed(gradients))
        self._order.note(results)
        return results
