"""What of a program still runs once other nodes took over."""

from __future__ import annotations

from collections.abc import Sequence

from geutil.memory.program import Node, Program


def pruned(
    nodes: Sequence[Node],
    sizes: Sequence[int],
    wanted: Sequence[int],
    held: Sequence[int],
) -> Program:
    """Return a program without what no wanted tensor depends on.

    Args:
        nodes: the nodes, in any order.
        sizes: the bytes of each tensor.
        wanted: the tensors that the step is run for, by number.
        held: those that are held to the end.

    Cost: linear in nodes and edges.

    Example:
        >>> from geutil.memory.program import Node
        >>> nodes = [Node("x", "Relu", outputs=[0]), Node("y", "Relu", [0], [1])]
        >>> [node.name for node in pruned(nodes, [4, 4], [0], []).nodes]
        ['x']
    """
    maker = [0] * len(sizes)
    for place, node in enumerate(nodes):
        for number in node.outputs:
            maker[number] = place
    waiting = list(dict.fromkeys(maker[number] for number in wanted))
    needed = [False] * len(nodes)
    for place in waiting:
        needed[place] = True
    while waiting:
        node = nodes[waiting.pop()]
        for place in (*(maker[number] for number in node.inputs), *node.controls):
            if not needed[place]:
                needed[place] = True
                waiting.append(place)
    left = [place for place, is_needed in enumerate(needed) if is_needed]
    moved = dict(zip(left, range(len(left)), strict=True))
    final = [nodes[place] for place in left]
    for place, node in enumerate(final):
        if node.controls:
            controls = [moved[control] for control in node.controls]
            final[place] = node.changed(controls=controls)
    return Program(final, sizes, held)
