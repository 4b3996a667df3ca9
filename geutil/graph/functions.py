"""Functions in graphs.

Carried along with the ops that call them, or built from parts.

The bodies of loops and conditionals are renamed on the way. Their gradient rewrites the
forward op and registers the new bodies under the old ones' names with a suffix, in a
table that the whole process shares: two copies that share bodies could not both be
differentiated (TensorFlow 2.21: "Attempting to add a duplicate function").

A FuncGraph reads objects outside (variables, tables) through *captures*: a tensor
inside corresponds to an eager tensor outside. A function is built from a FuncGraph
once; so the graph that is edited and the graph that a function is built from are two.
"""

from __future__ import annotations

import itertools
import keyword
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import tensorflow as tf

from geutil.graph import (
    _tf,
    creation,
    op_types,
    protos,
    replicas,
    resource_variables,
    state,
)
from geutil.graph._tf import ConcreteFunction, FuncGraph, TraceLiteral
from geutil.graph.protos import FunctionDef, FunctionDefLibrary
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import closure

_CONTROL_FLOW = op_types.LOOPS | op_types.BRANCHINGS
_numbers = itertools.count()


def body_graph(graph: Graph, name: str) -> Graph | None:
    """Return the FuncGraph that a function was traced in, None where it is gone."""
    function = graph._get_function(name) if graph._is_function(name) else None
    return getattr(function, "graph", None)


def merge_libraries(into: Any, added: Any) -> None:
    """Give a `GraphDef` the functions of another one, whose nodes it will have, too."""
    # A different function of the same name is renamed, throughout `added`, which is
    # changed in place; so are the bodies of loops and conditionals, if they are the
    # same.
    existing_functions = {f.signature.name: f for f in into.library.function}
    bodies = [function.node_def for function in added.library.function]
    own = {
        name
        for node in itertools.chain(added.node, *bodies)
        if node.op in _CONTROL_FLOW
        for name in protos.functions_of_attributes(node.attr)
    }
    renamed: dict[str, str] = {}
    for function in added.library.function:
        name = function.signature.name
        if name in existing_functions and (
            name in own or existing_functions[name] != function
        ):
            renamed[name] = f"{name}_merged_{next(_numbers)}"
    if renamed:
        for node in itertools.chain(added.node, *bodies):
            protos.rename_called(node, renamed)
        for function in added.library.function:
            name = function.signature.name
            function.signature.name = renamed.get(name, name)
        for gradient in added.library.gradient:
            name = gradient.function_name
            gradient.function_name = renamed.get(name, name)
            name = gradient.gradient_func
            gradient.gradient_func = renamed.get(name, name)
    for function in added.library.function:
        if function.signature.name not in existing_functions:
            into.library.function.append(function)
    present = {g.function_name for g in into.library.gradient}
    into.library.gradient.extend(
        g for g in added.library.gradient if g.function_name not in present
    )


def add_functions(graph: Graph, definitions: Iterable[Any]) -> None:
    """Add functions to the library of a graph; those that it holds are left out."""
    graph_def = creation.new_graph_def(graph)
    graph_def.library.function.extend(
        d for d in definitions if not graph._is_function(d.signature.name)
    )
    if graph_def.library.function:
        creation.import_ops(graph, graph_def, {})


def publish_functions(graph: Graph, names: Iterable[str] | None = None) -> None:
    """Register the functions of a graph with TensorFlow's runtime while they live."""
    # Imported functions are known to their graph alone until somebody reads their
    # definition.
    for name in list(graph._functions) if names is None else names:
        _ = graph._get_function(name).definition


def with_own_control_flow(graph: Graph, definition: Any) -> tuple[Any, Any]:
    """Return a function whose loops and conditionals have bodies of their own."""
    called: dict[str, None] = {}
    renamed: dict[str, None] = {}
    for node in definition.node_def:
        names = dict.fromkeys((node.op, *protos.functions_of_attributes(node.attr)))
        called |= names
        if node.op in _CONTROL_FLOW:
            renamed |= names
    library, fresh = library_for_copies(graph, called, renamed)
    own = FunctionDef()
    own.CopyFrom(definition)
    for node in own.node_def:
        if node.op in _CONTROL_FLOW:
            protos.rename_functions(node, fresh)
    return own, library


