"""Calls among the functions of a `GraphDef`.

The calls between functions, their order and their effects.

Protobufs only: no graph is made and nothing is run.

A call runs every stateful op of its body, whichever of its outputs is asked for, after
all that it reads and before all that reads it. Once the body stands in the caller's
place, only data and control edges order it, and only ancestors of an output run.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from geutil.errors import TransformError
from geutil.graph import flat_body, op_types
from geutil.graph.protos import FunctionDefLibrary
from geutil.graph.types import Operation, is_reference
from geutil.graph.walks import closure, topological_order

T = TypeVar("T", bound=Hashable)


def needs_first(needs: Mapping[T, Iterable[T]]) -> list[T]:
    """Return keys, each after those that it needs; a cycle loses one edge."""
    return topological_order(needs, lambda key: [n for n in needs[key] if n in needs])


def on_cycles(needs: Mapping[T, Iterable[T]]) -> set[T]:
    """Return the keys of `needs` that need themselves, however indirectly."""
    # Kosaraju's algorithm: the components are found by walks against the edges, from
    # the keys whose walk along the edges ended last.
    needed_by: dict[T, list[T]] = {key: [] for key in needs}
    for key, values in needs.items():
        for value in values:
            if value in needed_by:
                needed_by[value].append(key)
    result: set[T] = set()
    seen: set[T] = set()
    for start in reversed(needs_first(needs)):
        if start in seen:
            continue
        component = closure(
            [start], lambda key: [k for k in needed_by[key] if k not in seen]
        )
        seen.update(component)
        if len(component) > 1 or start in needed_by[start]:
            result.update(component)
    return result


def function_values(attributes: Any) -> Iterator[Any]:
    """Yield the `NameAttrList` protos in a map of `AttrValue` protos, nested too."""
    waiting = [attributes]
    for inner in waiting:
        for value in inner.values():
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


# Stateful by their signature, but they make a handle or a random number: nobody notices
# whether or when they ran.
_UNNOTICED = frozenset(
    (
        "HashTableV2",
        "Multinomial",
        "MutableHashTableV2",
        "RandomGamma",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "TruncatedNormal",
        "VarHandleOp",
        "VariableShape",
        "VariableV2",
    )
)
# Nobody notices whether they ran, but what they see depends on when.
_READS = frozenset(
    (
        "DisableCopyOnRead",
        "IsVariableInitialized",
        "LookupTableFindV2",
        "LookupTableSizeV2",
        "ReadVariableOp",
        "ResourceGather",
        "ResourceGatherNd",
        "VarIsInitializedOp",
    )
)
# Stateful by their signature, and made for what they yield.
_GIVEN = frozenset(("IteratorGetNext", "IteratorV2", "Placeholder"))
# They read a variable of version 1, or hand it on.
_QUIET_READS = frozenset(
    ("Identity", "IsVariableInitialized", "RefEnter", "RefIdentity", "RefSwitch")
)
# They do what a function of theirs does.
_AS_THEIR_FUNCTIONS = frozenset(
    (
        "Case",
        "If",
        "PartitionedCall",
        "StatefulPartitionedCall",
        "StatelessCase",
        "StatelessIf",
        "StatelessWhile",
        "SymbolicGradient",
        "While",
    )
)


class Effects:
    """Tells which nodes have an effect, given the functions that they may call."""

    # With `reads`, a read of a variable or table counts as an effect, too.

    def __init__(self, functions: Mapping[str, Any], *, reads: bool = False) -> None:
        self._functions = functions
        self._reads = reads
        callers: dict[str, list[str]] = {}
        effective_names: dict[str, None] = {}
        for name, function in functions.items():
            for node in function.node_def:
                if self.depends(node):
                    for called in names_of_functions(node):
                        callers.setdefault(called, []).append(name)
                if self._by_itself(node):
                    effective_names[name] = None
        # Effects pass from functions to their callers until no new function has one.
        self._found = closure(effective_names, lambda name: callers.get(name, ()))

    def of(self, node: Any) -> bool:
        """Tell whether a node has an effect."""
        return self._by_itself(node) or (
            self.depends(node)
            and any(name in self._found for name in names_of_functions(node))
        )

    def is_kernel(self, node: Any) -> bool:
        """Tell whether a node is an op that only computes."""
        signature = flat_body.signature_of(node.op, {})
        return not (self.depends(node) or signature is None or signature.is_stateful)

    def depends(self, node: Any) -> bool:
        """Tell whether a node has the effects of its functions, and no others."""
        return node.op in _AS_THEIR_FUNCTIONS or node.op in self._functions

    def _by_itself(self, node: Any) -> bool:
        if self.depends(node):
            # An attribute of the function decides what is called.
            return any(
                value.WhichOneof("value") == "placeholder" and name in _FUNCTION
                for name, value in node.attr.items()
            )
        if node.op in _UNNOTICED:
            return False
        if node.op in _READS:
            return self._reads
        signature = flat_body.signature_of(node.op, {})
        return signature is None or signature.is_stateful


_FUNCTION = frozenset(("f", "body", "cond", "then_branch", "else_branch", "branches"))


def changes_state(op: Operation) -> bool:
    """Tell whether running an op changes state that others see: a variable, a file."""
    # A call counts if TensorFlow calls it stateful; its function is not looked at.
    if any(is_reference(t) for t in op.inputs):
        # TensorFlow does not call the assignments of version 1 stateful.
        return op.type not in _QUIET_READS
    definition = op.op_def
    stateful = definition is None or bool(definition.is_stateful)
    return stateful and op.type not in _UNNOTICED | _READS | _GIVEN


Instance: TypeAlias = tuple[str, tuple[tuple[str, bytes], ...]]
"""A function, and the attributes that it is polymorphic in."""

# Written by tf.function itself; TensorFlow does not heed it.
_OWN_GRADIENT = re.compile(rb"(Stateful)?PartitionedCall-\d+")


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function, with values for its polymorphic attributes."""

    function: str
    # The attributes that the function is polymorphic in.
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

    def call(self, node: Any) -> FunctionCall | None:
        """Return the call of a node, or None when it is none."""
        if node.op in self.functions:
            name, attributes = node.op, node.attr
        elif node.op in op_types.CALLS or node.op == "SymbolicGradient":
            name, attributes = node.attr["f"].func.name, node.attr["f"].func.attr
        else:
            return None
        if name not in self.functions:
            raise TransformError(
                f"'{node.name}' calls function '{name}', which the library of the "
                "graph does not hold; add it to graph_def.library"
            )
        # Other attributes of a call, such as its config, make no other instance.
        declared = self.functions[name].signature.attr
        return FunctionCall(
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
        if any(
            flat_body.has_list(a) for a in (*signature.input_arg, *signature.output_arg)
        ):
            return "the function takes or returns a list of tensors"
        return ""

    def still_called(self, nodes: Iterable[Any]) -> Any:
        """Return a library of the functions that `nodes` call, however indirectly."""
        library = self._library
        # The runtime finds these by the type of an op: no node calls them.
        registered = [r.gradient_func for r in library.registered_gradients]

        def called(name: str) -> Iterator[str]:
            if name in self.functions:
                for node in self.functions[name].node_def:
                    yield from names_of_functions(node)
            if name in self.gradients:
                yield self.gradients[name]

        starts = (n for node in nodes for n in names_of_functions(node))
        reachable_names = closure([*registered, *starts], called)
        result = FunctionDefLibrary()
        result.function.extend(
            f for f in library.function if f.signature.name in reachable_names
        )
        result.gradient.extend(
            g for g in library.gradient if g.function_name in reachable_names
        )
        result.registered_gradients.extend(library.registered_gradients)
        return result


_REASONS = {
    "_XlaMustCompile": "XLA compiles it as a whole",
    "_noinline": "it is marked to stay a call",
}
