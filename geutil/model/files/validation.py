"""The check of a GraphDef before TensorFlow's importer sees it.

Nodes, edges, cycles.

The importer refuses most faults, but not all: some of it makes it abort the process, or
allocate without bound. A graph that passes here is safe to give to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from geutil.errors import ModelError
from geutil.graph.op_types import CALLS, MERGES, NEXT_ITERATIONS
from geutil.graph.protos import FunctionDef, GraphDef
from geutil.graph.walks import topological_order
from geutil.model.files import node_checks, tensor_checks
from geutil.model.files.node_checks import CheckedNode
from geutil.model.files.tensor_checks import UNKNOWN, OpSignatures, Types

# Faults that a message lists; the rest is counted.
_SHOWN = 8


def check_cycles(nodes: Sequence[Any], producers: Sequence[Sequence[int]]) -> None:
    """Check that only loops of version 1 close a circle."""
    if all(p < i for i, read in enumerate(producers) for p in read):
        return  # In topological order, as most graphs are.
    merges = {i for i, node in enumerate(nodes) if node.op in MERGES}
    closing = NEXT_ITERATIONS if merges else frozenset()
    ahead = {i for i, node in enumerate(nodes) if node.op in closing}

    def needs(i: int) -> list[int]:
        return [p for p in producers[i] if not (i in merges and p in ahead)]

    def refuse(cycle: list[int]) -> None:
        raise ModelError(_told([nodes[i].name for i in reversed(cycle)], "nodes"))

    topological_order(range(len(nodes)), needs, refuse)


def check_recursion(functions: Mapping[str, Any]) -> None:
    """Check that no function calls itself in any case, directly or through others."""

    def refuse(cycle: list[str]) -> None:
        raise ModelError(_told(cycle, "functions"))

    topological_order(
        functions, lambda name: _called(functions[name], functions), refuse
    )


def _called(function: Any, functions: Mapping[str, Any]) -> dict[str, None]:
    called: dict[str, None] = {}
    for node in function.node_def:
        # These run what they name. A While or an If may run it, or not, and so may end.
        name = node.attr["f"].func.name if node.op in CALLS else node.op
        if name in functions:
            called[name] = None
    return called


def _told(names: Sequence[str], what: str) -> str:
    shown = [*names[:_SHOWN], "..."] if len(names) > _SHOWN else [*names]
    return f"{what} wait for each other: {' -> '.join([*shown, names[0]])}"


_CONTROL = "^"


class InputResolver(ABC):
    """Resolves the names of inputs among nodes."""

    def __init__(self, nodes: Mapping[str, CheckedNode]) -> None:
        self.nodes = nodes

    @abstractmethod
    def resolve(self, name: str) -> tuple[CheckedNode | None, int]:
        """Return the producer of an input, if a node, and the input's type."""

    def control(self, name: str) -> CheckedNode | None:
        """Return the node that a control input waits for; None is an argument."""
        node = self.nodes.get(name)
        if node is None:
            raise ModelError(f"it waits for '{name}', which does not exist")
        return node


class GraphInputs(InputResolver):
    """Inputs of a graph: `node` or `node:1`."""

    def resolve(self, name: str) -> tuple[CheckedNode, int]:
        """Return the producer of an input, and the input's type."""
        producer, _, number = name.rpartition(":")
        if not producer or not _is_number(number):
            producer, number = name, "0"
        node = self.nodes.get(producer)
        if node is None:
            raise ModelError(f"its input '{name}' does not exist")
        return node, _taken(
            node.outputs, int(number), name, node_checks.label(node.proto)
        )


class BodyInputs(InputResolver):
    """The inputs of a function body: `arg`, `arg:1`, `node:output`, `node:output:1`."""

    def __init__(
        self, nodes: Mapping[str, CheckedNode], arguments: Mapping[str, Types | None]
    ) -> None:
        super().__init__(nodes)
        self.arguments = arguments
        self._outputs: dict[str, dict[str, Types | None]] = {}

    def control(self, name: str) -> CheckedNode | None:
        """Return the node that a control input waits for; None is an argument."""
        return None if name in self.arguments else super().control(name)

    def resolve(self, name: str) -> tuple[CheckedNode | None, int]:
        """Return the producer of an input, None for an argument, and its type."""
        first, *rest = name.split(":")
        # A name without a number is that of the first tensor.
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
                f"its input '{name}' does not exist: {node_checks.label(node.proto)} "
                f"has the outputs {list(outputs)}"
            )
        return node, _taken(
            outputs[rest[0]], int(number), name, node_checks.label(node.proto)
        )


def check_edges(
    nodes: Mapping[str, CheckedNode], inputs: InputResolver
) -> list[list[int]]:
    """Check the inputs of each node; return the places of the nodes that it needs."""
    producers = []
    for node in nodes.values():
        try:
            producers.append(_check_inputs(node, inputs))
        except ModelError as error:
            raise ModelError(f"{node_checks.label(node.proto)}: {error}") from error
    return producers


