"""What convolutions hold besides their results when Eigen computes them, not oneDNN."""

from __future__ import annotations

import math
from dataclasses import replace

from geutil.graph.kinds import Graph, Operation
from geutil.memory.program import Program
from geutil.memory.sizes import dims_of, dtype_bytes

_WORKING_SET = 30 << 20
"""The cache that TensorFlow takes the processor to have, in bytes."""


def with_column_buffers(program: Program, graph: Graph) -> Program:
    """Return the program with the buffers that filter gradients work in.

    The kernel of Conv2DBackpropFilter writes patches of images as the columns of a
    matrix, for as many images as fill 30 MB together with the filter and the gradient,
    however small the batch is. The buffer of Conv2DBackpropInput, which depends on the
    processor's caches, is left out.

    Args:
        program: the ops of the graph as nodes, in graph order.
        graph: what the program was read from.

    Cost: linear in the ops.
    """
    ops = graph.get_operations()
    nodes = [
        node.changed(temporary=node.temporary + column_bytes(op))
        if op.type == "Conv2DBackpropFilter"
        else node
        for node, op in zip(program.nodes, ops, strict=True)
    ]
    return replace(program, nodes=nodes)


def column_bytes(op: Operation) -> int:
    """Return the bytes of the columns of a Conv2DBackpropFilter; 0 if not known."""
    gradient, filters = dims_of(op.inputs[2]), dims_of(op.outputs[0])
    if not gradient or not filters or None in (*gradient[1:], *filters):
        return 0
    # On a CPU, channels come last.
    pixels = math.prod(dim or 0 for dim in gradient[1:3])
    patch, depth = math.prod(dim or 0 for dim in filters[:3]), filters[3] or 0
    each = dtype_bytes(op.outputs[0].dtype)
    work = pixels * patch + pixels * depth + patch * depth
    images = -(-(_WORKING_SET // each) // work) if work else 0
    return images * pixels * patch * each
