"""A step as numbers: what a prediction of its memory needs to know of a graph.

Nothing here knows TensorFlow, so a plan can be tried out without building its graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Node(NamedTuple):
    """An op of a step.

    Attributes:
        name: its name.
        type: its type.
        inputs: the tensors that it reads, by number.
        outputs: the tensors that it makes, by number.
        controls: the nodes that it waits for besides, by number.
        aliases: pairs (output, input) of places: the output is the input's buffer.
        reuses: pairs (output, input) of places, best first: the output takes over the
            input's buffer if it is of its size and nobody else will read it.
        temporary: the bytes that it holds only while it runs.
        surge: the bytes that it may hold besides under a bad schedule: more iterations
            of a loop at once.
        cheap: the executor runs it at once rather than hand it to a thread.
        queue: nodes with the same one can wait for each other
            (`geutil.memory.ordering`); None if a node runs as soon as it can.
        updates: of a node that changes a variable: the tensors that are the variable's
            buffer until then. If any is still to be read, the first output is a new
            buffer for the variable, which counts until the old one is let go; else
            there is no such buffer.
    """

    name: str
    type: str
    inputs: Sequence[int] = ()
    outputs: Sequence[int] = ()
    controls: Sequence[int] = ()
    aliases: Sequence[tuple[int, int]] = ()
    reuses: Sequence[tuple[int, int]] = ()
    temporary: int = 0
    surge: int = 0
    cheap: bool = False
    queue: str | None = None
    updates: Sequence[int] = ()

    def changed(self, **changes: Any) -> Node:
        """Return the node with some attributes changed."""
        return self._replace(**changes)


@dataclass(frozen=True)
class Program:
    """A step: nodes, and the tensors between them.

    Attributes:
        nodes: the nodes; a node's number is its place. Any order will do, but where
            several nodes are ready at once their order decides.
        sizes: the bytes of each tensor. What is held all the time (variables,
            constants, what the caller feeds) has size 0.
        fetched: the tensors that are held to the end, by number.
        variable_bytes: what the variables hold.
        constant_bytes: what the constants hold.
    """

    nodes: Sequence[Node]
    sizes: Sequence[int]
    fetched: Collection[int] = ()
    variable_bytes: int = 0
    constant_bytes: int = 0

    def with_queues(self, queues: Sequence[str | None]) -> Program:
        """Return the program with a queue for each node."""
        pairs = zip(self.nodes, queues, strict=True)
        return replace(self, nodes=[node.changed(queue=queue) for node, queue in pairs])

    def successors(self) -> Iterator[list[int]]:
        """Yield, for each node, the nodes it makes ready: a node once for each edge.

        Readers come first, by place, then the nodes that only wait.

        Cost: linear in nodes and edges.
        """
        readers: list[list[int]] = [[] for _ in self.sizes]
        waiting: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for tensor in node.inputs:
                readers[tensor].append(i)
            for control in node.controls:
                waiting[control].append(i)
        for node, after in zip(self.nodes, waiting, strict=True):
            outputs = node.outputs
            if len(outputs) == 1:
                yield readers[outputs[0]] + after
            else:
                data = [reader for tensor in outputs for reader in readers[tensor]]
                yield sorted(data) + after
