"""The passes of oneDNN and Grappler that run several ops as one.

TensorFlow merges convolutions with the ops around them, and rebuilds the ops that
oneDNN computes, so that these come after all others wherever the executor has a choice.
The order among them is that of a walk over the graph.
"""

# Grappler and oneDNN join a padding, a convolution, its bias and its activation, and
# the gradients of a filter and of its bias. A control edge at such an op undoes that,
# or makes the joint op and an op that waits for a part of it wait for each other
# (TensorFlow 2.21: "nodes in a cycle", or an abort).

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from geutil.graph.walks import topological_order
from geutil.memory.kernels.cpu import ONEDNN
from geutil.memory.program import Node, Program, addresses

ORDERED_EDGES = 8
"""Beyond so many edges TensorFlow keeps a node's in a hash set of pointers, whose order
changes from Session to Session."""
_PRODUCERS = {
    "Conv2D": ("Pad",),
    "BiasAdd": ("Conv2D", "DepthwiseConv2dNative", "MatMul"),
    **dict.fromkeys(("Elu", "LeakyRelu", "Relu", "Relu6"), ("BiasAdd",)),
}
"""For an op type, those that it is joined with if nothing else reads their results."""


def fused_groups(program: Program) -> list[list[int]]:
    """Return the nodes in groups that TensorFlow may run as one op each."""
    # A group begins with the node whose inputs are the group's, but a filter gradient
    # comes before the bias gradients that are summed along with it.
    nodes = program.nodes
    maker = program.makers
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
    """Return a program with one node for each group, numbered as the groups are."""
    place = {i: number for number, group in enumerate(groups) for i in group}
    nodes = [_fused_parts([program.nodes[i] for i in group]) for group in groups]
    return replace(program, nodes=[node.renumbered(place) for node in nodes])


def _fused_parts(parts: Sequence[Node]) -> Node:
    if len(parts) == 1:
        return parts[0]
    # Tensors between the parts are never made.
    read = {t for part in parts for t in part.inputs}
    inside = {t for part in parts for t in part.outputs}
    temporary = max(part.temporary for part in parts)
    # Packed bytes may be negative: they count against a kernel's own temporary ones.
    taken = max(part.temporary + part.packed for part in parts)
    return parts[0].changed(
        inputs=[t for part in parts for t in part.inputs if t not in inside],
        outputs=[t for part in parts for t in part.outputs if t not in read],
        controls=[c for part in parts for c in part.controls],
        aliases=(),
        reuses=(),
        temporary=temporary,
        packed=taken - temporary,
        cheap=False,
    )


def with_onednn(program: Program, seed: int = 0) -> Program:
    """Return the program with its convolutions merged and oneDNN's ops last."""
    # `seed` stands for the addresses of edges, on which the order depends.
    # A bias is added, and a bias's gradient summed, within the convolution at its side;
    # a padding that only a convolution reads is done within it. Nodes come in the order
    # in which TensorFlow made them.
    if not program.device.onednn:
        return program
    graph = _NodeEdges(program)
    place = graph.places(seed)
    for i in sorted(range(len(place)), key=place.__getitem__):
        _merge_bias(graph, i)
    for i in range(len(graph.nodes)):
        _merge_padding(graph, i)
    place = graph.places(seed)
    left = [i for i in range(len(graph.nodes)) if i not in graph.into]
    order = [i for i in left if graph.nodes[i].type not in ONEDNN]
    last = [i for i in left if graph.nodes[i].type in ONEDNN]
    return graph.program(order + sorted(last, key=place.__getitem__))


