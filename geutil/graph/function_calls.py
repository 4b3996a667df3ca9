"""Functions in use: their definitions, the ops that call them, how often loops run.

TensorFlow keeps one table of functions for the whole process and refuses a second
definition of a name; two files may hold different functions of the same name. Here a
function whose name is taken by a different one gets a name of its own.

Nothing runs to learn how often a loop does: constants, shapes and the edges in
conditions and bodies tell it.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.graph import _tf, creation, op_types, protos
from geutil.graph.gradient_functions import ATTRIBUTE
from geutil.graph.protos import Arg, AttrValue, FunctionDef, FunctionDefLibrary, Library
from geutil.graph.state import UndoStep, state_of
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import closure, topological_order, tree

_MARK = re.compile(r"(__geutil\d+)+$")
_numbers = itertools.count(1)
_known: dict[str, bytes] = {}
"""The digest of each definition that was given out, by name."""
_renamed: dict[bytes, str] = {}
"""The name that a definition got instead of its own, by digest."""
_used: set[str] = set()
"""The names that were in use when that was last asked."""
_SLACK = 1000
"""How many more may be known before it is asked again."""


def readable_name(name: str) -> str:
    """Return the name of a function without the suffix that makes it unique."""
    return _MARK.sub("", name)


def unused_name(name: str) -> str:
    """Return a name that resembles `name` and that no function of the process has."""
    base = readable_name(name)
    while True:
        unused = f"{base}__geutil{next(_numbers)}"
        if unused not in _known and not _tf.eager_context().has_function(unused):
            return unused


def register(definition: Any) -> None:
    """Note that the name of a `FunctionDef` is taken by it."""
    _known[definition.signature.name] = _digest(definition)


def with_unique_functions(graph_def: Any) -> dict[str, str]:
    """Give the functions of a `GraphDef` names that no different function has."""
    # Functions that nothing calls are left out. Definitions that are known under their
    # name keep it.
    if len(_known) > len(_used) + _SLACK:
        _forget_unused()
    library = graph_def.library
    definitions = {f.signature.name: f for f in library.function}
    gradients = {g.function_name: g.gradient_func for g in library.gradient}

    def callees(name: str) -> Iterator[str]:
        callee_names = [
            *called_names(definitions[name].node_def),
            gradients.get(name, ""),
        ]
        return (f for f in dict.fromkeys(callee_names) if f in definitions)

    registered = [g.gradient_func for g in library.registered_gradients]
    roots = [*registered, *called_names(graph_def.node)]
    names: dict[str, str] = {}
    unique_definitions: list[Any] = []
    for name in topological_order((r for r in roots if r in definitions), callees):
        definition = _unique(definitions[name], names)
        names[name] = definition.signature.name
        unique_definitions.append(definition)
    for node in graph_def.node:
        forget_own_gradient(node)
        protos.rename_called(node, names)
    graph_def.library.CopyFrom(_library(library, unique_definitions, names))
    return {old: new for old, new in names.items() if old != new}


def _forget_unused() -> None:
    """Forget the functions that no graph holds any more, and TensorFlow neither."""
    _used.clear()
    for obj in gc.get_objects():
        # type() and not isinstance(): the latter asks proxies for their __class__.
        if issubclass(type(obj), tf.Graph):
            _used.update(getattr(obj, "_functions", ()))
    _used.update(filter(_tf.eager_context().has_function, _known))
    _used.intersection_update(_known)
    for name in [n for n in _known if n not in _used]:
        del _known[name]
    for digest in [d for d, name in _renamed.items() if name not in _known]:
        del _renamed[digest]


def _unique(definition: Any, names: Mapping[str, str]) -> Any:
    """Return the definition with its callees renamed, under a name that it may have."""
    unique = FunctionDef()
    unique.CopyFrom(definition)
    for node in unique.node_def:
        forget_own_gradient(node)
        protos.rename_called(node, names)
    name, digest = unique.signature.name, _digest(unique)
    # A process has one function of a name, so that another body needs another name.
    if _taken(name) not in (None, digest):
        if digest not in _renamed:
            _renamed[digest] = unused_name(name)
        unique.signature.name = _renamed[digest]
    register(unique)
    return unique


def _taken(name: str) -> bytes | None:
    """Return the digest of the function that bears a name, None where it is free."""
    if _tf.eager_context().has_function(name):
        return _digest(_tf.eager_context().get_function_def(name))
    return _known.get(name)


def _digest(definition: Any) -> bytes:
    return hashlib.sha256(definition.SerializeToString(deterministic=True)).digest()


def _library(library: Any, definitions: Iterable[Any], names: Mapping[str, str]) -> Any:
    result = FunctionDefLibrary()
    result.function.extend(definitions)
    for gradient in library.gradient:
        if gradient.function_name in names:
            added = result.gradient.add()
            added.function_name = names[gradient.function_name]
            added.gradient_func = names[gradient.gradient_func]
    for registered in library.registered_gradients:
        added = result.registered_gradients.add()
        added.CopyFrom(registered)
        added.gradient_func = names.get(registered.gradient_func, added.gradient_func)
    return result


def called_names(nodes: Iterable[Any]) -> Iterator[str]:
    """Yield the functions that nodes call; a node's type may be one."""
    for node in nodes:
        yield from protos.names_of_functions(node)


