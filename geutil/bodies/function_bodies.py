"""The bodies of functions as graphs that can be edited.

A function cannot be edited: a graph is made of it (`read_body`, `add_ends`), and of
that graph, once it was edited, a function of another name (`define_body`), which its
callers hold and call instead (`NewFunctions`). A call of other arguments or results is
another op, which takes the place of the old one (`replace_caller`): TensorFlow cannot
change the number of an op's inputs or outputs.

`OpenedFunctions` does so for a graph that stays the caller's: all at once, whatever can
be opened, within a transaction. The functions of a model are opened when they are asked
for (`geutil.model.function_library`), keep their names for users, and change their
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.graph import (
    adjacency,
    creation,
    edits,
    function_calls,
    functions,
    op_types,
    state,
    v1_control_flow,
)
from geutil.graph.edits import ControlEdit, InputEdit, apply_edits
from geutil.graph.function_calls import (
    Caller,
    call_others,
    callers_in,
    recalling,
    renamed_node,
)
from geutil.graph.protos import Arg, FlatBody, flat_body
from geutil.graph.types import (
    Graph,
    Operation,
    Tensor,
    absolute_unique_name,
    is_func_graph,
)
from geutil.graph.walks import node_name, topological_order
from geutil.select.walks import get_backward_walk_ops


@dataclass(frozen=True, eq=False)
class ReadBody:
    """The body of a function as a graph whose ends nothing reads yet."""

    graph: Graph
    inputs: Mapping[str, Tensor]  # The arguments by name, in order: placeholders.
    body: FlatBody  # The nodes that it was made of, and their results.

    def results(self) -> dict[str, Tensor]:
        """Return the results by name, in order."""
        return {r.name: self._tensor(r.tensor) for r in self.body.results}

    def _tensor(self, where: str) -> Tensor:
        if where in self.inputs:
            return self.inputs[where]
        return self.graph.get_tensor_by_name(where if ":" in where else f"{where}:0")

    def side_effects(self) -> list[Operation]:
        """Return the ops that a call runs besides the ancestors of its results."""
        # Functions of version 1 do not name them: TensorFlow runs all that have a
        # state.
        if self.body.control_results:
            names = dict.fromkeys(node for _, node in self.body.control_results)
            return [self.graph.get_operation_by_name(name) for name in names]
        ends = {node_name(r.tensor) for r in self.body.results}
        return [
            op
            for op in self.graph.get_operations()
            if op.op_def.is_stateful
            and op.name not in ends
            and op.type != "Placeholder"
            and not any(t.consumers() for t in op.outputs)
        ]


def read_body(
    definition: Any,
    library: Iterable[Any],
    passed: Mapping[str, Tensor],
    release: Callable[[Any], None],
) -> ReadBody:
    """Make a graph of a function's definition."""
    # Of resources, the placeholders take the handle data from the arguments `passed`.
    # `release` takes the colocation with missing nodes off, which TensorFlow refuses.
    library = list(library)
    flat = flat_body(definition, {d.signature.name: d for d in library})
    graph = functions.new_function_graph(definition.signature.name)
    functions.add_functions(graph, library)
    inputs = {arg.name: _argument(graph, arg, passed) for arg in flat.args}
    _import_nodes(graph, flat, inputs, release)
    return ReadBody(graph, inputs, flat)


def _argument(graph: Graph, arg: Arg, passed: Mapping[str, Tensor]) -> Tensor:
    """Make the placeholder of an argument."""
    shapes = arg.attributes.get("_output_shapes")
    shape = shapes.list.shape[0] if shapes and shapes.list.shape else None
    placeholder = function_calls.make_argument(graph, arg, tf.TensorShape(shape))
    if arg.name in passed and not arg.handle_data:
        creation.copy_handle_data(passed[arg.name], placeholder)
    return placeholder