def _check_inputs(node: CheckedNode, inputs: InputResolver) -> list[int]:
    """Check the inputs of a node; return the places of its producers."""
    names: Sequence[str] = node.proto.input
    data: list[CheckedNode | None] = []
    types = []
    waits_for: list[CheckedNode | None] = []
    for name in names:
        if name.startswith(_CONTROL):
            waits_for.append(inputs.control(name[1:]))
            continue
        if waits_for:
            raise ModelError(f"its input '{name}' comes after a control input")
        producer, input_type = inputs.resolve(name)
        types.append(input_type)
        data.append(producer)
    check_types(node.inputs, types, names)
    node_checks.check_hazards(node.proto, [p and p.proto for p in data])
    return [p.place for p in (*data, *waits_for) if p is not None]


def check_types(
    expected: Types | None, actual: Sequence[int], names: Sequence[str]
) -> None:
    """Raise `ModelError` unless the actual types are the expected ones."""
    if expected is None:
        return
    if len(actual) != len(expected):
        raise ModelError(f"it takes {len(expected)} inputs, but has {len(actual)}")
    for name, have, want in zip(names, actual, expected, strict=False):
        if have != want and have != UNKNOWN and want != UNKNOWN:
            raise ModelError(
                f"its input '{name}' is of type {tensor_checks.type_name(have)}; taken "
                f"is {tensor_checks.type_name(want)}"
            )


def argument_types(args: Sequence[Any]) -> dict[str, Types | None]:
    """Return the types of a function's arguments by name."""
    return {
        arg.name: (
            None
            if arg.number_attr or arg.type_list_attr
            else (tensor_checks.base_type(arg.type),)
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


def check_graph_def(graph_def: GraphDef, what: str) -> None:
    """Check that TensorFlow can import a graph.

    Names are legal and unique; op types are known to this TensorFlow or are functions
    of the library; attributes are complete and of their declared types; constants hold
    as many values as type and shape ask for; inputs exist, as many as the op takes and
    of the right type, where the attributes tell; nodes wait for each other only by the
    back edges of loops; functions that are named exist, and none calls itself for ever.
    The bodies of functions are checked alike.

    Attributes that an op does not have (of older or newer versions), devices and shapes
    that do not fit each other are left to TensorFlow, which refuses them well.

    Args:
        graph_def: the graph with its library; it is not changed.
        what: how messages call it: the file that it comes from, for example.

    Example:
        >>> import tensorflow as tf
        >>> graph_def = tf.compat.v1.GraphDef()
        >>> _ = graph_def.node.add(name="x", op="NoSuchOp")
        >>> try:
        ...     check_graph_def(graph_def, "mine.pb")
        ... except ModelError as error:
        ...     print(error)
        mine.pb: node 'x' (NoSuchOp): this TensorFlow does not know the op, and no
        function is called so; if it is a custom op, load its library first with
        tf.load_op_library
    """
    try:
        functions = _functions(graph_def.library)
        signatures = OpSignatures(functions)
        _check_graph(graph_def, signatures)
        for name, function in functions.items():
            try:
                _check_body(function, signatures)
            except ModelError as error:
                raise ModelError(f"function '{name}': {error}") from error
        check_recursion(functions)
    except ModelError as error:
        raise ModelError(f"{what}: {error}") from error


def _functions(library: Any) -> dict[str, FunctionDef]:
    functions: dict[str, FunctionDef] = {}
    for function in library.function:
        name = function.signature.name
        if not name:
            raise ModelError("a function of the library has no name")
        if name in functions:
            raise ModelError(f"two functions are called '{name}'")
        functions[name] = function
    return functions


def _check_graph(graph_def: GraphDef, signatures: OpSignatures) -> None:
    nodes = node_checks.check_nodes(graph_def.node, signatures, in_function=False)
    producers = check_edges(nodes, GraphInputs(nodes))
    check_cycles(graph_def.node, producers)


def _check_body(function: FunctionDef, signatures: OpSignatures) -> None:
    for arg in (*function.signature.input_arg, *function.signature.output_arg):
        tensor_checks.check_type(arg.type)
    arguments = argument_types(function.signature.input_arg)
    if len(arguments) < len(function.signature.input_arg):
        raise ModelError("two of its arguments have the same name")
    nodes = node_checks.check_nodes(function.node_def, signatures, in_function=True)
    inputs = BodyInputs(nodes, arguments)
    producers = check_edges(nodes, inputs)
    check_cycles(function.node_def, producers)
    _check_results(function, inputs)
    for result in function.control_ret.values():
        inputs.control(result)


def _check_results(function: FunctionDef, inputs: BodyInputs) -> None:
    returned: Mapping[str, str] = function.ret
    types_by_name = argument_types(function.signature.output_arg)
    for name, types in types_by_name.items():
        tensor = returned.get(name)
        if tensor is None:
            raise ModelError(f"its result '{name}' is not computed")
        try:
            _, result_type = inputs.resolve(tensor)
            check_types(types, [result_type], [tensor])
        except ModelError as error:
            raise ModelError(f"its result '{name}': {error}") from error