def calls_of(ops: Sequence[Operation]) -> tuple[list[str], list[str]]:
    """Return the functions that `ops` call: all, and those that will be renamed."""
    examples = {op.type: op for op in ops}
    # An op may bear the name of a function itself.
    called = dict.fromkeys(examples)
    renamed: dict[str, None] = {}
    calling = {kind for kind, op in examples.items() if _can_call(op)}
    for op in ops if calling else ():
        kind = op.type
        if kind in calling:
            names = dict.fromkeys(protos.functions_of_attributes(op.node_def.attr))
            called |= names
            if kind in _CONTROL_FLOW:
                renamed |= names
    return list(called), list(renamed)


def _can_call(op: Operation) -> bool:
    definition = op.op_def
    return definition is None or any("func" in a.type for a in definition.attr)


def library_for_copies(
    graph: Graph, called: Iterable[str], renamed: Iterable[str]
) -> tuple[Any, dict[str, str]]:
    """Return the functions that copies need, and the new names of those renamed."""
    # Functions that the graph does not hold are kernels. With a renamed function go the
    # bodies of loops and conditionals that it calls in turn.
    root_names = dict.fromkeys(name for name in called if graph._is_function(name))
    library = FunctionDefLibrary()
    if not root_names:
        return library, {}
    whole = graph.as_graph_def().library
    bodies = {function.signature.name: function for function in whole.function}
    gradients = {g.function_name: g.gradient_func for g in whole.gradient}
    fresh: dict[str, str] = {}
    _extend(fresh, (name for name in renamed if name in bodies))
    # A body can be needed under its old name, its new one, or both.

    def needed(need: tuple[str, bool]) -> Iterator[tuple[str, bool]]:
        name, anew = need
        for node in bodies[name].node_def:
            called = protos.functions_of_attributes(node.attr)
            names = [n for n in called if n in bodies]
            own = anew and node.op in _CONTROL_FLOW
            if own:
                _extend(fresh, names)
            yield from ((n, own) for n in names)
            if node.op in bodies:
                yield node.op, False
        if gradients.get(name) in bodies:
            yield gradients[name], False

    needs = closure(((name, name in fresh) for name in root_names), needed)
    for name, anew in needs:
        if anew:
            _rename_body(library.function.add(), bodies[name], fresh)
        else:
            library.function.append(bodies[name])
    library.gradient.extend(
        g for g in whole.gradient if (g.function_name, False) in needs
    )
    return library, fresh


def _extend(fresh: dict[str, str], names: Iterable[str]) -> None:
    for name in names:
        if name not in fresh:
            fresh[name] = f"{name}_copy_{next(_numbers)}"


def _rename_body(target: Any, body: Any, fresh: Mapping[str, str]) -> None:
    target.CopyFrom(body)
    target.signature.name = fresh[body.signature.name]
    for node in target.node_def:
        if node.op in _CONTROL_FLOW:
            protos.rename_functions(node, fresh)


def new_function_graph(name: str) -> Graph:
    """Return an empty FuncGraph that belongs to no other graph."""
    with tf.init_scope():
        graph = FuncGraph(name, collections={})
    state.state_of(graph).own = True
    return graph


def make_capture_placeholder(
    graph: Graph, name: str, dtype: Any, shape: Any, external: Any
) -> Tensor:
    """Make a placeholder called `name` in `graph` and bind it to a tensor outside."""
    with graph.as_default(), graph.name_scope(None):
        placeholder = tf.compat.v1.placeholder(dtype, shape, name)
    bind(graph, placeholder, external)
    return placeholder


