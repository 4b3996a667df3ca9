"""How the nodes of a function name the tensors that they read.

`node:output:index` inside a `FunctionDef` is `node:k` in a `GraphDef`: outputs of
several tensors are counted through, which takes the signature of the op.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geutil.errors import TransformError
from geutil.graph._tf import get_op_def


def signature_of(op: str, library: Mapping[str, Any]) -> Any | None:
    """Return the `OpDef` of an op or a function of `library`, or None."""
    function = library.get(op)
    return get_op_def(op) if function is None else function.signature


def tensor_name(node: str, index: int) -> str:
    """Return how a `GraphDef` names output `index` of `node`."""
    return f"{node}:{index}" if index else node


def default_of(attribute: Any) -> Any | None:
    """Return the default of an attribute of a signature, or None."""
    return attribute.default_value if attribute.HasField("default_value") else None


class FlatNames:
    """Turns the names of one function's tensors into those of a `GraphDef`."""

    def __init__(
        self,
        function: str,
        args: list[str],
        definitions: list[Any],
        library: Mapping[str, Any],
    ) -> None:
        self._function = function
        self._args = frozenset(args)
        self._library = library
        self._nodes = {d.name: d for d in definitions}
        if len(self._nodes.keys() | self._args) < len(definitions) + len(args):
            raise TransformError(
                f"two nodes or arguments of function '{function}' have the same name"
            )
        self._outputs: dict[str, dict[str, tuple[int, int]]] = {}

    def of(self, name: str, reader: str) -> str:
        """Return the `GraphDef` name of what `reader` calls `name`."""
        if name.startswith("^"):
            self._check(name[1:] in self._nodes or name[1:] in self._args, name, reader)
            return name
        node, *output = name.split(":")
        if node in self._args:
            self._check(output in ([], ["0"]), name, reader)
            return node
        self._check(node in self._nodes and len(output) <= 2, name, reader)
        if not output:
            return node
        outputs = self._outputs.get(node)
        if outputs is None:
            outputs = self._outputs[node] = self._outputs_of(self._nodes[node])
        start, count = outputs.get(output[0], (0, 0))
        index = output[1] if len(output) > 1 else "0"
        self._check(is_index(index) and int(index) < count, name, reader)
        return tensor_name(node, start + int(index))

    def _check(self, holds: bool, name: str, reader: str) -> None:
        if not holds:
            raise TransformError(
                f"'{reader}' of function '{self._function}' reads '{name}', which the "
                "function does not hold; its definition is damaged"
            )

    def _outputs_of(self, definition: Any) -> dict[str, tuple[int, int]]:
        """Return (first index, number of tensors) of each output of a node."""
        signature = signature_of(definition.op, self._library)
        if signature is None:
            raise TransformError(
                f"op '{definition.op}' of node '{definition.name}' in function "
                f"'{self._function}' is unknown; load the library that defines it with "
                "tf.load_op_library"
            )
        start = 0
        outputs = {}
        for arg in signature.output_arg:
            count = _length(arg, definition, signature)
            outputs[arg.name] = start, count
            start += count
        return outputs


def _length(arg: Any, definition: Any, signature: Any) -> int:
    """Return the number of tensors of an output."""
    if arg.number_attr:
        return _attribute(arg.number_attr, definition, signature).i
    if arg.type_list_attr:
        return len(_attribute(arg.type_list_attr, definition, signature).list.type)
    return 1


def _attribute(name: str, definition: Any, signature: Any) -> Any:
    if name in definition.attr:
        return definition.attr[name]
    for attribute in signature.attr:
        if attribute.name == name and default_of(attribute) is not None:
            return attribute.default_value
    raise TransformError(
        f"node '{definition.name}' ({definition.op}) has no attribute '{name}', which "
        "says how many outputs it has"
    )


def is_index(text: str) -> bool:
    """Tell whether `text` is the number of an output."""
    return text.isascii() and text.isdigit() and len(text) < 10
