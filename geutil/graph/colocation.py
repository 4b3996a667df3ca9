"""Colocation: the ops that an op shall share a device with.

An op names them in its `_class` attribute as `loc:@name`; other entries of that
attribute mean something else and are kept as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from geutil.graph.protos import AttrValue
from geutil.graph.types import Graph, Operation

ATTRIBUTE = "_class"
_PREFIX = b"loc:@"


def class_entries(op: Operation) -> list[bytes]:
    """Return the entries of the `_class` attribute; [] when there is none."""
    try:
        return list(op.get_attr(ATTRIBUTE))
    except ValueError:
        return []


def colocation_names(op: Operation) -> list[str]:
    """Return the names of the ops that `op` is colocated with."""
    return [
        entry.removeprefix(_PREFIX).decode()
        for entry in class_entries(op)
        if entry.startswith(_PREFIX)
    ]


def rename_entries(
    entries: Iterable[bytes], rename: Callable[[str], str | None]
) -> list[bytes]:
    """Return `entries` with each colocation name renamed, or dropped for None."""
    renamed = []
    for entry in entries:
        if not entry.startswith(_PREFIX):
            renamed.append(entry)
            continue
        name = rename(entry.removeprefix(_PREFIX).decode())
        if name is not None:
            renamed.append(_PREFIX + name.encode())
    return renamed


def drop_missing_colocation(op: Operation) -> None:
    """Let `op` no longer be colocated with ops that its graph does not have."""
    entries = class_entries(op)
    if not entries:
        return
    remaining_entries = rename_entries(
        entries, lambda n: n if _has_op(op.graph, n) else None
    )
    if remaining_entries != entries:
        set_class_entries(op, remaining_entries)


def _has_op(graph: Graph, name: str) -> bool:
    try:
        graph.get_operation_by_name(name)
    except KeyError:
        return False
    return True


def set_class_entries(op: Operation, entries: Iterable[bytes]) -> None:
    """Set the `_class` attribute of `op`."""
    value = AttrValue(list=AttrValue.ListValue(s=list(entries)))
    op._set_attr(ATTRIBUTE, value)
