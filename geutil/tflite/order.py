"""The order of the ops of a TFLite file, in which interpreters run them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from geutil.errors import TFLiteError
from geutil.tflite.parts import Contents, LiteGraph, LiteOp

_STATEFUL = frozenset(
    {
        "ASSIGN_VARIABLE",
        "CALL_ONCE",
        "DELEGATE",
        "HASHTABLE",
        "HASHTABLE_FIND",
        "HASHTABLE_IMPORT",
        "HASHTABLE_SIZE",
        "MULTINOMIAL",
        "RANDOM_STANDARD_NORMAL",
        "RANDOM_UNIFORM",
        "READ_VARIABLE",
        "STABLEHLO_RNG_BIT_GENERATOR",
    }
)
_CALLS_OF_OTHERS = "STABLEHLO_CUSTOM_CALL"
_FIXED_BY_METADATA = {
    "model_control_dependencies": "its metadata ties ops by their places",
    "OfflineMemoryAllocation": "its metadata holds an arena that was planned offline",
}


def stateful_places(file: Contents, graph: LiteGraph) -> list[int]:
    """Return the places of ops that change or read a state, which keep their order.

    Calls are among them if any subgraph that may be called has such ops.
    """
    bodies = (op for one in file.graphs[1:] for op in one.ops)
    calls_too = any(_is_stateful(op) for op in bodies)
    return [
        at
        for at, op in enumerate(graph.ops)
        if _is_stateful(op) or (calls_too and calls_others(op))
    ]


def calls_others(op: LiteOp) -> bool:
    """Tell whether an op calls subgraphs, or functions of who runs the file."""
    return bool(op.subgraphs) or op.kind == _CALLS_OF_OTHERS


def _is_stateful(op: LiteOp) -> bool:
    is_known = op.kind in _STATEFUL or op.is_custom
    return is_known or any(t.is_variable for t in op.reads)


def dependencies(file: Contents, graph: LiteGraph) -> list[tuple[int, int]]:
    """Return the pairs (earlier, later) of places of ops that must keep their order.

    The later one reads what the earlier one makes, or both are stateful.

    Cost: linear in ops and edges.
    """
    place = {op: at for at, op in enumerate(graph.ops)}
    pairs = dict.fromkeys(
        (place[maker], at)
        for at, op in enumerate(graph.ops)
        for tensor in op.reads
        for maker in tensor.makers
    )
    stateful = stateful_places(file, graph)
    pairs |= dict.fromkeys(itertools.pairwise(stateful))
    return [*pairs]


def fixed_order_reason(file: Contents) -> str | None:
    """Return why the ops of a file must stay where they are; None if they may move."""
    named = (why for name, why in _FIXED_BY_METADATA.items() if name in file.metadata)
    return next(named, None)


def reorder(file: Contents, graph: LiteGraph, order: Sequence[int]) -> None:
    """Let the ops of a subgraph run in another order; nothing else changes.

    Args:
        file: the file.
        graph: one of its subgraphs.
        order: the ops by their present places.

    Raises:
        TFLiteError: the order leaves out an op, or runs one before another whose result
            or state it needs; the file is as it was.

    Cost: linear in ops and edges.
    """
    ops = graph.ops
    if sorted(order) != list(range(len(ops))):
        raise TFLiteError(
            f"the order of subgraph {file.graphs.index(graph)} has to hold each of its "
            f"{len(ops)} ops once"
        )
    step = {at: place for place, at in enumerate(order)}
    for earlier, later in dependencies(file, graph):
        if step[earlier] > step[later]:
            raise TFLiteError(
                f"op {later} ({ops[later].kind}) of subgraph "
                f"{file.graphs.index(graph)} cannot run before op {earlier} "
                f"({ops[earlier].kind}), whose result or state it needs"
            )
    graph.set_ops([ops[at] for at in order])
