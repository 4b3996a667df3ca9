"""Ops that TensorFlow runs as one: no edge may come between them.

Grappler and oneDNN join a padding, a convolution, its bias and its activation, and the
gradients of a filter and of its bias. A control edge at such an op undoes that, or
makes one of the joint op and what waits for a part of it wait for each other
(TensorFlow 2.21: "nodes in a cycle", or an abort).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from geutil.memory.program import Node, Program

_PRODUCERS = {
    "Conv2D": frozenset(("Pad",)),
    "BiasAdd": frozenset(("Conv2D", "DepthwiseConv2dNative", "MatMul")),
    "Elu": frozenset(("BiasAdd",)),
    "LeakyRelu": frozenset(("BiasAdd",)),
    "Relu": frozenset(("BiasAdd",)),
    "Relu6": frozenset(("BiasAdd",)),
}
"""For an op type, those that it is joined with if nothing else reads what they make."""


def fused_groups(program: Program) -> list[list[int]]:
    """Return the nodes in groups that TensorFlow may run as one op each.

    Args:
        program: the nodes, as the ops of a graph.

    Returns:
        Every node once. A group begins with the node whose inputs are the group's, but
        a filter gradient comes before the bias gradients that are summed along with it.

    Cost: linear in nodes and edges.
    """
    nodes = program.nodes
    maker = {t: i for i, node in enumerate(nodes) for t in node.outputs}
    after = list(program.successors())
    fetched = frozenset(program.fetched)
    first = list(range(len(nodes)))
    for i, node in enumerate(nodes):
        if node.type in _PRODUCERS and not node.controls:
            tensor = node.inputs[0]
            j = maker[tensor]
            alone = len(after[j]) == 1 and tensor not in fetched
            if alone and nodes[j].type in _PRODUCERS[node.type]:
                first[i] = first[j]
        elif node.type == "BiasAddGrad":
            for j in after[maker[node.inputs[0]]]:
                read = nodes[j].inputs[2:3]
                if "BackpropFilter" in nodes[j].type and read == node.inputs[:1]:
                    first[i] = j
                    break
    groups: dict[int, list[int]] = {i: [i] for i, j in enumerate(first) if i == j}
    for i, j in enumerate(first):
        if i != j:
            groups[j].append(i)
    return list(groups.values())


def with_groups_fused(program: Program, groups: Sequence[Sequence[int]]) -> Program:
    """Return a program with one node for each group.

    Args:
        program: the nodes.
        groups: from `fused_groups`; their places are the numbers of the new nodes.

    Cost: linear in nodes and edges.
    """
    place = {i: number for number, group in enumerate(groups) for i in group}
    nodes = [_fused([program.nodes[i] for i in group]) for group in groups]
    return replace(
        program,
        nodes=[
            node.changed(controls=list(dict.fromkeys(place[c] for c in node.controls)))
            if node.controls
            else node
            for node in nodes
        ],
    )


def _fused(parts: Sequence[Node]) -> Node:
    first, *others = parts
    if not others:
        return first
    read = {t for part in parts for t in part.inputs}
    inside = {t for part in parts for t in part.outputs}
    return first.changed(
        inputs=[t for part in parts for t in part.inputs if t not in inside],
        outputs=[t for part in parts for t in part.outputs if t not in read],
        controls=[c for part in parts for c in part.controls],
        aliases=(),
        reuses=(),
        temporary=max(part.temporary for part in parts),
        cheap=False,
    )
