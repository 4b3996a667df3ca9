"""Live ops: those that still count, since TensorFlow cannot delete what was replaced.

An op is retired when a rewrite leaves it without readers. Retired ops stay in the
graph, but they are never matched again and do not count as readers. The graph
remembers them from one call to the next; one that somebody reads again counts again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from geutil.graph import adjacency, colocation, edits
from geutil.graph.state import UndoStep, state_of
from geutil.graph.types import Graph, Operation


class Liveness:
    """Who reads what in a graph, retired ops left out.

    Args:
        graph: the graph. Retired ops that are read again count again from here on.

    Cost: linear in the retired ops and their edges, once; each answer is linear in the
    edges that leave the op when it is first asked for, and kept up to date then.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._retired = state_of(graph).retired
        self._readers: dict[Operation, set[Operation]] = {}
        self._revive(list(self._retired))

    def is_retired(self, op: Operation) -> bool:
        """Tell whether a rewrite left `op` without readers."""
        return op in self._retired

    def readers(self, op: Operation) -> set[Operation]:
        """Return the ops that read an output of `op`; not to be changed."""
        readers = self._readers.get(op)
        if readers is None:
            readers = {
                reader
                for tensor in op.outputs
                for reader in tensor.consumers()
                if reader not in self._retired
            }
            self._readers[op] = readers
        return readers

    def waiting(self, op: Operation) -> list[Operation]:
        """Return the ops that have `op` as a control input, in graph order."""
        return [c for c in adjacency.control_outputs(op) if c not in self._retired]

    def take_in(self, ops: Iterable[Operation]) -> None:
        """Learn what new or rewired ops read now."""
        for op in ops:
            for tensor in op.inputs:
                readers = self._readers.get(tensor.op)
                if readers is not None:
                    readers.add(op)

    def forget(self, ops: Iterable[Operation]) -> None:
        """Ask anew who reads `ops` when that is next needed."""
        for op in ops:
            self._readers.pop(op, None)

    def retire(
        self, ops: Iterable[Operation], spared: Callable[[Operation], bool]
    ) -> list[Operation]:
        """Retire those of `ops` that nobody reads, and what only they read.

        Args:
            ops: ops that a rewrite replaced.
            spared: tells which ops may not be retired.

        Returns:
            The retired ops. Stateful ops above `ops` are never among them.
        """
        retired: list[Operation] = []
        first = adjacency.graph_order(dict.fromkeys(ops))
        given = frozenset(first)
        queue = first
        while queue:
            op = queue.pop()
            if op in self._retired or self.readers(op) or self.waiting(op):
                continue
            if spared(op) or (op not in given and _must_stay(op)):
                continue
            self._mark(op)
            retired.append(op)
            for producer in dict.fromkeys(t.op for t in op.inputs):
                self.readers(producer).discard(op)
                queue.append(producer)
        return retired

    def abandon(self, ops: Iterable[Operation]) -> None:
        """Retire ops that were made in vain, whoever reads them among themselves.

        They may be colocated with an op that was to be made and was not.
        """
        for op in ops:
            colocation.drop_missing_colocation(op)
            self._retired.setdefault(op)

    def _mark(self, op: Operation) -> None:
        edits.note_undo(self._graph, UndoStep(lambda: self._unmark(op)))
        self._retired[op] = None

    def _unmark(self, op: Operation) -> None:
        self._retired.pop(op, None)

    def revive(self, ops: Iterable[Operation]) -> list[Operation]:
        """Let those of `ops` count again that are read; return them."""
        return self._revive([op for op in ops if op in self._retired])

    def _revive(self, queue: list[Operation]) -> list[Operation]:
        revived: list[Operation] = []
        while queue:
            op = queue.pop()
            if op not in self._retired:
                continue
            self.forget([op])
            if self.readers(op) or self.waiting(op):
                edits.note_undo(
                    self._graph, UndoStep(partial(self._retired.setdefault, op))
                )
                self._unmark(op)
                revived.append(op)
                producers = [t.op for t in op.inputs]
                self.forget(producers)
                queue.extend(producers)
        return revived


def _must_stay(op: Operation) -> bool:
    return op.type.startswith("Placeholder") or bool(op.op_def.is_stateful)