class _NodeEdges:
    """The nodes and edges of a program, in TensorFlow's order, while merged."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.nodes = list(program.nodes)
        self.into: dict[int, int] = {}
        self.maker = dict(program.makers)
        made_by = self.maker.__getitem__
        self._before = [[*map(made_by, n.inputs), *n.controls] for n in self.nodes]
        self.after: list[list[int]] = [[] for _ in self.nodes]
        for i, before in enumerate(self._before):
            for j in before:
                self.after[j].append(i)
        self._fetched = frozenset(program.fetched)

    def only_reader(self, tensor: int) -> bool:
        """Return whether a tensor has one reader, and nobody asks for it."""
        return len(self.after[self.maker[tensor]]) == 1 and tensor not in self._fetched

    def merge(self, parts: tuple[int, int], node: Node) -> None:
        """Put a new node in the place of two, which are removed in the given order."""
        new = len(self.nodes)
        inside = set(node.outputs)
        before = [self.maker[t] for t in node.inputs if t not in inside]
        before += node.controls
        self.nodes.append(node)
        self._before.append(before)
        self.after.append([])
        for j in before:
            self.after[j].append(new)
        for part in parts:
            self.into[part] = new
            for i in self.after[part]:
                if i not in parts:
                    self.after[new].append(i)
                    self._before[i] = [new if j == part else j for j in self._before[i]]
            for edges in (self.after[j] for j in self._before[part]):
                # As TensorFlow removes an edge: the last one fills the gap.
                edges[edges.index(part)] = edges[-1]
                edges.pop()
        for tensor in node.outputs:
            self.maker[tensor] = new

    def places(self, seed: int) -> list[int]:
        """Return the place of each node in reverse postorder, depth first."""
        address = addresses(self.nodes, seed)
        before = enumerate(self._before)
        starts = [i for i, edges in before if not edges and i not in self.into]
        starts.sort(key=address.__getitem__)

        def last_first(i: int) -> Iterable[int]:
            after = self.after[i]
            if len(after) > ORDERED_EDGES:
                after = sorted(after, key=address.__getitem__)
            return reversed(after)

        # TensorFlow's walk has a stack: it takes up first the edge that it saw last.
        left = topological_order(reversed(starts), last_first)
        places = [0] * len(self.nodes)
        for place, i in enumerate(reversed(left)):
            places[i] = place
        return places

    def program(self, order: list[int]) -> Program:
        """Return the nodes in `order` as a program."""
        place = {i: at for at, i in enumerate(order)}
        for i in reversed(self.into):
            place[i] = place[self.into[i]]
        nodes = [self.nodes[i].renumbered(place) for i in order]
        return replace(self._program, nodes=nodes)


def _merge_bias(graph: _NodeEdges, i: int) -> None:
    """Merge a node that adds or sums a bias into the convolution at its side."""
    bias = graph.nodes[i]
    if bias.type == "BiasAdd":
        other = graph.maker[bias.inputs[0]]
        convolution = graph.nodes[other]
        # Another reader would need the result without the bias.
        if convolution.type == "Conv2D" and graph.only_reader(bias.inputs[0]):
            graph.merge((i, other), _fused(convolution, bias))
    elif bias.type == "BiasAddGrad":
        # The gradients of bias and filter read one tensor, and a kernel computes both.
        for other in graph.after[graph.maker[bias.inputs[0]]]:
            filters = graph.nodes[other]
            is_filter = filters.type == "Conv2DBackpropFilter"
            if is_filter and filters.inputs[2] == bias.inputs[0]:
                node = filters.changed(
                    type="Conv2DBackpropFilterWithBias",
                    outputs=[*filters.outputs, *bias.outputs],
                    controls=[*filters.controls, *bias.controls],
                )
                graph.merge((i, other), node)
                return


def _merge_padding(graph: _NodeEdges, i: int) -> None:
    """Merge the padding that only a convolution reads into it."""
    convolution = graph.nodes[i]
    if convolution.type not in ("Conv2D", "_FusedConv2D") or i in graph.into:
        return
    other = graph.maker[convolution.inputs[0]]
    padding = graph.nodes[other]
    if padding.type == "Pad" and graph.only_reader(convolution.inputs[0]):
        graph.merge((i, other), _fused(padding, convolution))


def _fused(first: Node, second: Node) -> Node:
    """Return a node that runs `first` and then `second` on its output."""
    return second.changed(
        type="_FusedConv2D",
        inputs=[first.inputs[0], *second.inputs[1:], *first.inputs[1:]],
        controls=[*first.controls, *second.controls],
        reuses=(),
        packed=max(first.packed, second.packed),
    )
