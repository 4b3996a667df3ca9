"""Ops that call functions: their callees, the shapes of a call, how often loops run.

Nothing runs: constants, shapes and the edges in conditions and bodies tell it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.graph import function_defs, op_types
from geutil.graph._tf import FunctionDef, function_def_to_graph
from geutil.graph.call_graph import Library
from geutil.graph.gradient_functions import ATTRIBUTE
from geutil.graph.protos import AttrValue, FunctionDefLibrary
from geutil.graph.state import UndoStep, state_of
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import tree


def body_for_call(
    graph: Graph, name: str, arguments: Sequence[Tensor] | None
) -> Graph | None:
    """Return a new graph of a function's ops, with shapes inferred from a call."""
    # Without `arguments` it has the shapes of the trace. Those after the function's own
    # are left out: a SymbolicGradient passes gradients there.
    original_definition = function_defs.definition_in(graph, name)
    if original_definition is None:
        return None
    definition = FunctionDef()
    definition.CopyFrom(original_definition)
    # A resource's own shape says nothing of what it refers to.
    own_arguments = list(arguments or ())[: len(definition.signature.input_arg)]
    shapes = [None if t.dtype == tf.resource else t.shape for t in own_arguments]
    for i, shape in enumerate(shapes):
        # TensorFlow would take the shape of the trace instead.
        if shape is not None and shape.rank is not None and i in definition.arg_attr:
            definition.arg_attr[i].attr.pop("_output_shapes", None)
    with graph.as_default():
        return function_def_to_graph(
            definition, input_shapes=shapes or None, include_library_functions=True
        )


_AT_ONCE = "parallel_iterations"
COMPILED = "_XlaMustCompile"
"""The attribute of calls, and of functions, that XLA compiles."""
_GRADIENT = "SymbolicGradient"
_READ_ONLY = "_read_only_resource_inputs"
_NONE = AttrValue.ListValue()
_TRACED = ("_cond_graph", "_body_graph", "_true_graph", "_false_graph")


@dataclass(frozen=True)
class Callee:
    """A function that an op calls."""

    attribute: str  # The attribute that names it; empty for an op whose type it is.
    index: int  # Its place among the functions of the attribute.
    name: str


@dataclass(frozen=True, eq=False)
class Caller:
    """An op that calls functions."""

    op: Operation
    # The functions that it calls, in the order of its attributes.
    callees: tuple[Callee, ...] = field(repr=False)

    @property
    def names(self) -> list[str]:
        """Return the names of the functions, each once."""
        return list(dict.fromkeys(callee.name for callee in self.callees))

    @property
    def is_loop(self) -> bool:
        """Tell whether the functions are condition and body of a loop."""
        return self.op.type in op_types.LOOPS

    @property
    def is_branching(self) -> bool:
        """Tell whether one of the functions is run, with the inputs after the first."""
        return self.op.type in op_types.BRANCHINGS

    @property
    def is_call(self) -> bool:
        """Tell whether the op runs one function on its inputs and does nothing else."""
        return self.op.type in op_types.CALLS or not self.callees[0].attribute

    @property
    def first_argument(self) -> int:
        """Return which input of the op is the first argument of the functions."""
        return 1 if self.is_branching else 0

    @property
    def arguments(self) -> list[Tensor] | None:
        """Return the inputs that the functions get first; None where data decides."""
        # A function that an op of tf.data maps gets elements, which are no input.
        passes_inputs = self.is_loop or self.is_branching or self.is_call
        if passes_inputs or self.op.type == _GRADIENT:
            return list(self.op.inputs)[self.first_argument :]
        return None

    def passed(self, definition: Any) -> dict[str, Tensor]:
        """Return the inputs that one of the functions gets, by its arguments' names."""
        arguments = definition.signature.input_arg
        inputs = self.op.inputs[self.first_argument :]
        return {arg.name: t for arg, t in zip(arguments, inputs, strict=False)}


def has_function(graph: Graph, name: str) -> bool:
    """Tell whether `graph` holds a function called `name`."""
    return bool(graph._is_function(name))


