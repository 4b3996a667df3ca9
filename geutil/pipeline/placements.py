"""Placements: ops moved to a device, and the tensors that cross for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from geutil.errors import ArgumentTypeError, TransformError
from geutil.graph import adjacency, edits
from geutil.graph.placement import colocation_names
from geutil.graph.types import Operation, Tensor, type_name
from geutil.memory.sizes import tensor_bytes
from geutil.pipeline.stage_memory import is_handle
from geutil.select import conversions
from geutil.sizes import size_text


@dataclass(frozen=True, eq=False)
class Placement:
    """Ops that were moved to a device.

    Attributes:
        device: the device.
        ops: the ops that are there now, in graph order.
        left: the ops that stay where their variable is, in graph order.
        received: the tensors that the ops read from other devices.
        sent: the tensors that are read on other devices.
        received_bytes: the bytes of the former; open dimensions count as 32.
        sent_bytes: the bytes of the latter.
    """

    device: str
    ops: tuple[Operation, ...] = field(repr=False)
    left: tuple[Operation, ...] = field(repr=False)
    received: tuple[Tensor, ...] = field(repr=False)
    sent: tuple[Tensor, ...] = field(repr=False)
    received_bytes: int
    sent_bytes: int

    def __str__(self) -> str:
        lines = [f"{len(self.ops)} op(s) on {self.device}"]
        for way, tensors, size in (
            ("receive", self.received, self.received_bytes),
            ("send", self.sent, self.sent_bytes),
        ):
            names = ", ".join(f"'{t.name}'" for t in tensors[:3])
            more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
            if tensors:
                lines.append(f"  they {way} {size_text(size)}: {names}{more}")
        lines += [
            f"  '{op.name}' ({op.type}) stays: it reads a variable that is not moved"
            for op in self.left
        ]
        return "\n".join(lines)


def place(ops: Any, device: str) -> Placement:
    """Put ops on a device, and return the tensors that cross.

    Ops that read a variable from outside stay where that is, since TensorFlow runs them
    nowhere else.

    Args:
        ops: ops, or a nested list of them.
        device: the device, such as "/job:worker/task:1" or "/device:CPU:0".

    Returns:
        The ops, and the tensors that cross. The inputs and results of an op without a
        device count as crossing: TensorFlow is free to put that elsewhere.

    Raises:
        ArgumentTypeError: `device` is no text.
        SelectionError: there are no ops, or of several graphs.
        TransformError: an op is colocated with one that is not moved; nothing is
            changed.
        StaleGraphError, FinalizedGraphError: the graph cannot be edited any more.

    Cost: linear in the ops and their edges.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.transform import place
        >>> with tf.Graph().as_default():
        ...     x = tf.ones([1000, 250], name="x")
        ...     y = tf.reduce_sum(tf.nn.relu(x, name="relu"), name="sum")
        >>> print(place([y.op.inputs[0].op, y.op], "/device:CPU:0"))
        2 op(s) on /device:CPU:0
          they receive 1.0 MB: 'x:0', 'Const:0'
    """
    if not isinstance(device, str):
        raise ArgumentTypeError(
            f"a device is a text, such as '/device:CPU:0', not {type_name(device)}"
        )
    listed = adjacency.graph_order(conversions.make_list_of_op(ops))
    graph = conversions.graph_of_all(listed)
    inside = frozenset(listed)
    left = [
        op
        for op in listed
        if any(is_handle(t.op) and t.op not in inside for t in op.inputs)
    ]
    moved = [op for op in listed if op not in frozenset(left)]
    _check_colocation(moved)
    edits.set_devices(graph, dict.fromkeys(moved, device))
    there = frozenset(moved)
    received = _elsewhere([t for op in moved for t in op.inputs], there, device)
    sent = [
        t
        for op in moved
        for t in op.outputs
        if any(r.device != device for r in adjacency.consumers(t) if r not in there)
    ]
    return Placement(
        device,
        tuple(moved),
        tuple(left),
        tuple(received),
        tuple(sent),
        sum(map(tensor_bytes, received)),
        sum(map(tensor_bytes, sent)),
    )


def _elsewhere(
    tensors: Sequence[Tensor], there: frozenset[Operation], device: str
) -> list[Tensor]:
    """Return the tensors that are not made on a device, each once."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        if tensor.op not in there and tensor.op.device != device:
            found.setdefault(id(tensor), tensor)
    return list(found.values())


def _check_colocation(ops: Sequence[Operation]) -> None:
    """Raise TransformError if an op of a group is moved without another."""
    if not ops:
        return
    inside = {op.name for op in ops}
    for op in ops[0].graph.get_operations():
        for name in colocation_names(op):
            if (op.name in inside) != (name in inside) and name != op.name:
                moved, other = (op.name, name) if op.name in inside else (name, op.name)
                raise TransformError(
                    f"'{moved}' is colocated with '{other}', which is not moved; move "
                    "both"
                )
