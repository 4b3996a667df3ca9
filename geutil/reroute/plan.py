"""A plan of rewirings: several steps, checked and applied as one edit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from geutil.graph.adjacency import consumers, control_inputs
from geutil.graph.edits import ControlEdit, InputEdit, apply_edits, check_edits
from geutil.graph.importing import neutral
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.placeholders import make_placeholder_from_tensor

OpPredicate: TypeAlias = Callable[[Operation], bool]
Edge: TypeAlias = tuple[Operation, int]


class PlannedPlaceholder:
    """A placeholder that a plan will make, once nothing stands against it.

    Args:
        like: the tensor that it will stand in for.
    """

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The placeholder; it is there once the plan has been applied."""
        return self._tensor

    def make(self) -> None:
        """Make the placeholder in the default graph."""
        self._tensor = make_placeholder_from_tensor(self.like)


Source: TypeAlias = Tensor | PlannedPlaceholder
Redirection: TypeAlias = tuple[Sequence[tuple[Tensor, Source]], OpPredicate]
"""Pairs (old, new), and which readers of the old tensors may be rewired."""


class Plan:
    """Edits of one graph that are noted down but not yet applied.

    Each step sees the graph as the steps before it will leave it.

    Args:
        graph: the graph.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._inputs: dict[Edge, Source] = {}
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

    def set_input(self, edge: Edge, source: Source) -> None:
        """Plan that `edge` reads `source`."""
        before = self._inputs.get(edge)
        if before is not None:
            del self._readers[id(before)][edge]
        self._inputs[edge] = source
        self._readers.setdefault(id(source), {})[edge] = None

    def redirect(self, *redirections: Redirection) -> int:
        """Plan that whoever reads an old tensor reads its new one, all at once.

        Args:
            *redirections: where an old tensor is repeated, its first pair counts; a
                pair of one tensor with itself does nothing.

        Returns:
            The number of inputs that change.
        """
        changes: dict[Edge, Source] = {}
        for pairs, may_modify in redirections:
            for old, new in pairs:
                if old is new:
                    continue
                for edge in self.edges_reading(old):
                    if may_modify(edge[0]):
                        changes.setdefault(edge, new)
        for edge, source in changes.items():
            self.set_input(edge, source)
        return len(changes)

    def control_inputs(self, op: Operation) -> tuple[Operation, ...]:
        """Return the control inputs that `op` will have."""
        planned = self._controls.get(op)
        return tuple(control_inputs(op)) if planned is None else planned

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

    def apply(self, placeholders: Sequence[PlannedPlaceholder] = ()) -> None:
        """Check the whole plan and apply it; a refusal leaves the graph untouched.

        Args:
            placeholders: made between the check and the edit.

        Raises:
            FinalizedGraphError, StaleGraphError, CycleError, RerouteError: see
                `geutil.graph.edits.apply_edits`.
        """
        if placeholders:
            check_edits(self._graph, self._input_edits(), self._control_edits())
            with neutral(self._graph):
                for placeholder in placeholders:
                    placeholder.make()
        apply_edits(self._graph, self._input_edits(), self._control_edits())

    def _input_edits(self) -> list[InputEdit]:
        return [
            InputEdit(
                *edge,
                source.tensor if isinstance(source, PlannedPlaceholder) else source,
            )
            for edge, source in self._inputs.items()
        ]

    def _control_edits(self) -> list[ControlEdit]:
        return [ControlEdit(op, ops) for op, ops in self._controls.items()]


def may_modify(can_modify: Any = None, cannot_modify: Any = None) -> OpPredicate:
    """Return a predicate on ops from sets of ops; None for `can_modify` is all."""
    allowed = None if can_modify is None else frozenset(can_modify)
    forbidden = frozenset(cannot_modify or ())
    return lambda op: (allowed is None or op in allowed) and op not in forbidden
