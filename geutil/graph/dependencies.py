"""Orders and cycles of things that need each other, given by name."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def dependency_order(needs: Mapping[T, Iterable[T]]) -> list[T]:
    """Return the keys of `needs` so that each comes after those that it needs.

    The order of the mapping is kept, except that what is needed comes just ahead. On a
    cycle, one edge does not count. Values that are no keys do not count either.

    Cost: linear in keys and values.

    Example:
        >>> from geutil.graph.dependencies import dependency_order
        >>> dependency_order({"c": ["a", "b"], "a": [], "b": ["a"]})
        ['a', 'b', 'c']
    """
    placed: dict[T, None] = {}
    opened: set[T] = set()
    for start in needs:
        stack = [start]
        while stack:
            top = stack[-1]
            if top not in opened:
                opened.add(top)
                missing = [n for n in needs[top] if n in needs and n not in opened]
                if missing:
                    stack.extend(reversed(missing))
                    continue
            stack.pop()
            placed[top] = None
    return list(placed)


def on_cycles(needs: Mapping[T, Iterable[T]]) -> set[T]:
    """Return the keys of `needs` that need themselves, however indirectly.

    Kosaraju's algorithm: the components are found by walks against the edges, from the
    keys whose walk along the edges ended last.

    Cost: linear in keys and values.
    """
    needed_by: dict[T, list[T]] = {key: [] for key in needs}
    for key, values in needs.items():
        for value in values:
            if value in needed_by:
                needed_by[value].append(key)
    result: set[T] = set()
    seen: set[T] = set()
    for start in reversed(dependency_order(needs)):
        if start in seen:
            continue
        seen.add(start)
        component = [start]
        for key in component:
            for other in needed_by[key]:
                if other not in seen:
                    seen.add(other)
                    component.append(other)
        if len(component) > 1 or start in needed_by[start]:
            result.update(component)
    return result
