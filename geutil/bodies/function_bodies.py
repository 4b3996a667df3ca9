"""The bodies of functions as graphs that can be edited.

A function cannot be edited: a graph is made of it (`read_body`, `add_ends`), and of
that graph, once it was edited, a function of another name (`define_body`), which its
callers hold (`hold_functions`) and call instead.

`OpenedFunctions` does so for a graph that stays the caller's: all at once, whatever can
be opened, within a transaction. A model's functions (`geutil.model.functions`) are
opened when they are asked for, keep their names for users, and change their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.graph import (
    creation,
    edits,
    function_calls,
    function_defs,
    functions,
    op_types,
    state,
)
from geutil.graph.flat_body import Arg, FlatBody, flat_body
from geutil.graph.function_calls import Caller, call_others, callers_in, recalling
from geutil.graph.types import Graph, Operation, Tensor, is_func_graph
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
    placeholder = function_defs.make_argument(graph, arg, tf.TensorShape(shape))
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
        del node.input[:]
        node.input.extend(inputs)
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
    return function_defs.define(
        graph,
        name,
        [op for op in graph.get_operations() if op in needed and op not in ends],
        list(inputs.values()),
        {result: sink.inputs[0] for result, sink in sinks.items()},
        effects.control_inputs,
        like,
    )


Written = Mapping[str, tuple[Graph, Any]]
"""New functions by name: the graph of the body and its `FunctionDef`."""


def hold_functions(graph: Graph, names: Iterable[str], written: Written) -> list[str]:
    """Give a graph new functions, with all that they call."""
    added_names = []
    for name in names:
        source, definition = written[name]
        behind = function_defs.functions_behind(source, definition)
        functions.add_functions(graph, [*behind, definition])
        added_names += [d.signature.name for d in (*behind, definition)]
    return added_names


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
    # Whether it cannot be written back: an op that calls it, or a caller of it, has its
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
        names: dict[str, str] = {}
        written: dict[str, tuple[Graph, Any]] = {}
        for function in self._callees_first():
            called = _called_others(function.graph, names, written)
            if function not in changed and not called:
                continue
            definition = function.define(function_defs.unused_name(function.name))
            new = definition.signature.name
            function_defs.register(definition)
            names[function.name] = new
            written[new] = (function.graph, definition)
        _called_others(self._graph, names, written)

    def _callees_first(self) -> list[OpenedFunction]:
        def called(name: str) -> list[str]:
            return [callee.name for callee in self._called_by(self._by_name[name])]

        return [
            self._by_name[name] for name in topological_order(self._by_name, called)
        ]

    def _called_by(self, function: OpenedFunction) -> list[OpenedFunction]:
        names = dict.fromkeys(n for c in callers_in(function.graph) for n in c.names)
        return [self._by_name[name] for name in names if name in self._by_name]


def _called_others(graph: Graph, names: Mapping[str, str], written: Written) -> bool:
    """Make the ops of a graph call new functions; tell whether one does."""
    has_new_calls = False
    for caller in callers_in(graph):
        new = [names[n] for n in caller.names if n in names]
        if not new or not caller.callees[0].attribute:
            continue
        has_new_calls = True
        added_names = hold_functions(graph, new, written)
        if is_func_graph(graph):
            # A traced function finds its callees outside its graph.
            functions.publish_functions(graph, added_names)
        edits.note_undo(graph, recalling(caller))
        call_others(caller, names)
    return has_new_calls


def open_function(host: Graph, caller: Caller, name: str) -> OpenedFunction | Unopened:
    """Return a function that an op of a graph calls, opened by itself."""
    definition = function_defs.definition_in(host, name)
    behind = function_defs.functions_behind(host, definition)
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
        definition = function_defs.definition_in(graph, name)
        behind = function_defs.functions_behind(graph, definition)
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
