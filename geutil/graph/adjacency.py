"""Who reads what: the edges around an op.

TensorFlow keeps the consumers of a tensor in a hash set of pointers once there are
more than eight, so their order changes from process to process. The functions here
return them in graph order (the order in which the ops were made).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

from geutil.graph.op_types import MERGES, NEXT_ITERATIONS
from geutil.graph.types import Operation, Tensor

creation_index = attrgetter("_id_value")
"""Key that sorts ops into graph order."""

_LISTED = 8
"""How many edges TensorFlow keeps in a list."""


def consumers(tensor: Tensor) -> list[Operation]:
    """Return the ops that read `tensor`, each once, in graph order.

    Cost: linear in the edges that leave the tensor, and a sort when they are two or
    more.
    """
    ops: list[Operation] = tensor.consumers()
    if len(ops) < 2:
        return ops
    return sorted(dict.fromkeys(ops), key=creation_index)


def control_inputs(op: Operation) -> list[Operation]:
    """Return the ops that `op` waits for, in graph order.

    TensorFlow keeps them in a hash set too.
    """
    ops = list(op.control_inputs)
    if len(ops) > 1:
        ops.sort(key=creation_index)
    return ops


def control_input_orders(op: Operation) -> tuple[list[Operation], list[Operation]]:
    """Return the ops that `op` waits for as TensorFlow lists and as it writes them.

    Few edges of an op are kept in a list, many in a hash set, whose order means
    nothing: then both are in the order of the op's definition.
    """
    ops: list[Operation] = op.control_inputs
    names = (name[1:] for name in op.node_def.input if name.startswith("^"))
    place = {name: index for index, name in enumerate(names)}
    written = sorted(ops, key=lambda c: (place.get(c.name, len(place)), c._id))
    return (ops if len(ops) + len(op.inputs) <= _LISTED else written), written


def control_outputs(op: Operation) -> list[Operation]:
    """Return the ops that have `op` as a control input, in graph order."""
    ops = op._control_outputs
    return sorted(ops, key=creation_index) if len(ops) > 1 else list(ops)


def is_back_edge(producer: Operation, consumer: Operation) -> bool:
    """Tell whether an edge is the back edge of a version 1 while loop."""
    return producer.type in NEXT_ITERATIONS and consumer.type in MERGES


def predecessors(op: Operation) -> Iterator[Operation]:
    """Yield the ops that must run before `op`, loop back edges left out."""
    for tensor in op.inputs:
        producer = tensor.op
        if not is_back_edge(producer, op):
            yield producer
    yield from control_inputs(op)


def successors(op: Operation) -> Iterator[Operation]:
    """Yield the ops that must run after `op`, loop back edges left out."""
    for tensor in op.outputs:
        for consumer in tensor.consumers():
            if not is_back_edge(op, consumer):
                yield consumer
    yield from op._control_outputs


def graph_order(ops: Iterable[Operation]) -> list[Operation]:
    """Return `ops` sorted into graph order."""
    return sorted(ops, key=creation_index)


def input_indices(op: Operation, tensor: Tensor) -> list[int]:
    """Return the positions at which `op` reads `tensor`."""
    return [index for index, t in enumerate(op.inputs) if t is tensor]


def takes_reference(op: Operation, index: int) -> bool:
    """Tell whether input `index` of `op` must be a reference to a variable."""
    return bool(op._input_types[index]._is_ref_dtype)


def control_flow_context(op: Operation) -> Any:
    """Return the version 1 control-flow context of `op`, or None."""
    return op._get_control_flow_context()
