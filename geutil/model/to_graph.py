"""From a program to a graph that can be edited, and from there to a function.

A function names as its side effects all stateful ops, reading a variable among them,
and its results wait for them. Kept as they are, they would hold each part of a model to
the whole of it.

A traced function returns copies of its results that wait for all its effects, and a
SavedModel wraps each signature once more. Left in place, every output would depend on
every effect, and so on every input.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from geutil.bodies.function_bodies import SIDE_EFFECTS
from geutil.bodies.inlining import Kept, NodeOrigin, inline_calls
from geutil.errors import ModelError, TransformError, Words
from geutil.graph import (
    creation,
    function_calls,
    functions,
    gradient_functions,
    keras_calls,
    protos,
)
from geutil.graph.protos import Effects, FunctionDef
from geutil.graph.types import Graph, IdentitySet, Operation, Tensor
from geutil.graph.walks import (
    closure,
    node_name,
    short_name,
    tensor_name,
    topological_order,
)
from geutil.model import programs
from geutil.model.programs import ModelProgram, SharedState
from geutil.model.sources.objects import program_of_graph
from geutil.select.walks import get_backward_walk_ops
from geutil.transform import op_copies, transformer

# Ops behind them run in a frame of their own, or perhaps not at all.
_CONTROL_FLOW = frozenset(
    ("Exit", "Merge", "RefExit", "RefMerge", "RefSwitch", "Switch")
)


def effect_roots(graph_def: Any, roots: Iterable[str]) -> list[str]:
    """Return the nodes that must run for all effects behind some nodes to happen."""
    effects = Effects({f.signature.name: f for f in graph_def.library.function})
    effective = {node.name for node in graph_def.node if effects.of(node)}
    if not effective:
        return []
    nodes = programs.nodes_by_name(graph_def)
    late = programs.nodes_ahead(graph_def, effective)

    def is_end(name: str) -> bool:
        return name in effective or nodes[name].op in _CONTROL_FLOW

    def before(name: str) -> list[str]:
        names = [] if is_end(name) else map(node_name, nodes[name].input)
        return [n for n in names if n in late]

    met = closure([name for name in roots if name in late], before)
    return [n.name for n in graph_def.node if n.name in met and is_end(n.name)]


_COPY = re.compile(r"(^|/)Identity(_\d+)?$")


def without_wrappers(
    graph_def: Any, outputs: Mapping[str, str], side_effects: Iterable[str]
) -> tuple[dict[str, str], list[str]]:
    """Return the ends of a graph without the copies that wrapping adds."""
    # The nodes are those with an effect that ran besides or that the copies waited for.
    nodes = programs.nodes_by_name(graph_def)
    readers: dict[str, set[str]] = {}
    for node in graph_def.node:
        for text in node.input:
            # Ops that wait for a copy do not mind that nobody reads it.
            if not text.startswith("^"):
                readers.setdefault(node_name(text), set()).add(node.name)
    waited: dict[str, None] = dict.fromkeys(side_effects)
    copies: set[str] = set()
    tensors = {}
    for name, tensor in outputs.items():
        node = nodes[node_name(tensor)]
        while (
            node.op == "Identity"
            and _COPY.search(node.name)
            and readers.get(node.name, copies) <= copies
        ):
            copies.add(node.name)
            waited |= dict.fromkeys(t[1:] for t in node.input if t.startswith("^"))
            tensor = node.input[0]
            node = nodes[node_name(tensor)]
        tensors[name] = tensor if ":" in tensor else f"{tensor}:0"
    return tensors, effect_roots(graph_def, waited)


@dataclass
class GraphParts:
    """An editable graph and its ends."""

    graph: Graph  # A FuncGraph whose captures are bound.
    inputs: Mapping[str, Tensor]
    sinks: Mapping[str, Operation]  # For each output an Identity that serves it alone.
    side_effects: Operation  # An op that waits for all that runs besides the outputs.
    # The calls that were not inlined, with the reasons.
    kept: Sequence[Kept] = ()


def program_of_parts(parts: GraphParts) -> ModelProgram:
    """Return the program of a graph and its ends, as they are now."""
    program = program_of_graph(
        parts.graph,
        dict(parts.inputs),
        {name: sink.inputs[0] for name, sink in parts.sinks.items()},
        functions.bindings(parts.graph),
    )
    program.side_effects = [op.name for op in parts.side_effects.control_inputs]
    return program


def keep_of(parts: GraphParts) -> list[Any]:
    """Return the ends of a graph, which rewriting must leave."""
    return [*parts.inputs.values(), *parts.sinks.values(), parts.side_effects]


def live_ops(parts: GraphParts) -> frozenset[Operation]:
    """Return the ops that the values of the outputs are computed by."""
    return frozenset(get_backward_walk_ops(list(parts.sinks.values())))


def materialize(
    program: ModelProgram, *, inline: bool, what: str, keep: Collection[str] = ()
) -> GraphParts:
    """Make an editable graph of a program."""
    _check_ends(program, what)
    program = replace(program)
    programs.prune(program)
    _forget_defaults(program)
    graph_def = program.graph_def
    outputs = {name: tensor_name(t) for name, t in program.outputs.items()}
    effects: list[str] = list(program.side_effects)
    calls: tuple[Kept, ...] = ()
    origins: Mapping[str, NodeOrigin] = {}
    if inline:
        # A call leaves a node by its name if that is protected, to be waited for.
        protected = [*outputs.values(), *effects]
        try:
            inlined = inline_calls(graph_def, keep=keep, protected_names=protected)
        except TransformError as error:
            raise ModelError(
                f"the calls of {what} cannot be inlined: {error}"
            ) from error
        graph_def, calls, origins = inlined.graph_def, inlined.kept, inlined.origins
        outputs = {name: inlined.tensors.get(t, t) for name, t in outputs.items()}
    outputs, effects = without_wrappers(graph_def, outputs, effects)
    program = replace(
        program, graph_def=graph_def, outputs=outputs, side_effects=effects
    )
    programs.prune(program, origins)
    graph_def = program.graph_def
    sink = graph_def.node.add(op="NoOp", input=[f"^{name}" for name in effects])
    sink.name = programs.fresh_name(programs.nodes_by_name(graph_def), SIDE_EFFECTS)
    graph, stand_ins = _imported(graph_def, program.captures, what)
    programs.carry_closures(graph, graph_def.node, program.ancestors, origins)
    keras_calls.set_calls(graph, program.layers)

    def tensor(name: str) -> Tensor:
        name = tensor_name(name)
        try:
            return graph.get_tensor_by_name(stand_ins.get(name, name))
        except (KeyError, ValueError) as error:
            raise ModelError(f"{what} has no tensor '{name}': {error}") from error

    return GraphParts(
        graph,
        {name: tensor(t) for name, t in program.inputs.items()},
        {name: make_sink(graph, name, tensor(t)) for name, t in outputs.items()},
        graph.get_operation_by_name(sink.name),
        calls,
    )


def _check_ends(program: ModelProgram, what: str) -> None:
    nodes = programs.nodes_by_name(program.graph_def)
    ends = [*program.inputs.values(), *program.outputs.values(), *program.side_effects]
    for end in ends:
        if node_name(end) not in nodes:
            raise ModelError(f"{what} has no op '{node_name(end)}' for tensor '{end}'")


def _forget_defaults(program: ModelProgram) -> None:
    """Make inputs placeholders; they are always given, and the default is not here."""
    fed = {node_name(t) for t in program.inputs.values()}
    for node in program.graph_def.node:
        if node.name in fed and node.op == "PlaceholderWithDefault":
            node.op = "Placeholder"
            del node.input[:]


def _imported(
    graph_def: Any, captures: dict[str, Any], what: str
) -> tuple[Graph, dict[str, str]]:
    """Make a FuncGraph of a `GraphDef`, with its captures bound."""
    function_calls.with_unique_functions(graph_def)
    graph = functions.new_function_graph("model")
    stand_ins = _stand_ins(graph_def, captures)
    release_colocation(graph_def)
    try:
        creation.import_ops(graph, graph_def, {})
    except Exception as error:
        # The importer raises whatever the C++ status and its own checks make of it.
        raise ModelError(f"TensorFlow refuses the graph of {what}: {error}") from error
    for inside, external in dict(stand_ins.values()).items():
        functions.bind(graph, graph.get_tensor_by_name(inside), external)
    return graph, {name: inside for name, (inside, _) in stand_ins.items()}


def _stand_ins(graph_def: Any, captures: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Write the nodes that correspond to something outside, one for each thing."""
    first: dict[int, str] = {}
    stand_ins: dict[str, tuple[str, Any]] = {}
    by_node = {node_name(name): (name, external) for name, external in captures.items()}
    for node in graph_def.node:
        if node.name in by_node:
            name, external = by_node[node.name]
            functions.write_stand_in(node, external)
            stand_ins[name] = (first.setdefault(id(external), name), external)
    # A graph binds one tensor to one outside; nodes of the same one share it.
    shared = {short_name(n): short_name(t) for n, (t, _) in stand_ins.items() if n != t}
    if shared:
        for node in graph_def.node:
            inputs = [shared.get(text, text) for text in node.input]
            node.input[:] = inputs
    return stand_ins


