"""What remains to be done once the copies exist.

Devices, colocation, control edges, shapes, gradients known to Python, and the
control-flow contexts of version 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from geutil.errors import TransformError
from geutil.graph import contexts
from geutil.graph.adjacency import control_flow_context, control_inputs
from geutil.graph.colocation import rename_entries, set_class_entries
from geutil.graph.frames import output_while_context, reading_while_context, where
from geutil.graph.importing import (
    add_control_edges,
    python_gradient,
    set_python_gradient,
)
from geutil.graph.kinds import Operation
from geutil.graph.names import absolute_unique_name
from geutil.graph.shapes import refine_shapes, same_static_shape
from geutil.select.lists import get_consuming_ops
from geutil.select.walks import get_forward_walk_ops
from geutil.transform.state import TransformState

ControlHandler = Callable[[TransformState, Operation], Operation | None]


def finish_copies(info: TransformState) -> None:
    """Give the ops copied as they are what an import loses. Linear in the ops."""
    unlike = _ops_with_other_shapes(info)
    pairs = info.copied.items()
    refine_shapes([p for p in pairs if p[0] not in unlike] if unlike else pairs)
    for op, op_ in info.copied.items():
        original_op, gradient_function = python_gradient(op)
        if original_op is not None:
            original_op = info.transform_original_op_handler(info, original_op)
        if original_op is not None or gradient_function is not None:
            set_python_gradient(op_, original_op, gradient_function)
    _set_colocation(info)


def _ops_with_other_shapes(info: TransformState) -> set[Operation]:
    """Return the ops whose copies may well have other static shapes.

    That is, ops that a caller's function altered, and ops behind those or behind a
    tensor whose stand-in has another shape. For these, what the original knows about
    shapes need not hold.
    """
    pairs = [(t, info.transformed_ts[t]) for t in (*info.outside_ts, *info.handled_ts)]
    pairs += info.replacements.items()
    changed = [t for t, t_ in pairs if not same_static_shape(t, t_)]
    if not changed and not info.altered_ops:
        return set()
    ops = [*info.altered_ops, *get_consuming_ops(changed)]
    return set(get_forward_walk_ops(ops, within_ops=info.sgv.ops))


def _set_colocation(info: TransformState) -> None:
    if not info.colocated:
        return
    by_name = {op.name: op_.name for op, op_ in info.copied.items()}

    def rename(name: str) -> str | None:
        return by_name.get(name, name if info.same_graph else None)

    for op, entries in info.colocated.items():
        renamed = rename_entries(entries, rename)
        if renamed:
            set_class_entries(info.copied[op], renamed)


def connect_control_inputs(
    info: TransformState, handler: ControlHandler, ops: Iterable[Operation]
) -> None:
    """Make the copies wait for what the handler makes of each control input.

    Args:
        info: the running transformation.
        handler: returns the op that stands for a control input, or None.
        ops: the originals of the copies that have control inputs to connect. Control
            edges that the copy has are not made again.
    """
    for op in ops:
        op_ = info.transformed_ops[op]
        controls_ = [handler(info, control) for control in control_inputs(op)]
        known = {op_, None, *op_.control_inputs}
        add_control_edges(op_, [c for c in controls_ if c not in known])


def whole_contexts(info: TransformState) -> list[contexts.ContextMembers]:
    """Return the contexts of the view that will be copied, outer before inner.

    Raises:
        TransformError: the view holds part of a loop's machinery, or part of a loop
            that is to be copied to another graph.
    """
    whole = []
    found = contexts.members_of_contexts(info.graph, info.sgv.ops)
    info.has_contexts = bool(found)
    for members in found:
        missing = contexts.first_gap(members, info.ops)
        if missing is None and contexts.can_copy_context(members.context):
            whole.append(members)
        elif missing is not None and contexts.is_loop(members.context):
            _check_loop_part(info, members, missing)
    return whole


def check_replacements(
    info: TransformState, whole: Iterable[contexts.ContextMembers]
) -> None:
    """Refuse stand-ins that the copies would have to read across a loop's frame.

    Raises:
        TransformError: naming the two tensors, and the op whose copy would read.
    """
    copied = {id(m.context) for m in whole if contexts.is_loop(m.context)}
    for t, t_ in info.replacements.items():
        lives = output_while_context(t_.op)
        for op in get_consuming_ops([t]):
            reads = reading_while_context(op)
            if op not in info.ops or (reads is lives and id(reads) not in copied):
                continue
            inside = where(reads).replace("in ", "in the copy of ", 1)
            place = inside if id(reads) in copied else where(reads)
            raise TransformError(
                f"'{t_.name}' cannot stand in for '{t.name}': the copy of '{op.name}' "
                f"would read {place}, but '{t_.name}' lives {where(lives)}; replace "
                "what enters the loop, or what comes out of it"
            )


def name_contexts(
    info: TransformState, whole: Iterable[contexts.ContextMembers]
) -> None:
    """Choose names, and with them frames, for the contexts that will be copied."""
    for members in whole:
        name = members.context.name
        if name not in info.context_names:
            info.context_names[name] = absolute_unique_name(
                info.graph_, info.scope_ + name.removeprefix(info.scope)
            )


def _check_loop_part(
    info: TransformState, members: contexts.ContextMembers, missing: Operation
) -> None:
    machinery = next(
        (op for op in members.ops if op in info.ops and contexts.is_loop_structure(op)),
        None,
    )
    if machinery is None and info.same_graph:
        return
    part = machinery or next(op for op in members.ops if op in info.ops)
    raise TransformError(
        f"'{part.name}' is part of while loop '{members.context.name}', which can only "
        f"be copied whole: '{missing.name}' is missing; select the loop's name scope"
    )


def copy_contexts(
    info: TransformState, whole: Iterable[contexts.ContextMembers]
) -> None:
    """Give the copies control-flow contexts: copied ones, or those of the originals."""
    if not info.has_contexts:
        return
    copies: dict[int, Any] = {}
    kept = {id(members.context) for members in whole}
    for members in whole:
        if id(members.context) in copies:
            continue
        outer = members.context.outer_context
        copies |= contexts.copy_context(
            members,
            info.graph_,
            copies.get(id(outer), outer if info.same_graph else None),
            info.context_names,
            kept,
            _renaming(info, members),
        )
    for op, op_ in info.copied.items():
        context = control_flow_context(op)
        uncopied = context if info.same_graph else None
        contexts.set_context(op_, copies.get(id(context), uncopied))


def _renaming(
    info: TransformState, members: contexts.ContextMembers
) -> Callable[[str], str | None]:
    """Return what finds the new name of an op or tensor that a context knows."""
    left_out = {
        element.name
        for op in members.ops
        if op not in info.copied
        for element in (op, *op.outputs)
    }

    def rename(name: str) -> str | None:
        outside = info.same_graph and name not in left_out
        return info.copied_name(name) or (name if outside else None)

    return rename