def called_function(op: Operation) -> str:
    """Return the name of the function that an op calls and does nothing else; or ""."""
    if op.type in op_types.CALLS:
        return str(op.get_attr("f").name)
    return str(op.type) if has_function(op.graph, op.type) else ""


def is_compiled_call(op: Operation) -> bool:
    """Tell whether an op calls a function that XLA compiles as a whole."""
    name = called_function(op)
    if not name:
        return False
    definition = function_defs.definition_in(op.graph, name)
    marked = [op.node_def.attr, definition.attr if definition else {}]
    return any(COMPILED in a and a[COMPILED].b for a in marked)


def reason_to_stay(op: Operation) -> str:
    """Return why a call is not inlined when a model is opened; "" where nothing is."""
    name = called_function(op)
    definition = function_defs.definition_in(op.graph, name)
    if definition is None:
        return ""
    library = FunctionDefLibrary(function=[definition])
    return Library(library).reason_to_keep(op.node_def, name)


def callers_in(graph: Graph) -> list[Caller]:
    """Return the ops of a graph that call functions which the graph holds."""
    attributes: dict[str, list[str]] = {}
    callers = []
    for op in graph.get_operations():
        kind = op.type
        if kind not in attributes:
            attributes[kind] = _function_attributes(op)
        if attributes[kind]:
            callees = tuple(_callees(op, attributes[kind]))
            if callees:
                callers.append(Caller(op, callees))
    return callers


def _function_attributes(op: Operation) -> list[str]:
    """Return the attributes that name functions; the empty one for the op's type."""
    if op.graph._is_function(op.type):
        return [""]
    definition = op.op_def
    named = [a.name for a in definition.attr if "func" in a.type]
    order = {"then_branch": 0, "cond": 0, "else_branch": 1, "body": 1}
    return sorted(named, key=lambda name: order.get(name, 2))


def _callees(op: Operation, attributes: Iterable[str]) -> Iterator[Callee]:
    for attribute in attributes:
        for index, name in enumerate(_named(op, attribute)):
            if op.graph._is_function(name):
                yield Callee(attribute, index, name)


def _named(op: Operation, attribute: str) -> list[str]:
    if not attribute:
        return [op.type]
    value = op.get_attr(attribute)
    return [f.name for f in (value if isinstance(value, list) else [value])]


def call_others(caller: Caller, names: Mapping[str, str]) -> None:
    """Make an op call other functions of the same arguments and results."""
    op = caller.op
    node = op.node_def
    for attribute in {callee.attribute: None for callee in caller.callees}:
        value = AttrValue()
        value.CopyFrom(node.attr[attribute])
        is_list = value.WhichOneof("value") == "list"
        for function in value.list.func if is_list else [value.func]:
            function.name = names.get(function.name, function.name)
        op._set_attr(attribute, value)
    _forget_traces(caller)
    # TensorFlow wrote this list for the old bodies: the new ones may write a resource.
    if _READ_ONLY in node.attr:
        op._set_attr(_READ_ONLY, AttrValue(list=_NONE))
    # That gradient belongs to the function that the op called before.
    if function_defs.names_own_gradient(node):
        op._clear_attr(ATTRIBUTE)
    state_of(op.graph).edits += 1


def parallel_iterations(op: Operation) -> int:
    """Return how many iterations of a loop TensorFlow may run at once."""
    return int(op.get_attr(_AT_ONCE))


def limit_parallel_iterations(op: Operation, count: int) -> bool:
    """Let TensorFlow run no more than so many iterations of a loop at once."""
    if parallel_iterations(op) <= count:
        return False
    op._set_attr(_AT_ONCE, AttrValue(i=count))
    state_of(op.graph).edits += 1
    return True