def _import_nodes(
    graph: Graph,
    body: FlatBody,
    arguments: Mapping[str, Tensor],
    release: Callable[[Any], None],
) -> None:
    """Import the nodes of a body, which read the placeholders of its arguments."""
    graph_def = tf.compat.v1.GraphDef()
    graph_def.versions.CopyFrom(graph.graph_def_versions)
    graph_def.node.extend(body.node_defs())
    read: set[str] = set()
    for node in graph_def.node:
        # Arguments are there before anything runs; there is nothing to wait for.
        inputs = [n for n in node.input if n[0] != "^" or n[1:] not in arguments]
        node.input[:] = inputs
        read.update(n for n in inputs if n in arguments)
    release(graph_def)
    fed = {f"{name}:0": t for name, t in arguments.items() if name in read}
    creation.import_ops(graph, graph_def, fed)


def add_ends(
    graph: Graph,
    results: Mapping[str, Tensor],
    side_effects: Sequence[Operation],
    sink_name: Callable[[str], str],
) -> tuple[dict[str, Operation], Operation]:
    """Add the ops that stay the ends of a body: one a result, one for effects."""
    with creation.neutral(graph):
        effects: Operation = tf.no_op(SIDE_EFFECTS)
        sinks = {
            name: tf.identity(t, name=sink_name(name)).op for name, t in results.items()
        }
    creation.add_control_edges(effects, side_effects)
    return sinks, effects


SIDE_EFFECTS = "side_effects"
"""Name of the op that waits for all that a call runs besides its results."""


def define_body(
    graph: Graph,
    name: str,
    needed: Collection[Operation],
    inputs: Mapping[str, Tensor],
    sinks: Mapping[str, Operation],
    effects: Operation,
    like: Any,
) -> Any:
    """Return the `FunctionDef` of a body as it is, with the attributes of `like`."""
    needed = frozenset(needed)
    ends = {t.op for t in inputs.values()} | {*sinks.values(), effects}
    return function_calls.define(
        graph,
        name,
        [op for op in graph.get_operations() if op in needed and op not in ends],
        list(inputs.values()),
        {result: sink.inputs[0] for result, sink in sinks.items()},
        effects.control_inputs,
        like,
    )


