"""The order of the ops of a TFLite file, in which interpreters run them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from geutil.errors import TFLiteError
from geutil.tflite.parts import Contents, LiteGraph, LiteOp
from geutil.tflite.state import FIXED_BY_METADATA, check_places_are_free, keeps_order

_CALLS_OF_OTHERS = "STABLEHLO_CUSTOM_CALL"


def calls_others(op: LiteOp) -> bool:
    """Tell whether an op calls subgraphs, or functions of who runs the file."""
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
    named = (n for n in FIXED_BY_METADATA if n in file.metadata)
    return next((f"its metadata '{n}' {FIXED_BY_METADATA[n]}" for n in named), None)


def reorder(file: Contents, graph: LiteGraph, order: Sequence[int]) -> None:
    """Let the ops of a subgraph run in another order; nothing else changes."""
    check_places_are_free(file, "another order")
    ops = graph.ops
    if sorted(order) != list(range(len(ops))):
        raise TFLiteError(
            f"the order of subgraph {file.graphs.index(graph)} has to hold each of its "
            f"{len(ops)} ops once"
        )
    step = {at: place for place, at in enumerate(order)}
    for earlier, later in dependencies(graph):
        if step[earlier] > step[later]:
            raise TFLiteError(
                f"op {later} ({ops[later].kind}) of subgraph "
                f"{file.graphs.index(graph)} cannot run before op {earlier} "
                f"({ops[earlier].kind}), whose result or state it needs"
            )
    graph.set_ops([ops[at] for at in order])