def recalling(caller: Caller) -> UndoStep:
    """Note which functions an op calls, and the attributes that change with them."""
    op = caller.op
    # TensorFlow makes a new proto at each read: this one keeps the present attributes.
    node = op.node_def
    callee_attributes = [callee.attribute for callee in caller.callees]
    saved_attributes = [
        name
        for name in (*callee_attributes, _READ_ONLY, ATTRIBUTE, _AT_ONCE)
        if name in node.attr
    ]
    traced = {name: getattr(op, name, None) for name in _traces(caller)}

    def undo() -> None:
        for name in saved_attributes:
            op._set_attr(name, node.attr[name])
        for name, value in traced.items():
            if value is not None:
                setattr(op, name, value)
        state_of(op.graph).edits += 1

    return UndoStep(undo, (op,))


def set_traced_body(op: Operation, body: Graph) -> None:
    """Set the FuncGraph by which TensorFlow differentiates a loop."""
    op._body_graph = body


def _forget_traces(caller: Caller) -> None:
    """Make Python forget the functions that an op was traced with."""
    for name in _traces(caller):
        if getattr(caller.op, name, None) is not None:
            setattr(caller.op, name, None)


def _traces(caller: Caller) -> list[str]:
    """Return the attributes in which Python keeps the trace of an op."""
    branches = (f"_branch_graph_{i}" for i in range(len(caller.callees)))
    return ["_gradient_function", *_TRACED, *branches]


def renamed_node(caller: Caller, names: Mapping[str, str]) -> Any:
    """Return the node of an op that calls other functions, without stale facts."""
    node = caller.op.node_def
    for callee in caller.callees:
        new = names.get(callee.name, callee.name)
        if not callee.attribute:
            node.op = new
        elif node.attr[callee.attribute].WhichOneof("value") == "list":
            node.attr[callee.attribute].list.func[callee.index].name = new
        else:
            node.attr[callee.attribute].func.name = new
    for stale in (_READ_ONLY, "_output_shapes"):
        if stale in node.attr:
            del node.attr[stale]
    function_defs.forget_own_gradient(node)
    return node


_COMPARISONS = {"Less": 0, "LessEqual": 1}
"""How often more a counter is counted up once it has reached the bound."""


def source_of(tensor: Tensor) -> Tensor:
    """Return the tensor that a tensor is, behind ops that forward it."""
    while tensor.op.type in op_types.FORWARDING and tensor.op.inputs:
        tensor = tensor.op.inputs[0]
    return tensor


class LoopBody:
    """The body of a loop; `results` are its results, seen through Identity ops."""

    def __init__(self, graph: Graph) -> None:
        self._arguments: Sequence[Tensor] = graph.inputs
        self._place = {id(t): i for i, t in enumerate(graph.inputs)}
        self.results = [source_of(t) for t in graph.outputs]

    def place(self, tensor: Tensor) -> int | None:
        """Return the number of the argument that a tensor is, None if it is none."""
        return self._place.get(id(tensor))

    def stays(self, place: int | None) -> bool:
        """Tell whether an argument is the same each time; None is none."""
        if place is None:
            return False
        return self.results[place] is self._arguments[place]

    def step(self, place: int) -> Any:
        """Return the number added to a value each time, None if that is not known."""
        op = self.results[place].op
        if op.type not in op_types.ADDITIONS:
            return None
        first, second = (source_of(t) for t in op.inputs)
        # A sum may have its operands in either order.
        if second is self._arguments[place]:
            first, second = second, first
        if first is not self._arguments[place]:
            return None
        return tf.get_static_value(second)

    def added(self, place: int) -> Iterator[Tensor]:
        """Yield the tensors that each iteration puts into a list."""

        def lists(op: Operation) -> Iterable[Tensor]:
            if op.type in op_types.LIST_ELEMENTS:
                return op.inputs[:1]
            # TensorFlow adds up gradients of one list as lists.
            is_sum = op.type == "AddN" and op.outputs[0].dtype == tf.variant
            return op.inputs if is_sum else ()

        for op in _tree(self.results[place], lists):
            if op.type in op_types.LIST_ELEMENTS:
                yield op.inputs[op_types.LIST_ELEMENTS[op.type]]

    def origin(self, tensor: Tensor) -> Tensor:
        """Return the source of a value, in this iteration or an earlier one."""
        met: set[int] = set()
        tensor = source_of(tensor)
        while id(tensor) in self._place and id(tensor) not in met:
            met.add(id(tensor))
            tensor = self.results[self._place[id(tensor)]]
        return tensor

    def list_argument(self, tensor: Tensor) -> int | None:
        """Return the list, the same each time, of which a tensor is an element."""
        if tensor.op.type != "TensorListGetItem":
            return None
        place = self.place(source_of(tensor.op.inputs[0]))
        return place if self.stays(place) else None


