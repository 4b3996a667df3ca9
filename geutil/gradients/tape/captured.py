"""What the placeholders of function graphs stand for."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from geutil.gradients.tape.identifiers import tensor_id
from geutil.graph.function_graphs import bindings
from geutil.graph.kinds import Graph, is_func_graph
from geutil.graph.plain_gradients import variable_handle


class Captured:
    """Follows captures to the tensors that they stand for.

    A FuncGraph reads what is outside by placeholders, one for each tensor. What they
    stand for, in the graphs around it or eager, is one tensor for all of them.
    """

    def __init__(self) -> None:
        self._outside: dict[Graph, dict[int, Any]] = {}

    def beyond(self, tensor: Any) -> Any:
        """Return what a tensor stands for: itself, but for placeholders of captures."""
        while hasattr(tensor, "graph") and tensor.op.type == "Placeholder":
            outside = self._of(tensor.graph).get(id(tensor))
            if outside is None:
                break
            tensor = outside
        return tensor

    def source(self, x: Any) -> Any:
        """Return the tensor that a tensor or variable stands for; None for others.

        That is the handle of a variable, or the reference to one without a handle.
        """
        if isinstance(x, tf.Variable):
            x = variable_handle(x)
        return self.beyond(x) if isinstance(x, tf.Tensor) else None

    def _of(self, graph: Graph) -> dict[int, Any]:
        if graph not in self._outside:
            pairs = bindings(graph) if is_func_graph(graph) else []
            self._outside[graph] = {id(inside): outside for outside, inside in pairs}
        return self._outside[graph]


def number_of(tensor: Any) -> int:
    """Return the number of the tensor that a tensor or variable stands for.

    Arrays and eager tensors stand for themselves.
    """
    source = Captured().source(tensor)
    return tensor_id(tensor if source is None else source)
