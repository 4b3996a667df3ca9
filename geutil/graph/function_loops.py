"""Loops that are functions: how often they run, and the values that iterations pass on.

Nothing runs: constants, shapes and the edges in conditions and bodies tell it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from geutil.graph import op_types
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import tree

_COMPARISONS = {"Less": 0, "LessEqual": 1}
"""How often more a counter is counted up once it has reached the bound."""


def source_of(tensor: Tensor) -> Tensor:
    """Return the tensor that a tensor is, behind ops that forward it."""
    while tensor.op.type in op_types.FORWARDING and tensor.op.inputs:
        tensor = tensor.op.inputs[0]
    return tensor


class LoopBody:
    """The body of a loop; `results` are its results, seen through Identity ops."""

    def __init__(self, graph: Graph) -> None:
        self._arguments: Sequence[Tensor] = graph.inputs
        self._place = {id(t): i for i, t in enumerate(graph.inputs)}
        self.results = [source_of(t) for t in graph.outputs]

    def place(self, tensor: Tensor) -> int | None:
        """Return the number of the argument that a tensor is, None if it is none."""
        return self._place.get(id(tensor))

    def stays(self, place: int | None) -> bool:
        """Tell whether an argument is the same each time; None is none."""
        if place is None:
            return False
        return self.results[place] is self._arguments[place]

    def step(self, place: int) -> Any:
        """Return the number added to a value each time, None if that is not known."""
        op = self.results[place].op
        if op.type not in op_types.ADDITIONS:
            return None
        first, second = (source_of(t) for t in op.inputs)
        if second is self._arguments[place]:
            first, second = second, first
        if first is not self._arguments[place]:
            return None
        return tf.get_static_value(second)

    def added(self, place: int) -> Iterator[Tensor]:
        """Yield the tensors that each iteration puts into a list."""

        def lists(op: Operation) -> Iterable[Tensor]:
            if op.type in op_types.LIST_ELEMENTS:
                return op.inputs[:1]
            is_sum = op.type == "AddN" and op.outputs[0].dtype == tf.variant
            return op.inputs if is_sum else ()

        for op in _tree(self.results[place], lists):
            if op.type in op_types.LIST_ELEMENTS:
                yield op.inputs[op_types.LIST_ELEMENTS[op.type]]

    def origin(self, tensor: Tensor) -> Tensor:
        """Return the source of a value, in this iteration or an earlier one."""
        met: set[int] = set()
        tensor = source_of(tensor)
        while id(tensor) in self._place and id(tensor) not in met:
            met.add(id(tensor))
            tensor = self.results[self._place[id(tensor)]]
        return tensor

    def list_argument(self, tensor: Tensor) -> int | None:
        """Return the list, the same each time, of which a tensor is an element."""
        if tensor.op.type != "TensorListGetItem":
            return None
        place = self.place(source_of(tensor.op.inputs[0]))
        return place if self.stays(place) else None


_AND = "LogicalAnd"


def _tree(
    end: Tensor, inputs_of: Callable[[Operation], Iterable[Tensor]]
) -> Iterator[Operation]:
    """Yield the op that made a tensor, and those behind it, as far as is asked for."""
    return tree(
        [source_of(end).op], lambda op: [source_of(t).op for t in inputs_of(op)]
    )


class Loops:
    """The loops of a graph that are functions, each with its condition and body."""

    def __init__(self, loops: Mapping[Operation, tuple[Graph, Graph]]) -> None:
        self._loops = loops
        self._times: dict[Operation, int | None] = {}

    def times(self, op: Operation) -> int | None:
        """Return how often a loop runs, None if constants do not tell."""
        if op not in self._times:
            # A counter that starts with the result of a loop before.
            self._times[op] = None
            # Keras has two bounds: the length of a sequence and the most times at all.
            bounds = [n for n in self._bounds(op) if n is not None]
            self._times[op] = min(bounds, default=None)
        return self._times[op]

    def exact_times(self, op: Operation) -> int | None:
        """Return how often a loop runs, None if anything else may end it."""
        bounds = list(self._bounds(op))
        return None if None in bounds else self.times(op)

    def _bounds(self, op: Operation) -> Iterator[int | None]:
        """Yield how often each test lets a loop run, None if that is not known."""
        condition, graph = self._loops[op]
        body = LoopBody(graph)
        places = {id(t): i for i, t in enumerate(condition.inputs)}
        for test in _tree(
            condition.outputs[0], lambda op: op.inputs if op.type == _AND else ()
        ):
            if test.type != _AND:
                yield self._count(op, test, places, body)

    def _count(
        self, op: Operation, test: Operation, places: Mapping[int, int], body: LoopBody
    ) -> int | None:
        """Return how often a comparison lets a loop run, None if that is not known."""
        if test.type not in _COMPARISONS:
            return None
        counter, bound = (source_of(t) for t in test.inputs)
        place, of = places.get(id(counter)), places.get(id(bound))
        if place is None or (of is not None and not body.stays(of)):
            return None
        limit = _static(bound) if of is None else self._argument(op, of)
        start, step = self._argument(op, place), body.step(place)
        if start is None or step is None or limit is None or step <= 0:
            return None
        more = _COMPARISONS[test.type]
        return max(0, -((int(start) - int(limit) - more) // int(step)))

    def _argument(self, op: Operation, place: int) -> Any:
        """Return the initial value of a loop variable, or None if it is not known."""
        tensor = source_of(op.inputs[place])
        if tensor.op not in self._loops:
            return _static(tensor)
        # A counter after its loop.
        op, place = tensor.op, tensor.value_index
        step = LoopBody(self._loops[op][1]).step(place)
        times = self.times(op)
        start = None if times is None else self._argument(op, place)
        if times is None or step is None or start is None:
            return None
        return int(start) + times * int(step)


def _static(tensor: Tensor) -> Any:
    """Return the value of a constant tensor, or of a dimension that is known."""
    op = tensor.op
    if op.type != "StridedSlice" or op.get_attr("shrink_axis_mask") != 1:
        return tf.get_static_value(tensor)
    of, place = op.inputs[0], tf.get_static_value(op.inputs[1])
    is_shape = of.op.type == "Shape"
    values = of.op.inputs[0].shape if is_shape else tf.get_static_value(of)
    unknown = values is None or (is_shape and values.rank is None) or place is None
    return None if unknown or len(place) > 1 else values[int(place[0])]
