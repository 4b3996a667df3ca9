"""What oneDNN's passes do to a program after Grappler.

They merge a convolution with the ops around it, and put the ops that they rewrite after
all others.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from geutil.memory.predicting.kernels import ONEDNN
from geutil.memory.program import Node, Program

_FILTER_GRADIENTS = frozenset(("Conv2DBackpropFilter",))


def with_onednn(program: Program, seed: int = 0) -> Program:
    """Return the program with its convolutions merged and its order changed.

    A bias is added, and a bias's gradient summed, within the convolution at its side; a
    padding that only a convolution reads is done within it.

    Cost: linear in nodes and edges.
    """
    rng = random.Random(seed)
    merged, into = _merged(program)
    place = _places(_reverse_postorder(program, rng))
    last = sorted(merged, key=place.__getitem__)
    gone = set(into)
    first = [i for i in range(len(program.nodes)) if i not in gone and i not in merged]
    program = _renumbered(program, merged, into, first + last)
    place = _places(_reverse_postorder(program, rng))
    nodes = program.nodes
    order = sorted(
        range(len(nodes)),
        key=lambda i: (1, place[i]) if _is_onednn(nodes[i]) else (0, i),
    )
    return _renumbered(program, {}, {}, order)


def _places(order: list[int]) -> dict[int, int]:
    return {i: place for place, i in enumerate(order)}


def _reverse_postorder(program: Program, rng: random.Random) -> list[int]:
    successors = list(program.successors())
    stack = []
    for i, node in enumerate(program.nodes):
        if not node.inputs and not node.controls:
            stack.append(i)
    rng.shuffle(stack)
    seen = [False] * len(program.nodes)
    left: list[int] = []
    while stack:
        i = stack.pop()
        if i < 0:
            left.append(~i)
        elif not seen[i]:
            seen[i] = True
            stack.append(~i)
            after = successors[i]
            if len(after) > 8:
                rng.shuffle(after)
            stack.extend(j for j in after if not seen[j])
    left.reverse()
    return left


def _merged(program: Program) -> tuple[dict[int, Node], dict[int, int]]:
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
    merged: dict[int, Node] = {}
    for i, node in enumerate(nodes):
        if node.type == "BiasAdd":
            other = maker[node.inputs[0]]
            if nodes[other].type in ("Conv2D", "Conv3D") and _only(
                node.inputs[0], readers, kept
            ):
                nodes[i] = merged[i] = _with_bias(nodes[other], node)
                into[other] = i
        elif node.type == "BiasAddGrad":
            for reader in readers[node.inputs[0]]:
                filters = nodes[reader]
                if filters.type in _FILTER_GRADIENTS and (
                    filters.inputs[2] == node.inputs[0]
                ):
                    nodes[reader] = merged[reader] = _with_bias_gradient(filters, node)
                    into[i] = reader
                    break
    for i, node in enumerate(nodes):
        if i in into or node.type not in ("Conv2D", "_FusedConv2D"):
            continue
        other = maker[node.inputs[0]]
        if nodes[other].type == "Pad" and _only(node.inputs[0], readers, kept):
            nodes[i] = merged[i] = _with_padding(nodes[other], node)
            into[other] = i
    return merged, into


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


def _renumbered(
    program: Program, merged: dict[int, Node], into: dict[int, int], order: list[int]
) -> Program:
    place = _places(order)
    for i, target in into.items():
        while target in into:
            target = into[target]
        place[i] = place[target]
    nodes = [merged.get(i, program.nodes[i]) for i in order]
    final = [
        node._replace(controls=list(dict.fromkeys(place[c] for c in node.controls)))
        if node.controls
        else node
        for node in nodes
    ]
    return replace(program, nodes=final)


def _is_onednn(node: Node) -> bool:
    return node.type in ONEDNN or node.type == "Conv2DBackpropFilterWithBias"
