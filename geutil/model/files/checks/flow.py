"""Cycles: of data in a graph, of calls among functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from geutil.graph.op_types import CALLS, MERGES, NEXT_ITERATIONS
from geutil.model.errors import ModelError

_SHOWN = 8


def check_cycles(nodes: Sequence[Any], producers: Sequence[Sequence[int]]) -> None:
    """Check that only loops of version 1 close a circle.

    Args:
        nodes: the `NodeDef` protos.
        producers: for each node the places of those it reads or waits for.

    Raises:
        ModelError: some nodes wait for each other, by other edges than those from
            NextIteration to Merge.

    Cost: linear in nodes and edges.
    """
    if all(p < i for i, read in enumerate(producers) for p in read):
        return  # In topological order, as most graphs are.
    merges = {i for i, node in enumerate(nodes) if node.op in MERGES}
    closing = NEXT_ITERATIONS if merges else frozenset()
    ahead = {i for i, node in enumerate(nodes) if node.op in closing}
    consumers: list[list[int]] = [[] for _ in nodes]
    waiting = [0] * len(nodes)
    for i, read in enumerate(producers):
        for p in read:
            if not (i in merges and p in ahead):
                consumers[p].append(i)
                waiting[i] += 1
    ready = [i for i, count in enumerate(waiting) if not count]
    for i in ready:
        for consumer in consumers[i]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                ready.append(consumer)
    if len(ready) < len(nodes):
        circle = _circle(producers, waiting, merges, ahead)
        raise ModelError(_told([nodes[i].name for i in circle], "nodes"))


def _circle(
    producers: Sequence[Sequence[int]],
    waiting: Sequence[int],
    merges: set[int],
    ahead: set[int],
) -> list[int]:
    """Return one circle among the nodes that wait for ever."""
    i = next(i for i, count in enumerate(waiting) if count)
    path: dict[int, None] = {}
    while i not in path:
        path[i] = None
        i = next(
            p for p in producers[i] if waiting[p] and not (i in merges and p in ahead)
        )
    way = list(path)
    return way[way.index(i) :][::-1]


def check_recursion(functions: Mapping[str, Any]) -> None:
    """Check that no function calls itself in any case, directly or through others.

    Args:
        functions: the `FunctionDef` protos by name.

    Raises:
        ModelError: one does, so that it never returns.

    Cost: linear in the nodes of the functions.
    """
    calls = {name: list(_called(f, functions)) for name, f in functions.items()}
    done: set[str] = set()
    for start in functions:
        path: dict[str, None] = {}
        stack = [(start, iter(calls[start]))] if start not in done else []
        path.update((name, None) for name, _ in stack)
        while stack:
            name, rest = stack[-1]
            callee = next(rest, None)
            if callee is None:
                stack.pop()
                del path[name]
                done.add(name)
            elif callee in path:
                way = list(path)
                raise ModelError(_told(way[way.index(callee) :], "functions"))
            elif callee not in done:
                path[callee] = None
                stack.append((callee, iter(calls[callee])))


def _called(function: Any, functions: Mapping[str, Any]) -> dict[str, None]:
    called: dict[str, None] = {}
    for node in function.node_def:
        # These run what they name. A While or an If may run it, or not, and so may end.
        name = node.attr["f"].func.name if node.op in CALLS else node.op
        if name in functions:
            called[name] = None
    return called


def _told(names: Sequence[str], what: str) -> str:
    shown = [*names[:_SHOWN], "..."] if len(names) > _SHOWN else [*names]
    return f"{what} wait for each other: {' -> '.join([*shown, names[0]])}"
