"""Values that freezing left where ops take variables.

Scripts made constants of all variables, and left the ops that take a variable itself:
those that change it, in a branch for training, or that read it by its handle.
TensorFlow refuses such a graph (`Input 0 of node ... was passed float from ...
incompatible with expected float_ref`, or `expected resource`).

So that a graph can be checked, such ops get a variable that corresponds to the value.
Then all are made to take the value. In functions they are at once: TensorFlow's own
freezing makes values of the arguments alone, whatever branches and loops do with them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError
from geutil.graph.walks import node_name, short_name
from geutil.model import freezing, handle_values, programs
from geutil.model.files.tensor_checks import UNKNOWN, OpSignatures
from geutil.model.handle_values import HandleValue, Versions
from geutil.model.sources import v1_variables

_logger = logging.getLogger("geutil")
_HANDLES = frozenset(t.as_datatype_enum for t in (tf.resource, tf.variant))
_PASSING = frozenset(
    (*handle_values.SINGLE_PASSES, *handle_values.LIST_PASSES, "Switch")
)


@dataclass(frozen=True)
class Frozen:
    """The traces of variables in a frozen graph."""

    # For the name of each variable that corresponds to a value its tensor.
    values: Mapping[str, str] = field(default_factory=dict)
    changes: Sequence[str] = ()  # The ops in functions that changed a variable.


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
                handles[text, kind] = handle = _variable(producer, kind, dtype)
                handle.name = programs.fresh_name(
                    names, f"{node_name(text)}/geutil_handle"
                )
                names.add(handle.name)
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
            freezing.replace_in_function(
                mended, seeds, versions, function.signature.name
            )
        except ModelError:  # The check of the graph names what is wrong.
            continue
        arguments = {handle: value.variable for handle, value in seeds.items()}
        freezing.rename_references(mended, {**reads, **arguments})
        function.CopyFrom(mended)
    freezing.add_versions(graph_def, versions)
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
            if v1_variables.takes_reference(node, index) and not text.startswith("^"):
                yield index, "VariableV2"
        return
    if (
        any(argument.type in _HANDLES for argument in signature.inputs)
        or node.op in _PASSING
        or node.op in handle_values.CALLS
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


def _variable(producer: Any, kind: str, dtype: int) -> Any:
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
        freezing.replace_handles(graph_def, seeds, changes)
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
            del node.input[:]
            node.input.extend(texts)
            left.append(node)
    graph_def.CopyFrom(programs.subgraph(graph_def, left))
