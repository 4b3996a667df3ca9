"""Programs of GraphDefs and of graphs in memory, fed wherever their inputs are.

Version 1 feeds any tensor: a `PlaceholderWithDefault`, or one in the middle of a graph.

Scripts made constants of all variables, and left the ops that take a variable itself:
those that change it, in a branch for training, or that read it by its handle.
TensorFlow refuses such a graph (`Input 0 of node ... was passed float from ...
incompatible with expected float_ref`, or `expected resource`).

So that a graph can be checked, such ops get a variable that corresponds to the value.
Then all are made to take the value. In functions they are at once: TensorFlow's own
freezing makes values of the arguments alone, whatever branches and loops do with them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ModelError, Words
from geutil.graph import op_types, replicas
from geutil.graph.protos import op_def_of
from geutil.graph.resource_variables import VariableFacts, uninitialized_variable
from geutil.graph.types import Graph, is_op, is_tensor, type_name
from geutil.graph.walks import node_name, short_name, tensor_name
from geutil.model import frozen_variables, programs, variable_nodes
from geutil.model.files.tensor_checks import UNKNOWN, OpSignatures
from geutil.model.programs import ModelProgram, SharedState
from geutil.model.variable_nodes import GraphResource, HandleValue, Versions

_logger = logging.getLogger("geutil")
_HANDLES = frozenset(t.as_datatype_enum for t in (tf.resource, tf.variant))
_PASSING = frozenset(
    (*variable_nodes.SINGLE_PASSES, *variable_nodes.LIST_PASSES, "Switch")
)


@dataclass(frozen=True)
class Frozen:
    """The traces of variables in a frozen graph."""

    # For the name of each variable that corresponds to a value its tensor.
    values: Mapping[str, str] = field(default_factory=dict)
    changes: Sequence[str] = ()  # The ops in functions that changed a variable.


_NOTHING = Frozen()


def insert_handles(graph_def: Any) -> Frozen:
    """Put variables where ops take one and are given a value, in place."""
    signatures = OpSignatures({f.signature.name: f for f in graph_def.library.function})
    nodes = programs.nodes_by_name(graph_def)
    names = set(nodes)
    handles: dict[tuple[str, str], Any] = {}
    for node in graph_def.node:
        for index, kind in _handles_taken(node, signatures):
            text = short_name(node.input[index])
            producer = nodes.get(node_name(text))
            dtype = producer is not None and _value_type(producer, text, signatures)
            if not dtype:
                continue
            if (text, kind) not in handles:
                handles[text, kind] = handle = _variable_for(producer, kind, dtype)
                handle.name = programs.take_name(
                    names, f"{node_name(text)}/geutil_handle"
                )
            node.input[index] = handles[text, kind].name
    # Readers of a reference may wait for a change.
    references = {t: h.name for (t, kind), h in handles.items() if kind == "VariableV2"}
    for node in graph_def.node if references else ():
        for index, text in enumerate(node.input):
            node.input[index] = references.get(short_name(text), text)
    graph_def.node.extend(handles.values())
    values = {handle.name: text for (text, _), handle in handles.items()}
    return Frozen(values, _put_into_functions(graph_def, signatures))


_UNKNOWN_SHAPE = tf.TensorShape(None).as_proto().SerializeToString()


def _put_into_functions(graph_def: Any, signatures: OpSignatures) -> list[str]:
    """Let nodes of functions take values as arguments; return their changes."""
    changes: list[str] = []
    versions = Versions(graph_def.library, changes)
    for function in graph_def.library.function:
        # Where freezing made an Identity of a read, some still read its old output.
        reads = {
            f"{node.name}:value": f"{node.name}:output:0"
            for node in function.node_def
            if node.op == "Identity"
        }
        mended = type(function).FromString(function.SerializeToString())
        seeds = _insert_into_function(mended, signatures)
        try:
            frozen_variables.replace_in_function(
                mended, seeds, versions, function.signature.name
            )
        except ModelError:  # The check of the graph names what is wrong.
            continue
        arguments = {handle: value.variable for handle, value in seeds.items()}
        frozen_variables.rename_references(mended, {**reads, **arguments})
        function.CopyFrom(mended)
    frozen_variables.add_versions(graph_def, versions)
    return changes


def _insert_into_function(
    function: Any, signatures: OpSignatures
) -> dict[str, HandleValue]:
    """Let nodes read handles in place of arguments; return these by their names."""
    types = {arg.name: arg.type for arg in function.signature.input_arg}
    seeds = {}
    for node in function.node_def:
        for index, kind in _handles_taken(node, signatures):
            name = short_name(node.input[index])
            dtype = types.get(name, UNKNOWN)
            if kind == "VarHandleOp" and dtype not in (UNKNOWN, *_HANDLES):
                node.input[index] = f"{name}/geutil_handle"
                seeds[node.input[index]] = HandleValue(name, dtype, _UNKNOWN_SHAPE)
    return seeds


def _handles_taken(node: Any, signatures: OpSignatures) -> Iterator[tuple[int, str]]:
    """Yield the index of each input that is a handle, and the variable that has it."""
    signature = signatures.get(node.op)
    if signature is None:
        return
    if any(argument.is_ref for argument in signature.inputs):
        for index, text in enumerate(node.input):
            if variable_nodes.takes_reference(node, index) and not text.startswith("^"):
                yield index, "VariableV2"
        return
    if (
        any(argument.type in _HANDLES for argument in signature.inputs)
        or node.op in _PASSING
        or node.op in variable_nodes.CALLS
    ):
        try:
            types = signature.input_types(node.attr)
        except ModelError:  # Whoever checks the graph refuses it.
            return
        for index, (text, taken) in enumerate(
            zip(node.input, types or (), strict=False)
        ):
            if taken in _HANDLES and not text.startswith("^"):
                yield index, "VarHandleOp"


def _value_type(producer: Any, text: str, signatures: OpSignatures) -> int:
    """Return the type of a tensor, 0 if it is none that a variable has."""
    signature = signatures.get(producer.op)
    position = text.partition(":")[2] or "0"
    if signature is None or any(argument.is_ref for argument in signature.outputs):
        return UNKNOWN
    try:
        types = signature.output_types(producer.attr) or ()
    except ModelError:
        return UNKNOWN
    if not position.isdecimal() or int(position) >= len(types):
        return UNKNOWN
    dtype = types[int(position)]
    return UNKNOWN if dtype in _HANDLES else dtype


def _variable_for(producer: Any, kind: str, dtype: int) -> Any:
    # It waits for its value, so that this is not dropped.
    node = tf.compat.v1.NodeDef(op=kind, input=[f"^{producer.name}"])
    node.attr["dtype"].type = dtype
    shape = node.attr["shape"].shape
    if producer.op == "Const" and "value" in producer.attr:
        shape.CopyFrom(producer.attr["value"].tensor.tensor_shape)
    else:
        shape.unknown_rank = True
    return node


def put_values(graph_def: Any, frozen: Frozen, what: str) -> None:
    """Give all that takes a variable which a value replaced that value."""
    # An op that changes such a variable computes the new value. Ops after it in its
    # branch read that, and nothing keeps it: a warning names the op.
    values = frozen.values
    seeds = {
        node.name: HandleValue(
            node_name(values[node.name]),
            node.attr["dtype"].type,
            node.attr["shape"].shape.SerializeToString(),
        )
        for node in graph_def.node
        if node.name in values
    }
    changes = list(frozen.changes)
    try:
        frozen_variables.replace_handles(graph_def, seeds, changes)
    except ModelError as error:
        raise ModelError(
            f"{what} was frozen with ops that need variables, and outputs depend on "
            f"one: {error}"
        ) from error
    if changes:
        _logger.warning(
            "%s was frozen with ops that change variables; these are constants, and "
            "nothing is kept of what is set: %s",
            what,
            "; ".join(changes),
        )
    if not seeds:
        return
    left = []
    for node in graph_def.node:
        if node.name not in seeds:
            texts = [values.get(short_name(text), text) for text in node.input]
            node.input[:] = texts
            left.append(node)
    graph_def.CopyFrom(programs.subgraph(graph_def, left))


def with_placeholders(program: ModelProgram, what: str) -> ModelProgram:
    """Return a program in which each input is a placeholder."""
    nodes = programs.nodes_by_name(program.graph_def)
    fed = {
        name: tensor_name(t)
        for name, t in program.inputs.items()
        if nodes[node_name(t)].op != "Placeholder"
    }
    if not fed:
        return program
    # The graph belongs to the caller, and stays as it is.
    graph_def = programs.subgraph(program.graph_def, program.graph_def.node)
    program = replace(program, graph_def=graph_def)
    node_names = set(nodes)
    stand_ins = {}
    for name, spec in _specs(graph_def, fed, what).items():
        free = programs.take_name(node_names, programs.legal_name(name))
        graph_def.node.append(programs.placeholder(free, spec))
        stand_ins[fed[name]] = f"{free}:0"
    programs.redirect(program, stand_ins)
    program.inputs = {
        name: stand_ins.get(tensor_name(t), t) for name, t in program.inputs.items()
    }
    return program


def _specs(graph_def: Any, tensors: dict[str, str], what: str) -> dict[str, Any]:
    """Return a spec of the dtype and shape of each tensor."""
    with tf.Graph().as_default():
        try:
            elements = tf.import_graph_def(
                graph_def, name="", return_elements=list(tensors.values())
            )
        except Exception as error:
            # The importer raises whatever the C++ status and its own checks make of it.
            raise ModelError(
                f"the inputs {list(tensors)} of {what} cannot be fed: {error}"
            ) from error
    return dict(zip(tensors, elements, strict=True))


Ends = Sequence[Any] | Mapping[str, Any] | None
"""Tensors, ops, or their names; a mapping gives each a public name."""

_NOT_DATA = (tf.resource.as_datatype_enum, tf.variant.as_datatype_enum)


def named_ends(graph_def: Any, ends: Ends, what: str, kind: str) -> dict[str, str]:
    """Return the requested ends as a mapping from public name to tensor name."""
    if ends is None:
        ends = _placeholders(graph_def) if kind == "input" else _results(graph_def)
    if isinstance(ends, str) or is_tensor(ends) or is_op(ends):
        ends = [ends]
    pairs = (
        [(public, _name(end)) for public, end in ends.items()]
        if isinstance(ends, Mapping)
        else [(_public(name), name) for name in map(_name, ends)]
    )
    nodes = programs.nodes_by_name(graph_def)
    named: dict[str, str] = {}
    for public, name in pairs:
        if node_name(name) not in nodes or name.startswith("^"):
            end_names = (
                _placeholders(graph_def) if kind == "input" else _results(graph_def)
            )
            raise ModelError(
                f"{what} has no {kind} '{name}': there is no op of that name; its "
                f"{'placeholders' if kind == 'input' else 'ends'} are {end_names[:20]}"
            )
        if kind == "input" and tensor_name(name) in named.values():
            raise ModelError(f"two inputs of {what} are '{name}'; name it once")
        named[public] = tensor_name(name)
    if kind == "output" and not named:
        raise ModelError(
            f"{what} has no outputs", remedy=Words("name tensors with outputs=[...]")
        )
    return named


def _name(end: Any) -> str:
    """Return the name of a tensor or op that may be given by its name."""
    if isinstance(end, str):
        return end
    if is_tensor(end) or is_op(end):
        return str(end.name)
    raise ModelError(f"expected a tensor, an op or a name, got {type_name(end)}")


def _public(name: str) -> str:
    return name.removesuffix(":0")


def _placeholders(graph_def: Any) -> list[str]:
    return [
        node.name
        for node in graph_def.node
        if node.op == "Placeholder" and node.attr["dtype"].type not in _NOT_DATA
    ]


def _results(graph_def: Any) -> list[str]:
    """Return the nodes with outputs that no node reads."""
    # If some of them depend on a placeholder, only those: the others initialize or
    # save.
    read = {node_name(text) for node in graph_def.node for text in node.input}
    ends = [
        node.name
        for node in graph_def.node
        if node.name not in read and node.op not in _NO_RESULT and _has_outputs(node.op)
    ]
    fed = programs.nodes_ahead(graph_def, _placeholders(graph_def), data_only=True)
    return [name for name in ends if name in fed] or ends


def _has_outputs(op_type: str) -> bool:
    """Return whether ops of a type have outputs; a function's call may have."""
    definition = op_def_of(op_type)
    return definition is None or bool(definition.output_arg)


