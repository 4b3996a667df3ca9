"""Checks a GraphDef before TensorFlow's importer sees it.

The importer refuses most of what is wrong, but not all: some of it makes it abort the
process, or allocate without bound. What passes here is safe to give to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geutil.graph.protos import FunctionDef, GraphDef
from geutil.model.errors import ModelError
from geutil.model.files.checks.edges import (
    BodyInputs,
    GraphInputs,
    argument_types,
    check_edges,
    check_types,
)
from geutil.model.files.checks.flow import check_cycles, check_recursion
from geutil.model.files.checks.nodes import check_nodes
from geutil.model.files.checks.signatures import Signatures
from geutil.model.files.checks.tensors import check_type


def check_graph_def(graph_def: GraphDef, what: str) -> None:
    """Check that TensorFlow can import a graph.

    Names are legal and unique; op types are known to this TensorFlow or are functions
    of the library; attributes are complete and of their declared types; constants hold
    what type and shape ask for; inputs exist, as many as the op takes and of the right
    type, where the attributes tell; nodes wait for each other only by the back edges of
    loops; functions that are named exist, and none calls itself for ever. The bodies
    of functions are checked alike.

    Attributes that an op does not have (of older or newer versions), devices and
    shapes that do not fit each other are left to TensorFlow, which refuses them well.

    Args:
        graph_def: the graph with its library; it is not changed.
        what: how messages call it: the file that it comes from, for example.

    Raises:
        ModelError: one of these does not hold; the message names the function and the
            node.

    Cost: linear in nodes, edges and attributes; values of constants are not read.

    Example:
        >>> import tensorflow as tf
        >>> graph_def = tf.compat.v1.GraphDef()
        >>> _ = graph_def.node.add(name="x", op="NoSuchOp")
        >>> try:
        ...     check_graph_def(graph_def, "mine.pb")
        ... except ModelError as error:
        ...     print(error)
        mine.pb: node 'x' (NoSuchOp): this TensorFlow does not know the op, and no
        function is called so; if it is a custom op, load its library first with
        tf.load_op_library
    """
    try:
        functions = _functions(graph_def.library)
        signatures = Signatures(functions)
        _check_graph(graph_def, signatures)
        for name, function in functions.items():
            try:
                _check_body(function, signatures)
            except ModelError as error:
                raise ModelError(f"function '{name}': {error}") from error
        check_recursion(functions)
    except ModelError as error:
        raise ModelError(f"{what}: {error}") from error


def _functions(library: Any) -> dict[str, FunctionDef]:
    functions: dict[str, FunctionDef] = {}
    for function in library.function:
        name = function.signature.name
        if not name:
            raise ModelError("a function of the library has no name")
        if name in functions:
            raise ModelError(f"two functions are called '{name}'")
        functions[name] = function
    return functions


def _check_graph(graph_def: GraphDef, signatures: Signatures) -> None:
    nodes = check_nodes(graph_def.node, signatures, in_function=False)
    producers = check_edges(nodes, GraphInputs(nodes))
    check_cycles(graph_def.node, producers)


def _check_body(function: FunctionDef, signatures: Signatures) -> None:
    for arg in (*function.signature.input_arg, *function.signature.output_arg):
        check_type(arg.type)
    arguments = argument_types(function.signature.input_arg)
    if len(arguments) < len(function.signature.input_arg):
        raise ModelError("two of its arguments have the same name")
    nodes = check_nodes(function.node_def, signatures, in_function=True)
    inputs = BodyInputs(nodes, arguments)
    producers = check_edges(nodes, inputs)
    check_cycles(function.node_def, producers)
    _check_results(function, inputs)
    for result in function.control_ret.values():
        inputs.control(result)


def _check_results(function: FunctionDef, inputs: BodyInputs) -> None:
    returned: Mapping[str, str] = function.ret
    wanted = argument_types(function.signature.output_arg)
    for name, types in wanted.items():
        tensor = returned.get(name)
        if tensor is None:
            raise ModelError(f"its result '{name}' is not computed")
        try:
            _, found = inputs.resolve(tensor)
            check_types(types, [found], [tensor])
        except ModelError as error:
            raise ModelError(f"its result '{name}': {error}") from error
