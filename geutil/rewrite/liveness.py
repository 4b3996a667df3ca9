"""Live ops: TensorFlow cannot delete those that were replaced.

An op is retired when a rewrite leaves it without readers. Retired ops stay in the
graph, but they are never matched again and do not count as readers. The graph remembers
them from one call to the next; one that somebody reads again counts again.

The territory of a rewrite holds the ops it may match, and those of them that must
survive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from geutil.graph import adjacency, creation, edits, state, types
from geutil.graph.runtime import drop_missing_colocation
from geutil.graph.state import UndoStep, slot
from geutil.graph.types import Graph, IdentitySet, Operation, Tensor

_FEW = 8
"""How many readers besides a match are looked through for one to name."""


class _Retired(dict[Operation, None]):
    """Ops that a rewrite rule left without readers, in order of retirement."""


class Liveness:
    """The readers of each op of a graph, retired ones left out."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._retired = slot(graph, _Retired)
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
        """Take in the present inputs of new or rewired ops."""
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
        """Retire those of `ops` that nobody reads, and ops that only they read."""
        retired: list[Operation] = []
        first = adjacency.graph_order(dict.fromkeys(ops))
        replaced_ops = frozenset(first)
        # Taken from the end: readers are retired before their producers are asked.
        queue = first
        while queue:
            op = queue.pop()
            if op in self._retired or self.readers(op) or self.waiting(op):
                continue
            # An op outside of the match may have effects or be fed, read or not.
            if spared(op) or (op not in replaced_ops and _must_stay(op)):
                continue
            self._mark(op)
            retired.append(op)
            for producer in dict.fromkeys(t.op for t in op.inputs):
                self.readers(producer).discard(op)
                queue.append(producer)
        return retired

    def abandon(self, ops: Iterable[Operation]) -> None:
        """Retire ops that were made in vain, whoever reads them among themselves."""
        # They may be colocated with an op that was to be made and was not.
        for op in ops:
            drop_missing_colocation(op)
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
        """Let retired ops that have readers count again, and then their producers."""
        revived: list[Operation] = []
        while queue:
            op = queue.pop()
            if op not in self._retired:
                continue
            # The known readers lack those that were retired when they were asked for.
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


@contextmanager
def undone_on_error(graph: Graph, liveness: Liveness | None = None) -> Iterator[None]:
    """Put back all edges when the block raises; the ops that it made count no more."""
    count = state.count_ops(graph)
    try:
        with edits.transaction(graph):
            yield
    except BaseException:
        # The edges are back; the ops that were built for them lead nowhere.
        (liveness or Liveness(graph)).abandon(state.ops_since(graph, count))
        raise


def _must_stay(op: Operation) -> bool:
    return op.type.startswith("Placeholder") or bool(op.op_def.is_stateful)


class Territory:
    """The limits of a match that its pattern does not state."""

    def __init__(
        self,
        graph: Graph,
        liveness: Liveness,
        within: Iterable[Operation] | None = None,
        keep: Iterable[Operation | Tensor] = (),
    ) -> None:
        listed = list(keep)
        self.liveness = liveness
        self.within = None if within is None else set(within)
        self._kept_ops = frozenset(e for e in listed if types.is_op(e))
        self._kept = IdentitySet(e for e in listed if not types.is_op(e))
        self._results = IdentitySet(graph.outputs if types.is_func_graph(graph) else ())

    def protection(self, op: Operation) -> str | None:
        """Return why the outputs of `op` must survive, or None."""
        if op in self._kept_ops:
            return f"'{op.name}' is in keep"
        for tensor in op.outputs:
            if tensor in self._kept:
                return f"'{tensor.name}' is in keep"
            if tensor in self._results:
                return f"'{tensor.name}' is an output of the function"
        return None

    def outside_reader(self, op: Operation, ops: Iterable[Operation]) -> str | None:
        """Return who needs an output of `op` besides `ops`, or None."""
        protection = self.protection(op)
        if protection is not None:
            return protection
        members = frozenset(ops)
        readers = self.liveness.readers(op)
        if len(readers) > len(members) + _FEW:
            # Not looked through: a constant may be read by every op there is.
            return f"'{op.name}' has {len(readers)} readers"
        others = [r for r in readers if r not in members]
        if not others:
            return None
        # A set has no order of its own; the oldest reader is the one to name.
        return (
            f"'{min(others, key=adjacency.creation_index).name}' reads '{op.name}' too"
        )

    def objection(self, root: Operation, ops: Iterable[Operation]) -> str | None:
        """Return why `ops` cannot be a match with this root, or None."""
        context = adjacency.control_flow_context(root)
        for op in ops:
            if adjacency.control_flow_context(op) is not context:
                return (
                    f"'{op.name}' runs {_where(op)} but '{root.name}' {_where(root)}; "
                    "one match runs in one context"
                )
            if self.within is not None and op not in self.within:
                return f"'{op.name}' is not among ops"
            if op is not root and self.liveness.is_retired(op):
                return f"'{op.name}' was replaced before"
        return None


def _where(op: Operation) -> str:
    name = creation.context_name(op)
    return "outside every v1 context" if name is None else f"in '{name}'"
