"""The invariants of a graph, written down and checked.

| invariant | meaning |
|---|---|
| `acyclic` | no cycle but through the back edge of a version 1 while loop |
| `inputs` | as many inputs, of the types, as the op's definition and attributes say |
| `membership` | inputs and control inputs belong to the same graph as the op |
| `colocation` | every op named in a `loc:@` attribute exists |
| `names` | no two ops share a name |
| `functions` | the graph holds the body of every function that an op calls |
| `frames` | no edge crosses the frame of a version 1 while loop |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from geutil.errors import ArgumentTypeError, RerouteError, VerificationError
from geutil.graph import adjacency, function_calls, protos, v1_control_flow
from geutil.graph.runtime import colocation_names
from geutil.graph.types import Graph, Operation, is_graph, type_name
from geutil.graph.walks import closure, topological_order

# Violations that a message lists; the rest is counted.
_SHOWN = 10


@dataclass(frozen=True)
class Violation:
    """One breach of an invariant.

    Attributes:
        invariant: its name in the table of this module.
        op: the name of the op that breaks it.
        reason: a sentence that describes the violation.

    Example:
        >>> import geutil as ge
        >>> print(ge.Violation("names", "x", "names 2 ops"))
        [names] 'x': names 2 ops
    """

    invariant: str
    op: str
    reason: str

    def __str__(self) -> str:
        return f"[{self.invariant}] '{self.op}': {self.reason}"


def verify(graph_or_ops: Graph | Iterable[Operation]) -> None:
    """Check that a graph, or some ops of one, keeps every invariant of this module.

    Args:
        graph_or_ops: a `tf.Graph`, or ops of one graph. With ops, only these are
            checked; a cycle counts only if all its ops are among them.

    Raises:
        ArgumentTypeError: the argument is neither a graph nor ops.
        VerificationError: with a line and a `Violation` for each breach.

    Cost: linear in ops and edges; reads the definition of each op (about 10 us per op).

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0) + 2.0
        >>> ge.verify(graph)
    """
    violations = tuple(find_violations(graph_or_ops))
    if violations:
        lines = [str(violation) for violation in violations[:_SHOWN]]
        if len(violations) > _SHOWN:
            lines.append(f"and {len(violations) - _SHOWN} more")
        count = f"{len(violations)} invariant{'s' * (len(violations) > 1)} broken"
        raise VerificationError("\n  ".join([f"{count}:", *lines]), violations)


def find_violations(graph_or_ops: Graph | Iterable[Operation]) -> list[Violation]:
    """Return every breach of an invariant that `verify` knows.

    Args:
        graph_or_ops: a `tf.Graph`, or ops of one graph.

    Returns:
        A `Violation` for each, grouped by invariant, in graph order.

    Raises:
        ArgumentTypeError: the argument is neither.

    Cost: as `verify`.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0) + 2.0
        >>> ge.find_violations(graph)
        []
    """
    ops = _ops(graph_or_ops)
    return [violation for check in CHECKS for violation in check(ops)]


def _ops(graph_or_ops: Any) -> list[Operation]:
    if is_graph(graph_or_ops):
        ops: list[Operation] = graph_or_ops.get_operations()
        return ops
    if not isinstance(graph_or_ops, Iterable):
        raise ArgumentTypeError(
            f"expected a tf.Graph or ops of one, got {type_name(graph_or_ops)}"
        )
    return list(dict.fromkeys(graph_or_ops))


def _check_acyclic(ops: list[Operation]) -> Iterator[Violation]:
    """Yield a cycle for each strong component that a topological sort gets stuck in."""
    waiting = dict.fromkeys(ops, 0)
    for op in ops:
        waiting[op] = sum(1 for p in adjacency.predecessors(op) if p in waiting)
    ready = [op for op in ops if not waiting[op]]
    for op in ready:
        for successor in adjacency.successors(op):
            if successor in waiting:
                waiting[successor] -= 1
                if not waiting[successor]:
                    ready.append(successor)
    # Ops behind a cycle are stuck as well: they form components without a cycle.
    stuck = [op for op in ops if waiting[op] > 0]
    for component in _strong_components(stuck):
        cycle = _some_cycle(component)
        if cycle:
            yield Violation(
                "acyclic",
                cycle[0].name,
                f"is on the cycle {' -> '.join(op.name for op in (*cycle, cycle[0]))}",
            )


def _strong_components(ops: list[Operation]) -> list[dict[Operation, None]]:
    """Return the strongly connected components among `ops`, by their first op."""
    # Kosaraju's way: ops are finished walking forward, then collected walking backward
    # from the one that finished last.
    members = dict.fromkeys(ops)
    finished = topological_order(
        ops, lambda op: [s for s in adjacency.successors(op) if s in members]
    )
    components = []
    for op in reversed(finished):
        if op in members:
            component = closure(
                [op], lambda o: [p for p in adjacency.predecessors(o) if p in members]
            )
            for member in component:
                del members[member]
            components.append(component)
    return sorted(components, key=lambda c: min(op._id for op in c))


def _some_cycle(component: Collection[Operation]) -> list[Operation]:
    """Return a cycle within a strongly connected component; [] for a lone op."""
    op = min(component, key=lambda op: op._id)
    place: dict[Operation, int] = {}
    path: list[Operation] = []
    while op not in place:
        place[op] = len(path)
        path.append(op)
        before = next((p for p in adjacency.predecessors(op) if p in component), None)
        if before is None:
            return []
        op = before
    cycle = path[place[op] :][::-1]
    first = min(range(len(cycle)), key=lambda i: cycle[i]._id)
    return cycle[first:] + cycle[:first]


def _check_inputs(ops: list[Operation]) -> Iterator[Violation]:
    for op in ops:
        expected = [t.base_dtype for t in op._input_types]
        actual = [t.dtype.base_dtype for t in op.inputs]
        if expected != actual:
            yield Violation(
                "inputs",
                op.name,
                f"{op.type} takes {_dtypes(expected)} but reads {_dtypes(actual)}",
            )


def _dtypes(dtypes: list[Any]) -> str:
    return f"({', '.join(dtype.name for dtype in dtypes)})"


def _check_membership(ops: list[Operation]) -> Iterator[Violation]:
    for op in ops:
        for tensor in op.inputs:
            if tensor.graph is not op.graph:
                yield Violation(
                    "membership", op.name, f"reads '{tensor.name}' of another graph"
                )
        for control in op.control_inputs:
            if control.graph is not op.graph:
                yield Violation(
                    "membership",
                    op.name,
                    f"waits for '{control.name}' of another graph",
                )


def _check_colocation(ops: list[Operation]) -> Iterator[Violation]:
    op_names = _all_names(ops)
    for op in ops:
        for name in colocation_names(op):
            if name not in op_names:
                yield Violation(
                    "colocation",
                    op.name,
                    f"is colocated with '{name}', which does not exist",
                )


def _all_names(ops: list[Operation]) -> frozenset[str]:
    return (
        frozenset(op.name for op in ops[0].graph.get_operations())
        if ops
        else frozenset()
    )


def _check_names(ops: list[Operation]) -> Iterator[Violation]:
    for name, count in Counter(op.name for op in ops).items():
        if count > 1:
            yield Violation("names", name, f"names {count} ops")


def _check_functions(ops: list[Operation]) -> Iterator[Violation]:
    for op in ops:
        for name in protos.functions_of_attributes(op.node_def.attr):
            if name and not function_calls.has_function(op.graph, name):
                yield Violation(
                    "functions",
                    op.name,
                    f"calls '{name}', which the graph does not hold",
                )


def _check_frames(ops: list[Operation]) -> Iterator[Violation]:
    for op in ops:
        checks: list[Callable[[], None]] = [
            partial(v1_control_flow.check_frames, op, tensor) for tensor in op.inputs
        ]
        checks += [
            partial(v1_control_flow.check_control_frames, op, c)
            for c in op.control_inputs
        ]
        for check in checks:
            try:
                check()
            except RerouteError as error:
                yield Violation("frames", op.name, str(error))


CHECKS: tuple[Callable[[list[Operation]], Iterator[Violation]], ...] = (
    _check_acyclic,
    _check_inputs,
    _check_membership,
    _check_colocation,
    _check_names,
    _check_functions,
    _check_frames,
)
