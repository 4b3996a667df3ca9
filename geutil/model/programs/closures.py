"""Gradients that exist in Python only, carried over from a source's graph.

`tf.custom_gradient` leaves its gradient as a closure over tensors of the graph that it
was called in; a graph made from protobufs knows the closure's name alone. Here the ops
of such a graph get gradients that read their own graph's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from geutil.graph import gradient_registry
from geutil.graph.functions import body_graph
from geutil.graph.inlining import Origin
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.model.programs.program import Ancestor
from geutil.transform.custom_gradients import carried_gradient


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


def carry_closures(
    graph: Graph,
    nodes: Iterable[Any],
    ancestors: Iterable[Ancestor],
    origins: Mapping[str, Origin],
) -> None:
    """Give the ops of a graph the gradients that `tf.custom_gradient` made for others.

    Args:
        graph: the new graph.
        nodes: the definitions that its ops were made from.
        ancestors: the graphs whose nodes it was made from.
        origins: where ops that were in the body of a function come from.

    Cost: linear in the nodes.
    """
    ancestors = list(ancestors)
    for node in nodes:
        # Of an op, TensorFlow tells what attributes it has by raising.
        if gradient_registry.ATTRIBUTE not in node.attr:
            continue
        gradient = node.attr[gradient_registry.ATTRIBUTE].s.decode()
        if not gradient_registry.is_closure(gradient):
            continue
        op_ = graph.get_operation_by_name(node.name)
        for ancestor in ancestors:
            found = _origin(ancestor, op_, origins.get(op_.name))
            if (
                found is not None
                and gradient_registry.gradient_of(found[0]) == gradient
            ):
                copies = _Copies(graph, found[0].graph, found[1])
                carried = carried_gradient(found[0], gradient, graph, copies)
                gradient_registry.set_gradient(op_, carried)
                break


def _origin(
    ancestor: Ancestor, op_: Operation, origin: Origin | None
) -> tuple[Operation, Callable[[str], str]] | None:
    """Return the op that `op_` was made from, and what tensors near it are called."""
    if origin is not None:
        body = body_graph(ancestor.graph, origin.function)
        if body is None:
            return None
        op = _op(body, origin.node)
        return None if op is None else (op, _renaming(body, origin))
    if not op_.name.startswith(ancestor.prefix):
        return None
    op = _op(ancestor.graph, op_.name.removeprefix(ancestor.prefix))
    return None if op is None else (op, ancestor.tensor)


def _renaming(body: Graph, origin: Origin) -> Callable[[str], str]:
    """Return what finds the names that tensors of a function's FuncGraph have now."""
    # The FuncGraph calls its arguments otherwise than the function's definition does.
    names = (t.name for t in body.inputs)
    arguments = dict(zip(names, origin.arguments, strict=True))
    return lambda name: arguments.get(name) or origin.tensor(name)


def _op(graph: Graph, name: str) -> Operation | None:
    try:
        op: Operation = graph.get_operation_by_name(name)
    except (KeyError, ValueError):
        return None
    return op
