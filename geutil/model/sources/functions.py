"""Programs of concrete functions and of functions with an input signature."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from geutil.graph.function_graphs import bindings, side_effects
from geutil.graph.kinds import Graph, Tensor
from geutil.model.errors import ModelError
from geutil.model.programs.program import Ancestor, Program, nodes_by_name

CONSTANT_LIMIT = 64 * 2**20
"""Captured values of at most so many bytes become constants of the graph."""


def concrete_function_of(function: Any) -> Any:
    """Return the one concrete function of a `tf.function` with an input signature.

    Raises:
        ModelError: it has no input signature and was traced not once but never or
            several times.
    """
    if getattr(function, "input_signature", None) is None:
        raise ModelError(
            f"{function!r} has no input signature, so there is no telling which trace "
            "of it is meant; pass function.get_concrete_function(...) or decorate it "
            "with tf.function(input_signature=[...])"
        )
    return function.get_concrete_function()


def ordered(
    variables: Iterable[tf.Variable], captured: Iterable[Any]
) -> list[tf.Variable]:
    """Return variables in the order in which a function captured them.

    TensorFlow lists them in another order in each process. Those that were not captured
    go last, by name.
    """
    rest = {id(v.handle): v for v in variables}
    found = [rest.pop(id(t)) for t in captured if id(t) in rest]
    return [*found, *sorted(rest.values(), key=lambda v: str(v.name))]


def program_of_function(function: Any) -> Program:
    """Return the program of a concrete function; named as its arguments and results.

    A result that is no dictionary of tensors has outputs called `output_0` and so on,
    as TensorFlow calls them in a SavedModel.
    """
    graph = function.graph
    arguments = function.inputs[: len(function.inputs) - len(function.captured_inputs)]
    return program_of_graph(
        graph,
        dict(zip(_argument_names(function, arguments), arguments, strict=True)),
        _named_results(function),
        zip(
            function.captured_inputs,
            function.inputs[len(arguments) :],
            strict=True,
        ),
    )


def program_of_graph(
    graph: Graph,
    inputs: dict[str, Tensor],
    outputs: dict[str, Tensor],
    captures: Iterable[tuple[Any, Tensor]] | None = None,
) -> Program:
    """Return the program of a FuncGraph or of a `tf.Graph`, which captures nothing."""
    if captures is None:
        captures = bindings(graph) if hasattr(graph, "captures") else ()
    graph_def = graph_def_with_shapes(graph)
    outside = {inner.name: external for external, inner in captures}
    return Program(
        graph_def,
        {name: t.name for name, t in inputs.items()},
        {name: t.name for name, t in outputs.items()},
        _small_values_as_constants(graph_def, outside),
        [op.name for op in side_effects(graph)],
        [Ancestor(graph)],
    )


def graph_def_with_shapes(graph: Graph) -> Any:
    """Return the `GraphDef` of a graph, with what is known of its shapes.

    Raises:
        ModelError: it holds more than a protobuf can.
    """
    try:
        graph_def = graph.as_graph_def(add_shapes=True)
        if graph_def.library.function:
            # Shapes inside functions would make them differ from what TensorFlow holds
            # under the same names, which it refuses.
            graph_def.library.CopyFrom(graph.as_graph_def().library)
        return graph_def
    except (ValueError, tf.errors.OpError) as error:
        raise ModelError(
            "the graph holds more constants than fit into one protobuf (2 GB); keep "
            f"large values in variables: {error}"
        ) from error


def _argument_names(function: Any, arguments: list[Tensor]) -> list[str]:
    """Name arguments by keyword if there are only keywords, else by placeholder."""
    signature = function.structured_input_signature
    if signature is not None and not signature[0]:
        keywords = signature[1]
        if len(keywords) == len(arguments) and all(
            isinstance(spec, tf.TensorSpec) for spec in keywords.values()
        ):
            return _in_order_of(keywords, arguments)
    return [t.op.name for t in arguments]


def _in_order_of(keywords: dict[str, Any], arguments: list[Tensor]) -> list[str]:
    """Return the keywords in the order of the placeholders, which bear their names."""
    by_name = {}
    for keyword, spec in keywords.items():
        by_name[spec.name or keyword] = keyword
        by_name[keyword] = keyword
    names = [by_name.get(t.op.name) for t in arguments]
    if None in names or len(set(names)) != len(names):
        return list(keywords)
    return [name for name in names if name is not None]


def _named_results(function: Any) -> dict[str, Tensor]:
    structure = function.structured_outputs
    outputs = list(function.outputs)
    if structure is not None:
        # A tape that differentiated the function has added what the gradient reads.
        flat = tf.nest.flatten(structure, expand_composites=True)
        outputs = outputs[: sum(map(_is_tensor, flat))]
    if isinstance(structure, dict) and all(map(_is_tensor, structure.values())):
        # Functions flatten dictionaries by sorted key.
        by_name = dict(zip(sorted(structure), outputs, strict=True))
        return {name: by_name[name] for name in structure}
    return {f"output_{i}": t for i, t in enumerate(outputs)}


def _is_tensor(result: Any) -> bool:
    return isinstance(result, tf.Tensor | tf.TensorSpec)


def _small_values_as_constants(
    graph_def: Any, captures: dict[str, Any]
) -> dict[str, Any]:
    """Turn captured values into constants; return the captures that remain."""
    nodes = nodes_by_name(graph_def) if captures else {}
    remaining: dict[str, Any] = {}
    for name, external in captures.items():
        node = nodes.get(name.partition(":")[0])
        if node is None or not _is_small_value(external):
            remaining[name] = external
            continue
        proto = tf.make_tensor_proto(external.numpy(), dtype=external.dtype)
        node.op = "Const"
        node.ClearField("attr")
        node.attr["dtype"].type = external.dtype.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(proto)
    return remaining


def _is_small_value(external: Any) -> bool:
    if not isinstance(external, tf.Tensor) or not hasattr(external, "numpy"):
        return False
    if external.dtype in (tf.resource, tf.variant):
        return False
    size: int = tf.size(external).numpy() * max(external.dtype.size or 0, 1)
    return size <= CONSTANT_LIMIT
