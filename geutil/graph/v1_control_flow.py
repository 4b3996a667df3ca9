"""Version 1 loops and conditionals: contexts, frames, and edges that cross them.

A while loop or conditional made without control flow v2 leaves two traces: primitive
ops (Enter, Merge, Switch, ...) in the graph, and a context object in Python that knows
which ops belong to it. `tf.gradients` needs the object. `tf.import_graph_def` makes the
ops only, so a copy gets its objects here: written to TensorFlow's own proto, renamed,
and read back.

The executor kills the ops of a branch that is not taken and all that wait for them. The
gradient of a conditional is made of such ops too, but nothing marks these except the
Switch ops behind them and the Merge ops ahead.

The executor runs the body of a loop in a frame of its own. A tensor enters a frame
through an Enter op only; read otherwise, the step fails or hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.errors import RerouteError
from geutil.graph import _tf, adjacency, creation, op_types
from geutil.graph._tf import CondContext, GetContainingWhileContext, GetOutputContext
from geutil.graph.types import Graph, Operation, Tensor, is_op
from geutil.graph.walks import closure


def while_context(op: Operation) -> Any:
    """Return the innermost while-loop context that `op` runs in, or None."""
    return GetContainingWhileContext(adjacency.control_flow_context(op))


def output_while_context(op: Operation) -> Any:
    """Return the innermost while-loop context that the outputs of `op` live in."""
    return GetContainingWhileContext(GetOutputContext(op))


def reading_while_context(op: Operation) -> Any:
    """Return the innermost while loop that `op` reads its inputs in, or None."""
    # An Enter op belongs to the loop that it leads into, and reads outside of it.
    context = while_context(op)
    if context is None or not _tf.IsLoopEnter(op):
        return context
    # The context need not list the op: it knows one Enter for each tensor outside.
    if op.get_attr("frame_name") == context.name.encode():
        return GetContainingWhileContext(context.outer_context)
    return context


def check_frames(op: Operation, tensor: Tensor) -> None:
    """Refuse `tensor` as an input of `op` when they live in different frames."""
    places = _different_frames(op, tensor.op)
    if places is not None:
        raise RerouteError(
            f"'{op.name}' reads {places[0]} but '{tensor.name}' lives {places[1]}: "
            "bring it in through an Enter op or out through an Exit op of the loop"
        )


def check_control_frames(op: Operation, control_input: Operation) -> None:
    """Refuse a control edge from one loop's frame into another."""
    places = _different_frames(op, control_input)
    if places is not None:
        raise RerouteError(
            f"'{op.name}' runs {places[0]} but '{control_input.name}' runs "
            f"{places[1]}: a control edge cannot cross a loop's frame; wait for an "
            "op of the same loop, or for the loop's Exit op"
        )


def _different_frames(op: Operation, producer: Operation) -> tuple[str, str] | None:
    """Return where `op` reads and where `producer` yields, or None if it is one."""
    # Outside of any context there is no frame: most ops need no search for one.
    if (
        adjacency.control_flow_context(op) is None
        and adjacency.control_flow_context(producer) is None
    ):
        return None
    reads, lives = reading_while_context(op), output_while_context(producer)
    return None if reads is lives else (where(reads), where(lives))


def where(context: Any) -> str:
    """Describe where ops of a while-loop context, or of none, run."""
    return f"in while loop '{context.name}'" if context else "outside every while loop"


def branch_name(op: Operation) -> str | None:
    """Return the name of the version 1 conditional in a branch of which `op` runs."""
    context = adjacency.control_flow_context(op)
    if context is None or not context.IsCondContext() or _tf.IsSwitch(op):
        return None
    name: str = context.name
    return name


_FLOW = ("WhileContext", "CondContext")


def is_inside(op: Operation) -> bool:
    """Return whether `op` runs in a loop or a conditional of version 1."""
    # A context that only marks ops for XLA does not count.
    return _is_flow(adjacency.control_flow_context(op))


def yields_inside(op: Operation) -> bool:
    """Return whether the results of `op` are inside, as those of an Exit are not."""
    return _is_flow(GetOutputContext(op))


def _is_flow(context: Any) -> bool:
    return any(type(one).__name__ in _FLOW for one in chain(context))


_DEEPER = {"Switch": 1, "RefSwitch": 1, "Merge": -1, "RefMerge": -1}


