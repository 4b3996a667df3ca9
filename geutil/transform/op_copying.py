"""Copies of ops.

In bulk or one by one, with the edges and metadata that they get afterwards.

Devices, colocation, control edges, shapes, gradients known to Python, and the
control-flow contexts of version 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from geutil.errors import TransformError
from geutil.graph import (
    adjacency,
    creation,
    functions,
    gradient_functions,
    op_types,
    protos,
    types,
    v1_control_flow,
)
from geutil.graph.creation import BULK_LIMIT
from geutil.graph.runtime import COLOCATION, rename_entries, set_class_entries
from geutil.graph.types import (
    Graph,
    Operation,
    Tensor,
    absolute_unique_name,
    absolute_unique_names,
)
from geutil.graph.v1_control_flow import (
    output_while_context,
    reading_while_context,
    where,
)
from geutil.select import selections, walks
from geutil.transform.custom_gradients import copied_gradient, read_by_names
from geutil.transform.state import TransformState

ControlHandler = Callable[[TransformState, Operation], Operation | None]


_FRAME = "frame_name"


def carry_functions(info: TransformState) -> None:
    """Give the destination the functions that the copies will call."""
    # Loops and conditionals get bodies of their own, so that original and copy can both
    # be differentiated.
    called, renamed = functions.calls_of(info.sgv.ops)
    if info.same_graph:
        called = renamed
    library, info.function_names = functions.library_for_copies(
        info.graph, called, renamed
    )
    renamed_bodies = {*info.function_names.values()}
    for definition in library.function:
        # A function that keeps its name is the same one in both graphs.
        if definition.signature.name in renamed_bodies:
            read_by_names(definition, info.copy_replacing)
    if library.function:
        graph_def = creation.new_graph_def(info.graph)
        graph_def.library.CopyFrom(library)
        creation.import_ops(info.graph_, graph_def, {})
        if types.is_func_graph(info.graph_):
            # A traced function finds its callees outside its graph.
            functions.publish_functions(
                info.graph_, [f.signature.name for f in library.function]
            )


def adapt_node(info: TransformState, op: Operation, node_def: Any) -> None:
    """Turn the definition of `op` into that of its copy; name and inputs stay.

    Attributes and device are the original's, except that frames of version 1 loops,
    bodies of version 2 loops and closures of `tf.custom_gradient` become the copy's
    own, and colocation is left for `finish_copies`.
    """
    attributes = node_def.attr
    # The importer refuses an op that is colocated with one that it does not know.
    if COLOCATION in attributes:
        info.colocated[op] = list(attributes[COLOCATION].list.s)
        del attributes[COLOCATION]
    if _FRAME in attributes:
        frame = attributes[_FRAME].s.decode()
        attributes[_FRAME].s = info.context_names.get(frame, frame).encode()
    if gradient_functions.ATTRIBUTE in attributes:
        gradient = attributes[gradient_functions.ATTRIBUTE].s.decode()
        if gradient_functions.is_closure(gradient):
            copied = copied_gradient(info, op, gradient)
            attributes[gradient_functions.ATTRIBUTE].s = copied.encode()
    if info.function_names:
        protos.rename_functions(node_def, info.function_names)


def finish_copies(info: TransformState) -> None:
    """Restore the attributes that an import loses on copied ops. Linear in the ops."""
    unlike = _ops_with_other_shapes(info)
    pairs = info.copied.items()
    alike = [p for p in pairs if p[0] not in unlike] if unlike else pairs
    types.refine_shapes(alike)
    _carry_handles(alike)
    for op, op_ in info.copied.items():
        original_op, gradient_function = creation.python_gradient(op)
        if original_op is not None:
            original_op = info.transform_original_op_handler(info, original_op)
        if original_op is not None or gradient_function is not None:
            creation.set_python_gradient(op_, original_op, gradient_function)
    _set_colocation(info)


def _carry_handles(alike: Iterable[tuple[Operation, Operation]]) -> None:
    """Copy the handle data of the originals' results to those of the copies."""
    # TensorFlow infers that for ops that make a resource or hand one on. It does not
    # for placeholders of a function's arguments, and so for no loop that such a handle
    # goes through; and it differentiates no variable that a loop reads by an unknown
    # handle.
    for op, op_ in alike:
        if op.type in op_types.PLACEHOLDERS or op.type in op_types.LOOPS:
            for t, t_ in zip(op.outputs, op_.outputs, strict=True):
                creation.copy_handle_data(t, t_)


