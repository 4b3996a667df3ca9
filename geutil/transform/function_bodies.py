"""The functions that the ops of a graph call, opened as graphs that can be edited.

A function cannot be edited: a graph is made of it, and of that graph, once it was
edited, a function of another name, which its callers call instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.graph import creation, edits, function_defs, functions, state
from geutil.graph.flat_body import FlatBody, flat_body
from geutil.graph.function_calls import Caller, call_others, callers_in, recalling
from geutil.graph.function_defs import define
from geutil.graph.types import Graph, Operation, Tensor, is_func_graph
from geutil.select.walks import get_backward_walk_ops


def make_arguments(
    graph: Graph, body: FlatBody, passed: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Make placeholders for the arguments of a body, and return them by name.

    Args:
        graph: the graph.
        body: the body.
        passed: what a caller passes for arguments: of resources, the placeholders learn
            from it what is behind the handle.

    Cost: linear in the arguments.
    """
    made = {}
    for arg in body.args:
        shapes = arg.attributes.get("_output_shapes")
        known = shapes.list.shape[0] if shapes and shapes.list.shape else None
        made[arg.name] = function_defs.make_argument(graph, arg, tf.TensorShape(known))
        if arg.name in passed and not arg.handle_data:
            creation.copy_handle_data(passed[arg.name], made[arg.name])
    return made


def import_nodes(
    graph: Graph,
    body: FlatBody,
    arguments: Mapping[str, Tensor],
    release: Callable[[Any], None],
) -> Callable[[str], Tensor]:
    """Import the nodes of a body.

    Args:
        graph: the graph.
        body: the body.
        arguments: the placeholders of its arguments by name.
        release: takes from a `GraphDef` the colocation with nodes that are not in it;
            TensorFlow refuses that.

    Returns:
        What finds tensors by the names that they have in the body.

    Cost: linear in nodes and edges.
    """
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

    def tensor(where: str) -> Tensor:
        if where in arguments:
            return arguments[where]
        return graph.get_tensor_by_name(where if ":" in where else f"{where}:0")

    return tensor


def side_effects(graph: Graph, body: FlatBody) -> list[Operation]:
    """Return the ops that a call runs besides what the results need.

    Functions of version 1 do not name them: TensorFlow runs all that have a state.

    Args:
        graph: the graph of the body, in which nothing reads the results yet.
        body: the body.

    Cost: linear in the ops.
    """
    if body.control_results:
        names = dict.fromkeys(node for _, node in body.control_results)
        return [graph.get_operation_by_name(name) for name in names]
    ends = {r.tensor.partition(":")[0] for r in body.results}
    return [
        op
        for op in graph.get_operations()
        if op.op_def.is_stateful
        and op.name not in ends
        and op.type != "Placeholder"
        and not any(t.consumers() for t in op.outputs)
    ]


@dataclass(eq=False)
class OpenedFunction:
    """A function as a graph that can be edited.

    Attributes:
        name: the name of the function.
        graph: its body.
        definition: its `FunctionDef`.
        inputs: its arguments by name, in order: placeholders.
        sinks: for each result by name, in order, the Identity that reads it.
        effects: an op that waits for what the function runs besides.
        callers: the ops that call it, in the graph and in opened functions.
        fixed: whether it cannot be written back: an op that calls it, or calls what
            calls it, does so by being of a type of its name. Such an op cannot be made
            to call another function.
    """

    name: str
    graph: Graph
    definition: Any
    inputs: Mapping[str, Tensor]
    sinks: Mapping[str, Operation]
    effects: Operation
    callers: list[Caller] = field(default_factory=list)
    fixed: bool = False

    def define(self, name: str) -> Any:
        """Return a `FunctionDef` of the body as it is now."""
        given = list(self.inputs.values())
        ends = [*self.sinks.values(), self.effects]
        left_out = {t.op for t in given} | set(ends)
        behind = get_backward_walk_ops(ends, stop_at_ts=given, control_inputs=True)
        needed = {op for op in behind if op not in left_out}
        return define(
            self.graph,
            name,
            [op for op in self.graph.get_operations() if op in needed],
            given,
            {result: sink.inputs[0] for result, sink in self.sinks.items()},
            self.effects.control_inputs,
            self.definition,
        )


@dataclass(frozen=True, eq=False)
class Unopened:
    """A function that cannot be opened.

    Attributes:
        name: its name.
        caller: an op that calls it.
        definitions: its `FunctionDef`, and those of what it calls, however indirectly.
        reason: why.
    """

    name: str
    caller: Operation
    definitions: tuple[Any, ...]
    reason: str


