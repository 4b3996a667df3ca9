"""From a program to a graph that can be edited."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from geutil.errors import TransformError
from geutil.graph.function_graphs import bind, new_function_graph, write_stand_in
from geutil.graph.function_registry import with_unique_functions
from geutil.graph.importing import import_ops, neutral
from geutil.graph.inlining import Kept, Origin, inline_calls
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.model.errors import ModelError
from geutil.model.programs.closures import carry_closures, prune
from geutil.model.programs.program import (
    Program,
    canonical,
    fresh_name,
    legal_name,
    node_of,
    nodes_by_name,
    short,
)
from geutil.model.programs.wrappers import without_wrappers

SIDE_EFFECTS = "side_effects"
"""Name of the op that waits for all that a call runs besides its outputs."""


@dataclass
class Parts:
    """An editable graph and its ends.

    Attributes:
        graph: a FuncGraph whose captures are bound.
        inputs: a placeholder for each input.
        sinks: for each output an Identity that serves it alone.
        side_effects: an op that waits for all that runs besides the outputs.
        kept: the calls that were not inlined, with the reasons.
    """

    graph: Graph
    inputs: dict[str, Tensor]
    sinks: dict[str, Operation]
    side_effects: Operation
    kept: list[Kept]


def materialize(
    program: Program, *, inline: bool, what: str, keep: Collection[str] = ()
) -> Parts:
    """Make an editable graph of a program.

    Args:
        program: the program, which is not changed.
        inline: whether calls of functions are replaced by the functions' bodies.
        what: what the program was made from, for messages.
        keep: names of functions whose calls stay.

    Raises:
        ModelError: an end is not in the graph, or TensorFlow refuses the nodes.

    Cost: linear in nodes and edges, function bodies included.
    """
    _check_ends(program, what)
    program = replace(program)
    prune(program)
    _forget_defaults(program)
    graph_def = program.graph_def
    outputs = {name: canonical(t) for name, t in program.outputs.items()}
    effects: list[str] = list(program.side_effects)
    kept: tuple[Kept, ...] = ()
    origins: Mapping[str, Origin] = {}
    if inline:
        # A call leaves a node by its name if that is protected, to be waited for.
        protected = [*outputs.values(), *effects]
        try:
            inlined = inline_calls(graph_def, keep=keep, protected_names=protected)
        except TransformError as error:
            raise ModelError(
                f"the calls of {what} cannot be inlined: {error}"
            ) from error
        graph_def, kept, origins = inlined.graph_def, inlined.kept, inlined.origins
        outputs = {name: inlined.tensors.get(t, t) for name, t in outputs.items()}
    outputs, effects = without_wrappers(graph_def, outputs, effects)
    program = replace(
        program, graph_def=graph_def, outputs=outputs, side_effects=effects
    )
    prune(program, origins)
    graph_def = program.graph_def
    sink = graph_def.node.add(op="NoOp", input=[f"^{name}" for name in effects])
    sink.name = fresh_name(nodes_by_name(graph_def), SIDE_EFFECTS)
    graph, stand_ins = _imported(graph_def, program.captures, what)
    carry_closures(graph, graph_def.node, program.ancestors, origins)

    def tensor(name: str) -> Tensor:
        name = canonical(name)
        try:
            return graph.get_tensor_by_name(stand_ins.get(name, name))
        except (KeyError, ValueError) as error:
            raise ModelError(f"{what} has no tensor '{name}': {error}") from error

    return Parts(
        graph,
        {name: tensor(t) for name, t in program.inputs.items()},
        {name: make_sink(graph, name, tensor(t)) for name, t in outputs.items()},
        graph.get_operation_by_name(sink.name),
        list(kept),
    )


def _check_ends(program: Program, what: str) -> None:
    nodes = nodes_by_name(program.graph_def)
    ends = [*program.inputs.values(), *program.outputs.values(), *program.side_effects]
    for end in ends:
        if node_of(end) not in nodes:
            raise ModelError(f"{what} has no op '{node_of(end)}' for tensor '{end}'")


def _forget_defaults(program: Program) -> None:
    """Make inputs placeholders; they are always given, and the default is not here."""
    fed = {node_of(t) for t in program.inputs.values()}
    for node in program.graph_def.node:
        if node.name in fed and node.op == "PlaceholderWithDefault":
            node.op = "Placeholder"
            del node.input[:]


def _imported(
    graph_def: Any, captures: dict[str, Any], what: str
) -> tuple[Graph, dict[str, str]]:
    """Make a FuncGraph of a `GraphDef`, with its captures bound.

    Returns:
        The graph, and the tensor that stands for each capture.

    Raises:
        ModelError: TensorFlow refuses the nodes.
    """
    with_unique_functions(graph_def)
    graph = new_function_graph("model")
    stand_ins = _stand_ins(graph_def, captures)
    release_colocation(graph_def)
    try:
        import_ops(graph, graph_def, {})
    except Exception as error:
        # The importer raises whatever the C++ status and its own checks make of it.
        raise ModelError(f"TensorFlow refuses the graph of {what}: {error}") from error
    for inside, external in dict(stand_ins.values()).items():
        bind(graph, graph.get_tensor_by_name(inside), external)
    return graph, {name: inside for name, (inside, _) in stand_ins.items()}


def _stand_ins(graph_def: Any, captures: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Write the nodes that stand for something outside, one for each thing.

    Returns:
        For each capture the tensor that stands for it, and what it stands for.
    """
    first: dict[int, str] = {}
    stand_ins: dict[str, tuple[str, Any]] = {}
    by_node = {node_of(name): (name, external) for name, external in captures.items()}
    for node in graph_def.node:
        if node.name in by_node:
            name, external = by_node[node.name]
            write_stand_in(node, external)
            stand_ins[name] = (first.setdefault(id(external), name), external)
    # A graph binds one tensor to one outside; nodes that stand for the same share it.
    shared = {short(n): short(t) for n, (t, _) in stand_ins.items() if n != t}
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
    with neutral(graph):
        op: Operation = tf.identity(tensor, name=legal_name(name)).op
    return op