def _ops_with_other_shapes(info: TransformState) -> set[Operation]:
    """Return the ops whose copies may well have other static shapes."""
    # Ops that a caller's function altered, and ops behind those or behind a tensor
    # whose stand-in has another shape.
    pairs = [(t, info.transformed_ts[t]) for t in (*info.outside_ts, *info.handled_ts)]
    pairs += info.replacements.items()
    changed = [t for t, t_ in pairs if not types.same_static_shape(t, t_)]
    if not changed and not info.altered_ops:
        return set()
    ops = [*info.altered_ops, *selections.get_consuming_ops(changed)]
    return set(walks.get_forward_walk_ops(ops, within_ops=info.sgv.ops))


def _set_colocation(info: TransformState) -> None:
    if not info.colocated:
        return
    by_name = {op.name: op_.name for op, op_ in info.copied.items()}

    # In another graph there is no original to be colocated with.
    def rename(name: str) -> str | None:
        return by_name.get(name, name if info.same_graph else None)

    for op, entries in info.colocated.items():
        renamed = rename_entries(entries, rename)
        if renamed:
            set_class_entries(info.copied[op], renamed)


def connect_control_inputs(
    info: TransformState, handler: ControlHandler, ops: Iterable[Operation]
) -> None:
    """Make the copies wait for the handler's result for each control input."""
    # Control edges that the copy has are not made again.
    for op in ops:
        op_ = info.transformed_ops[op]
        controls_ = [handler(info, control) for control in adjacency.control_inputs(op)]
        excluded = {op_, None, *op_.control_inputs}
        creation.add_control_edges(op_, [c for c in controls_ if c not in excluded])


def whole_contexts(info: TransformState) -> list[v1_control_flow.ContextMembers]:
    """Return the contexts of the view that will be copied, outer before inner."""
    whole = []
    contexts = v1_control_flow.members_of_contexts(info.graph, info.sgv.ops)
    info.has_contexts = bool(contexts)
    for members in contexts:
        missing = v1_control_flow.first_gap(members, info.ops)
        if missing is None and v1_control_flow.can_copy_context(members.context):
            whole.append(members)
        # Only a loop has to be whole: part of a conditional has no frame.
        elif missing is not None and v1_control_flow.is_loop(members.context):
            _check_loop_part(info, members, missing)
    return whole


def check_replacements(
    info: TransformState, whole: Iterable[v1_control_flow.ContextMembers]
) -> None:
    """Refuse stand-ins that the copies would have to read across a loop's frame."""
    copied = {id(m.context) for m in whole if v1_control_flow.is_loop(m.context)}
    for t, t_ in info.replacements.items():
        lives = output_while_context(t_.op)
        for op in selections.get_consuming_ops([t]):
            reads = reading_while_context(op)
            # A copied loop has its own frame, with no tensors of the original in it.
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
    info: TransformState, whole: Iterable[v1_control_flow.ContextMembers]
) -> None:
    """Choose names, and with them frames, for the contexts that will be copied."""
    for members in whole:
        name = members.context.name
        if name not in info.context_names:
            info.context_names[name] = absolute_unique_name(
                info.graph_, info.scope_ + name.removeprefix(info.scope)
            )


def _check_loop_part(
    info: TransformState, members: v1_control_flow.ContextMembers, missing: Operation
) -> None:
    """Refuse part of a loop, unless copies of it may stay in the loop."""
    machinery = next(
        (
            op
            for op in members.ops
            if op in info.ops and v1_control_flow.is_loop_structure(op)
        ),
        None,
    )
    # Copies of ops of the body run in the frame of the original loop.
    if machinery is None and info.same_graph:
        return
    part = machinery or next(op for op in members.ops if op in info.ops)
    raise TransformError(
        f"'{part.name}' is part of while loop '{members.context.name}', which can only "
        f"be copied whole: '{missing.name}' is missing; select the loop's name scope"
    )


