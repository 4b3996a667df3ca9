"""The invariants of a graph, written down and checked.

| invariant | meaning |
|---|---|
| `acyclic` | no cycle but through the back edge of a version 1 while loop |
| `inputs` | as many inputs, of the types, as the op's definition and attributes say |
| `membership` | inputs and control inputs belong to the same graph as the op |
| `colocation` | every op named in a `loc:@` attribute exists |
| `names` | no two ops share a name |
| `functions` | the graph holds the body of every function that an op calls |
| `frames` | no tensor is read across the frame of a version 1 while loop |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from geutil.errors import RerouteError, VerificationError
from geutil.graph.adjacency import predecessors, successors
from geutil.graph.colocation import colocation_names
from geutil.graph.frames import check_frames
from geutil.graph.functions import functions_of_attributes, has_function
from geutil.graph.kinds import Graph, Operation, is_graph

_SHOWN = 10


@dataclass(frozen=True)
class Violation:
    """One breach of an invariant.

    Attributes:
        invariant: its name in the table of this module.
        op: the name of the op that breaks it.
        reason: what is wrong, in a sentence.
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
            checked; a cycle counts when all of it lies among them.

    Raises:
        VerificationError: with a line and a `Violation` for each breach.

    Cost: linear in ops and edges; reads the definition of each op (about 10 us an op).

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
    """Return every breach of an invariant, grouped by invariant, in graph order."""
    ops = _ops(graph_or_ops)
    return [violation for check in CHECKS for violation in check(ops)]


def _ops(graph_or_ops: Any) -> list[Operation]:
    if is_graph(graph_or_ops):
        ops: list[Operation] = graph_or_ops.get_operations()
        return ops
    return list(graph_or_ops)


def _check_acyclic(ops: list[Operation]) -> Iterator[Violation]:
    waiting = dict.fromkeys(ops, 0)
    for op in ops:
        waiting[op] = sum(1 for p in predecessors(op) if p in waiting)
    ready = [op for op in ops if not waiting[op]]
    for op in ready:
        for successor in successors(op):
            if successor in waiting:
                waiting[successor] -= 1
                if not waiting[successor]:
                    ready.append(successor)
    stuck = {op for op in ops if waiting[op] > 0}
    while stuck:
        cycle = _some_cycle(stuck)
        yield Violation(
            "acyclic",
            cycle[0].name,
            f"is on the cycle {' -> '.join(op.name for op in (*cycle, cycle[0]))}",
        )
        # Whatever cannot be told apart from this cycle is part of the same breach.
        stuck = _beyond(stuck, cycle)


def _some_cycle(stuck: set[Operation]) -> list[Operation]:
    """Walk backward in `stuck`, where every op has a predecessor, to a cycle."""
    op = min(stuck, key=lambda op: op._id)
    place: dict[Operation, int] = {}
    path: list[Operation] = []
    while op not in place:
        place[op] = len(path)
        path.append(op)
        op = next(p for p in predecessors(op) if p in stuck)
    cycle = path[place[op] :][::-1]
    first = min(range(len(cycle)), key=lambda i: cycle[i]._id)
    return cycle[first:] + cycle[:first]


def _beyond(stuck: set[Operation], cycle: list[Operation]) -> set[Operation]:
    """Return the ops of `stuck` that neither lead to `cycle` nor follow from it."""
    touched = set(cycle)
    for neighbours in (predecessors, successors):
        queue = list(cycle)
        for op in queue:
            new = [o for o in neighbours(op) if o in stuck and o not in touched]
            touched.update(new)
            queue.extend(new)
    return stuck - touched


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
    known = _all_names(ops)
    for op in ops:
        for name in colocation_names(op):
            if name not in known:
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
        for name in functions_of_attributes(op.node_def.attr):
            if name and not has_function(op.graph, name):
                yield Violation(
                    "functions",
                    op.name,
                    f"calls '{name}', which the graph does not hold",
                )


def _check_frames(ops: list[Operation]) -> Iterator[Violation]:
    for op in ops:
        for tensor in op.inputs:
            try:
                check_frames(op, tensor)
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
