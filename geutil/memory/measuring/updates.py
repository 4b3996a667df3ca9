"""When the records of a step fail to tell that memory is free again: variables.

A variable that is changed while its value is still to be read gets a new buffer, and
one that is assigned takes over the value's. That buffer stays; what becomes free is the
old one, once it has been read. It was allocated before the step, so the records know
nothing of that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from geutil.memory.predicting.kernels import passes_on, updates_variable


class Updates:
    """Tells when the old buffers of variables become free.

    Args:
        nodes: the `NodeDef`s of the graph that ran.
        executions: the `NodeExecStats` of the step.
        buffers: the names of the tensors that buffers were allocated for.

    Cost: linear in nodes and edges.
    """

    def __init__(
        self,
        nodes: Iterable[Any],
        executions: Iterable[Any],
        buffers: Collection[str],
    ) -> None:
        started = {stats.node_name: stats.all_start_micros for stats in executions}
        ended = {
            stats.node_name: stats.all_start_micros + stats.all_end_rel_micros
            for stats in executions
        }
        self._free: dict[str, int] = {}
        nodes = list(nodes)
        reads = _reads(nodes)
        readers = _readers(nodes, chain.from_iterable(reads.values()))
        inputs = {node.name: node.input for node in nodes}
        seen: set[str] = set()
        for node in nodes:
            assigns = node.op == "AssignVariableOp"
            if node.name not in started or not (assigns or updates_variable(node.op)):
                continue
            free = ended[node.name]
            for read in reads.get(_maker(node.input[0]), ()):
                if started.get(read, free) < started[node.name]:
                    ends = (ended.get(name, 0) for name in readers.get(read, ()))
                    free = max(free, *ends, 0)
            if assigns:
                for buffer in _taken_over(node.input[1], inputs, buffers, seen):
                    self._free[buffer] = free
            else:
                self._free[f"{node.name} (temporary)"] = free

    def free(self, buffer: str) -> int | None:
        """Return when the buffer is free that another one takes the place of.

        Args:
            buffer: the name of the other one: that of a tensor, or that of an op and
                " (temporary)".

        Returns:
            The microsecond, or None if it takes no variable's place.
        """
        return self._free.get(buffer)


def _maker(name: str) -> str:
    return name.removeprefix("^").partition(":")[0]


def _tensor(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def _taken_over(
    value: str,
    inputs: Mapping[str, Sequence[str]],
    buffers: Collection[str],
    seen: set[str],
) -> Iterator[str]:
    """Yield the tensors whose buffers a value may lie in.

    An op that allocates nothing writes into, or hands on, a buffer of what it reads: a
    gradient's is multiplied in place, subtracted from the variable in place, assigned.
    What was `seen` on the way from another value is not followed again.
    """
    waiting = [value]
    while waiting:
        tensor = _tensor(waiting.pop())
        if tensor in buffers:
            yield tensor
        elif tensor not in seen:
            seen.add(tensor)
            read = inputs.get(_maker(tensor), ())
            waiting += [name for name in read if not name.startswith("^")]


def _reads(nodes: Iterable[Any]) -> Mapping[str, list[str]]:
    """Map each handle's op to the nodes that read the variable."""
    reads: dict[str, list[str]] = {}
    for node in nodes:
        if node.op == "ReadVariableOp":
            reads.setdefault(_maker(node.input[0]), []).append(node.name)
    return reads


def _readers(nodes: Iterable[Any], reads: Iterable[str]) -> Mapping[str, list[str]]:
    """Map each of some nodes to those that read its buffer."""
    after: dict[str, list[Any]] = {}
    for node in nodes:
        for name in node.input:
            if not name.startswith("^"):
                after.setdefault(_maker(name), []).append(node)
    readers = {}
    for read in reads:
        found = list(after.get(read, ()))
        # The list grows while it is gone through.
        for node in found:
            if passes_on(node.op):
                found += after.get(node.name, ())
        readers[read] = [node.name for node in found]
    return readers