def copy_contexts(
    info: TransformState, whole: Iterable[v1_control_flow.ContextMembers]
) -> None:
    """Give the copies control-flow contexts: copied ones, or those of the originals."""
    if not info.has_contexts:
        return
    copies: dict[int, Any] = {}
    context_ids = {id(members.context) for members in whole}
    # The copy of an outer context brought its inner ones along.
    for members in whole:
        if id(members.context) in copies:
            continue
        outer = members.context.outer_context
        copies |= v1_control_flow.copy_context(
            members,
            info.graph_,
            copies.get(id(outer), outer if info.same_graph else None),
            info.context_names,
            context_ids,
            _renaming(info, members),
        )
    for op, op_ in info.copied.items():
        context = adjacency.control_flow_context(op)
        uncopied = context if info.same_graph else None
        v1_control_flow.set_context(op_, copies.get(id(context), uncopied))


def _renaming(
    info: TransformState, members: v1_control_flow.ContextMembers
) -> Callable[[str], str | None]:
    """Return a function that finds the new name of an op or tensor of a context."""
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


OutsideHandler = Callable[[Tensor], Tensor]
NodeFunction = Callable[[Any], Any]


def copy_ops_in_bulk(
    info: TransformState,
    transform_outside: OutsideHandler,
    keep_control_inputs: bool,
    nodedef_fn: NodeFunction | None,
) -> bool:
    """Copy all ops of the view at once."""
    ops = adjacency.topological_sort(info.sgv.ops)
    graph_def = creation.graph_def_of(info.graph, ops)
    if graph_def.ByteSize() > BULK_LIMIT:
        return False
    # The importer itself puts a scope before every name. But where a name is taken, it
    # may choose that of another copy, and the definition of a loop edge then names the
    # op that bore the name before.
    renamed = (
        bool(info.scope or info.reuses_scope)
        or nodedef_fn is not None
        or any("NextIteration" in node.op for node in graph_def.node)
    )
    inputs = _Inputs(info, _new_names(info, ops) if renamed else None)
    for op, node_def in zip(ops, graph_def.node, strict=True):
        adapt_node(info, op, node_def)
        inputs.connect(op, node_def, keep_control_inputs)
        if renamed:
            node_def.name = inputs.name(op)
        if nodedef_fn is not None:
            node_def.CopyFrom(nodedef_fn(node_def))
    # A shape may be refused when placeholders have been made already.
    pairs = info.replacements.items()
    if not info.same_graph and any(
        not types.same_static_shape(t, t_) for t, t_ in pairs
    ):
        _rehearse(info, graph_def, inputs.outside)
    if nodedef_fn is not None:
        info.altered_ops += ops
    input_map = {name: transform_outside(t) for name, t in inputs.outside.items()}
    scope_ = "" if renamed else info.scope_
    ops_ = _import(info.graph_, graph_def, input_map, scope_)
    for op_, node_def in zip(ops_, graph_def.node, strict=True):
        if node_def.device:
            # The importer writes a device in its own spelling.
            creation.set_device(op_, node_def.device)
    info.copied.update(zip(ops, ops_, strict=True))
    info.transformed_ops.update(info.copied)
    info.transformed_ts.update(
        pair
        for op, op_ in info.copied.items()
        for pair in zip(op.outputs, op_.outputs, strict=True)
    )
    return True


def _import(
    graph: Graph, graph_def: Any, input_map: Mapping[str, Tensor], scope: str = ""
) -> list[Operation]:
    try:
        return creation.import_ops(graph, graph_def, input_map, scope)
    except Exception as error:
        raise TransformError(f"TensorFlow refuses the copy: {error}") from error


def _rehearse(
    info: TransformState, graph_def: Any, outside: Mapping[str, Tensor]
) -> None:
    """Import into a graph that is thrown away: a refusal leaves nothing behind."""
    rehearsal = type(graph_def)()
    rehearsal.CopyFrom(graph_def)
    rehearsal.library.CopyFrom(info.graph_.as_graph_def().library)
    graph = creation.new_graph()
    with creation.neutral(graph):
        input_map = {
            name: creation.make_placeholder_from_tensor(
                info.replacements.get(t, t), scope=""
            )
            for name, t in outside.items()
        }
    _import(graph, rehearsal, input_map)