class OpenedFunctions:
    """The functions that the ops of a graph call, however indirectly.

    Args:
        graph: the graph, which is not changed before `write_back`.

    Attributes:
        opened: those that can be edited, callers before what they call.
        unopened: those that cannot.

    Cost: linear in the ops of the graph and of the functions.
    """

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
                    found = _open(host, caller, name)
                    if isinstance(found, Unopened):
                        closed.add(name)
                        self.unopened.append(found)
                    else:
                        self._by_name[name] = found
                        waiting.append(found.graph)
                self._note_call(caller)
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
        """Make functions of edited bodies, and let all callers call them.

        Functions that call edited ones are made anew as well. Within a transaction of
        the graph, the calls go back when it is undone.

        Args:
            edited: the functions that were edited; none of them `fixed`.

        Raises:
            StaleGraphError, FinalizedGraphError: an edit would have no effect, or is
                forbidden.
            ValueError: TensorFlow refuses a function.

        Cost: linear in the ops of the graph, of these functions and their callers.
        """
        changed = set(edited)
        if not changed:
            return
        state.check_editable(self._graph, [c.op for c in callers_in(self._graph)])
        names: dict[str, str] = {}
        written: dict[str, tuple[OpenedFunction, Any]] = {}
        for function in self._callees_first():
            called = _called_others(function.graph, names, written)
            if function not in changed and not called:
                continue
            definition = function.define(function_defs.unused_name(function.name))
            new = definition.signature.name
            function_defs.register(definition)
            names[function.name] = new
            written[new] = (function, definition)
        _called_others(self._graph, names, written)

    def _callees_first(self) -> list[OpenedFunction]:
        def called(name: str) -> list[str]:
            return [callee.name for callee in self._called_by(self._by_name[name])]

        return [
            self._by_name[name]
            for name in function_defs.callees_first(self._by_name, called)
        ]

    def _called_by(self, function: OpenedFunction) -> list[OpenedFunction]:
        names = dict.fromkeys(n for c in callers_in(function.graph) for n in c.names)
        return [self._by_name[name] for name in names if name in self._by_name]


def _called_others(
    graph: Graph,
    names: Mapping[str, str],
    written: Mapping[str, tuple[OpenedFunction, Any]],
) -> bool:
    """Make the ops of a graph call new functions; tell whether one does."""
    found = False
    for caller in callers_in(graph):
        new = [names[n] for n in caller.names if n in names]
        if not new or not caller.callees[0].attribute:
            continue
        found = True
        for name in new:
            function, definition = written[name]
            behind = function_defs.functions_behind(function.graph, definition)
            functions.add_functions(graph, [*behind, definition])
            if is_func_graph(graph):
                # What is traced finds the functions it calls outside its graph.
                listed = [d.signature.name for d in (*behind, definition)]
                functions.publish_functions(graph, listed)
        edits.note_undo(graph, recalling(caller))
        call_others(caller, names)
    return found


def _open(host: Graph, caller: Caller, name: str) -> OpenedFunction | Unopened:
    """Open a function that an op of a graph calls."""
    definition = function_defs.definition_in(host, name)
    behind = function_defs.functions_behind(host, definition)
    try:
        library = {d.signature.name: d for d in (definition, *behind)}
        flat = flat_body(definition, library)
        graph = functions.new_function_graph(name)
        functions.add_functions(graph, behind)
        passed = caller.op.inputs[caller.first_argument :]
        names = (arg.name for arg in flat.args)
        inputs = make_arguments(graph, flat, dict(zip(names, passed, strict=False)))
        tensor = import_nodes(graph, flat, inputs, _without_colocation)
    except (ValueError, TypeError, tf.errors.OpError) as error:
        return Unopened(name, caller.op, (definition, *behind), str(error))
    awaited = side_effects(graph, flat)
    with creation.neutral(graph):
        sinks = {
            r.name: tf.identity(tensor(r.tensor), name=f"result_{r.name}").op
            for r in flat.results
        }
        effects = tf.no_op("side_effects")
    creation.add_control_edges(effects, awaited)
    return OpenedFunction(name, graph, definition, inputs, sinks, effects)


def _without_colocation(graph_def: Any) -> None:
    for node in graph_def.node:
        node.attr.pop("_class", None)
