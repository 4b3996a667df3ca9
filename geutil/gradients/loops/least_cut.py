"""The cheapest nodes that part a graph: a minimum vertex cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence


def least_cut(
    weights: Sequence[int],
    read: Sequence[Collection[int]],
    given: Collection[int],
    needed: Collection[int],
) -> list[int]:
    """Return the nodes of least weight that all needed ones follow from.

    Each way from a given node to a needed one goes through a node of the cut, its ends
    included. Of cuts of the same weight it is the one nearest to what is needed.

    Args:
        weights: of each node, from 0 up.
        read: for each node the nodes that it reads.
        given: nodes that cannot be computed from others.
        needed: nodes that are asked for.

    Returns:
        The cut, in order.

    Cost: an augmentation of the flow, linear in nodes and edges, for each path that it
        takes; in bodies of loops about as many as there are needed nodes.

    Source: Ford and Fulkerson, "Maximal flow through a network", 1956; the shortest
        path first (Edmonds and Karp, 1972).

    Example:
        Two gates of 4 bytes follow from a state of 2 bytes and a weight of none:

        >>> least_cut([2, 0, 8, 4, 4], [[], [], [0, 1], [2], [2]], [0, 1], [3, 4])
        [0, 1]
    """
    flow = _Flow(weights, read, given, needed)
    while flow.augment():
        pass
    return flow.cut()


class _Flow:
    """A flow through nodes that let through as much as they weigh.

    Node i is an entrance 2 i and an exit 2 i + 1.
    """

    def __init__(
        self,
        weights: Sequence[int],
        read: Sequence[Collection[int]],
        given: Collection[int],
        needed: Collection[int],
    ) -> None:
        count = len(weights)
        self._count = count
        self._source, self._sink = 2 * count, 2 * count + 1
        # More than any cut of the nodes weighs: such edges are never a part of one.
        unlimited = sum(weights) + 1
        self._ends: list[int] = []
        self._left: list[int] = []
        self._edges: list[list[int]] = [[] for _ in range(2 * count + 2)]
        for node, weight in enumerate(weights):
            self._join(2 * node, 2 * node + 1, weight)
            for before in read[node]:
                self._join(2 * before + 1, 2 * node, unlimited)
        for node in given:
            self._join(self._source, 2 * node, unlimited)
        for node in needed:
            self._join(2 * node + 1, self._sink, unlimited)

    def _join(self, start: int, end: int, most: int) -> None:
        """Add an edge and, right behind it, the one that takes flow back."""
        for one, other, room in ((start, end, most), (end, start, 0)):
            self._edges[one].append(len(self._ends))
            self._ends.append(other)
            self._left.append(room)

    def augment(self) -> bool:
        """Let more through on a shortest way; tell whether there is one."""
        by: dict[int, int] = {self._source: -1}
        waiting = deque([self._source])
        while waiting and self._sink not in by:
            for edge in self._edges[waiting[0]]:
                end = self._ends[edge]
                if self._left[edge] and end not in by:
                    by[end] = edge
                    waiting.append(end)
            waiting.popleft()
        if self._sink not in by:
            return False
        way = []
        end = self._sink
        while by[end] >= 0:
            way.append(by[end])
            end = self._ends[by[end] ^ 1]
        more = min(self._left[edge] for edge in way)
        for edge in way:
            self._left[edge] -= more
            self._left[edge ^ 1] += more
        return True

    def cut(self) -> list[int]:
        """Return the nodes that let no more through, those nearest to the sink."""
        behind = {self._sink}
        waiting = [self._sink]
        while waiting:
            for edge in self._edges[waiting.pop()]:
                before = self._ends[edge]
                if self._left[edge ^ 1] and before not in behind:
                    behind.add(before)
                    waiting.append(before)
        return [
            node
            for node in range(self._count)
            if 2 * node + 1 in behind and 2 * node not in behind
        ]
