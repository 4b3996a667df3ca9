"""What a layer and its norms wait for, what is folded waits for too."""

from __future__ import annotations

from collections.abc import Collection

from geutil.batchnorm.folds import Fold, build
from geutil.graph.adjacency import control_inputs, graph_order
from geutil.graph.importing import add_control_edges
from geutil.graph.kinds import Operation, Tensor
from geutil.graph.surroundings import count_ops, ops_since


def build_waiting(fold: Fold) -> Tensor:
    """Build what stands in for a layer and its norms, and let it wait as they do.

    Returns:
        What replaces the result of the fold's end.

    Cost: that of building, and linear in the ops that make the parameters.
    """
    awaited = _awaited(fold)
    before = count_ops(fold.end.graph)
    result = build(fold)
    if awaited:
        new = frozenset(ops_since(fold.end.graph, before))
        waiting = _parameter_of(result.op, new)
        present = control_inputs(waiting)
        add_control_edges(waiting, [op for op in awaited if op not in present])
    return result


def _awaited(fold: Fold) -> list[Operation]:
    """Return what the ops wait for that are not copied, in the order of the graph."""
    steps = [link.step for link in fold.links if link.step is not None]
    gone = dict.fromkeys(step.op for step in steps)
    parameters = [t for op in gone for t in op.inputs]
    data = {id(step.data) for step in steps}
    waiting = [fold.layer.kernel.op]
    waiting += [t.op for t in parameters if id(t) not in data]
    while waiting:
        op = waiting.pop()
        if op not in gone:
            gone[op] = None
            waiting += [t.op for t in op.inputs]
    found = dict.fromkeys(c for op in gone for c in control_inputs(op))
    return graph_order(op for op in found if op not in gone)


def _parameter_of(op: Operation, new: Collection[Operation]) -> Operation:
    """Return a new op that an op reads its weights or bias from, or the op itself.

    TensorFlow may put a layer and its bias into one op, where an edge onto the sum has
    no place.
    """
    made = (t.op for t in op.inputs[1:] if t.op in new)
    return next(made, op)
