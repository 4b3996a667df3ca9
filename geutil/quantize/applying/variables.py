"""The variables that hold ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
        for end in ENDS:
            variable = self._given.get(f"{name}/{end}")
            if variable is None:
                continue
            if tuple(variable.shape) != shape:
                raise QuantizeError(
                    f"'{name}/{end}' is given with shape {variable.shape}, and a range "
                    f"of shape {list(shape)} is needed"
                )
            owner = getattr(variable.handle, "graph", self._graph)
            if owner is not self._graph and not is_func_graph(self._graph):
                raise QuantizeError(
                    f"'{name}/{end}' is given from another graph; graphs share ranges "
                    "through a checkpoint, by name"
                )

    def make(self, ranges: Sequence[tuple[str, tuple[int, ...], Range]]) -> None:
        """Make the variables of ranges that are not given, in one go.

        Args:
            ranges: the name of each range, the shape of its ends, and its ends.
        """
        wanted = []
        for name, shape, ends in ranges:
            for end, value in zip(ENDS, ends, strict=True):
                given = self._given.get(f"{name}/{end}")
                if given is None:
                    initial = np.broadcast_to(np.asarray(value, np.float32), shape)
                    wanted.append((f"{name}/{end}", initial))
                else:
                    self.by_name[f"{name}/{end}"] = given
        made = variables_outside(self._graph, wanted)
        for (name, _), variable in zip(wanted, made, strict=True):
            self.by_name[name] = variable
            if self._collection is not None:
                self._add_to(self._collection, variable)

    def handles(self, name: str) -> Pair:
        """Return the handles of the two variables of a range, as the graph has them."""
        low, high = (
            handle_in(self._graph, self.by_name[f"{name}/{end}"]) for end in ENDS
        )
        return low, high

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
    """Return the range of weights in their format."""
    axes = None
    if form.axes:
        axes = tuple(a for a in range(values.ndim) if a not in form.axes)
    low, high = with_zero(values.min(axes).reshape(-1), values.max(axes).reshape(-1))
    if not form.axes:
        low, high = low[0], high[0]
    if form.symmetric:
        return symmetric(low, high, form.bits, form.narrow_range)
    return Range(low, high)