def stand_in_for(graph: Graph, external: Any, name: str) -> Tensor:
    """Return the tensor of a FuncGraph for one outside, made if need be."""
    for outside, inside in bindings(graph):
        if outside is external:
            return inside
    return make_capture_placeholder(
        graph, name, external.dtype, external.shape, external
    )


def bind(graph: Graph, inside: Tensor, external: Any) -> None:
    """Make a tensor of a FuncGraph correspond to one outside."""
    if inside.op.type == "Placeholder" and isinstance(external, tf.Tensor):
        _tf.copy_handle_data(external, inside)
    graph.replace_capture(external, inside)


def write_stand_in(node: Any, external: Any) -> None:
    """Turn a node definition into an op that can represent a tensor outside."""
    # Unlike a placeholder, a VarHandleOp tells the importer shape and dtype of the
    # variable.
    data = getattr(external, "_handle_data", None)
    node.ClearField("attr")
    del node.input[:]
    # Of a table there are two, of keys and of values.
    behind: list[Any] = (
        list(data.shape_and_type) if data is not None and data.is_set else []
    )
    if external.dtype == tf.resource and len(behind) == 1:
        (variable,) = behind
        node.op = "VarHandleOp"
        node.attr["dtype"].type = variable.dtype
        node.attr["shape"].shape.CopyFrom(variable.shape)
        node.attr["shared_name"].s = node.name.encode()
    else:
        node.op = "Placeholder"
        node.attr["dtype"].type = external.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(external.shape.as_proto())


def bindings(graph: Graph) -> list[tuple[Any, Tensor]]:
    """Return (outside tensor, placeholder) for each capture; other graphs have none."""
    return list(getattr(graph, "captures", ()))


def unbind(graph: Graph, external: Any) -> None:
    """Forget the capture of a tensor outside; its placeholder stays in the graph."""
    graph.function_captures.pop(id(external), is_by_ref=False)


def side_effects(graph: Graph) -> list[Operation]:
    """Return the ops that a call of a FuncGraph's function runs besides its outputs."""
    return list(getattr(graph, "control_outputs", ()))


