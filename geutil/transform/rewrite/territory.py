"""Where a match may lie: in one control-flow context, within the ops asked about."""

from __future__ import annotations

from collections.abc import Iterable

from geutil.graph.adjacency import control_flow_context, creation_index
from geutil.graph.identity import IdentitySet
from geutil.graph.kinds import Graph, Operation, Tensor, is_func_graph, is_op
from geutil.graph.surroundings import context_name
from geutil.transform.rewrite.liveness import Liveness

_FEW = 8
"""How many readers besides a match are looked through for one to name."""


class Territory:
    """The limits of a match that its pattern does not state.

    Args:
        graph: the graph.
        liveness: who reads what.
        within: the ops that a match may be made of; None is all.
        keep: ops and tensors that stay as they are.
    """

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
        self._kept_ops = frozenset(e for e in listed if is_op(e))
        self._kept = IdentitySet(e for e in listed if not is_op(e))
        self._results = IdentitySet(graph.outputs if is_func_graph(graph) else ())

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
        return f"'{min(others, key=creation_index).name}' reads '{op.name}' too"

    def objection(self, root: Operation, ops: Iterable[Operation]) -> str | None:
        """Return why `ops` cannot be a match with this root, or None."""
        context = control_flow_context(root)
        for op in ops:
            if control_flow_context(op) is not context:
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
    name = context_name(op)
    return "outside every v1 context" if name is None else f"in '{name}'"
