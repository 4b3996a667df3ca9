"""A call of a checkpointed function."""

from __future__ import annotations

from dataclasses import dataclass

from geutil.graph.kinds import Graph, Tensor


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a function in a graph.

    Attributes:
        graph: the graph.
        ys: the differentiable tensors that the function returned.
        inputs: the differentiable tensors from outside that they depend on: arguments,
            what the function closes over, handles of variables.
        end: how many ops the graph had after the call.
        alone: whether the graph holds the call and nothing else, so that what comes
            after it is unknown.
        siblings: all checkpointed calls in the graph so far; it grows.
    """

    graph: Graph
    ys: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    end: int
    alone: bool
    siblings: list[Call]