_NO_RESULT = frozenset(("Const", "NextIteration", "Placeholder", "VarHandleOp"))
"""Types of ops that end a graph without being its result."""


def programs_of_graph_def(
    graph_def: Any,
    signatures: Mapping[str, tuple[dict[str, str], dict[str, str]]],
    what: str,
    *,
    facts: Mapping[str, VariableFacts] | None = None,
    value_of: Callable[[str, Any], np.ndarray[Any, Any] | None] = lambda _name, _: None,
    assets: Mapping[str, str] | None = None,
    frozen: Frozen = _NOTHING,
) -> tuple[dict[str, ModelProgram], SharedState]:
    """Return programs that share one graph, and its variables and tables."""
    # In the programs reference variables are resource variables. `value_of` gives the
    # value of a variable from its op's name and node; None where it has none.
    graph_def = _needed(graph_def, signatures.values())
    ends = [t for _, outputs in signatures.values() for t in outputs.values()]
    values = variable_nodes.with_resource_variables(graph_def, ends)
    put_values(graph_def, frozen, what)
    assets = {**variable_nodes.files_of_tables(graph_def), **(assets or {})}
    holdings = SharedState()
    captures: dict[str, Any] = {}
    shared: dict[bytes, tf.Variable] = {}
    for node in graph_def.node:
        if node.op == "VarHandleOp":
            key = node.attr["shared_name"].s or node.name.encode()
            if key not in shared:
                shared[key] = _variable(node, facts or {}, value_of)
            copy = replicas.first_copy(shared[key])
            captures[f"{node.name}:0"] = copy.handle
        elif variable_nodes.is_table(node):
            resource = _table(graph_def, node, assets, what)
            holdings.resources.append(resource)
            holdings.assets += resource.assets
            captures[f"{node.name}:0"] = resource.resource_handle
    holdings.add_variables(shared.values())
    of_signatures = {
        name: with_placeholders(
            ModelProgram(
                graph_def,
                dict(inputs),
                {n: tensor_name(values.get(t, t)) for n, t in outputs.items()},
                captures,
            ),
            what,
        )
        for name, (inputs, outputs) in signatures.items()
    }
    return of_signatures, holdings