OF_THE_OLD_BODY = frozenset(
    (
        "_input_shapes",
        "_construction_context",
        "_implements",
        "api_implements",
        "api_preferred_device",
        "forward_function_name",
        "backward_function_name",
        "_original_func_name",
    )
)
"""Attributes that name shapes, twins or a fused form of a function as it was."""


def definition_in(graph: Graph, name: str) -> Any | None:
    """Return the `FunctionDef` of a function that a graph holds, else None."""
    if not graph._is_function(name):
        return None
    function = graph._get_function(name)
    made_in_c = getattr(function, "_c_func", None)
    if made_in_c is None:
        return function.cached_definition
    # `cached_definition` would put it into the eager context, which refuses a function
    # of a name that it has: one that Grappler has changed, say.
    with _tf.tf_buffer() as buffer, made_in_c.get() as c_function:
        _tf.TF_FunctionToFunctionDef(c_function, buffer)
        data = _tf.TF_GetBuffer(buffer)
    return FunctionDef.FromString(bytes(data))


def make_argument(graph: Graph, arg: Arg, shape: Any) -> Tensor:
    """Make the placeholder of an argument, with the handle data of a resource."""
    graph_def = tf.compat.v1.GraphDef()
    # An older producer would make TensorFlow forget that a shape is scalar.
    graph_def.versions.CopyFrom(graph.graph_def_versions)
    node = graph_def.node.add(name=arg.name, op="Placeholder")
    node.attr["dtype"].type = arg.dtype
    value = tf.compat.v1.AttrValue(shape=tf.TensorShape(shape).as_proto())
    node.attr["shape"].CopyFrom(value)
    for name, attribute in arg.attributes.items():
        # It may be colocated with an op outside of the function.
        if name.startswith("_") and name not in ("_class", "_output_shapes"):
            node.attr[name].CopyFrom(attribute)
    (op,) = creation.import_ops(graph, graph_def, {})
    (placeholder,) = op.outputs
    if arg.handle_data:
        handle = _tf.CppShapeInferenceResult.HandleData()
        handle.is_set = True
        for data in arg.handle_data:
            handle.shape_and_type.add(shape=data.shape, dtype=data.dtype)
        _tf.set_handle_data(placeholder, handle)
    return placeholder