def _new_names(info: TransformState, ops: Sequence[Operation]) -> dict[Operation, str]:
    candidate_names = [info.new_name(op.name) for op in ops]
    names = absolute_unique_names(info.graph_, candidate_names)
    return dict(zip(ops, names, strict=True))


class _Inputs:
    """The inputs of the nodes: names of other nodes, or of tensors from outside."""

    def __init__(
        self, info: TransformState, names: dict[Operation, str] | None
    ) -> None:
        self._members = info.ops
        self._loose_controls = info.loose_controls
        self._replaced = info.replacements
        self._names = names
        self._references: dict[int, str] = {}
        # The tensor of the source graph that each name from outside means.
        self.outside: dict[str, Tensor] = {}

    def name(self, op: Operation) -> str:
        """Return the name that the node of `op` bears in the import."""
        name: str = op.name if self._names is None else self._names[op]
        return name

    def connect(
        self,
        op: Operation,
        node_def: Any,
        keep_control_inputs: bool,
    ) -> None:
        """Set the inputs of a node, which still are those of the original."""
        tensors = op.inputs
        for index, t in enumerate(tensors):
            if t.op not in self._members or (self._replaced and t in self._replaced):
                node_def.input[index] = self._outside_name(t)
            elif self._names is not None:
                node_def.input[index] = f"{self._names[t.op]}:{t.value_index}"
        # Control inputs come behind the tensors.
        if len(node_def.input) > len(tensors):
            del node_def.input[len(tensors) :]
            controls = adjacency.control_inputs(op)
            inner_controls = [
                c for c in controls if c in self._members and keep_control_inputs
            ]
            node_def.input.extend(
                f"^{self.name(control)}" for control in inner_controls
            )
            # The others are connected after the import, which knows the copies alone.
            if len(inner_controls) < len(controls):
                self._loose_controls.append(op)

    def _outside_name(self, t: Tensor) -> str:
        reference = self._references.get(id(t))
        if reference is None:
            reference = f"geutil_outside:{len(self.outside)}"
            self._references[id(t)] = reference
            self.outside[reference] = t
        return reference


def transform_ops_one_by_one(
    info: TransformState, transform_outside: OutsideHandler, op_handler: Any
) -> None:
    """Call `op_handler(info, op, new_inputs)` for each op, producers first."""
    for op in adjacency.topological_sort(info.sgv.ops):
        inputs = _inputs(info, op, transform_outside)
        op_, outputs_ = op_handler(info, op, inputs)
        if op_ is op:
            raise TransformError(
                f"the handler returned '{op.name}' itself; return a new op, or leave "
                "the op out of the view"
            )
        info.transformed_ops[op] = op_
        if op.control_inputs:
            info.loose_controls.append(op)
        for t, t_ in zip(op.outputs, outputs_, strict=False):
            info.transformed_ts[t] = t_
            # A result that the handler made may have another shape than a copy.
            if t_.op is not info.copied.get(op):
                info.handled_ts.append(t)
    # By now the producers of the edges that close loops are there.
    for op, index, t in info.cyclic_ts:
        creation.set_new_input(info.transformed_ops[op], index, info.transformed_ts[t])


def _inputs(
    info: TransformState, op: Operation, transform_outside: OutsideHandler
) -> list[Tensor]:
    """Return the transformed inputs; a loop edge gets a stand-in until it closes."""
    inputs: list[Tensor] = []
    for index, t in enumerate(op.inputs):
        if t.op not in info.ops or t in info.replacements:
            inputs.append(transform_outside(t))
            continue
        t_ = info.transformed_ts.get(t)
        if t_ is None:
            info.cyclic_ts.append((op, index, t))
            # A Merge starts with its Enter, whose value is of the same type.
            with info.graph_.as_default():
                t_ = (
                    inputs[0]
                    if inputs
                    else creation.make_placeholder_from_tensor(t, info.scope_)
                )
        inputs.append(t_)
    return inputs
