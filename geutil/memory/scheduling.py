"""An order in which a step holds little: what frees memory first, the rest late."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from geutil.memory.execution import execution_order
from geutil.memory.program import Node, Program

_NEAR = 16
SMALL = 8
"""Tensors below this part of the largest one do not matter for the order."""


def negligible_size(program: Program) -> int:
    """Return the bytes up to which a tensor does not matter for the order."""
    return max(program.sizes, default=0) // SMALL


def frugal_order(program: Program) -> list[int]:
    """Return the nodes in an order that holds little while the late ones run.

    Nodes that are not late come first, in the order of TensorFlow's executor. Of the
    late ones, whatever holds no more than before runs as soon as it can. If there is
    no such node, the one with the longest way to the end runs: what is only needed at
    the end of a shorter way, to be added to the result of a longer one, would be held
    in the meantime. (List scheduling by critical path, Coffman and Graham 1972, after
    what is for free.)

    Args:
        program: the nodes and their edges. What reads or awaits a late node is late.

    Returns:
        The numbers of the nodes.

    Raises:
        PredictionError: nodes wait for each other.

    Cost: linear in nodes and edges, times the logarithm of how many are ready at once;
        some 15 us for each node.

    Example:
        The sum waits for `long`, so `short` had better run after it:

        >>> from geutil.memory.program import Node, Program
        >>> x = Node("x", "Relu", outputs=[0])
        >>> short = Node("short", "Tile", inputs=[0], outputs=[1], late=True)
        >>> first = Node("first", "Exp", inputs=[0], outputs=[2], late=True)
        >>> long = Node("long", "Sum", inputs=[2], outputs=[3], late=True)
        >>> both = Node("both", "Add", inputs=[1, 3], outputs=[4], late=True)
        >>> nodes = [x, short, first, long, both]
        >>> order = frugal_order(Program(nodes, sizes=[8, 80, 80, 80, 80]))
        >>> [nodes[i].name for i in order]
        ['x', 'first', 'long', 'short', 'both']
    """
    usual = execution_order(program)
    nodes = program.nodes
    successors = list(program.successors())
    heights = _heights(usual, successors)
    buffers = _Buffers(program)
    small = negligible_size(program)
    pending = [len(node.inputs) + len(node.controls) for node in nodes]
    ready: list[tuple[bool, int, int]] = []
    waiting = [False] * len(nodes)

    def offer(i: int) -> None:
        waiting[i] = True
        heapq.heappush(ready, (buffers.growth(nodes[i]) > small, -heights[i], i))

    order: list[int] = []

    def run(i: int) -> None:
        order.append(i)
        waiting[i] = False
        for j in successors[i]:
            pending[j] -= 1
        changed = buffers.run(nodes[i])
        for j in dict.fromkeys(successors[i]):
            if not pending[j] and nodes[j].late:
                offer(j)
        for j in changed:
            if waiting[j]:
                offer(j)

    for i in usual:
        if not nodes[i].late:
            run(i)
    for i in usual:
        if nodes[i].late and not pending[i] and not waiting[i]:
            offer(i)
    while ready:
        i = heapq.heappop(ready)[-1]
        # Offered again since, and run.
        if waiting[i]:
            run(i)
    return order


def turns(program: Program) -> list[tuple[int, int]]:
    """Return who has to wait for whom so that queues run in `frugal_order`.

    Of the nodes of a queue those count that read or make something large. Each waits
    for the one before it, unless it reads what that one makes anyway.

    Args:
        program: the nodes and their edges.

    Returns:
        Pairs of numbers: a node and the one that it waits for.

    Raises:
        PredictionError: nodes wait for each other.

    Cost: that of `frugal_order`.
    """
    nodes = program.nodes
    small = negligible_size(program)
    maker = {t: i for i, node in enumerate(nodes) for t in node.outputs}
    last: dict[str, int] = {}
    pairs = []
    for i in frugal_order(program):
        node = nodes[i]
        if node.queue is None or _largest(program, node) <= small:
            continue
        before = last.get(node.queue)
        last[node.queue] = i
        if before is not None and not _is_behind(before, i, nodes, maker):
            pairs.append((i, before))
    return pairs


def in_turn(program: Program) -> Program:
    """Return a program with nodes by which the nodes of a queue wait for their turns.

    Args:
        program: the nodes and their edges.

    Raises:
        PredictionError: nodes wait for each other.

    Cost: that of `frugal_order`.

    Example:
        >>> from geutil.memory.program import Node, Program
        >>> x = Node("x", "Relu", outputs=[0])
        >>> short = Node("short", "Tile", [0], [1], late=True, queue="CPU")
        >>> long = Node("long", "Exp", [0], [2], late=True, queue="CPU")
        >>> sum = Node("sum", "Sum", [2], [3], late=True)
        >>> both = Node("both", "Add", [1, 3], [4], late=True)
        >>> program = Program([x, short, long, sum, both], [80, 80, 80, 8, 80], [0])
        >>> waiting = in_turn(program).nodes[-1]
        >>> waiting.name, waiting.controls
        ('turn of short', [2])
    """
    nodes = list(program.nodes)
    sizes = list(program.sizes)
    for i, before in turns(program):
        node = nodes[i]
        if not node.inputs:
            nodes[i] = node.changed(controls=[*node.controls, before])
            continue
        held, *others = node.inputs
        nodes[i] = node.changed(inputs=[len(sizes), *others])
        nodes.append(_turn(node, held, len(sizes), before))
        sizes.append(sizes[held])
    return replace(program, nodes=nodes, sizes=sizes)


def _turn(node: Node, held: int, made: int, before: int) -> Node:
    return Node(
        name=f"turn of {node.name}",
        type="PlaceholderWithDefault",
        inputs=[held],
        outputs=[made],
        controls=[before],
        aliases=((0, 0),),
        cheap=True,
        late=True,
    )


def _largest(program: Program, node: Node) -> int:
    return max((program.sizes[t] for t in (*node.inputs, *node.outputs)), default=0)


def _is_behind(
    before: int, i: int, nodes: Sequence[Node], maker: Mapping[int, int]
) -> bool:
    """Tell whether a node reads what another makes, or what waits for it.

    Looks only near by, through nodes that hand on: to wait once more does no harm.
    """
    nearest = [i]
    for nearer in nearest:
        if nearer == before:
            return True
        node = nodes[nearer]
        if nearer == i or (node.cheap and len(nearest) < _NEAR):
            nearest += [*(maker[t] for t in node.inputs), *node.controls]
    return False


def _heights(order: Sequence[int], successors: Sequence[Sequence[int]]) -> list[int]:
    """Return for each node the number of nodes on the longest way from it."""
    heights = [0] * len(order)
    for i in reversed(order):
        heights[i] = 1 + max((heights[j] for j in successors[i]), default=0)
    return heights


class _Buffers:
    """The buffers that are held while nodes run."""

    def __init__(self, program: Program) -> None:
        self._sizes = program.sizes
        self._small = negligible_size(program)
        self._reads = [0] * len(program.sizes)
        self._readers: list[list[int]] = [[] for _ in program.sizes]
        for i, node in enumerate(program.nodes):
            for tensor in node.inputs:
                self._reads[tensor] += 1
                self._readers[tensor].append(i)
        for tensor in program.fetched:
            self._reads[tensor] += 1
        self._left = list(self._reads)
        self._buffer = list(range(len(program.sizes)))
        self._sharing: dict[int, dict[int, None]] = {}
        self._holders = [0] * len(program.sizes)

    def growth(self, node: Node) -> int:
        """Return how many bytes more are held once a node has run."""
        counts = Counter(self._buffer[tensor] for tensor in node.inputs)
        freed = {b for b, count in counts.items() if self._holders[b] == count}
        shared = dict(self._shared(node))
        freed.difference_update(b for t, b in shared.items() if self._reads[t])
        made = (t for t in node.outputs if t not in shared and self._reads[t])
        return sum(self._sizes[t] for t in made) - sum(self._sizes[b] for b in freed)

    def run(self, node: Node) -> list[int]:
        """Hold what a node makes, and let go of what it read.

        Returns:
            The nodes that may now free more than before: the last readers.
        """
        for tensor, taken in list(self._shared(node)):
            self._buffer[tensor] = taken
            self._sharing.setdefault(taken, {taken: None})[tensor] = None
        for tensor in node.outputs:
            self._holders[self._buffer[tensor]] += self._reads[tensor]
        last: list[int] = []
        for tensor in node.inputs:
            taken = self._buffer[tensor]
            self._holders[taken] -= 1
            self._left[tensor] -= 1
            if not self._left[tensor]:
                self._sharing.get(taken, {}).pop(tensor, None)
            # A node seldom reads a tensor more than twice.
            if self._holders[taken] in (1, 2) and self._sizes[taken] > self._small:
                for other in self._sharing.get(taken, [taken]):
                    last += self._readers[other]
        return last

    def _shared(self, node: Node) -> Iterator[tuple[int, int]]:
        """Yield the outputs that get no buffer of their own, and whose they get."""
        met: set[int] = set()
        taken: set[int] = set()
        for out, place in node.aliases:
            tensor, buffer = node.outputs[out], self._buffer[node.inputs[place]]
            met.add(tensor)
            taken.add(buffer)
            yield tensor, buffer
        for out, place in node.reuses:
            tensor, buffer = node.outputs[out], self._buffer[node.inputs[place]]
            if (
                tensor not in met
                and buffer not in taken
                and self._holders[buffer] == 1
                and self._sizes[buffer] == self._sizes[tensor]
            ):
                met.add(tensor)
                taken.add(buffer)
                yield tensor, buffer