class NewFunctions:
    """The functions that edited bodies become, by the names that they had."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self._written: dict[str, tuple[Graph, Any]] = {}

    def define(self, old: str, graph: Graph, define: Callable[[str], Any]) -> Any:
        """Note and return the `FunctionDef` that `define` makes under a new name."""
        definition = define(function_calls.unused_name(old))
        function_calls.register(definition)
        self.names[old] = definition.signature.name
        self._written[definition.signature.name] = (graph, definition)
        return definition

    def hold(self, graph: Graph, caller: Caller) -> list[str]:
        """Give a graph those that an op shall call, with all behind, and name them."""
        added_names = []
        for name in (self.names[n] for n in caller.names if n in self.names):
            source, definition = self._written[name]
            behind = function_calls.functions_behind(source, definition)
            functions.add_functions(graph, [*behind, definition])
            added_names += [d.signature.name for d in (*behind, definition)]
        return added_names


@dataclass(frozen=True)
class NewOutput:
    """An output of the new op."""

    like: Tensor  # The tensor whose dtype, shape and, for a resource, handle it has.
    # The index of the output of the old op whose place it takes, if any.
    old: int | None = None


@dataclass(frozen=True)
class Rebuild:
    """The definition of the op that replaces a caller."""

    inputs: Sequence[Tensor]
    outputs: Sequence[NewOutput]
    # The replacements of outputs of the old op that are gone.
    stand_ins: Mapping[int, Tensor] = field(default_factory=dict)


def same_ends(caller: Caller) -> Rebuild:
    """Return the inputs and outputs of a caller as they are."""
    op = caller.op
    outputs = [NewOutput(t, index) for index, t in enumerate(op.outputs)]
    return Rebuild(list(op.inputs), outputs)


def replace_caller(
    caller: Caller, names: Mapping[str, str], rebuild: Rebuild
) -> Operation:
    """Put a new op in the place of a caller, and return it."""
    old = caller.op
    graph = old.graph
    node = renamed_node(caller, names)
    _set_types(node, caller, rebuild)
    node.name = absolute_unique_name(graph, old.name)
    new = creation.make_op(graph, node, rebuild.inputs)
    v1_control_flow.set_context(new, adjacency.control_flow_context(old))
    creation.add_control_edges(new, adjacency.control_inputs(old))
    stand_ins = dict(rebuild.stand_ins)
    for output, t in zip(rebuild.outputs, new.outputs, strict=True):
        creation.copy_handle_data(output.like, t)
        t.set_shape(output.like.shape)
        if output.old is not None:
            stand_ins[output.old] = t
    inputs = [
        InputEdit(reader, place, stand_ins[index])
        for index, t in enumerate(old.outputs)
        if index in stand_ins
        for reader in adjacency.consumers(t)
        for place in adjacency.input_indices(reader, t)
    ]
    waiting = [
        ControlEdit(
            op, tuple(new if c is old else c for c in adjacency.control_inputs(op))
        )
        for op in adjacency.control_outputs(old)
    ]
    apply_edits(graph, inputs, waiting)
    return new


def _set_types(node: Any, caller: Caller, rebuild: Rebuild) -> None:
    """Write dtypes and shapes of the inputs and outputs into a node."""
    types_in = [t.dtype.as_datatype_enum for t in rebuild.inputs]
    types_out = [o.like.dtype.as_datatype_enum for o in rebuild.outputs]
    if caller.is_loop:
        _set_list(node, "T", "type", types_in)
        if "_num_original_outputs" in node.attr:
            node.attr["_num_original_outputs"].i = len(types_out)
    elif caller.callees[0].attribute:
        _set_list(node, "Tin", "type", types_in[caller.first_argument :])
        _set_list(node, "Tout", "type", types_out)
    # Reading an attribute that is not there would make one.
    if "output_shapes" in node.attr and node.attr["output_shapes"].list.shape:
        old_shapes = list(node.attr["output_shapes"].list.shape)
        shapes = [
            o.like.shape.as_proto() if o.old is None else old_shapes[o.old]
            for o in rebuild.outputs
        ]
        _set_list(node, "output_shapes", "shape", shapes)


def _set_list(node: Any, name: str, kind: str, values: Sequence[Any]) -> None:
    value = tf.compat.v1.AttrValue()
    value.list.SetInParent()  # An empty list is a list as well.
    getattr(value.list, kind).extend(values)
    node.attr[name].CopyFrom(value)


@dataclass(eq=False)
class OpenedFunction:
    """A function as a graph that can be edited."""

    name: str
    graph: Graph
    definition: Any
    inputs: Mapping[str, Tensor]  # Its arguments by name, in order: placeholders.
    # For each result by name, in order, the Identity that reads it.
    sinks: Mapping[str, Operation]
    effects: Operation  # An op that waits for the function's other ops.
    # The ops that call it, in the graph and in opened functions.
    callers: list[Caller] = field(default_factory=list)
    # True if it cannot be written back: an op that calls it, or a caller of it, has its
    # name as the op's type. Such an op cannot be made to call another function.
    fixed: bool = False

    def define(self, name: str) -> Any:
        """Return a `FunctionDef` of the body as it is now."""
        behind = get_backward_walk_ops(
            [*self.sinks.values(), self.effects],
            stop_at_ts=list(self.inputs.values()),
            control_inputs=True,
        )
        return define_body(
            self.graph,
            name,
            behind,
            self.inputs,
            self.sinks,
            self.effects,
            self.definition,
        )


@dataclass(frozen=True, eq=False)
class Unopened:
    """A function that cannot be opened."""

    name: str
    caller: Operation
    definitions: tuple[Any, ...]  # Its `FunctionDef`, and those of all its callees.
    reason: str


class OpenedFunctions:
    """The functions that the ops of a graph call, however indirectly."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._by_name: dict[str, OpenedFunction] = {}
        self.unopened: list[Unopened] = []
        closed: set[str] = set()
        waiting = [graph]
        # Opened bodies join the list, and are searched for calls in turn.
        for host in waiting:
            for caller in callers_in(host):
                for name in caller.names:
                    if name in self._by_name or name in closed:
                        continue
                    callee = open_function(host, caller, name)
                    if isinstance(callee, Unopened):
                        closed.add(name)
                        self.unopened.append(callee)
                    else:
                        self._by_name[name] = callee
                        waiting.append(callee.graph)
                self._note_call(caller)
        # Those that can be edited, callers before callees.
        self.opened = self._callees_first()[::-1]
        # With callers first, one pass reaches all that a fixed function calls.
        for function in self.opened:
            for called in self._called_by(function):
                called.fixed |= function.fixed

    def _note_call(self, caller: Caller) -> None:
        for callee in caller.callees:
            function = self._by_name.get(callee.name)
            if function is not None:
                function.callers.append(caller)
                function.fixed |= not callee.attribute

    def write_back(self, edited: Collection[OpenedFunction]) -> None:
        """Make functions of edited bodies, and let all callers call them."""
        # Functions that call edited ones are rebuilt as well. Within a transaction of
        # the graph, the calls go back when it is undone.
        changed = set(edited)
        if not changed:
            return
        state.check_editable(self._graph, [c.op for c in callers_in(self._graph)])
        new = NewFunctions()
        for function in self._callees_first():
            if _called_others(function.graph, new) or function in changed:
                new.define(function.name, function.graph, function.define)
        _called_others(self._graph, new)

    def _callees_first(self) -> list[OpenedFunction]:
        def called(name: str) -> list[str]:
            return [callee.name for callee in self._called_by(self._by_name[name])]

        return [
            self._by_name[name] for name in topological_order(self._by_name, called)
        ]

    def _called_by(self, function: OpenedFunction) -> list[OpenedFunction]:
        names = dict.fromkeys(n for c in callers_in(function.graph) for n in c.names)
        return [self._by_name[name] for name in names if name in self._by_name]


