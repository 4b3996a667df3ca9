"""Function bodies as plain nodes, and the names by which they read tensors.

Inside a `FunctionDef` a node reads `node:output:index`, an argument by its name, and
results are a map. Here a body reads as a `GraphDef` does: `node`, `node:k`, `^node`.
Protobufs only: no graph is made and nothing is run.

`node:output:index` inside a `FunctionDef` is `node:k` in a `GraphDef`: outputs of
several tensors are counted through, which takes the signature of the op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from geutil.errors import TransformError
from geutil.graph._tf import get_op_def
from geutil.graph.protos import NodeDef


def signature_of(op: str, library: Mapping[str, Any]) -> Any | None:
    """Return the `OpDef` of an op or a function of `library`, or None."""
    function = library.get(op)
    return get_op_def(op) if function is None else function.signature


def output_name(node: str, index: int) -> str:
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
        # Names are all that edges refer to: a second one would hide the first.
        if len(self._nodes.keys() | self._args) < len(definitions) + len(args):
            raise TransformError(
                f"two nodes or arguments of function '{function}' have the same name"
            )
        self._outputs: dict[str, dict[str, tuple[int, int]]] = {}

    def of(self, name: str, reader: str) -> str:
        """Return the `GraphDef` name of the tensor that `reader` calls `name`."""
        if name.startswith("^"):
            self._check(name[1:] in self._nodes or name[1:] in self._args, name, reader)
            return name
        node, *output = name.split(":")
        if node in self._args:
            # An argument is one tensor, so it has no output but the first.
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
        return output_name(node, start + int(index))

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


@dataclass(frozen=True)
class Arg:
    """An argument of a function."""

    name: str  # Its name, which nodes of the body read.
    dtype: int  # The number of its `tf.DType`.
    # Its `AttrValue` protos by name: `_output_shapes`, `_handle_shapes`,
    # `_user_specified_name` and others.
    attributes: Mapping[str, Any] = field(repr=False)
    # Dtype and shape of the variable behind a resource, as protos.
    handle_data: tuple[Any, ...] = field(repr=False)


@dataclass(frozen=True)
class Result:
    """A result of a function."""

    name: str
    tensor: str  # Where it comes from: `node`, `node:k` or the name of an argument.
    dtype: int  # The number of its `tf.DType`.
    handle_data: tuple[Any, ...] = field(repr=False)


@dataclass(frozen=True)
class BodyNode:
    """A node of a body: its definition, which names other inputs, and its inputs."""

    definition: Any = field(repr=False)
    inputs: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the name of the node inside the body."""
        return self.definition.name


@dataclass(frozen=True)
class FlatBody:
    """A function as plain nodes, for one choice of its attributes."""

    name: str
    args: tuple[Arg, ...]
    nodes: tuple[BodyNode, ...] = field(repr=False)
    results: tuple[Result, ...]
    # (name, node) of each op that a call waits for.
    control_results: tuple[tuple[str, str], ...]

    def node_defs(self) -> list[Any]:
        """Return a new `NodeDef` for each node, with the inputs of a `GraphDef`."""
        result = []
        for node in self.nodes:
            copied = NodeDef()
            copied.CopyFrom(node.definition)
            copied.ClearField("input")
            copied.input.extend(node.inputs)
            result.append(copied)
        return result


def flat_body(
    function_def: Any,
    library: Mapping[str, Any],
    attributes: Mapping[str, Any] | None = None,
) -> FlatBody:
    """Return the body of a function as plain nodes."""
    # Definitions are those of `function_def`, not copies, where no attribute had to be
    # filled in: those left out of `attributes` have their defaults.
    signature = function_def.signature
    bound = _bound_attributes(signature, attributes or {})
    definitions = list(function_def.node_def)
    if signature.attr:
        where = f"function '{signature.name}'"
        definitions = [_filled_in(d, bound, where) for d in definitions]
    args = tuple(_args(function_def, bound))
    flat = FlatNames(signature.name, [arg.name for arg in args], definitions, library)
    nodes = tuple(
        BodyNode(d, tuple(flat.of(name, d.name) for name in d.input))
        for d in definitions
    )
    results = []
    for arg in signature.output_arg:
        _refuse_list(signature.name, arg)
        if arg.name not in function_def.ret:
            raise TransformError(
                f"function '{signature.name}' does not say what its result "
                f"'{arg.name}' is; its definition is damaged"
            )
        tensor = flat.of(function_def.ret[arg.name], arg.name)
        dtype = _dtype(signature.name, arg, bound)
        results.append(Result(arg.name, tensor, dtype, tuple(arg.handle_data)))
    controls, control_ret = [], dict(function_def.control_ret)
    # The signature knows their order; functions of older files leave it out.
    for name in dict.fromkeys((*signature.control_output, *sorted(control_ret))):
        controls.append((name, flat.of(f"^{control_ret.get(name, '')}", name)[1:]))
    return FlatBody(signature.name, args, nodes, tuple(results), tuple(controls))


def _args(function_def: Any, bound: Mapping[str, Any]) -> Iterator[Arg]:
    for index, arg in enumerate(function_def.signature.input_arg):
        _refuse_list(function_def.signature.name, arg)
        dtype = _dtype(function_def.signature.name, arg, bound)
        has_attributes = index in function_def.arg_attr
        attributes = dict(function_def.arg_attr[index].attr) if has_attributes else {}
        yield Arg(arg.name, dtype, attributes, tuple(arg.handle_data))


def _dtype(function: str, arg: Any, bound: Mapping[str, Any]) -> int:
    if not arg.type_attr:
        return arg.type
    if arg.type_attr not in bound:
        raise TransformError(
            f"attribute '{arg.type_attr}' of function '{function}' has no value: it "
            f"says the type of '{arg.name}'; give it in attributes"
        )
    return bound[arg.type_attr].type


def _refuse_list(function: str, arg: Any) -> None:
    if has_list(arg):
        raise TransformError(
            f"'{arg.name}' of function '{function}' is a list of tensors; such a "
            "function can be called but not opened: leave its calls as they are"
        )


def has_list(arg: Any) -> bool:
    """Tell whether an argument or result of a signature is a list of tensors."""
    return bool(arg.number_attr or arg.type_list_attr)


def _bound_attributes(signature: Any, attributes: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {a.name: default_of(a) for a in signature.attr}
    return {name: v for name, v in {**defaults, **attributes}.items() if v is not None}


def _filled_in(definition: Any, bound: Mapping[str, Any], where: str) -> Any:
    """Return a copy of a node with its placeholders replaced by the values bound."""
    filled = NodeDef()
    filled.CopyFrom(definition)
    # An attribute that names a function has attributes of its own, with placeholders.
    waiting = [filled.attr]
    for attributes in waiting:
        for value in attributes.values():
            kind = value.WhichOneof("value")
            if kind == "placeholder":
                if value.placeholder not in bound:
                    raise TransformError(
                        f"attribute '{value.placeholder}' of {where} has no value, and "
                        f"'{definition.name}' needs it; give it in attributes"
                    )
                value.CopyFrom(bound[value.placeholder])
            elif kind == "func":
                waiting.append(value.func.attr)
            elif kind == "list":
                waiting.extend(function.attr for function in value.list.func)
    return filled
