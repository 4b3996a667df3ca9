"""From a graph that is edited to a function that runs.

TensorFlow takes the ops of a FuncGraph over once, when the function is made (fact 2 of
the design). So a function is built from a copy, and the graph itself stays editable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError, Words
from geutil.graph import (
    call_graph,
    creation,
    function_calls,
    function_defs,
    functions,
    gradient_functions,
)
from geutil.graph.protos import FunctionDef
from geutil.graph.types import Graph, IdentitySet, Operation, Tensor
from geutil.graph.walks import topological_order
from geutil.model.programs import fresh_name
from geutil.model.shared_state import SharedState
from geutil.select.walks import get_backward_walk_ops
from geutil.transform import copying, custom_gradients, transformer


def ops_to_run(
    graph: Graph,
    inputs: Mapping[str, Tensor],
    sinks: Mapping[str, Operation],
    side_effects: Operation,
) -> list[Operation]:
    """Return the ops that a call runs, in the order of the graph."""
    stops = [
        *inputs.values(),
        *(placeholder for _, placeholder in functions.bindings(graph)),
    ]
    behind = get_backward_walk_ops(
        [*sinks.values(), side_effects], stop_at_ts=stops, control_inputs=True
    )
    # Ops may wait for what is given, which costs no wait.
    stop_ops = {t.op for t in stops}
    needed = frozenset(op for op in behind if op not in stop_ops)
    for op in behind:
        if op.type == "Placeholder" and op not in stop_ops:
            reader = next(
                reader.name
                for reader in behind
                if any(t.op is op for t in reader.inputs) or op in reader.control_inputs
            )
            raise ModelError(
                f"placeholder '{op.name}' is no input, and '{reader}' depends on it: "
                "rewire its readers, or make it an input with "
                f"{Words('model.cut(inputs=[...])')}"
            )
    needed |= _needed_by_gradients(needed, stops)
    return [op for op in graph.get_operations() if op in needed]


def _needed_by_gradients(
    needed: Collection[Operation], stops: Iterable[Tensor]
) -> frozenset[Operation]:
    """Return the other ops that the gradients of some read, if these can run."""
    stop_ops = {t.op for t in stops}
    extra_ops: set[Operation] = set()
    waiting = list(needed)
    while waiting:
        read = [t.op for op in waiting for t in custom_gradients.read_by_gradient(op)]
        waiting = []
        for start in dict.fromkeys(read):
            if start in needed or start in extra_ops or start in stop_ops:
                continue
            behind = get_backward_walk_ops(
                [start], stop_at_ts=stops, control_inputs=True
            )
            new = [op for op in behind if op not in stop_ops]
            if not any(op.type == "Placeholder" for op in new):
                waiting += [op for op in new if op not in extra_ops]
                extra_ops.update(new)
    return frozenset(extra_ops)


def captures_of(graph: Graph, ops: Iterable[Operation]) -> list[tuple[Any, Tensor]]:
    """Return the captures that `ops` read."""
    read = IdentitySet(t for op in ops for t in op.inputs)
    needed = [
        (outside, inside)
        for outside, inside in functions.bindings(graph)
        if inside in read
    ]
    for outside, inside in needed:
        if not hasattr(outside, "numpy"):
            raise ModelError(
                f"'{inside.name}' stands for '{outside.name}' of another graph; a "
                "model can read eager tensors and variables only"
            )
    return needed


def variables_of(
    graph: Graph, captures: Iterable[tuple[Any, Tensor]], holdings: SharedState
) -> list[tf.Variable]:
    """Return the variables whose handles are captured, and hold them from now on."""
    holdings.add_variables(functions.seen_variables(graph))
    by_handle = holdings.by_handle()
    return [
        by_handle[id(outside)] for outside, _ in captures if id(outside) in by_handle
    ]


def build(
    graph: Graph,
    inputs: Mapping[str, Tensor],
    sinks: Mapping[str, Operation],
    side_effects: Operation,
    holdings: SharedState,
) -> Any:
    """Return a concrete function of a graph as it is now."""
    ops = ops_to_run(graph, inputs, sinks, side_effects)
    captures = captures_of(graph, ops)
    target = functions.new_function_graph("model")
    read = IdentitySet(t for op in ops for t in op.inputs)
    replaced: list[tuple[Tensor, Tensor]] = []
    arguments: dict[str, Tensor] = {}
    names = _ArgumentNames(ops)
    with creation.neutral(target):
        for name, t in inputs.items():
            arguments[name] = tf.compat.v1.placeholder(t.dtype, t.shape, names(t.op))
            if t in read:
                replaced.append((t, arguments[name]))
    for outside, inside in captures:
        stand_in = functions.make_capture_placeholder(
            target, names(inside.op), inside.dtype, inside.shape, outside
        )
        replaced.append((inside, stand_in))
    _, info = copying.copy_with_input_replacements(ops, replaced, dst_graph=target)
    results = {n: info.transformed(sink.outputs[0]) for n, sink in sinks.items()}
    waits = [info.transformed(op) for op in side_effects.control_inputs]
    variables = variables_of(graph, captures, holdings)
    renew_bodies(target)
    return functions.build_function(target, arguments, results, waits, variables)


class _ArgumentNames:
    """Names for placeholders that leave all other ops theirs.

    The importer renames an op that is called like the scope of an op that is there
    already, so an argument must not open a scope that an op is called like.
    """

    def __init__(self, ops: Iterable[Operation]) -> None:
        self._taken = {op.name for op in ops}
        self._taken |= {name.partition("/")[0] for name in self._taken}

    def __call__(self, op: Operation) -> str:
        name = fresh_name(self._taken, op.name.replace("/", "."))
        self._taken.add(name)
        return name


def renew_bodies(graph: Graph) -> None:
    """Let a graph call bodies whose gradients can be built, and saved.

    A gradient of `tf.custom_gradient` is a closure over the tensors of its body as it
    was traced. TensorFlow rebuilds bodies from their definitions, to differentiate them
    and once a graph was imported, and saves only gradients whose body is a graph of
    Python.
    """
    callers: list[function_calls.Caller] = []
    direct: dict[str, None] = {}
    for caller in function_calls.callers_in(graph):
        if all(callee.attribute for callee in caller.callees):
            callers.append(caller)
        else:
            # An op whose type is a function cannot call another one.
            direct.update(dict.fromkeys(caller.names))
    definitions: dict[str, Any] = {}

    def callees(name: str) -> list[str]:
        definitions[name] = function_defs.definition_in(graph, name)
        called = function_defs.called_names(definitions[name].node_def)
        return [n for n in called if function_calls.has_function(graph, n)]

    roots = dict.fromkeys(name for caller in callers for name in caller.names)
    new_names: dict[str, str] = {}
    for name in topological_order(roots, callees):
        definition = definitions[name]
        called = set(function_defs.called_names(definition.node_def))
        if _closures(definition) or not called.isdisjoint(new_names):
            new_names[name] = _renewed(graph, definition, new_names)
    for caller in callers:
        if not new_names.keys().isdisjoint(caller.names):
            function_calls.call_others(caller, new_names)
    kept = topological_order(direct, callees)
    functions.forget_functions(graph, new_names.keys() - set(kept))


def _closures(definition: Any) -> dict[str, str]:
    """Return the nodes of a function whose gradient is a closure, with its name."""
    attribute = gradient_functions.ATTRIBUTE
    named = {
        node.name: node.attr[attribute].s.decode()
        for node in definition.node_def
        if attribute in node.attr
    }
    return {n: g for n, g in named.items() if gradient_functions.is_closure(g)}


def _renewed(graph: Graph, definition: Any, new_names: dict[str, str]) -> str:
    """Give a graph a function like one that it holds; return its name."""
    own = FunctionDef()
    own.CopyFrom(definition)
    own.signature.name = function_defs.unused_name(definition.signature.name)
    for node in own.node_def:
        call_graph.rename_called(node, new_names)
    body = functions.body_of(graph, own)
    for name, gradient in _closures(own).items():
        op = body.get_operation_by_name(name)
        gradient_by_names = custom_gradients.gradient_by_names(
            op, gradient, transformer.copy_replacing
        )
        gradient_functions.set_gradient(op, gradient_by_names)
    return functions.add_function_of(graph, body, own)