def _called_others(graph: Graph, new: NewFunctions) -> bool:
    """Make the ops of a graph call new functions; return whether one does."""
    has_new_calls = False
    for caller in callers_in(graph):
        added_names = new.hold(graph, caller) if caller.callees[0].attribute else []
        if not added_names:
            continue
        has_new_calls = True
        if is_func_graph(graph):
            # A traced function finds its callees outside its graph.
            functions.publish_functions(graph, added_names)
        edits.note_undo(graph, recalling(caller))
        call_others(caller, new.names)
    return has_new_calls


def open_function(host: Graph, caller: Caller, name: str) -> OpenedFunction | Unopened:
    """Return a function that an op of a graph calls, opened by itself."""
    definition = function_calls.definition_in(host, name)
    behind = function_calls.functions_behind(host, definition)
    passed = caller.passed(definition)
    try:
        read = read_body(definition, behind, passed, _without_colocation)
    except (ValueError, TypeError, tf.errors.OpError) as error:
        return Unopened(name, caller.op, (definition, *behind), str(error))
    sinks, effects = add_ends(
        read.graph, read.results(), read.side_effects(), "result_{}".format
    )
    return OpenedFunction(name, read.graph, definition, read.inputs, sinks, effects)


def trace_bodies(graph: Graph, ops: Iterable[Operation]) -> None:
    """Give loops bodies to differentiate that know the shapes of elements of lists."""
    # TensorFlow makes the body of a copied loop anew from its definition, without
    # these: gradients come out the same, by more ops.
    loops = frozenset(op for op in ops if op.type in op_types.LOOPS)
    for caller in callers_in(graph) if loops else ():
        if caller.op not in loops:
            continue
        (name,) = (c.name for c in caller.callees if c.attribute == "body")
        definition = function_calls.definition_in(graph, name)
        behind = function_calls.functions_behind(graph, definition)
        passed = caller.passed(definition)
        with graph.as_default():
            read = read_body(definition, behind, passed, _without_colocation)
        for t in read.inputs.values():
            if t.dtype in (tf.resource, tf.variant):
                t.set_shape([])
        results = read.results().values()
        functions.set_ends(read.graph, read.inputs.values(), results)
        function_calls.set_traced_body(caller.op, read.graph)


def _without_colocation(graph_def: Any) -> None:
    """Forget all colocation: an edit may leave out the ops that others stay with."""
    for node in graph_def.node:
        node.attr.pop("_class", None)
