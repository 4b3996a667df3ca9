"""The variables that hold ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from geutil.errors import QuantizeError
from geutil.graph.identity import MutableIdentityMap
from geutil.graph.kinds import Graph, Tensor, is_func_graph
from geutil.graph.outside_variables import handle_in
from geutil.graph.variable_series import variables_outside
from geutil.quantize.arithmetic import Range, symmetric, with_zero
from geutil.quantize.finding.points import RangeGroup
from geutil.quantize.finding.weights import source_of
from geutil.quantize.simulation import Pair
from geutil.quantize.spec import Format

ENDS = ("min", "max")
LEARNT = "learnt"
"""How much of a moving average the batches made: 0 before the first, then up to 1."""


class NewRange(NamedTuple):
    """A range that needs variables.

    Attributes:
        name: its name, as in `<name>/min`.
        shape: the shape of its ends.
        ends: the range to start with.
        averages: whether a moving average is learnt, which is counted.
    """

    name: str
    shape: tuple[int, ...]
    ends: Range
    averages: bool = False


class RangeVariables:
    """Makes the variables of ranges, or takes those that are given.

    Args:
        graph: the graph that reads them.
        given: variables by name.
        collection: the collection of a v1 graph that they are put in, besides that of
            all variables.

    Attributes:
        by_name: all variables that the ranges of the graph are in, by name.
    """

    def __init__(
        self, graph: Graph, given: Mapping[str, Any], collection: str | None
    ) -> None:
        self._graph = graph
        self._given = given
        self._collection = collection
        self.by_name: dict[str, Any] = {}

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise QuantizeError if a given variable cannot hold an end of a range."""
        for end, needed in zip((*ENDS, LEARNT), (shape, shape, ()), strict=True):
            variable = self._given.get(f"{name}/{end}")
            if variable is None:
                continue
            if tuple(variable.shape) != needed:
                raise QuantizeError(
                    f"'{name}/{end}' is given with shape {variable.shape}, and a range "
                    f"of shape {list(needed)} is needed"
                )
            owner = getattr(variable.handle, "graph", self._graph)
            if owner is not self._graph and not is_func_graph(self._graph):
                raise QuantizeError(
                    f"'{name}/{end}' is given from another graph; graphs share ranges "
                    "through a checkpoint, by name"
                )

    def make(self, ranges: Sequence[NewRange]) -> None:
        """Make the variables of ranges that are not given, in one go."""
        wanted = []
        for name, initial in (v for new in ranges for v in self._values(new)):
            given = self._given.get(name)
            if given is None:
                wanted.append((name, initial))
            else:
                self.by_name[name] = given
        made = variables_outside(self._graph, wanted)
        for (name, _), variable in zip(wanted, made, strict=True):
            self.by_name[name] = variable
            if self._collection is not None and not name.endswith(f"/{LEARNT}"):
                self._add_to(self._collection, variable)

    def _values(self, new: NewRange) -> Iterator[tuple[str, Any]]:
        """Yield the names and the first values of the variables of a range."""
        for end, value in zip(ENDS, new.ends, strict=True):
            initial = np.broadcast_to(np.asarray(value, np.float32), new.shape)
            yield f"{new.name}/{end}", initial
        if new.averages:
            # A range that is given was learnt elsewhere.
            known = all(f"{new.name}/{end}" in self._given for end in ENDS)
            yield f"{new.name}/{LEARNT}", np.float32(known)

    def handles(self, name: str) -> Pair:
        """Return the handles of the two variables of a range, as the graph has them."""
        low, high = (
            handle_in(self._graph, self.by_name[f"{name}/{end}"]) for end in ENDS
        )
        return low, high

    def learnt(self, name: str) -> Any:
        """Return the handle of the variable that counts a moving average."""
        return handle_in(self._graph, self.by_name[f"{name}/{LEARNT}"])

    def _add_to(self, collection: str, variable: Any) -> None:
        held = self._graph.get_collection_ref(collection)
        if not any(v is variable for v in held):
            held.append(variable)


def shape_of(group: RangeGroup) -> tuple[int, ...]:
    """Return the shape of the ends of a range."""
    axes = group.form.axes
    if not axes:
        return ()
    sizes = group.points[0].tensor.shape.as_list()
    return (int(np.prod([sizes[axis] for axis in axes])),)


class KnownValues:
    """The values of weights, as far as they can be told without running the graph.

    Args:
        graph: the graph.
    """

    def __init__(self, graph: Graph) -> None:
        captures = getattr(graph, "captures", ())
        self._outside: MutableIdentityMap[Any] = MutableIdentityMap(
            (inside, outside) for outside, inside in captures
        )

    def of(self, weights: Tensor) -> Any:
        """Return the value of weights as an array; None if it is not known."""
        source = source_of(weights)
        handle = self._outside.get(source)
        if handle is None:
            return tf.get_static_value(source) if source.op.type == "Const" else None
        if not isinstance(handle, tf.Tensor) or not hasattr(handle, "numpy"):
            return None
        with tf.init_scope():
            read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=weights.dtype)
            return read.numpy()


def range_of(values: Any, form: Format) -> Range:
    """Return the range of weights in their format; infinities are not counted."""
    values = np.where(np.isinf(values), np.float32(0.0), values)
    axes = None
    if form.axes:
        axes = tuple(a for a in range(values.ndim) if a not in form.axes)
    low, high = with_zero(values.min(axes).reshape(-1), values.max(axes).reshape(-1))
    if not form.axes:
        low, high = low[0], high[0]
    if form.symmetric:
        return symmetric(low, high, form.bits, form.narrow_range)
    return Range(low, high)