def release_colocation(graph_def: Any) -> None:
    """Forget colocation with nodes that are not here; the importer refuses it."""
    # Bytes: those of a damaged file are no text.
    names = {node.name.encode() for node in graph_def.node}
    for node in graph_def.node:
        if "_class" not in node.attr:
            continue
        groups = node.attr["_class"].list.s
        inside = [g for g in groups if g.removeprefix(b"loc:@") in names]
        if len(inside) == len(groups):
            continue
        if inside:
            groups[:] = inside
        else:
            del node.attr["_class"]


def make_sink(graph: Graph, name: str, tensor: Tensor) -> Operation:
    """Make the op that reads an output for the outside world, and nothing else."""
    with creation.neutral(graph):
        op: Operation = tf.identity(tensor, name=programs.legal_name(name)).op
    return op


def ops_to_run(parts: GraphParts) -> list[Operation]:
    """Return the ops that a call runs, in the order of the graph."""
    stops = [
        *parts.inputs.values(),
        *(placeholder for _, placeholder in functions.bindings(parts.graph)),
    ]
    ends = [*parts.sinks.values(), parts.side_effects]
    behind = get_backward_walk_ops(ends, stop_at_ts=stops, control_inputs=True)
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
    return [op for op in parts.graph.get_operations() if op in needed]