def unconditional(
    ops: Iterable[Operation], *, exits: bool = False
) -> Iterator[Operation]:
    """Yield the ops that run once whenever their graph is run, and can be awaited."""
    # The ops are in topological order, with all that lies between two of them. With
    # `exits` the ends of loops count, which are a part of these.
    depth: dict[Operation, int] = {}
    for op in ops:
        outside = not is_inside(op)
        behind = max(
            (depth[p] for p in adjacency.predecessors(op) if p in depth), default=0
        )
        # Within a loop, Switch and Merge make up the loop.
        depth[op] = behind + (_DEEPER.get(op.type, 0) if outside else 0)
        counts = outside or (exits and not yields_inside(op))
        if counts and not depth[op]:
            yield op


def back_edges_among(ops: Iterable[Operation]) -> list[tuple[Operation, Operation]]:
    """Return the back edges of loops among ops: (producer, consumer)."""
    members = frozenset(ops)
    return [
        (t.op, op)
        for op in ops
        for t in op.inputs
        if t.op in members and adjacency.is_back_edge(t.op, op)
    ]


_LOOP_OPS = op_types.ENTERS | {
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


_STEP_STATES = frozenset({"Stack", "StackV2", "TensorArrayV3"})
_PASS_HANDLES = op_types.ENTERS | {
    "Identity",
    "RefIdentity",
    "Switch",
    "TensorArrayGradV3",
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
    """Return the contexts that `ops` run in, outer before inner, with all their ops."""
    members_by_id: dict[int, ContextMembers] = {}
    for op in ops:
        for context in reversed(chain(adjacency.control_flow_context(op))):
            members_by_id.setdefault(id(context), ContextMembers(context))
    if not members_by_id:
        return []
    for op in graph.get_operations():
        for context in chain(adjacency.control_flow_context(op)):
            if id(context) in members_by_id:
                members_by_id[id(context)].ops[op] = None
    for members in members_by_id.values():
        for op in _entrances(members.context):
            members.ops.setdefault(op)
    return sorted(members_by_id.values(), key=lambda m: len(chain(m.context)))


def _entrances(context: Any) -> list[Operation]:
    """Return the Enter ops of a loop, which TensorFlow counts to the outside."""
    if not context.IsWhileContext():
        return []
    tensors = [*context.loop_enters, *context._external_values.values()]
    return [t.op for t in tensors if t.op.type in op_types.ENTERS]


def is_loop(context: Any) -> bool:
    """Return whether `context` is a while loop's."""
    return bool(context.IsWhileContext())


def is_loop_structure(op: Operation) -> bool:
    """Return whether `op` is part of the machinery of a loop, not of its body."""
    return op.type in _LOOP_OPS


def whole_loops(graph: Graph, ops: Iterable[Operation]) -> list[Operation]:
    """Return `ops` and the rest of every version 1 while loop that they are part of."""
    # Part of a loop's copy would share the frame of the original.
    listed = dict.fromkeys(ops)
    for members in members_of_contexts(graph, listed):
        if is_loop(members.context):
            listed.update(members.ops)
    return list(listed)


def step_states(ops: Iterable[Operation]) -> list[Operation]:
    """Return the stacks and arrays that `ops` use, which a step fills as it goes."""
    # Loops keep values for their gradients in stacks, and results of iterations in
    # arrays. Two users that know nothing of each other spoil them.
    states: dict[Operation, None] = {}

    def behind(op: Operation) -> list[Operation]:
        producers = adjacency.producers(op)
        states.update((p, None) for p in producers if p.type in _STEP_STATES)
        return [p for p in producers if p.type in _PASS_HANDLES]

    closure(ops, behind)
    return list(states)


def copy_context(
    members: ContextMembers,
    graph: Graph,
    outer: Any,
    names: Mapping[str, str],
    context_ids: Collection[int],
    rename: Callable[[str], str | None],
) -> dict[int, Any]:
    """Make a copy of a context, and of contexts nested in it, in `graph`."""
    # `names` has the name of each context's copy (its frame, for a loop), `context_ids`
    # the nested contexts that are copied too. `rename` returns None for an op without
    # copy, which the copied context does not know then.
    proto = members.context.to_proto()
    originals = _prepare_protos(proto, members.context, names, context_ids, rename)
    with creation.neutral(graph):
        graph._set_control_flow_context(outer)
        if members.context.IsWhileContext():
            copied = _tf.WhileContext.from_proto(proto)
        else:
            copied = CondContext.from_proto(proto)
    copies = [copied]
    for copy in copies:
        copies += copy._nested_contexts
    for original, copy in zip(originals, copies, strict=True):
        _copy_collections(original, copy, graph)
    return {id(o): c for o, c in zip(originals, copies, strict=True)}


def _prepare_protos(
    proto: Any,
    context: Any,
    names: Mapping[str, str],
    context_ids: Collection[int],
    rename: Callable[[str], str | None],
) -> list[Any]:
    """Rename a context proto and those nested in it; return their contexts."""
    pairs = [(proto, context)]
    for definition, original in pairs:
        _leave_out_foreign(definition, original)
        _rename_proto(definition, rename)
        definition.context_name = names[original.name]
        if original.IsCondContext() and not definition.pivot_name:
            definition.pivot_name = next(
                iter(definition.values_def.external_values.values())
            )
        nested = [
            (d, c)
            for d, c in zip(
                list(definition.nested_contexts), original._nested_contexts, strict=True
            )
            if id(c) in context_ids
        ]
        # To empty the field ends the messages that it held: these are copies.
        protos = [type(d).FromString(d.SerializeToString()) for d, _ in nested]
        del definition.nested_contexts[:]
        definition.nested_contexts.extend(protos)
        for d, (_, c) in zip(definition.nested_contexts, nested, strict=True):
            pairs.append((getattr(d, d.WhichOneof("ctxt")), c))
    return [original for _, original in pairs]


def _copy_collections(context: Any, copy: Any, graph: Graph) -> None:
    """Put a copied context into the collection that `tf.train.Saver` writes out."""
    source = context._graph if context.IsWhileContext() else context.pred.graph
    keys = tf.compat.v1.GraphKeys
    for key in (keys.WHILE_CONTEXT, keys.COND_CONTEXT):
        if any(member is context for member in source.get_collection_ref(key)):
            graph.add_to_collection(key, copy)


def first_gap(
    members: ContextMembers, chosen: Collection[Operation]
) -> Operation | None:
    """Return an op of a context that `chosen` ones need and that is not chosen."""
    # None means that only ends are missing that nobody reads, such as a counter's Exit.
    for op in (op for op in members.ops if op in chosen):
        for needed in (*(t.op for t in op.inputs), *op.control_inputs):
            if needed in members.ops and needed not in chosen:
                return needed
    for alternatives in _pivots(members.context):
        ops = [p if is_op(p) else p.op for p in alternatives]
        if not any(op in chosen for op in ops):
            return ops[0]
    return None


def _pivots(context: Any) -> list[list[Any]]:
    """Return the predicate and pivot ops of a context; one of each list must exist."""
    if context.IsWhileContext():
        return [
            [p]
            for p in (context._pivot_for_pred, context._pivot_for_body, context._pivot)
        ]
    # Any tensor switched into a branch is alive only if the branch is, and can do the
    # work of the pivot, which nobody needs when the branch makes nothing of its own.
    return (
        [[context.pivot, *context._external_values.values()]]
        if context.IsCondContext()
        else []
    )


def set_context(op: Operation, context: Any) -> None:
    """Set the context of an op; one that it joins learns the op's outputs."""
    op._set_control_flow_context(context)
    for joined in chain(context):
        for tensor in op.outputs:
            joined.AddName(tensor.name)


def can_copy_context(context: Any) -> bool:
    """Return whether TensorFlow can write `context` to a proto."""
    return bool(context.IsWhileContext() or context.IsCondContext())


def _leave_out_foreign(definition: Any, context: Any) -> None:
    """Remove names of ops outside from a context proto, but for those that enter."""
    # A context knows some, such as the constants that its counters start with. Reading
    # the proto would move these ops into the new context.
    graph = context._graph if context.IsWhileContext() else context.pred.graph
    values = definition.values_def
    values.values[:] = [
        name
        for name in values.values
        if name in values.external_values or _runs_in(graph, name, context)
    ]


def _runs_in(graph: Graph, name: str, context: Any) -> bool:
    element = graph.as_graph_element(name)
    op = element if is_op(element) else element.op
    return any(c is context for c in chain(adjacency.control_flow_context(op)))


def _rename_proto(definition: Any, rename: Callable[[str], str | None]) -> None:
    """Rename every op and tensor that one context proto names."""
    for descriptor, _ in definition.ListFields():
        name = descriptor.name
        if name.endswith("_name") and name != "context_name":
            setattr(definition, name, rename(getattr(definition, name)) or "")
        elif name.endswith("_names"):
            names = getattr(definition, name)
            names[:] = [new for n in names if (new := rename(n)) is not None]
    _rename_values(definition.values_def, rename)


def _rename_values(values_def: Any, rename: Callable[[str], str | None]) -> None:
    renamed = _tf.ValuesDef()
    for name in values_def.values:
        new = rename(name)
        if new is not None:
            renamed.values.append(new)
    for key, value in values_def.external_values.items():
        new_key, new_value = rename(key), rename(value)
        if new_key is not None and new_value is not None:
            renamed.external_values[new_key] = new_value
    values_def.CopyFrom(renamed)
