"""Reading a graph as a `Program`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow as tf

from geutil.graph.adjacency import control_inputs, is_back_edge
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.memory.predicting.calls import call_bytes
from geutil.memory.predicting.kernels import (
    CHEAP,
    HELD,
    aliases,
    reuses,
    updates_variable,
)
from geutil.memory.predicting.temporaries import temporary_bytes
from geutil.memory.program import Node, Program
from geutil.memory.sizes import bytes_of_shape

_VARIABLES = frozenset(("VarHandleOp", "Variable", "VariableV2"))

SizeOf = Callable[[Tensor], int]
"""The bytes of a tensor of the graph that is read."""


def read_program(graph: Graph, fetched: Iterable[Tensor], size_of: SizeOf) -> Program:
    """Return all ops of a graph as a program.

    Args:
        graph: holds nothing but what runs.
        fetched: the tensors that are asked for.
        size_of: the bytes of a tensor.

    Cost: linear in ops and edges, those of called functions included.
    """

    def read_body(body: Graph, calls: Mapping[Operation, int]) -> Program:
        return read_ops(body.get_operations(), body.outputs, size_of, calls)

    calls = call_bytes(graph, read_body)
    return read_ops(graph.get_operations(), fetched, size_of, calls)


def read_ops(
    ops: Sequence[Operation],
    fetched: Iterable[Tensor],
    size_of: SizeOf,
    calls: Mapping[Operation, int] | None = None,
) -> Program:
    """Return some ops of a graph as a program.

    Args:
        ops: the ops, with all that they read and wait for.
        fetched: the tensors that are asked for.
        size_of: the bytes of a tensor.
        calls: the bytes that functions hold which ops call, beside the ops' results.

    Cost: linear in the ops and their edges.
    """
    calls = calls or {}
    place = {op: i for i, op in enumerate(ops)}
    tensors: dict[int, int] = {}
    sizes: list[int] = []
    for op in ops:
        held = op.type in HELD
        for tensor in op.outputs:
            tensors[id(tensor)] = len(sizes)
            sizes.append(0 if held else size_of(tensor))
    nodes = [_node(op, tensors, place, calls.get(op, 0)) for op in ops]
    _add_updates(ops, tensors, nodes, sizes)
    return Program(
        nodes=nodes,
        sizes=sizes,
        fetched=[tensors[id(t)] for t in fetched],
        variable_bytes=sum(_variable_bytes(op) for op in ops),
        constant_bytes=sum(size_of(op.outputs[0]) for op in ops if op.type == "Const"),
    )


def _node(
    op: Operation,
    tensors: Mapping[int, int],
    place: Mapping[Operation, int],
    called: int,
) -> Node:
    inputs: Sequence[Tensor] = op.inputs
    if op.type in ("Merge", "RefMerge"):
        inputs = [t for t in inputs if not is_back_edge(t.op, op)]
    return Node(
        name=op.name,
        type=op.type,
        inputs=[tensors[id(t)] for t in inputs],
        outputs=[tensors[id(t)] for t in op.outputs],
        controls=[place[c] for c in control_inputs(op)],
        aliases=aliases(op) if inputs else (),
        reuses=reuses(op),
        temporary=temporary_bytes(op) + called,
        cheap=op.type in CHEAP,
    )


def _add_updates(
    ops: Sequence[Operation],
    tensors: Mapping[int, int],
    nodes: list[Node],
    sizes: list[int],
) -> None:
    """Let ops that change a variable make a buffer for it, if its own is in use."""
    reads: dict[int, list[int]] = {}
    for op in ops:
        if op.type == "ReadVariableOp":
            reads.setdefault(id(op.inputs[0]), []).append(tensors[id(op.outputs[0])])
    for i, op in enumerate(ops):
        if updates_variable(op.type) and id(op.inputs[0]) in reads:
            node = nodes[i]
            nodes[i] = node.changed(
                outputs=[len(sizes)], updates=reads[id(op.inputs[0])]
            )
            # What is added is as large, should the handle come from elsewhere.
            added = max(sizes[tensor] for tensor in node.inputs)
            sizes.append(_variable_bytes(op.inputs[0].op) or added)


def _variable_bytes(op: Operation) -> int:
    if op.type not in _VARIABLES:
        return 0
    shape = tf.TensorShape(op.get_attr("shape"))
    dims = None if shape.rank is None else shape.as_list()
    return bytes_of_shape(op.get_attr("dtype"), dims) or 0
