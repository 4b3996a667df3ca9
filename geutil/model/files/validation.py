"""The check of a GraphDef before TensorFlow's importer sees it: nodes, edges, cycles.

The importer refuses most faults, but not all: some of it makes it abort the process, or
allocate without bound. A graph that passes here is safe to give to it.

TensorFlow infers shapes while it imports, and most shape functions refuse senseless
values. Some do not: each rule was found by a damaged graph that took the process down.
"""

from __future__ import annotations

import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from geutil.errors import ModelError
from geutil.graph.op_types import CALLS, MERGES, NEXT_ITERATIONS
from geutil.graph.protos import PARSE_ERRORS, FunctionDef, GraphDef, TensorProto
from geutil.graph.walks import topological_order
from geutil.model.files import tensor_checks
from geutil.model.files.tensor_checks import UNKNOWN, OpSignatures, Signature, Types

_Rule: TypeAlias = Callable[[Any, Sequence[Any]], None]
"""Takes a `NodeDef` and those of its producers, None for unknown ones; raises
`ModelError`."""


_RUNTIME_ONLY = ("_FusedQuantized", "_Quantized", "_ScopedAllocator")
"""Begin the names of ops that TensorFlow's optimizers make while they run a graph."""

_SHAPES_OF_OUTPUTS = {
    "InfeedDequeueTuple": ("shapes", "dtypes"),
    "XlaCallModule": ("Sout", "Tout"),
}
"""A list of shapes is written to the outputs, however many there are."""

_ONE_ELEMENT = {
    "QueueDequeueMany": 1,
    "QueueDequeueManyV2": 1,
    "QueueDequeueUpTo": 1,
    "QueueDequeueUpToV2": 1,
}
"""The input that a constant must give one number to."""

_LEAST_RANKS = {
    "BoostedTreesAggregateStats": (1, 1, 1, 1),
    "BoostedTreesExampleDebugOutputs": (0, 1),
    "BoostedTreesPredict": (0, 1),
    "BoostedTreesTrainingPredict": (0, 1, 1, 1),
    "XlaSparseGradientsStack": (2,),
}
"""How many dimensions each input must have at least; the last goes for the rest."""

_RANK_GIVERS = {
    "ConjugateTranspose": 1,
    "MirrorPad": 1,
    "Pad": 1,
    "PadV2": 1,
    "Slice": 1,
    "Transpose": 1,
    "_MklConjugateTranspose": 1,
    "_MklTranspose": 1,
}
"""The input whose size gives the number of dimensions, which TensorFlow allocates."""

_NUMBERS = {"CollectiveGather": "group_size"}
"""An attribute that must fit into 32 bits."""


def _check_hazards(node: Any, producers: Sequence[Any]) -> None:
    """Raise `ModelError` if a node would take the process down."""
    rule = _RULES.get(node.op)
    if rule is not None:
        rule(node, producers)
    elif node.op.startswith(_RUNTIME_ONLY):
        raise ModelError(
            "TensorFlow makes this op only while it runs a graph; save the graph as it "
            "was before its optimizers"
        )


def _constant(node: Any, producers: Sequence[Any]) -> None:
    attributes = node.attr
    # Shape functions read constants as the type that the inputs are declared to have.
    if "value" not in attributes or "dtype" not in attributes:
        return
    declared, value = attributes["dtype"], attributes["value"]
    if "placeholder" in (declared.WhichOneof("value"), value.WhichOneof("value")):
        return
    if value.tensor.dtype != declared.type:
        raise ModelError(
            f"its value is {tensor_checks.type_name(value.tensor.dtype)}, but its type "
            f"is {tensor_checks.type_name(declared.type)}"
        )


def _gather(node: Any, producers: Sequence[Any]) -> None:
    attributes = node.attr
    if "batch_dims" not in attributes:
        return
    shapes = [_known_shape(p) for p in producers[:2]]
    most = min(
        [len(s) for s in shapes if s is not None], default=tensor_checks.MOST_DIMENSIONS
    )
    batch = attributes["batch_dims"].i
    if not -most <= batch <= most:
        raise ModelError(f"'batch_dims' is {batch}, of at most {most} dimensions")


