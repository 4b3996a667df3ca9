"""The functions that a node names: in its attributes, and as its op."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def function_values(attributes: Any) -> Iterator[Any]:
    """Yield the `NameAttrList` protos in a map of `AttrValue` protos.

    Attributes of a function can name functions in turn; those are among them.
    """
    waiting = [attributes]
    while waiting:
        for value in waiting.pop().values():
            kind = value.WhichOneof("value")
            for function in [value.func] if kind == "func" else value.list.func:
                yield function
                waiting.append(function.attr)


def functions_of_attributes(attributes: Any) -> Iterator[str]:
    """Yield the names of the functions in a map of `AttrValue` protos."""
    for value in function_values(attributes):
        if value.name:
            yield value.name


def rename_functions(node_def: Any, names: Mapping[str, str]) -> None:
    """Rename the functions in the attributes of a node."""
    for value in function_values(node_def.attr):
        value.name = names.get(value.name, value.name)


def names_of_functions(node: Any) -> Iterator[str]:
    """Yield the name of the op of a node and of the functions in its attributes."""
    yield node.op
    for value in function_values(node.attr):
        yield value.name


def rename_called(node: Any, names: Mapping[str, str]) -> None:
    """Rename the functions that a node calls; its op may be one."""
    node.op = names.get(node.op, node.op)
    rename_functions(node, names)
