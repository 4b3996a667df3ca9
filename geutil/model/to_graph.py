"""From a program to a graph that can be edited, with named inputs and outputs.

A function names as its side effects all stateful ops, reading a variable among them,
and its results wait for them. Kept as they are, they would hold each part of a model to
the whole of it.

A traced function returns copies of its results that wait for all its effects, and a
SavedModel wraps each signature once more. Left in place, every output would depend on
every effect, and so on every input.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from geutil.bodies.function_bodies import SIDE_EFFECTS
from geutil.bodies.inlining import Kept, NodeOrigin, inline_calls
from geutil.errors import ModelError, TransformError
from geutil.graph import creation, function_defs, functions, keras_calls
from geutil.graph.call_graph import Effects
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import closure, node_name, short_name, tensor_name
from geutil.model import programs, shared_state
from geutil.model.programs import ModelProgram

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
    inputs: dict[str, Tensor]
    sinks: dict[str, Operation]  # For each output an Identity that serves it alone.
    side_effects: Operation  # An op that waits for all that runs besides the outputs.
    kept: list[Kept]  # The calls that were not inlined, with the reasons.


def materialize(
    program: ModelProgram, *, inline: bool, what: str, keep: Collection[str] = ()
) -> GraphParts:
    """Make an editable graph of a program."""
    _check_ends(program, what)
    program = replace(program)
    shared_state.prune(program)
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
    shared_state.prune(program, origins)
    graph_def = program.graph_def
    sink = graph_def.node.add(op="NoOp", input=[f"^{name}" for name in effects])
    sink.name = programs.fresh_name(programs.nodes_by_name(graph_def), SIDE_EFFECTS)
    graph, stand_ins = _imported(graph_def, program.captures, what)
    shared_state.carry_closures(graph, graph_def.node, program.ancestors, origins)
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
        list(calls),
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
    function_defs.with_unique_functions(graph_def)
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
            del node.input[:]
            node.input.extend(inputs)
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
            del groups[:]
            groups.extend(inside)
        else:
            del node.attr["_class"]


def make_sink(graph: Graph, name: str, tensor: Tensor) -> Operation:
    """Make the op that reads an output for the outside world, and nothing else."""
    with creation.neutral(graph):
        op: Operation = tf.identity(tensor, name=programs.legal_name(name)).op
    return op