def set_ends(graph: Graph, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
    """Set the arguments and results of a FuncGraph."""
    graph.inputs = list(inputs)
    graph.outputs = list(outputs)


def seen_variables(graph: Graph) -> list[tf.Variable]:
    """Return the live variables that were read under `graph`, in order of capture."""
    by_handle = {
        id(replicas.local_handle(v)): replicas.first_copy(v)
        for v in graph._watched_variables
    }
    return [by_handle[id(e)] for e, _ in graph.captures if id(e) in by_handle]


def body_of(graph: Graph, definition: Any) -> Graph:
    """Return a FuncGraph of a function whose callees a graph holds."""
    with graph.as_default():
        body: Graph = _tf.function_def_to_graph(definition)
    resource_variables.carry_loop_handles(body)
    return body


def add_function_of(graph: Graph, body: Graph, definition: Any) -> str:
    """Give a graph the function of a FuncGraph; return its name."""
    allowed = _tf.MONOMORPHIC_FUNCTION_ALLOWLIST - {"_input_shapes"}
    attributes = {k: v for k, v in definition.attr.items() if k in allowed}
    function = ConcreteFunction.from_func_graph(body, None, attributes)
    function.add_to_graph(graph)
    name: bytes = function.name
    return name.decode()


def forget_functions(graph: Graph, names: Iterable[str]) -> None:
    """Forget functions that nothing in a graph calls; TensorFlow would save them."""
    for name in names:
        graph._functions.pop(name, None)


def build_function(
    graph: Graph,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    control_outputs: Sequence[Operation],
    variables: Sequence[tf.Variable],
) -> Any:
    """Build a ConcreteFunction from a FuncGraph, which must not be edited any more."""
    # TensorFlow flattens dictionaries by sorted key in some places and in order of
    # insertion in others; sorted, both are the same.
    inputs = dict(sorted(inputs.items()))
    outputs = dict(sorted(outputs.items()))
    graph.inputs = [*inputs.values(), *(inner for _, inner in graph.captures)]
    graph.outputs = list(outputs.values())
    graph.control_outputs = list(control_outputs)
    signature = ((), {_parameter(n): _spec(t, n) for n, t in inputs.items()})
    graph.structured_input_signature = signature
    graph.structured_outputs = {name: _spec(t, name) for name, t in outputs.items()}
    graph.variables = variables
    function_type = _tf.from_structured_signature(
        signature, graph.structured_outputs, graph.function_captures.capture_types
    )
    resource_variables.carry_loop_handles(graph)
    publish_functions(graph)
    function = ConcreteFunction.from_func_graph(graph, function_type, attrs={})
    # Saving a signature needs these.
    function._arg_keywords = list(inputs)
    function._num_positional_args = 1 if len(inputs) == 1 else 0
    return function


def call_function(
    function: Any, arguments: Mapping[str, Any], *, optimized: bool = True
) -> dict[str, Any]:
    """Call a function made by `build_function`; return its results by name."""
    # In a replica of `tf.distribute` it reads that one's copies of variables. Grappler
    # in the first call takes longer than a graph itself that runs a few times.
    flat = [arguments[name] for name in function._arg_keywords]
    captured = replicas.captured_here(function)
    with nullcontext() if optimized else _without_grappler():
        results: dict[str, Any] = function._call_flat(flat, captured)
    return results


@contextmanager
def _without_grappler() -> Iterator[None]:
    """Let Grappler leave functions alone that this thread calls for the first time."""
    context = _tf.eager_context()
    before = context.function_call_options
    config = tf.compat.v1.ConfigProto.FromString(before.config_proto_serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    context.function_call_options = _tf.FunctionCallOptions(
        before.executor_type, config
    )
    try:
        yield
    finally:
        context.function_call_options = before


def _parameter(name: str) -> str:
    """Return a name that Python accepts for a parameter."""
    return f"{name}_" if keyword.iskeyword(name) else name


def _spec(tensor: Tensor, name: str) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype, name)


def bound_arguments(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], traced_from: Any
) -> list[tuple[Any, Tensor]]:
    """Return (outside tensor, placeholder) for each argument and capture of a call."""
    # `traced_from` is the `tf.function` that it is a trace of, which knows the
    # defaults.
    captured = list(function.captured_inputs)
    inputs = list(function.inputs)
    if function.function_type is None:
        values = [tf.convert_to_tensor(value) for value in args]
    else:
        values = _canonical(function.function_type, args, kwargs, traced_from)
    argument_count = len(inputs) - len(captured)
    if len(values) != argument_count:
        raise TypeError(f"{len(values)} values for {argument_count} tensor arguments")
    return list(zip([*values, *captured], inputs, strict=True))


def _canonical(
    kind: Any, args: Sequence[Any], kwargs: Mapping[str, Any], traced_from: Any
) -> list[Tensor]:
    """Return the tensors that a call passes to a trace of some type."""
    function_type, defaults = kind, None
    if traced_from is not None:
        function_type, defaults = traced_from.function_type, traced_from._default_values
    else:
        kwargs = {**_fixed(kind, args, kwargs), **kwargs}
    bound = _tf.canonicalize_function_inputs(
        tuple(args), dict(kwargs), function_type, defaults
    )
    # A trace has a parameter for each value that `*args` takes.
    bound = kind.bind(*bound.args, **bound.kwargs)
    return list(kind.unpack_inputs(bound))


def _fixed(kind: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of Python that a trace was made for and a call leaves out."""
    call_arguments = kind.bind_partial(*args, **kwargs).arguments
    return {
        name: parameter.type_constraint.value
        for name, parameter in kind.parameters.items()
        if name not in call_arguments
        and isinstance(parameter.type_constraint, TraceLiteral)
    }


def is_compiled(function: Any) -> bool:
    """Return whether a ConcreteFunction is compiled by XLA when it is called."""
    attributes = function.function_def.attr
    return "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b
