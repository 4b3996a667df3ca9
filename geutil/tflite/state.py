"""State in TFLite files: variables, tables, random numbers; the order it imposes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from geutil.errors import TFLiteError, Words
from geutil.tflite.parts import Contents, LiteGraph, LiteOp, LiteTensor

HANDLES = frozenset({"HASHTABLE", "VAR_HANDLE"})
"""Kinds that give a handle; all with one name give that of one resource."""
WRITERS = frozenset({"ASSIGN_VARIABLE", "HASHTABLE_IMPORT"})
"""Kinds that write to the resource of a handle."""
_READERS = frozenset({"HASHTABLE_FIND", "HASHTABLE_SIZE", "READ_VARIABLE"})
TAKE_HANDLES = WRITERS | _READERS
"""Kinds that read a handle; ops that call subgraphs can hand one on."""
_RANDOM = frozenset(
    {
        "MULTINOMIAL",
        "RANDOM_STANDARD_NORMAL",
        "RANDOM_UNIFORM",
        "STABLEHLO_RNG_BIT_GENERATOR",
    }
)
_ORDERED = HANDLES | WRITERS | _READERS | _RANDOM | {"CALL_ONCE", "DELEGATE"}
FIXED_BY_METADATA: Mapping[str, str] = {
    "model_control_dependencies": "ties ops by their places",
    "OfflineMemoryAllocation": "holds an arena that was planned for these ops",
}
"""Metadata that no longer fit the file once its ops have other places."""

DESCRIPTION = "TFLITE_METADATA"
"""Metadata that describe the inputs and outputs of a file in their order."""
Resource = tuple[object, ...]


def called_graphs(ops: Iterable[LiteOp]) -> list[LiteGraph]:
    """Return the subgraphs that ops call, and those that these call, each once."""
    found = dict.fromkeys(graph for op in ops for graph in op.subgraphs)
    queue = [*found]
    for graph in queue:
        for op in graph.ops:
            for callee in op.subgraphs:
                if callee not in found:
                    found[callee] = None
                    queue.append(callee)
    return queue


def with_called(op: LiteOp) -> list[LiteOp]:
    """Return an op and the ops of all subgraphs that it calls."""
    return [op, *(inner for graph in called_graphs([op]) for inner in graph.ops)]


def keeps_order(op: LiteOp) -> bool:
    """Tell whether an op runs in its place among others that read or change state."""
    return any(
        one.kind in _ORDERED or one.is_custom or any(t.is_variable for t in one.reads)
        for one in with_called(op)
    )


def has_effect(op: LiteOp) -> bool:
    """Tell whether an op is needed even if nothing reads its results."""
    return any(
        one.kind in WRITERS
        or one.kind == "CALL_ONCE"
        or one.is_custom
        # A state that another op reads, too.
        or any(t.is_variable and len(t.readers) > 1 for t in one.reads)
        for one in with_called(op)
    )


def resources(op: LiteOp) -> set[Resource]:
    """Return the variables and tables that an op, or a subgraph it calls, is about."""
    found: set[Resource] = set()
    for one in with_called(op):
        makers = (t.producer for t in one.reads)
        for handle in (one, *makers):
            if handle is not None and handle.kind in HANDLES:
                names = handle.options
                found.add((handle.kind, *(names[key] for key in sorted(names))))
        found |= {
            ("tensor", t) for t in one.reads if (t.is_variable or t.dtype == "resource")
        }
    return found


def writes_state(op: LiteOp) -> bool:
    """Tell whether an op, or a subgraph that it calls, writes to a resource."""
    return any(one.kind in WRITERS for one in with_called(op))


def check_places_are_free(file: Contents, edit: str) -> None:
    """Refuse an edit that gives ops other places where metadata names them by place."""
    for name, reason in FIXED_BY_METADATA.items():
        if name in file.metadata:
            raise TFLiteError(
                f"{edit} gives ops other places, and the metadata '{name}' {reason}",
                remedy=f"leave it out first: {without(name)}",
            )


def without(name: str) -> Words:
    """Return the call that leaves metadata out."""
    return Words(f"strip(metadata=['{name}'])")


def leave_description_out(file: Contents) -> None:
    """Drop the metadata that describe ends which the file no longer has as they were.

    The files of the archive belong to the description.
    """
    if file.metadata.pop(DESCRIPTION, None) is not None:
        file.archive = None


def in_order(
    ops: Sequence[LiteOp],
    inputs: Mapping[LiteOp, Sequence[LiteTensor | None]],
) -> list[LiteOp]:
    """Return ops in an order in which each runs behind those that it reads from.

    Ops stay where they are as far as that goes, and those with state keep their order
    among themselves.
    """
    maker = {t: op for op in ops for t in op.outputs}
    place = {op: i for i, op in enumerate(ops)}
    after: dict[LiteOp, list[LiteOp]] = {op: [] for op in ops}
    waiting = dict.fromkeys(ops, 0)
    last: LiteOp | None = None
    for op in ops:
        read = dict.fromkeys(maker.get(t) for t in inputs.get(op, op.inputs) if t)
        earlier = [*read]
        if keeps_order(op):
            earlier.append(last)
            last = op
        for other in earlier:
            if other is not None:
                after[other].append(op)
                waiting[op] += 1
    ready = [place[op] for op in ops if not waiting[op]]
    ordered: list[LiteOp] = []
    while ready:
        op = ops[heapq.heappop(ready)]
        ordered.append(op)
        for later in after[op]:
            waiting[later] -= 1
            if not waiting[later]:
                heapq.heappush(ready, place[later])
    if len(ordered) < len(ops):
        stuck = next(op for op in ops if waiting[op])
        raise TFLiteError(
            f"{stuck!r} would have to run before itself: it would read a tensor that "
            "is made from its own result, or that ops with state make behind it"
        )
    return ordered
