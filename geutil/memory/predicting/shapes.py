"""The sizes of the tensors of a step, with what the caller knows of their shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from geutil.errors import PredictionError
from geutil.graph.functions import body_graph
from geutil.graph.identity import dereference
from geutil.graph.kinds import Graph, Tensor, is_tensor
from geutil.graph.op_types import PLACEHOLDERS
from geutil.memory.sizes import (
    GivenShapes,
    bytes_of_shape,
    dims_of,
    pairs_of,
    tensor_name,
)

_SHOWN = 6
"""How many tensors a message names."""


class Shapes:
    """Tells the bytes of the tensors of a step.

    Args:
        graph: the caller's graph.
        given: shapes for some of its tensors: a mapping, or pairs. A key is a tensor,
            its `ref()` or its name; the name of an op stands for its first output.

    Raises:
        PredictionError: the graph has no tensor of a name.
    """

    def __init__(self, graph: Graph, given: GivenShapes | None) -> None:
        self._graph = graph
        self._given = {
            _found(graph, key).name: tf.TensorShape(shape)
            for key, shape in pairs_of(given)
        }
        self._open: list[Tensor] = []

    def told_to(self, graph_def: Any) -> Any:
        """Return the `GraphDef` with the shapes in it, so that others follow from them.

        Cost: linear in the nodes.
        """
        for node in graph_def.node:
            # Shape inference follows constants through an Identity, but not through
            # this op, which does the same.
            if node.op == "PlaceholderWithDefault":
                node.op = "Identity"
                node.attr["T"].CopyFrom(node.attr["dtype"])
                del node.attr["dtype"], node.attr["shape"]
            elif node.op in PLACEHOLDERS:
                shape = self._given.get(f"{node.name}:0")
                if shape is not None:
                    node.attr["shape"].shape.CopyFrom(shape.as_proto())
        return graph_def

    def bytes_of(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor of the graph that was made with the shapes.

        0 where they are not known; `check` then says so.
        """
        dims = dims_of(tensor)
        size = bytes_of_shape(tensor.dtype, dims)
        if size is None and hasattr(tensor.graph, "outer_graph"):
            size = bytes_of_shape(tensor.dtype, self._in_a_function(tensor))
        elif size is None:
            shape = self._given.get(tensor.name)
            if shape is None:
                shape = self._static(tensor.name)
            if shape is not None and shape.rank is not None:
                size = bytes_of_shape(tensor.dtype, shape.as_list())
        if size is None:
            self._open.append(tensor)
            return 0
        return size

    def _in_a_function(self, tensor: Tensor) -> list[int | None] | None:
        """Return what the function says from which the body of a call was made."""
        body = body_graph(self._graph, tensor.graph.name)
        if body is None:
            return None
        try:
            shape = body.get_tensor_by_name(tensor.name).shape
        except (KeyError, ValueError):
            return None  # The optimizer made it.
        return None if shape.rank is None else shape.as_list()

    def _static(self, name: str) -> tf.TensorShape | None:
        """Return what the caller's graph says, by `set_shape` beyond what follows."""
        try:
            return self._graph.get_tensor_by_name(name).shape
        except (KeyError, ValueError):
            return None  # The optimizer made it.

    def check(self, fed: Iterable[Tensor]) -> None:
        """Raise `PredictionError` if the bytes of some tensor were not known.

        Args:
            fed: the tensors that the caller feeds, the likely cause.
        """
        if not self._open:
            return
        causes = [t.name for t in fed if not t.shape.is_fully_defined()]
        causes = [name for name in causes if name not in self._given]
        names = causes or [t.name for t in self._open]
        shown = ", ".join(f"'{name}'" for name in names[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise PredictionError(
            f"the sizes of {len(self._open)} tensors, '{self._open[0].name}' among "
            f"them, depend on dimensions that are not known, of {shown}{more}; pass "
            f"shapes={{'{names[0]}': [...]}}"
        )


def _found(graph: Graph, key: Any) -> Tensor:
    key = dereference(key)
    if is_tensor(key):
        return key
    try:
        return graph.get_tensor_by_name(tensor_name(key))
    except (KeyError, ValueError, TypeError):
        raise PredictionError(
            f"shapes= names {key!r}, but the graph has no such tensor"
        ) from None
