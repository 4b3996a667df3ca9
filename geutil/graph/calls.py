"""Calls of functions in a `GraphDef`: what a node calls, and what may stay called.

Protobufs only: no graph is made and nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from geutil.errors import TransformError
from geutil.graph.bodies import has_list
from geutil.graph.function_attributes import names_of_functions
from geutil.graph.op_types import CALLS
from geutil.graph.protos import FunctionDefLibrary

Instance: TypeAlias = tuple[str, tuple[tuple[str, bytes], ...]]
"""A function, and the attributes that it is polymorphic in."""

# What tf.function writes there by itself; TensorFlow does not heed it.
_OWN_GRADIENT = re.compile(rb"(Stateful)?PartitionedCall-\d+")


@dataclass(frozen=True)
class Call:
    """What a node calls.

    Attributes:
        function: the name of the function.
        attributes: the attributes that the function is polymorphic in.
    """

    function: str
    attributes: Mapping[str, Any] = field(repr=False)

    @property
    def instance(self) -> Instance:
        """Return the function and its attributes as a key."""
        values = sorted(self.attributes.items())
        return self.function, tuple(
            (name, value.SerializeToString(deterministic=True))
            for name, value in values
        )


class Library:
    """The functions of a `GraphDef`, by name."""

    def __init__(self, library: Any) -> None:
        self.functions = {f.signature.name: f for f in library.function}
        self.gradients = {g.function_name: g.gradient_func for g in library.gradient}
        self._library = library

    def call(self, node: Any) -> Call | None:
        """Return what a node calls, or None when it is no call.

        Raises:
            TransformError: the library does not hold the function.
        """
        if node.op in self.functions:
            name, attributes = node.op, node.attr
        elif node.op in CALLS or node.op == "SymbolicGradient":
            name, attributes = node.attr["f"].func.name, node.attr["f"].func.attr
        else:
            return None
        if name not in self.functions:
            raise TransformError(
                f"'{node.name}' calls function '{name}', which the library of the "
                "graph does not hold; add it to graph_def.library"
            )
        declared = self.functions[name].signature.attr
        return Call(
            name, {a.name: attributes[a.name] for a in declared if a.name in attributes}
        )

    def reason_to_keep(self, node: Any, function: str) -> str:
        """Return why a call cannot be replaced by its body, or nothing."""
        definition = self.functions[function]
        signature = definition.signature
        for name, reason in _REASONS.items():
            if node.attr[name].b if name in node.attr else False:
                return f"{reason} ({name} of the call)"
            if definition.attr[name].b if name in definition.attr else False:
                return f"{reason} ({name} of the function)"
        if node.op == "SymbolicGradient":
            return "it calls the gradient of the function, not the function"
        if function in self.gradients:
            return f"its gradient is another function, '{self.gradients[function]}'"
        if "_gradient_op_type" in node.attr and not _OWN_GRADIENT.fullmatch(
            node.attr["_gradient_op_type"].s
        ):
            return "its gradient is overridden (_gradient_op_type of the call)"
        if any(has_list(a) for a in (*signature.input_arg, *signature.output_arg)):
            return "the function takes or returns a list of tensors"
        return ""

    def still_called(self, nodes: Iterable[Any]) -> Any:
        """Return a library of the functions that `nodes` call, however indirectly."""
        library = self._library
        registered = [r.gradient_func for r in library.registered_gradients]
        found: dict[str, None] = {}
        waiting = [
            *registered,
            *(n for node in nodes for n in names_of_functions(node)),
        ]
        while waiting:
            name = waiting.pop()
            if name in found or name not in self.functions:
                continue
            found[name] = None
            for node in self.functions[name].node_def:
                waiting.extend(names_of_functions(node))
            if name in self.gradients:
                waiting.append(self.gradients[name])
        result = FunctionDefLibrary()
        result.function.extend(f for f in library.function if f.signature.name in found)
        result.gradient.extend(g for g in library.gradient if g.function_name in found)
        result.registered_gradients.extend(library.registered_gradients)
        return result


_REASONS = {
    "_XlaMustCompile": "XLA compiles it as a whole",
    "_noinline": "it is marked to stay a call",
}
