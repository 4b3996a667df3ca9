"""Control-flow contexts of version 1 loops and conditionals.

A while loop or conditional made without control flow v2 leaves two traces: primitive
ops (Enter, Merge, Switch, ...) in the graph, and a context object in Python that knows
which ops belong to it. `tf.gradients` needs the object. `tf.import_graph_def` makes the
ops only, so a copy gets its objects here: written to TensorFlow's own proto, renamed,
and read back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensorflow.core.protobuf import control_flow_pb2
from tensorflow.python.ops import control_flow_ops

from geutil.graph.adjacency import control_flow_context
from geutil.graph.importing import neutral
from geutil.graph.kinds import Graph, Operation

_ENTER = frozenset({"Enter", "RefEnter"})
_LOOP_OPS = _ENTER | {
    "Exit",
    "RefExit",
    "Merge",
    "RefMerge",
    "Switch",
    "RefSwitch",
    "NextIteration",
    "RefNextIteration",
    "LoopCond",
}


@dataclass(eq=False)
class ContextMembers:
    """A context with the ops that belong to it, those of nested contexts included."""

    context: Any
    ops: dict[Operation, None] = field(default_factory=dict)


def chain(context: Any) -> list[Any]:
    """Return `context` and the contexts around it, innermost first."""
    contexts = []
    while context is not None:
        contexts.append(context)
        context = context.outer_context
    return contexts


def members_of_contexts(graph: Graph, ops: Iterable[Operation]) -> list[ContextMembers]:
    """Return the contexts that `ops` run in, outer before inner, with all their ops.

    Cost: linear in the ops, and in the graph when there is a context at all.
    """
    found: dict[int, ContextMembers] = {}
    for op in ops:
        for context in reversed(chain(control_flow_context(op))):
            found.setdefault(id(context), ContextMembers(context))
    if not found:
        return []
    for op in graph.get_operations():
        for context in chain(control_flow_context(op)):
            if id(context) in found:
                found[id(context)].ops[op] = None
    for members in found.values():
        for op in _entrances(members.context):
            members.ops.setdefault(op)
    return sorted(found.values(), key=lambda m: len(chain(m.context)))


def _entrances(context: Any) -> list[Operation]:
    """Return the Enter ops of a loop, which TensorFlow counts to the outside."""
    if not context.IsWhileContext():
        return []
    tensors = [*context.loop_enters, *context._external_values.values()]
    return [t.op for t in tensors if t.op.type in _ENTER]


def is_loop(context: Any) -> bool:
    """Tell whether `context` is a while loop's."""
    return bool(context.IsWhileContext())


def is_loop_structure(op: Operation) -> bool:
    """Tell whether `op` is part of the machinery of a loop, not of its body."""
    return op.type in _LOOP_OPS


def whole_loops(graph: Graph, ops: Iterable[Operation]) -> list[Operation]:
    """Return `ops` and the rest of every version 1 while loop that they are part of.

    A loop's copy runs only as a whole: part of one would share the frame of the
    original.
    """
    listed = dict.fromkeys(ops)
    for members in members_of_contexts(graph, listed):
        if is_loop(members.context):
            listed.update(members.ops)
    return list(listed)


def copy_context(
    context: Any, graph: Graph, outer: Any, name: str, rename: Callable[[str], str]
) -> dict[int, Any]:
    """Make a copy of a context, and of those nested in it, in `graph`.

    Args:
        context: the outermost context to copy.
        graph: the graph that holds the copies of its ops.
        outer: the context around the copy, or None.
        name: the name of the copy (its frame, for a loop).
        rename: the name of the copy of an op or tensor from the original's.

    Returns:
        The copy of each context, by the `id` of its original.
    """
    proto = _to_proto(context)
    _rename_proto(proto, rename)
    _name_proto(proto, name)
    with neutral(graph):
        graph._set_control_flow_context(outer)
        if context.IsWhileContext():
            copied = control_flow_ops.WhileContext.from_proto(proto)
        else:
            copied = control_flow_ops.CondContext.from_proto(proto)
    copies: dict[int, Any] = {}
    pairs = [(context, copied)]
    for original, copy in pairs:
        copies[id(original)] = copy
        pairs += zip(original._nested_contexts, copy._nested_contexts, strict=True)
    return copies


def set_context(op: Operation, context: Any) -> None:
    """Set the context of an op; one that it joins learns the op's outputs."""
    op._set_control_flow_context(context)
    for joined in chain(context):
        for tensor in op.outputs:
            joined.AddName(tensor.name)


def can_copy_context(context: Any) -> bool:
    """Tell whether TensorFlow can write `context` to a proto."""
    return bool(context.IsWhileContext() or context.IsCondContext())


def _to_proto(context: Any) -> Any:
    return context.to_proto()


def _rename_proto(proto: Any, rename: Callable[[str], str]) -> None:
    """Rename every op and tensor that a context proto names; contexts keep names."""
    stack = [proto]
    for definition in stack:
        for descriptor, _ in definition.ListFields():
            name = descriptor.name
            if name.endswith("_name") and name != "context_name":
                setattr(definition, name, rename(getattr(definition, name)))
            elif name.endswith("_names"):
                names = getattr(definition, name)
                names[:] = [rename(n) for n in names]
        _rename_values(definition.values_def, rename)
        for nested in definition.nested_contexts:
            stack.append(getattr(nested, nested.WhichOneof("ctxt")))


def _rename_values(values_def: Any, rename: Callable[[str], str]) -> None:
    renamed = control_flow_pb2.ValuesDef()
    renamed.values.extend(rename(name) for name in values_def.values)
    for key, value in values_def.external_values.items():
        renamed.external_values[rename(key)] = rename(value)
    values_def.CopyFrom(renamed)


def _name_proto(proto: Any, name: str) -> None:
    """Name a context and, by the same prefix, the contexts nested in it."""
    before = proto.context_name
    stack = [proto]
    for definition in stack:
        old = definition.context_name
        definition.context_name = (
            name if definition is proto else nested_name(old, before, name)
        )
        for nested in definition.nested_contexts:
            stack.append(getattr(nested, nested.WhichOneof("ctxt")))


def nested_name(nested: str, outer: str, outer_copy: str) -> str:
    """Return the name for the copy of a nested context: unique as its outer one is."""
    return f"{outer_copy}/{nested.removeprefix(outer).lstrip('/')}"


def frame_name(context: Any) -> str:
    """Return the frame name that the Enter ops of a loop carry."""
    name: str = context.name
    return name


def frame_names(context: Any, name: str) -> Mapping[str, str]:
    """Return the new frame name of `context` and of each context nested in it."""
    names = {context.name: name}
    stack = [context]
    for outer in stack:
        for nested in outer._nested_contexts:
            names[nested.name] = nested_name(nested.name, context.name, name)
            stack.append(nested)
    return names