def define(
    graph: Graph,
    name: str,
    ops: Sequence[Operation],
    inputs: Sequence[Tensor],
    outputs: Mapping[str, Tensor],
    control_outputs: Sequence[Operation],
    like: Any,
) -> Any:
    """Return the `FunctionDef` of a part of a graph, which is not changed."""
    with graph._c_graph.get() as c_graph:
        function = _tf.TF_GraphToFunction_wrapper(
            c_graph,
            name,
            False,
            [op._c_op for op in ops],
            [t._as_tf_output() for t in inputs],
            [t._as_tf_output() for t in outputs.values()],
            [output.encode() for output in outputs],
            [op._c_op for op in control_outputs],
            [],
            None,
            "",
        )
    try:
        with _tf.tf_buffer() as buffer:
            _tf.TF_FunctionToFunctionDef(function, buffer)
            data = _tf.TF_GetBuffer(buffer)
            definition = FunctionDef.FromString(tf.compat.as_bytes(data))
    finally:
        _tf.TF_DeleteFunction(function)
    for key, value in like.attr.items():
        if key not in OF_THE_OLD_BODY:
            definition.attr[key].CopyFrom(value)
    arguments = zip(definition.signature.input_arg, inputs, strict=True)
    results = zip(definition.signature.output_arg, outputs.values(), strict=True)
    for arg, t in (*arguments, *results):
        _describe_handle(arg, t)
    return definition


def _describe_handle(arg: Any, t: Tensor) -> None:
    """Write the handle data of a resource into a signature."""
    if t.dtype != tf.resource or arg.handle_data:
        return
    for shape_and_type in _tf.get_handle_data(t).shape_and_type:
        arg.handle_data.add(shape=shape_and_type.shape, dtype=shape_and_type.dtype)


def functions_behind(graph: Graph, definition: Any) -> list[Any]:
    """Return the functions of a graph that a definition calls, however indirectly."""
    definition_by_name: dict[str, Any] = {}

    def called(name: str) -> Iterable[str]:
        found = definition_in(graph, name)
        if found is None:
            return ()
        definition_by_name[name] = found
        return called_names(found.node_def)

    closure(called_names(definition.node_def), called)
    return list(definition_by_name.values())


_OWN = re.compile(rb"(Stateful)?PartitionedCall-\d+")
"""The name of a gradient that `tf.function` gives by itself."""


def names_own_gradient(node: Any) -> bool:
    """Return whether a node is a call that names the gradient of a traced function."""
    if node.op not in op_types.CALLS or ATTRIBUTE not in node.attr:
        return False
    return _OWN.fullmatch(node.attr[ATTRIBUTE].s) is not None


def forget_own_gradient(node: Any) -> None:
    """Remove the gradient's name from a call, unless a caller chose it."""
    if names_own_gradient(node):
        del node.attr[ATTRIBUTE]


def body_for_call(
    graph: Graph, name: str, arguments: Sequence[Tensor] | None
) -> Graph | None:
    """Return a new graph of a function's ops, with shapes inferred from a call."""
    # Without `arguments` it has the shapes of the trace. Those after the function's own
    # are left out: a SymbolicGradient passes gradients there.
    original_definition = definition_in(graph, name)
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
        return _tf.function_def_to_graph(
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
        """Return whether the functions are condition and body of a loop."""
        return self.op.type in op_types.LOOPS

    @property
    def is_branching(self) -> bool:
        """Return whether one of the functions runs, with the inputs after the first."""
        return self.op.type in op_types.BRANCHINGS

    @property
    def is_call(self) -> bool:
        """Return whether the op runs one function on its inputs and nothing else."""
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
    """Return whether `graph` holds a function called `name`."""
    return bool(graph._is_function(name))


def called_function(op: Operation) -> str:
    """Return the name of the function that an op calls and does nothing else; or ""."""
    if op.type in op_types.CALLS:
        return str(op.get_attr("f").name)
    return str(op.type) if has_function(op.graph, op.type) else ""


def is_compiled_call(op: Operation) -> bool:
    """Return whether an op calls a function that XLA compiles as a whole."""
    name = called_function(op)
    if not name:
        return False
    definition = definition_in(op.graph, name)
    marked = [op.node_def.attr, definition.attr if definition else {}]
    return any(COMPILED in a and a[COMPILED].b for a in marked)


def reason_to_stay(op: Operation) -> str:
    """Return why a call is not inlined when a model is opened; "" where nothing is."""
    name = called_function(op)
    definition = definition_in(op.graph, name)
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
    if names_own_gradient(node):
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
    """Remove Python's notes of the functions that an op was traced with."""
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
    forget_own_gradient(node)
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
        """Return whether an argument is the same each time; None is none."""
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
