"""Gradients that exist in Python only, carried over from a source's graph.

`tf.custom_gradient` leaves its gradient as a closure over tensors of the graph that it
was called in; a graph made from protobufs knows the closure's name alone. Here the ops
of such a graph get gradients that read their own graph's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from geutil.graph import gradient_registry
from geutil.graph.functions import body_graph
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.transform.custom_gradients import carried_gradient


@dataclass(frozen=True)
class Origin:
    """Where an op of the new graph comes from.

    Attributes:
        function: the function whose body it was in; empty for the graph itself.
        node: its name there.
        tensor: gives the name in the new graph of a tensor of that body.
    """

    function: str
    node: str
    tensor: Callable[[str], str]


class _Copies(Mapping[Any, Tensor]):
    """The tensors of a graph that stand for those of another one, found by name."""

    def __init__(
        self, graph: Graph, source: Graph, rename: Callable[[str], str]
    ) -> None:
        self._graph = graph
        self._source = source
        self._rename = rename

    def __getitem__(self, t: Any) -> Tensor:
        if t.graph is not self._source:
            raise KeyError(t.name)
        try:
            found: Tensor = self._graph.get_tensor_by_name(self._rename(t.name))
        except ValueError as error:
            raise KeyError(t.name) from error
        return found

    def get(self, t: Any, default: Any = None) -> Any:
        """Return the tensor that stands for `t`; tensors cannot be compared."""
        try:
            return self[t]
        except KeyError:
            return default

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


def carry_closures(graph: Graph, source: Graph, origins: Mapping[str, Origin]) -> None:
    """Give the ops of a graph the gradients that `tf.custom_gradient` made for others.

    Args:
        graph: the new graph.
        source: the graph whose nodes it was made from.
        origins: where ops with a gradient come from, if not from the op of the same
            name in `source`.

    Cost: linear in the ops.
    """
    for op_ in graph.get_operations():
        gradient = gradient_registry.gradient_of(op_)
        if gradient is None or not gradient_registry.is_closure(gradient):
            continue
        origin = origins.get(op_.name, Origin("", op_.name, str))
        body = body_graph(source, origin.function) if origin.function else source
        op = None if body is None else _op(body, origin.node)
        if op is not None:
            copies = _Copies(graph, body, origin.tensor)
            carried = carried_gradient(op, gradient, graph, copies)
            gradient_registry.set_gradient(op_, carried)


def _op(graph: Graph, name: str) -> Operation | None:
    try:
        op: Operation = graph.get_operation_by_name(name)
    except KeyError:
        return None
    return op
