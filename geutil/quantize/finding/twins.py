"""Ops that compute the same from the same, of which TFLite's converter makes one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from geutil.graph.kinds import Operation, Tensor
from geutil.graph.plain_gradients import is_stateful

_SMALL = 64
"""Constants of so many values are told by them."""


def find_twins(ops: Iterable[Operation]) -> list[list[Operation]]:
    """Return groups of ops that have the same type, attributes and inputs.

    Inputs are the same, too, if twins make them. Placeholders, variables and what has
    state have no twins.

    Args:
        ops: the ops, in topological order.

    Cost: linear in ops and edges.
    """
    groups: dict[Any, list[Operation]] = {}
    first: dict[Operation, Operation] = {}
    for op in ops:
        if _has_its_own_value(op):
            continue
        node = op.node_def
        node.name = ""
        del node.input[:]
        node.attr.pop("_class", None)
        inputs = tuple(_identity(t, first) for t in op.inputs)
        key = node.SerializeToString(deterministic=True), inputs
        group = groups.setdefault(key, [])
        group.append(op)
        first[op] = group[0]
    return [group for group in groups.values() if len(group) > 1]


def _has_its_own_value(op: Operation) -> bool:
    """Tell whether an op of the same kind and inputs may yield something else."""
    if op.type == "ReadVariableOp":
        return False
    return is_stateful(op) or (not op.inputs and op.type != "Const")


def _identity(tensor: Tensor, first: dict[Operation, Operation]) -> Any:
    is_constant = tensor.op.type == "Const" and tensor.dtype != tf.string
    if is_constant and (tensor.shape.num_elements() or 0) <= _SMALL:
        value = tf.get_static_value(tensor)
        return tensor.dtype.name, value.shape, value.tobytes()
    return first.get(tensor.op, tensor.op).name, tensor.value_index
