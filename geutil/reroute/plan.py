"""A plan of rewirings: several steps, checked and applied as one edit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from geutil.graph.adjacency import consumers
from geutil.graph.edits import ControlEdit, InputEdit, apply_edits
from geutil.graph.kinds import Graph, Operation, Tensor

OpPredicate = Callable[[Operation], bool]
Edge = tuple[Operation, int]


class Plan:
    """Edits of one graph that are noted down but not yet applied.

    Each step sees the graph as the steps before it will leave it.

    Args:
        graph: the graph.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._inputs: dict[Edge, Tensor] = {}
        self._readers: dict[int, dict[Edge, None]] = {}
        self._controls: dict[Operation, tuple[Operation, ...]] = {}

    def edges_reading(self, tensor: Tensor) -> list[Edge]:
        """Return the (op, index) pairs that read `tensor`, planned steps included.

        Cost: linear in the inputs of the ops that read it.
        """
        edges = [
            (op, index)
            for op in consumers(tensor)
            for index, t in enumerate(op.inputs)
            if t is tensor and (op, index) not in self._inputs
        ]
        return edges + list(self._readers.get(id(tensor), ()))

    def set_input(self, edge: Edge, tensor: Tensor) -> None:
        """Plan that `edge` reads `tensor`."""
        before = self._inputs.get(edge)
        if before is not None:
            del self._readers[id(before)][edge]
        self._inputs[edge] = tensor
        self._readers.setdefault(id(tensor), {})[edge] = None

    def redirect(
        self, pairs: Iterable[tuple[Tensor, Tensor]], may_modify: OpPredicate
    ) -> int:
        """Plan that whoever reads `old` reads `new`, for all pairs (old, new) at once.

        Args:
            pairs: where an old tensor is repeated, its first pair counts; a pair of
                one tensor with itself does nothing.
            may_modify: tells which ops may be rewired.

        Returns:
            The number of inputs that change.
        """
        changes: dict[Edge, Tensor] = {}
        for old, new in pairs:
            if old is new:
                continue
            for edge in self.edges_reading(old):
                if may_modify(edge[0]):
                    changes.setdefault(edge, new)
        for edge, tensor in changes.items():
            self.set_input(edge, tensor)
        return len(changes)

    def control_inputs(self, op: Operation) -> tuple[Operation, ...]:
        """Return the control inputs that `op` will have."""
        planned = self._controls.get(op)
        return tuple(op.control_inputs) if planned is None else planned

    def set_control_inputs(self, op: Operation, ops: Iterable[Operation]) -> None:
        """Plan that `op` has these control inputs."""
        self._controls[op] = tuple(ops)

    def drop_control_inputs(self, op: Operation, ops: Iterable[Operation]) -> None:
        """Plan that `op` does not wait for `ops`."""
        dropped = frozenset(ops)
        before = self.control_inputs(op)
        after = tuple(c for c in before if c not in dropped)
        if len(after) != len(before):
            self._controls[op] = after

    def apply(self) -> None:
        """Check the whole plan and apply it; a refusal leaves the graph untouched.

        Raises:
            FinalizedGraphError, StaleGraphError, CycleError, RerouteError: see
                `geutil.graph.edits.apply_edits`.
        """
        apply_edits(
            self._graph,
            [InputEdit(*edge, tensor) for edge, tensor in self._inputs.items()],
            [ControlEdit(op, ops) for op, ops in self._controls.items()],
        )


def may_modify(can_modify: Any = None, cannot_modify: Any = None) -> OpPredicate:
    """Return a predicate on ops from sets of ops; None for `can_modify` is all."""
    allowed = None if can_modify is None else frozenset(can_modify)
    forbidden = frozenset(cannot_modify or ())
    return lambda op: (allowed is None or op in allowed) and op not in forbidden