def _shapes(node: Any, producers: Sequence[Any]) -> None:
    shapes, types = _SHAPES_OF_OUTPUTS[node.op]
    shape_count = len(node.attr[shapes].list.shape) if shapes in node.attr else 0
    outputs = len(node.attr[types].list.type) if types in node.attr else 0
    if shape_count > outputs:
        raise ModelError(f"'{shapes}' lists {shape_count} shapes for {outputs} outputs")


def _one_element(node: Any, producers: Sequence[Any]) -> None:
    place = _ONE_ELEMENT[node.op]
    shape = _known_shape(producers[place]) if place < len(producers) else None
    if shape is not None and math.prod(shape) != 1:
        raise ModelError(f"its input number {place} is of shape {shape}, not a scalar")


def _ranks(node: Any, producers: Sequence[Any]) -> None:
    least = _LEAST_RANKS[node.op]
    for place, producer in enumerate(producers):
        shape = _known_shape(producer)
        least_rank = least[min(place, len(least) - 1)]
        if shape is not None and len(shape) < least_rank:
            raise ModelError(
                f"its input number {place} is of shape {shape}; it needs at least "
                f"{least_rank} dimensions"
            )


def _rank_giver(node: Any, producers: Sequence[Any]) -> None:
    place = _RANK_GIVERS[node.op]
    shape = _known_shape(producers[place]) if place < len(producers) else None
    # Paddings are two numbers for each dimension.
    if (
        shape
        and math.prod(size for size in shape if size > 0)
        > 2 * tensor_checks.MOST_DIMENSIONS
    ):
        raise ModelError(
            f"its input number {place} is of shape {shape}, for more than "
            f"{tensor_checks.MOST_DIMENSIONS} dimensions"
        )


def _split_vector(node: Any, producers: Sequence[Any]) -> None:
    sizes = _known_shape(producers[1]) if len(producers) > 1 else None
    if sizes is not None and len(sizes) != 1:
        raise ModelError(f"its input number 1 is of shape {sizes}, not a vector")


def _tuple_mask(node: Any, producers: Sequence[Any]) -> None:
    mask = node.attr["tuple_mask"].s if "tuple_mask" in node.attr else b""
    try:
        dimensions = len(TensorProto.FromString(mask).tensor_shape.dim)
    except PARSE_ERRORS:
        dimensions = 0
    if not dimensions:
        raise ModelError("'tuple_mask' holds no tensor")


def _small_number(node: Any, producers: Sequence[Any]) -> None:
    name = _NUMBERS[node.op]
    if name in node.attr and abs(node.attr[name].i) >= 2**31:
        raise ModelError(f"'{name}' is {node.attr[name].i}")


def _known_shape(producer: Any) -> list[int] | None:
    """Return the shape of a constant or a placeholder, or None if it is unknown."""
    if producer is None:
        return None
    shape = None
    if producer.op == "Const" and "value" in producer.attr:
        shape = producer.attr["value"].tensor.tensor_shape
    elif producer.op == "Placeholder" and "shape" in producer.attr:
        shape = producer.attr["shape"].shape
    if shape is None or shape.unknown_rank:
        return None
    return [d.size for d in shape.dim]


_RULES: dict[str, _Rule] = {
    "Const": _constant,
    "GatherV2": _gather,
    **dict.fromkeys(_SHAPES_OF_OUTPUTS, _shapes),
    **dict.fromkeys(_ONE_ELEMENT, _one_element),
    **dict.fromkeys(_LEAST_RANKS, _ranks),
    **dict.fromkeys(_NUMBERS, _small_number),
    **dict.fromkeys(_RANK_GIVERS, _rank_giver),
    "SplitV": _split_vector,
    "SplitDedupData": _tuple_mask,
}


_FIELDS = {
    "string": "s",
    "int": "i",
    "float": "f",
    "bool": "b",
    "type": "type",
    "shape": "shape",
    "tensor": "tensor",
    "func": "func",
}
_LIST = re.compile(r"list\((\w+)\)")


def _check_attributes(
    attributes: Mapping[str, Any],
    signature: Signature,
    signatures: OpSignatures,
    *,
    in_function: bool,
) -> None:
    """Check the attributes of one node."""
    # Attributes that the definition does not mention are left to TensorFlow: graphs of
    # other versions bear such. In a function's body an attribute may be one of the
    # function's own.
    for name in signature.required:
        if name not in attributes:
            raise ModelError(f"attribute '{name}' is missing")
    declared = signature.attributes
    for name, value in attributes.items():
        kind = value.WhichOneof("value")
        if kind == "placeholder" and in_function:
            continue
        try:
            check = _CHECKS.get(kind)
            if check is not None:
                check(value)
            if name in declared:
                _check_declared(value, kind, declared[name], signatures)
        except ModelError as error:
            raise ModelError(f"attribute '{name}' {error}") from error


