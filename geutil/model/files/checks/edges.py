"""The edges of a graph or a function body: do the inputs exist, and do they fit?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from geutil.model.errors import ModelError
from geutil.model.files.checks.hazards import check_hazards
from geutil.model.files.checks.nodes import Node, label
from geutil.model.files.checks.signatures import UNKNOWN, Types, base_type
from geutil.model.files.checks.tensors import type_name

_CONTROL = "^"


class Inputs(ABC):
    """Resolves the names of inputs among nodes.

    Args:
        nodes: the nodes by name.
    """

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.nodes = nodes

    @abstractmethod
    def resolve(self, name: str) -> tuple[Node | None, int]:
        """Return the producer of an input, if a node, and the input's type.

        Raises:
            ModelError: there is no such tensor.
        """

    def control(self, name: str) -> Node | None:
        """Return the node that a control input waits for; None is an argument."""
        node = self.nodes.get(name)
        if node is None:
            raise ModelError(f"it waits for '{name}', which does not exist")
        return node


class GraphInputs(Inputs):
    """Inputs of a graph: `node` or `node:1`."""

    def resolve(self, name: str) -> tuple[Node, int]:
        """Return the producer of an input, and the input's type."""
        producer, _, number = name.rpartition(":")
        if not producer or not _is_number(number):
            producer, number = name, "0"
        node = self.nodes.get(producer)
        if node is None:
            raise ModelError(f"its input '{name}' does not exist")
        return node, _taken(node.outputs, int(number), name, label(node.proto))


class BodyInputs(Inputs):
    """Inputs of a function body: `arg`, `arg:1`, `node:output` or `node:output:1`.

    Args:
        nodes: the nodes by name.
        arguments: the types of each argument of the function by name.
    """

    def __init__(
        self, nodes: Mapping[str, Node], arguments: Mapping[str, Types | None]
    ) -> None:
        super().__init__(nodes)
        self.arguments = arguments
        self._outputs: dict[str, dict[str, Types | None]] = {}

    def control(self, name: str) -> Node | None:
        """Return the node that a control input waits for; None is an argument."""
        return None if name in self.arguments else super().control(name)

    def resolve(self, name: str) -> tuple[Node | None, int]:
        """Return the producer of an input, None for an argument, and its type."""
        first, *rest = name.split(":")
        number = rest.pop() if rest and _is_number(rest[-1]) else "0"
        if not rest and first in self.arguments:
            types = self.arguments[first]
            return None, _taken(types, int(number), name, "the argument")
        node = self.nodes.get(first)
        if node is None or len(rest) != 1:
            raise ModelError(f"its input '{name}' does not exist")
        outputs = self._outputs.get(first)
        if outputs is None:
            outputs = node.signature.named_outputs(node.attributes or {})
            self._outputs[first] = outputs
        if rest[0] not in outputs:
            raise ModelError(
                f"its input '{name}' does not exist: {label(node.proto)} has the "
                f"outputs {list(outputs)}"
            )
        return node, _taken(outputs[rest[0]], int(number), name, label(node.proto))


def check_edges(nodes: Mapping[str, Node], inputs: Inputs) -> list[list[int]]:
    """Check the inputs of each node.

    Args:
        nodes: the nodes by name, in order.
        inputs: resolves the names of inputs.

    Returns:
        For each node the places of the nodes that it reads or waits for.

    Raises:
        ModelError: an input does not exist or is of another type than the op takes,
            there are too few or too many, or data comes after a control input.

    Cost: linear in the edges.
    """
    producers = []
    for node in nodes.values():
        try:
            producers.append(_check_inputs(node, inputs))
        except ModelError as error:
            raise ModelError(f"{label(node.proto)}: {error}") from error
    return producers


def _check_inputs(node: Node, inputs: Inputs) -> list[int]:
    names: Sequence[str] = node.proto.input
    data: list[Node | None] = []
    types = []
    waits_for: list[Node | None] = []
    for name in names:
        if name.startswith(_CONTROL):
            waits_for.append(inputs.control(name[1:]))
            continue
        if waits_for:
            raise ModelError(f"its input '{name}' comes after a control input")
        producer, found = inputs.resolve(name)
        types.append(found)
        data.append(producer)
    check_types(node.inputs, types, names)
    check_hazards(node.proto, [p and p.proto for p in data])
    return [p.place for p in (*data, *waits_for) if p is not None]


def check_types(
    wanted: Types | None, found: Sequence[int], names: Sequence[str]
) -> None:
    """Raise `ModelError` unless the types that were found are the wanted ones."""
    if wanted is None:
        return
    if len(found) != len(wanted):
        raise ModelError(f"it takes {len(wanted)} inputs, but has {len(found)}")
    for name, have, want in zip(names, found, wanted, strict=False):
        if have != want and have != UNKNOWN and want != UNKNOWN:
            raise ModelError(
                f"its input '{name}' is of type {type_name(have)}; taken is "
                f"{type_name(want)}"
            )


def argument_types(args: Sequence[Any]) -> dict[str, Types | None]:
    """Return the types of a function's arguments by name."""
    return {
        arg.name: (
            None if arg.number_attr or arg.type_list_attr else (base_type(arg.type),)
        )
        for arg in args
    }


def _taken(types: Types | None, number: int, name: str, of: str) -> int:
    if types is None:
        return UNKNOWN
    if number >= len(types):
        raise ModelError(
            f"its input '{name}' does not exist: {of} has {len(types)} outputs"
        )
    return types[number]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10
