"""Conditions on attributes, and how messages show them."""

from __future__ import annotations

from typing import Any

from geutil.graph.kinds import Operation


def has_attribute(op: Operation, name: str, wanted: Any) -> bool:
    """Tell whether an attribute of `op` has a value, or passes a predicate."""
    try:
        value = op.get_attr(name)
    except ValueError:
        return False
    if callable(wanted):
        return bool(wanted(value))
    if isinstance(value, bytes) and isinstance(wanted, str):
        return value == wanted.encode()
    if isinstance(wanted, tuple):
        wanted = list(wanted)
    return bool(value == wanted)


def predicate_name(function: Any) -> str:
    """Return the name of a predicate, for messages."""
    return f"{getattr(function, '__name__', 'predicate')}()"


def shown(wanted: Any) -> str:
    """Return what is wanted of an attribute, for messages."""
    return f"what {predicate_name(wanted)} asks" if callable(wanted) else repr(wanted)