def _check_declared(
    value: Any, kind: str | None, declaration: Any, signatures: OpSignatures
) -> None:
    """Check a value against the declaration of its attribute."""
    field, element = _field_and_element(declaration.type)
    if field is None:
        return
    if kind != field:
        raise ModelError(
            f"is of type {kind or 'none at all'}; declared: {declaration.type}"
        )
    if element is None:
        elements = [getattr(value, field)]
    else:
        _check_elements(value.list, element)
        elements = getattr(value.list, element)
    if declaration.HasField("allowed_values"):
        _check_allowed(elements, declaration.allowed_values.list)
    if declaration.has_minimum:
        # The minimum of a list is one of its length.
        least = value.i if field == "i" else len(elements)
        if least < declaration.minimum:
            raise ModelError(f"is or has {least}; at least {declaration.minimum}")
    if "func" in (field, element):
        for func in elements:
            _check_function(func.name, signatures)


@functools.cache
def _field_and_element(declared: str) -> tuple[str | None, str | None]:
    """Return the field of `AttrValue` for a declared type, and that of its list."""
    match = _LIST.fullmatch(declared)
    if match:
        return "list", _FIELDS.get(match[1])
    return _FIELDS.get(declared), None


def _check_elements(values: Any, element: str) -> None:
    for descriptor, _ in values.ListFields():
        if descriptor.name != element:
            raise ModelError(
                f"lists values of type {descriptor.name}; declared: {element}"
            )


def _check_allowed(elements: Iterable[Any], allowed: Any) -> None:
    # Some shape functions of TensorFlow abort the process on a type that is not.
    choice = allowed.type or allowed.s
    for element in elements:
        if element not in choice:
            accepted = ", ".join(map(_named, choice))
            raise ModelError(f"is {_named(element)}; accepted: {accepted}")


def _named(value: Any) -> str:
    return (
        tensor_checks.type_name(value)
        if isinstance(value, int)
        else repr(value.decode(errors="replace"))
    )


def _check_function(name: str, signatures: OpSignatures) -> None:
    # An op type may stand in for a function, and no name for no function.
    if name and signatures.get(name) is None:
        raise ModelError(
            f"names the function '{name}', which the graph's library does not hold"
        )


def _check_list(value: Any) -> None:
    for number in value.list.type:
        tensor_checks.check_type(number)
    for shape in value.list.shape:
        tensor_checks.check_shape(shape)
    for tensor in value.list.tensor:
        tensor_checks.check_tensor(tensor)


_CHECKS: dict[str | None, Callable[[Any], Any]] = {
    "type": lambda value: tensor_checks.check_type(value.type),
    "shape": lambda value: tensor_checks.check_shape(value.shape),
    "tensor": lambda value: tensor_checks.check_tensor(value.tensor),
    "list": _check_list,
}


_PART = r"[A-Za-z0-9._/\\-]*"
_NAME = re.compile(rf"[A-Za-z0-9.]{_PART}(>[A-Za-z0-9.]{_PART})*")
# TensorFlow names nodes that it adds to bodies like this.
_INTERNAL_NAME = re.compile(r"_*" + _NAME.pattern)


@dataclass(eq=False)
class _CheckedNode:
    """A node that passed, with the facts that its inputs are checked against."""

    proto: Any
    place: int
    signature: Signature  # The definition of its op type.
    inputs: Types | None  # The types of its inputs, None if their number is unknown.
    outputs: Types | None  # The types of its outputs, likewise.
    attributes: dict[str, Any] | None = field(default=None, repr=False)


def _check_nodes(
    protos: Iterable[Any], signatures: OpSignatures, *, in_function: bool
) -> dict[str, _CheckedNode]:
    """Check each node by itself, and return the nodes by name, in order."""
    legal = _INTERNAL_NAME if in_function else _NAME
    nodes: dict[str, _CheckedNode] = {}
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
            raise ModelError(f"{_label(proto)}: {error}") from error
        # Most nodes take and give the same as others: one tuple for all saves memory.
        if node.inputs is not None:
            node.inputs = shared.setdefault(node.inputs, node.inputs)
        if node.outputs is not None:
            node.outputs = shared.setdefault(node.outputs, node.outputs)
        nodes[name] = node
    return nodes


