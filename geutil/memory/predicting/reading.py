"""Reading a graph as a `Program`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import tensorflow as tf

from geutil.graph.adjacency import control_inputs, is_back_edge
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.op_types import VARIABLES
from geutil.memory.predicting.calls import NOTHING, Called, SizeOf, called_functions
from geutil.memory.predicting.kernels import (
    CHEAP,
    HELD,
    aliases,
    reuses,
    updates_variable,
)
from geutil.memory.predicting.loops import ListSizes
from geutil.memory.predicting.shapes import Shapes
from geutil.memory.predicting.temporaries import temporary_bytes
from geutil.memory.program import Node, Program
from geutil.memory.sizes import bytes_of_shape


def read_program(graph: Graph, fetched: Iterable[Tensor], size_of: SizeOf) -> Program:
    """Return all ops of a graph as a program.

    Args:
        graph: holds nothing but what runs.
        fetched: the tensors that are asked for.
        size_of: the bytes of a tensor.

    Cost: linear in ops and edges, those of called functions included.
    """
    calls = calls_in(graph, size_of)
    return read_ops(graph.get_operations(), fetched, size_of, calls)


def calls_in(
    graph: Graph, size_of: SizeOf, among: Collection[Operation] | None = None
) -> dict[Operation, Called]:
    """Return what the functions hold that a graph's ops run.

    Args:
        graph: the graph of the calls.
        size_of: the bytes of a tensor of the graph or of a function's body.
        among: the ops that count; all if None.

    Cost: linear in the ops of the bodies, each once for the shapes of its calls.
    """

    def read_body(body: Graph, calls: Mapping[Operation, Called]) -> Program:
        return read_ops(body.get_operations(), body.outputs, size_of, calls)

    return called_functions(graph, read_body, size_of, among)


def calls_of(ops: Collection[Operation]) -> dict[Operation, Called]:
    """Return what the functions hold that some ops of a graph run.

    What has no known shape in a body counts nothing.

    Cost: linear in the ops of the graph, and of the bodies.
    """
    for op in ops:
        return calls_in(op.graph, Shapes(op.graph, None).bytes_of, frozenset(ops))
    return {}


def read_ops(
    ops: Sequence[Operation],
    fetched: Iterable[Tensor],
    size_of: SizeOf,
    calls: Mapping[Operation, Called] | None = None,
) -> Program:
    """Return some ops of a graph as a program.

    Args:
        ops: the ops, with all that they read and wait for; each after what it reads,
            but for loops of version 1.
        fetched: the tensors that are asked for.
        size_of: the bytes of a tensor.
        calls: what functions hold that ops run.

    Cost: linear in the ops and their edges.
    """
    calls = calls or {}
    place = {op: i for i, op in enumerate(ops)}
    tensors: dict[int, int] = {}
    sizes: list[int] = []
    lists = ListSizes(size_of)
    for op in ops:
        held = op.type in HELD
        listed = lists.add(op, calls.get(op, NOTHING).results)
        for i, tensor in enumerate(op.outputs):
            tensors[id(tensor)] = len(sizes)
            sizes.append(0 if held else listed.get(i) or size_of(tensor))
    nodes = [_node(op, tensors, place, calls.get(op, NOTHING)) for op in ops]
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
    called: Called,
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
        aliases=called.results.aliases or aliases(op) if inputs else (),
        reuses=reuses(op),
        temporary=temporary_bytes(op) + called.temporary,
        surge=called.surge,
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
    if op.type not in VARIABLES:
        return 0
    shape = tf.TensorShape(op.get_attr("shape"))
    dims = None if shape.rank is None else shape.as_list()
    return bytes_of_shape(op.get_attr("dtype"), dims) or 0