def _needed_by_gradients(
    needed: Collection[Operation], stops: Iterable[Tensor]
) -> frozenset[Operation]:
    """Return the other ops that the gradients of some read, if these can run."""
    stop_ops = {t.op for t in stops}
    extra_ops: set[Operation] = set()
    waiting = list(needed)
    while waiting:
        read = [t.op for op in waiting for t in op_copies.read_by_gradient(op)]
        waiting = []
        for start in dict.fromkeys(read):
            if start in needed or start in extra_ops or start in stop_ops:
                continue
            behind = get_backward_walk_ops(
                [start], stop_at_ts=stops, control_inputs=True
            )
            new = [op for op in behind if op not in stop_ops]
            # An op behind a placeholder that nothing feeds cannot run.
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


# TensorFlow takes the ops of a FuncGraph over once, when the function is made. So a
# function is built from a copy, and the graph itself stays editable.
def build(parts: GraphParts, holdings: SharedState) -> Any:
    """Return a concrete function of a graph as it is now."""
    ops = ops_to_run(parts)
    captures = captures_of(parts.graph, ops)
    target = functions.new_function_graph("model")
    read = IdentitySet(t for op in ops for t in op.inputs)
    replaced: list[tuple[Tensor, Tensor]] = []
    arguments: dict[str, Tensor] = {}
    # The importer renames an op that is called like the scope of an op that is there
    # already, so an argument must not open a scope that an op is called like.
    taken = {op.name for op in ops}
    taken |= {name.partition("/")[0] for name in taken}

    def argument_name(op: Operation) -> str:
        return programs.take_name(taken, op.name.replace("/", "."))

    with creation.neutral(target):
        for name, t in parts.inputs.items():
            free = argument_name(t.op)
            arguments[name] = tf.compat.v1.placeholder(t.dtype, t.shape, free)
            # An input that no op reads stays an argument, and has nothing to replace.
            if t in read:
                replaced.append((t, arguments[name]))
    for outside, inside in captures:
        stand_in = functions.make_capture_placeholder(
            target, argument_name(inside.op), inside.dtype, inside.shape, outside
        )
        replaced.append((inside, stand_in))
    _, info = transformer.copy_with_input_replacements(ops, replaced, dst_graph=target)
    results = {n: info.transformed(sink.outputs[0]) for n, sink in parts.sinks.items()}
    waits = [info.transformed(op) for op in parts.side_effects.control_inputs]
    variables = variables_of(parts.graph, captures, holdings)
    renew_bodies(target)
    return functions.build_function(target, arguments, results, waits, variables)


def renew_bodies(graph: Graph) -> None:
    """Let a graph call bodies whose gradients can be built, and saved."""
    # A gradient of `tf.custom_gradient` is a closure over the tensors of its body as it
    # was traced. TensorFlow rebuilds bodies from their definitions, and saves only
    # gradients whose body is a graph of Python.
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
        definitions[name] = function_calls.definition_in(graph, name)
        called = function_calls.called_names(definitions[name].node_def)
        return [n for n in called if function_calls.has_function(graph, n)]

    roots = dict.fromkeys(name for caller in callers for name in caller.names)
    new_names: dict[str, str] = {}
    for name in topological_order(roots, callees):
        definition = definitions[name]
        called = set(function_calls.called_names(definition.node_def))
        if op_copies.closures_of(definition) or not called.isdisjoint(new_names):
            new_names[name] = _renewed(graph, definition, new_names)
    for caller in callers:
        if not new_names.keys().isdisjoint(caller.names):
            function_calls.call_others(caller, new_names)
    kept = topological_order(direct, callees)
    functions.forget_functions(graph, new_names.keys() - set(kept))


def _renewed(graph: Graph, definition: Any, new_names: dict[str, str]) -> str:
    """Give a graph a function like one that it holds; return its name."""
    own = FunctionDef()
    own.CopyFrom(definition)
    own.signature.name = function_calls.unused_name(definition.signature.name)
    for node in own.node_def:
        protos.rename_called(node, new_names)
    body = functions.body_of(graph, own)
    for name, gradient in op_copies.closures_of(own).items():
        op = body.get_operation_by_name(name)
        by_names = op_copies.gradient_by_names(
            name, gradient, transformer.copy_replacing, body
        )
        gradient_functions.set_gradient(op, by_names)
    return functions.add_function_of(graph, body, own)