_AND = "LogicalAnd"


def _tree(
    end: Tensor, inputs_of: Callable[[Operation], Iterable[Tensor]]
) -> Iterator[Operation]:
    """Yield the op that made a tensor, and those behind it, as far as is asked for."""
    return tree(
        [source_of(end).op], lambda op: [source_of(t).op for t in inputs_of(op)]
    )


class Loops:
    """The loops of a graph that are functions, each with its condition and body."""

    def __init__(self, loops: Mapping[Operation, tuple[Graph, Graph]]) -> None:
        self._loops = loops
        self._times: dict[Operation, int | None] = {}

    def times(self, op: Operation) -> int | None:
        """Return how often a loop runs, None if constants do not tell."""
        if op not in self._times:
            # A counter that starts with the result of a loop before.
            self._times[op] = None
            # Keras has two bounds: the length of a sequence and the most times at all.
            bounds = [n for n in self._bounds(op) if n is not None]
            self._times[op] = min(bounds, default=None)
        return self._times[op]

    def exact_times(self, op: Operation) -> int | None:
        """Return how often a loop runs, None if anything else may end it."""
        bounds = list(self._bounds(op))
        return None if None in bounds else self.times(op)

    def _bounds(self, op: Operation) -> Iterator[int | None]:
        """Yield how often each test lets a loop run, None if that is not known."""
        condition, graph = self._loops[op]
        body = LoopBody(graph)
        places = {id(t): i for i, t in enumerate(condition.inputs)}
        for test in _tree(
            condition.outputs[0], lambda op: op.inputs if op.type == _AND else ()
        ):
            if test.type != _AND:
                yield self._count(op, test, places, body)

    def _count(
        self, op: Operation, test: Operation, places: Mapping[int, int], body: LoopBody
    ) -> int | None:
        """Return how often a comparison lets a loop run, None if that is not known."""
        if test.type not in _COMPARISONS:
            return None
        counter, bound = (source_of(t) for t in test.inputs)
        place, of = places.get(id(counter)), places.get(id(bound))
        # A bound that the body changes is no bound.
        if place is None or (of is not None and not body.stays(of)):
            return None
        limit = _static(bound) if of is None else self._argument(op, of)
        start, step = self._argument(op, place), body.step(place)
        # A counter that does not rise never meets an upper bound.
        if start is None or step is None or limit is None or step <= 0:
            return None
        more = _COMPARISONS[test.type]
        return max(0, -((int(start) - int(limit) - more) // int(step)))

    def _argument(self, op: Operation, place: int) -> Any:
        """Return the initial value of a loop variable, or None if it is not known."""
        tensor = source_of(op.inputs[place])
        if tensor.op not in self._loops:
            return _static(tensor)
        # A counter after its loop.
        op, place = tensor.op, tensor.value_index
        step = LoopBody(self._loops[op][1]).step(place)
        times = self.times(op)
        start = None if times is None else self._argument(op, place)
        if times is None or step is None or start is None:
            return None
        return int(start) + times * int(step)


def _static(tensor: Tensor) -> Any:
    """Return the value of a constant tensor, or of a dimension that is known."""
    op = tensor.op
    if op.type != "StridedSlice" or op.get_attr("shrink_axis_mask") != 1:
        return tf.get_static_value(tensor)
    of, place = op.inputs[0], tf.get_static_value(op.inputs[1])
    is_shape = of.op.type == "Shape"
    values = of.op.inputs[0].shape if is_shape else tf.get_static_value(of)
    unknown = values is None or (is_shape and values.rank is None) or place is None
    return None if unknown or len(place) > 1 else values[int(place[0])]
