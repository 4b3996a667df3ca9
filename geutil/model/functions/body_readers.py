"""What reads an argument of a function."""

from __future__ import annotations

from geutil.graph.adjacency import consumers
from geutil.graph.kinds import Operation, Tensor
from geutil.model.functions.bodies import EditableBody


def readers_of(body: EditableBody, index: int, in_loop: bool) -> list[str]:
    """Return what reads an argument; a loop's body may return it as it is."""
    argument = list(body.inputs.values())[index]
    passing: set[Operation] = set()
    if in_loop:
        result = list(body.outputs.values())[index]
        passing = _way_back(result, argument)
        if result is not argument and not passing:
            return [f"{result.op.name} (it is another value after each round)"]
        passing.add(list(body.outputs.sinks.values())[index])
    needed = frozenset(body.needed_ops())
    sinks = {sink: f"output '{n}'" for n, sink in body.outputs.sinks.items()}
    read = [argument, *(t for op in passing for t in op.outputs)]
    found = [op for t in read for op in consumers(t)]
    return [
        sinks.get(op, op.name)
        for op in dict.fromkeys(found)
        if op in needed and op not in passing
    ]


def _way_back(t: Tensor, source: Tensor) -> set[Operation]:
    """Return the Identity ops between two tensors; none if there are others."""
    ops = set()
    while t is not source:
        if t.op.type != "Identity":
            return set()
        ops.add(t.op)
        (t,) = t.op.inputs
    return ops
