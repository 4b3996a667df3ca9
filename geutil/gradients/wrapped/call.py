"""The calls of checkpointed functions in a graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from geutil.gradients.step import Step
from geutil.graph.adjacency import consumers, creation_index
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.state import state_of
from geutil.graph.version_1_flow import unconditional


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a function in a graph.

    Attributes:
        graph: the graph.
        ys: the differentiable tensors that the function returned.
        inputs: the differentiable tensors from outside that they depend on: arguments,
            what the function closes over, handles of variables.
        first: the creation index of the first op that the call made.
        end: how many ops the graph had after the call.
        alone: whether the graph holds the call and nothing else, so that what comes
            after it is unknown.
    """

    graph: Graph
    ys: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    first: int
    end: int
    alone: bool


@dataclass(eq=False)
class GraphCalls:
    """All that is known of the checkpointed calls in one graph.

    Attributes:
        count: how many there are.
        ends: for each backward op of a call, the backward ops of the same call that no
            other one of them reads: when these have run, it holds nothing more.
        first: the creation index of the oldest of those backward ops.
    """

    count: int = 0
    ends: dict[Operation, tuple[Operation, ...]] = field(default_factory=dict)
    first: int = 0

    def add(self, step: Step) -> None:
        """Note the backward pass of a call."""
        members = frozenset(step.backward)
        ends = tuple(
            op
            for op in unconditional(step.backward)
            if not any(r in members for t in op.outputs for r in consumers(t))
        )
        if step.backward and not self.ends:
            self.first = min(map(creation_index, step.backward))
        self.ends.update(dict.fromkeys(step.backward, ends))

    def before(self, ops: Iterable[Operation]) -> tuple[Operation, ...]:
        """Return the ends of the calls whose backward pass comes just before ops.

        Cost: linear in the backward ops in between, and their inputs.
        """
        found: dict[Operation, None] = {}
        waiting = list(ops)
        met = set(waiting)
        while waiting:
            op = waiting.pop()
            if op in self.ends:
                found.update(dict.fromkeys(self.ends[op]))
                continue
            for t in op.inputs:
                if t.op not in met and creation_index(t.op) >= self.first:
                    met.add(t.op)
                    waiting.append(t.op)
        return tuple(found)


def calls_in(graph: Graph) -> GraphCalls:
    """Return what is known of the checkpointed calls in a graph."""
    state = state_of(graph)
    if state.checkpointed_calls is None:
        state.checkpointed_calls = GraphCalls()
    calls: GraphCalls = state.checkpointed_calls
    return calls
