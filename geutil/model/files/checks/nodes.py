"""The nodes of one graph or function body: names, op types, attributes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from geutil.model.errors import ModelError
from geutil.model.files.checks.attributes import check_attributes
from geutil.model.files.checks.signatures import Signature, Signatures, Types

_PART = r"[A-Za-z0-9._/\\-]*"
_NAME = re.compile(rf"[A-Za-z0-9.]{_PART}(>[A-Za-z0-9.]{_PART})*")
# TensorFlow names nodes that it adds to bodies like this.
_INTERNAL_NAME = re.compile(r"_*" + _NAME.pattern)


@dataclass(eq=False)
class Node:
    """A node that passed, with what its inputs are checked against.

    Attributes:
        proto: its `NodeDef`.
        place: its place among the nodes.
        signature: the definition of its op type.
        inputs: the types of its inputs, None if their number is unknown.
        outputs: the types of its outputs, likewise.
    """

    proto: Any
    place: int
    signature: Signature
    inputs: Types | None
    outputs: Types | None
    attributes: dict[str, Any] | None = field(default=None, repr=False)


def check_nodes(
    protos: Iterable[Any], signatures: Signatures, *, in_function: bool
) -> dict[str, Node]:
    """Check each node by itself, and return the nodes by name, in order.

    Args:
        protos: the `NodeDef` protos.
        signatures: the known op types.
        in_function: they are the body of a function.

    Raises:
        ModelError: a name is not legal or occurs twice, an op type is unknown, or an
            attribute is wrong.

    Cost: linear in the nodes and their attributes.
    """
    legal = _INTERNAL_NAME if in_function else _NAME
    nodes: dict[str, Node] = {}
    shared: dict[Types, Types] = {}
    for place, proto in enumerate(protos):
        name = proto.name
        if not legal.fullmatch(name):
            raise ModelError(
                f"node number {place} is called '{name}', which is no legal name"
            )
        if name in nodes:
            raise ModelError(f"two nodes are called '{name}'")
        try:
            node = _checked(proto, place, signatures, in_function)
        except ModelError as error:
            raise ModelError(f"{label(proto)}: {error}") from error
        # Most nodes take and give the same as others: one tuple for all saves memory.
        if node.inputs is not None:
            node.inputs = shared.setdefault(node.inputs, node.inputs)
        if node.outputs is not None:
            node.outputs = shared.setdefault(node.outputs, node.outputs)
        nodes[name] = node
    return nodes


def _checked(proto: Any, place: int, signatures: Signatures, in_function: bool) -> Node:
    signature = signatures.get(proto.op)
    if signature is None:
        raise ModelError(
            "this TensorFlow does not know the op, and no function is called so; if "
            "it is a custom op, load its library first with tf.load_op_library"
        )
    attributes = dict(proto.attr.items())
    check_attributes(attributes, signature, signatures, in_function=in_function)
    return Node(
        proto,
        place,
        signature,
        signature.input_types(attributes),
        signature.output_types(attributes),
        attributes if in_function else None,
    )


def label(proto: Any) -> str:
    """Return how a message calls a node."""
    return f"node '{proto.name}' ({proto.op})"