def _needed(
    graph_def: Any, ends: Iterable[tuple[dict[str, str], dict[str, str]]]
) -> Any:
    """Return a graph without nodes that neither signatures nor tables need."""
    # All variables stay: the model holds them.
    nodes = programs.nodes_by_name(graph_def)
    tensors = [t for pair in ends for part in pair for t in part.values()]
    # An end that is not there is reported later.
    names = {name for name in map(node_name, tensors) if name in nodes}
    names |= {name for name, node in nodes.items() if node.op in op_types.VARIABLES}
    while True:
        behind = programs.nodes_behind(graph_def, names)
        tables = (node for node in behind if variable_nodes.is_table(node))
        fills = (variable_nodes.initializer_of(graph_def, table) for table in tables)
        names, before = names.union(fill for fill in fills if fill), names
        if names == before:
            return programs.subgraph(graph_def, behind)


def _table(
    graph_def: Any, node: Any, assets: Mapping[str, str], what: str
) -> GraphResource:
    try:
        return GraphResource(
            graph_def, node, variable_nodes.initializer_of(graph_def, node), assets
        )
    except tf.errors.OpError as error:
        # Before it come Python's lines that made the node; behind it, its name.
        reason = " ".join(map(str.strip, str(error.message).strip().splitlines()[-2:]))
        raise ModelError(
            f"table '{node.name}' of {what} cannot be filled: {reason}"
        ) from error