def _checked(
    proto: Any, place: int, signatures: OpSignatures, in_function: bool
) -> _CheckedNode:
    """Return a node with its types, once its op and attributes are checked."""
    signature = signatures.get(proto.op)
    if signature is None:
        raise ModelError(
            "this TensorFlow does not know the op, and no function is called so; if "
            "it is a custom op, load its library first with tf.load_op_library"
        )
    attributes = dict(proto.attr.items())
    _check_attributes(attributes, signature, signatures, in_function=in_function)
    return _CheckedNode(
        proto,
        place,
        signature,
        signature.input_types(attributes),
        signature.output_types(attributes),
        # Edges in functions name output arguments, whose sizes the attributes tell.
        attributes if in_function else None,
    )


def _label(proto: Any) -> str:
    """Return how a message calls a node."""
    return f"node '{proto.name}' ({proto.op})"


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

    def __init__(self, nodes: Mapping[str, _CheckedNode]) -> None:
        self.nodes = nodes

    @abstractmethod
    def resolve(self, name: str) -> tuple[_CheckedNode | None, int]:
        """Return the producer of an input, if a node, and the input's type."""

    def control(self, name: str) -> _CheckedNode | None:
        """Return the node that a control input waits for; None is an argument."""
        node = self.nodes.get(name)
        if node is None:
            raise ModelError(f"it waits for '{name}', which does not exist")
        return node


class GraphInputs(InputResolver):
    """Inputs of a graph: `node` or `node:1`."""

    def resolve(self, name: str) -> tuple[_CheckedNode, int]:
        """Return the producer of an input, and the input's type."""
        producer, _, number = name.rpartition(":")
        if not producer or not _is_number(number):
            producer, number = name, "0"
        node = self.nodes.get(producer)
        if node is None:
            raise ModelError(f"its input '{name}' does not exist")
        return node, _taken(node.outputs, int(number), name, _label(node.proto))


class BodyInputs(InputResolver):
    """The inputs of a function body: `arg`, `arg:1`, `node:output`, `node:output:1`."""

    def __init__(
        self, nodes: Mapping[str, _CheckedNode], arguments: Mapping[str, Types | None]
    ) -> None:
        super().__init__(nodes)
        self.arguments = arguments
        self._outputs: dict[str, dict[str, Types | None]] = {}

    def control(self, name: str) -> _CheckedNode | None:
        """Return the node that a control input waits for; None is an argument."""
        return None if name in self.arguments else super().control(name)

    def resolve(self, name: str) -> tuple[_CheckedNode | None, int]:
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
                f"its input '{name}' does not exist: {_label(node.proto)} "
                f"has the outputs {list(outputs)}"
            )
        return node, _taken(outputs[rest[0]], int(number), name, _label(node.proto))


def check_edges(
    nodes: Mapping[str, _CheckedNode], inputs: InputResolver
) -> list[list[int]]:
    """Check the inputs of each node; return the places of the nodes that it needs."""
    producers = []
    for node in nodes.values():
        try:
            producers.append(_check_inputs(node, inputs))
        except ModelError as error:
            raise ModelError(f"{_label(node.proto)}: {error}") from error
    return producers


def _check_inputs(node: _CheckedNode, inputs: InputResolver) -> list[int]:
    """Check the inputs of a node; return the places of its producers."""
    names: Sequence[str] = node.proto.input
    data: list[_CheckedNode | None] = []
    types = []
    waits_for: list[_CheckedNode | None] = []
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
    _check_hazards(node.proto, [p and p.proto for p in data])
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
    nodes = _check_nodes(graph_def.node, signatures, in_function=False)
    producers = check_edges(nodes, GraphInputs(nodes))
    check_cycles(graph_def.node, producers)


def _check_body(function: FunctionDef, signatures: OpSignatures) -> None:
    for arg in (*function.signature.input_arg, *function.signature.output_arg):
        tensor_checks.check_type(arg.type)
    arguments = argument_types(function.signature.input_arg)
    if len(arguments) < len(function.signature.input_arg):
        raise ModelError("two of its arguments have the same name")
    nodes = _check_nodes(function.node_def, signatures, in_function=True)
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
