"""What oneDNN's passes do to a program after Grappler.

They merge a convolution with the ops around it, and put the ops that they rewrite after
all others.
"""

from __future__ import annotations

from collections.abc import Iterable

from geutil.memory.predicting.kernels import ONEDNN
from geutil.memory.program import Node, Program

_FILTER_GRADIENTS = frozenset(("Conv2DBackpropFilter",))


def with_onednn(program: Program) -> Program:
    """Return the program with its convolutions merged and its order changed.

    A bias is added, and a bias's gradient summed, within the convolution at its side; a
    padding that only a convolution reads is done within it.

    Cost: linear in nodes and edges.
    """
    nodes = list(program.nodes)
    kept = set(program.fetched)
    readers: list[list[int]] = [[] for _ in program.sizes]
    maker = [0] * len(program.sizes)
    for i, node in enumerate(nodes):
        for tensor in node.inputs:
            readers[tensor].append(i)
        for tensor in node.outputs:
            maker[tensor] = i
    into: dict[int, int] = {}
    for i, node in enumerate(nodes):
        if node.type == "BiasAdd":
            other = maker[node.inputs[0]]
            if nodes[other].type in ("Conv2D", "Conv3D") and _only(
                node.inputs[0], readers, kept
            ):
                nodes[i] = _with_bias(nodes[other], node)
                into[other] = i
        elif node.type == "BiasAddGrad":
            for reader in readers[node.inputs[0]]:
                filters = nodes[reader]
                if filters.type in _FILTER_GRADIENTS and (
                    filters.inputs[2] == node.inputs[0]
                ):
                    nodes[reader] = _with_bias_gradient(filters, node)
                    into[i] = reader
                    break
    for i, node in enumerate(nodes):
        if i in into or node.type not in ("Conv2D", "_FusedConv2D"):
            continue
        other = maker[node.inputs[0]]
        if nodes[other].type == "Pad" and _only(node.inputs[0], readers, kept):
            nodes[i] = _with_padding(nodes[other], node)
            into[other] = i
    return _renumbered(program, nodes, into)


def _only(tensor: int, readers: list[list[int]], kept: Iterable[int]) -> bool:
    return len(readers[tensor]) == 1 and tensor not in kept


def _with_bias(convolution: Node, bias: Node) -> Node:
    return bias._replace(
        type="_FusedConv2D",
        inputs=[*convolution.inputs, *bias.inputs[1:]],
        controls=[*convolution.controls, *bias.controls],
        reuses=(),
    )


def _with_bias_gradient(filters: Node, bias: Node) -> Node:
    return filters._replace(
        type="Conv2DBackpropFilterWithBias",
        outputs=[*filters.outputs, *bias.outputs],
        controls=[*filters.controls, *bias.controls],
    )


def _with_padding(padding: Node, convolution: Node) -> Node:
    return convolution._replace(
        inputs=[padding.inputs[0], *convolution.inputs[1:], *padding.inputs[1:]],
        controls=[*padding.controls, *convolution.controls],
    )


def _renumbered(program: Program, nodes: list[Node], into: dict[int, int]) -> Program:
    """Leave out the nodes that were merged into others, and put oneDNN's last."""
    left = [i for i in range(len(nodes)) if i not in into]
    order = sorted(left, key=lambda i: _is_onednn(nodes[i]))
    place = {i: at for at, i in enumerate(order)}
    for i, target in into.items():
        while target in into:
            target = into[target]
        place[i] = place[target]
    final = [
        nodes[i]._replace(
            controls=list(dict.fromkeys(place[c] for c in nodes[i].controls))
        )
        if nodes[i].controls
        else nodes[i]
        for i in order
    ]
    return Program(
        final,
        program.sizes,
        program.fetched,
        program.variable_bytes,
        program.constant_bytes,
    )


def _is_onednn(node: Node) -> bool:
    return node.type in ONEDNN or node.type == "Conv2DBackpropFilterWithBias"