def _variable(
    node: Any,
    facts: Mapping[str, VariableFacts],
    value_of: Callable[[str, Any], np.ndarray[Any, Any] | None],
) -> tf.Variable:
    node_facts = facts.get(node.name)
    trainable = node_facts.trainable if node_facts is not None else True
    value = value_of(node.name, node)
    shape = tf.TensorShape(node.attr["shape"].shape)
    dtype = tf.as_dtype(node.attr["dtype"].type)
    if value is None:
        return uninitialized_variable(dtype, shape, trainable, node.name)
    return tf.Variable(
        value, trainable=trainable, dtype=dtype, shape=shape, name=node.name
    )


def facts_of_graph(graph: Graph) -> dict[str, VariableFacts]:
    """Return the facts in the variable objects of a graph."""
    return {
        v.op.name: VariableFacts(v.op.name, bool(v.trainable), None, "")
        for v in _graph_variables(graph)
    }


def values_in_session(
    graph: Graph, session: Any
) -> Callable[[str, Any], np.ndarray[Any, Any] | None]:
    """Return a function that reads each variable's value in a Session, once."""
    # They are read in one run, if all have been initialized; nothing is added to the
    # graph, which may be finalized.
    if session is None:
        return lambda _name, _: None
    variables = {v.op.name: v for v in _graph_variables(graph)}

    @functools.cache
    def read() -> dict[str, Any]:
        try:
            return dict(session.run(variables))
        except tf.errors.FailedPreconditionError:
            return {name: _value_in(session, v) for name, v in variables.items()}

    return lambda name, _: read().pop(name, None)


def _value_in(session: Any, variable: tf.Variable) -> Any:
    """Return the value of a variable, None if it was not initialized."""
    try:
        return session.run(variable)
    except tf.errors.FailedPreconditionError:
        return None


def _graph_variables(graph: Graph) -> Iterable[tf.Variable]:
    variable_by_id: dict[int, tf.Variable] = {}
    for key in sorted(graph.get_all_collection_keys(), key=str):
        for element in graph.get_collection(key):
            if isinstance(element, tf.Variable):
                variable_by_id[id(element)] = element
    return variable_by_id.values()
