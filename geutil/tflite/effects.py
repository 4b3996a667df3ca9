"""Effects of ops of TFLite files: variables, tables, random numbers; their order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from geutil.errors import TFLiteError, Words
from geutil.graph.walks import walk
from geutil.tflite.parts import Contents, LiteGraph, LiteOp, LiteTensor
from geutil.tflite.schema import words

HANDLES: Mapping[str, str] = {"HASHTABLE": "table_id", "VAR_HANDLE": "shared_name"}
"""Kinds that give a handle, and their option that names the resource of all such."""
WRITERS = frozenset({"ASSIGN_VARIABLE", "HASHTABLE_IMPORT"})
"""Kinds that write to the resource of a handle."""
_READERS = frozenset({"HASHTABLE_FIND", "HASHTABLE_SIZE", "READ_VARIABLE"})
TAKE_HANDLES = WRITERS | _READERS
"""Kinds that read a handle; ops that call subgraphs can hand one on."""
_RANDOM = words(
    "MULTINOMIAL RANDOM_STANDARD_NORMAL RANDOM_UNIFORM STABLEHLO_RNG_BIT_GENERATOR"
)
_ORDERED = {*HANDLES} | WRITERS | _READERS | _RANDOM | {"CALL_ONCE", "DELEGATE"}
FIXED_BY_METADATA: Mapping[str, str] = {
    "model_control_dependencies": "ties ops by their places",
    "OfflineMemoryAllocation": "holds an arena that was planned for these ops",
}
"""Metadata that no longer fit the file once its ops have other places."""

DESCRIPTION = "TFLITE_METADATA"
"""Metadata that describe the inputs and outputs of a file in their order."""
Resource = tuple[object, object, object]
"""The kind, the container and the name of a variable or table."""


def called_graphs(ops: Iterable[LiteOp]) -> list[LiteGraph]:
    """Return the subgraphs that ops call, and those that these call, each once."""
    first = (graph for op in ops for graph in op.subgraphs)
    return [*walk(first, lambda graph: (g for op in graph.ops for g in op.subgraphs))]


def with_called(op: LiteOp) -> list[LiteOp]:
    """Return an op and the ops of all subgraphs that it calls."""
    return [op, *(inner for graph in called_graphs([op]) for inner in graph.ops)]


def keeps_order(op: LiteOp) -> bool:
    """Return whether an op runs in its place among others that read or change state."""
    return any(
        one.kind in _ORDERED or one.is_custom or any(t.is_variable for t in one.reads)
        for one in with_called(op)
    )


def has_effect(op: LiteOp) -> bool:
    """Return whether an op is needed even if nothing reads its results."""
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
                found.add(resource_of(handle))
        found |= {
            ("tensor", "", t)
            for t in one.reads
            if (t.is_variable or t.dtype == "resource")
        }
    return found


def resource_of(handle: LiteOp) -> Resource:
    """Return the variable or table of an op that gives a handle."""
    name = HANDLES.get(handle.kind, "")
    return handle.kind, handle.options.get("container"), handle.options.get(name)


def calls(
    op: LiteOp,
) -> Iterator[tuple[Sequence[LiteTensor | None], LiteGraph, str]]:
    """Yield the tensors of an IF or WHILE, and the subgraphs whose ends they meet."""
    if op.kind in ("IF", "WHILE"):
        first = int(op.kind == "IF")
        for place, graph in enumerate(op.subgraphs):
            yield op.inputs[first:], graph, "inputs"
            # The condition of a loop gives a truth value, and not the loop's tensors.
            if first or place:
                yield op.outputs, graph, "outputs"


def writes_state(op: LiteOp) -> bool:
    """Return whether an op, or a subgraph that it calls, writes to a resource."""
    return any(one.kind in WRITERS for one in with_called(op))


def check_places_are_free(file: Contents, edit: str) -> None:
    """Refuse an edit that gives ops other places where metadata names them by place."""
    for name, reason in _fixing(file).items():
        raise TFLiteError(
            f"{edit} gives ops other places, and the metadata '{name}' {reason}",
            remedy=f"leave it out first: {without(name)}",
        )


def _fixing(file: Contents) -> dict[str, str]:
    return {n: why for n, why in FIXED_BY_METADATA.items() if n in file.metadata}


def without(name: str) -> Words:
    """Return the call that leaves metadata out."""
    return Words(f"strip(metadata=['{name}'])")


def leave_description_out(file: Contents) -> None:
    """Drop the metadata, with their archive, that describe ends as they were before."""
    if file.metadata.pop(DESCRIPTION, None) is not None:
        file.archive = None


def in_order(
    ops: Sequence[LiteOp], inputs: Mapping[LiteOp, Sequence[LiteTensor | None]]
) -> list[LiteOp]:
    """Return ops in an order in which each runs behind those that it reads from."""
    maker = {t: op for op in ops for t in op.outputs}
    place = {op: i for i, op in enumerate(ops)}
    after: dict[LiteOp, list[LiteOp]] = {op: [] for op in ops}
    waiting = dict.fromkeys(ops, 0)
    last: LiteOp | None = None
    for op in ops:
        read = dict.fromkeys(maker.get(t) for t in inputs.get(op, op.inputs) if t)
        earlier = [*read]
        # No tensor shows that one op writes the state which the next one reads.
        if keeps_order(op):
            earlier.append(last)
            last = op
        for other in earlier:
            if other is not None:
                after[other].append(op)
                waiting[op] += 1
    ready = [place[op] for op in ops if not waiting[op]]
    ordered: list[LiteOp] = []
    # The earliest in the old order goes first, so that few ops move.
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


_CALLS_OF_OTHERS = "STABLEHLO_CUSTOM_CALL"


def calls_others(op: LiteOp) -> bool:
    """Return whether an op calls subgraphs, or functions of who runs the file."""
    return bool(op.subgraphs) or op.kind == _CALLS_OF_OTHERS


def dependencies(graph: LiteGraph) -> list[tuple[int, int]]:
    """Return the pairs (earlier, later) of places of ops that must keep their order.

    The later one reads what the earlier one makes, or both are stateful.
    """
    place = {op: at for at, op in enumerate(graph.ops)}
    pairs = dict.fromkeys(
        (place[maker], at)
        for at, op in enumerate(graph.ops)
        for tensor in op.reads
        for maker in tensor.makers
    )
    stateful = (at for op, at in place.items() if keeps_order(op))
    pairs |= dict.fromkeys(itertools.pairwise(stateful))
    return [*pairs]


def fixed_order_reason(file: Contents) -> str | None:
    """Return why the ops of a file must stay where they are; None if they may move."""
    found = (f"its metadata '{n}' {why}" for n, why in _fixing(file).items())
    return next(found, None)
