"""Definitions of functions.

From a graph's library to a graph and back, under names that mean one thing only.

TensorFlow keeps one table of functions for the whole process and refuses a second
definition of a name; two files may hold different functions of the same name. Here a
function whose name is taken by a different one gets a name of its own.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from geutil.graph import _tf, call_graph, creation, op_types
from geutil.graph._tf import TF_DeleteFunction, TF_FunctionToFunctionDef, TF_GetBuffer
from geutil.graph.call_graph import Arg
from geutil.graph.gradient_functions import ATTRIBUTE
from geutil.graph.protos import FunctionDef, FunctionDefLibrary
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import closure, topological_order

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
        call_graph.rename_called(node, names)
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
        call_graph.rename_called(node, names)
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
        yield from call_graph.names_of_functions(node)


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
        TF_FunctionToFunctionDef(c_function, buffer)
        data = TF_GetBuffer(buffer)
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
            TF_FunctionToFunctionDef(function, buffer)
            data = TF_GetBuffer(buffer)
            definition = FunctionDef.FromString(tf.compat.as_bytes(data))
    finally:
        TF_DeleteFunction(function)
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
    """Tell whether a node is a call that names the gradient of a traced function."""
    if node.op not in op_types.CALLS or ATTRIBUTE not in node.attr:
        return False
    return _OWN.fullmatch(node.attr[ATTRIBUTE].s) is not None


def forget_own_gradient(node: Any) -> None:
    """Make a call name no gradient, unless somebody gave it one on purpose."""
    if names_own_gradient(node):
        del node.attr[ATTRIBUTE]
