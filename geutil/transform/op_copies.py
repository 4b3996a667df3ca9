"""Copies of ops, with their edges, metadata and gradients.

They are made in bulk or one by one, and get devices, colocation, control edges, shapes,
gradients known to Python, and the control-flow contexts of version 1 afterwards.

The gradient of an op made by `tf.custom_gradient` is a Python closure over tensors of
the original's graph. Left alone, the gradient of a copy would be computed from the
original's tensors: wrong as soon as the copy has other inputs, impossible when it lies
in another graph. So a copy gets a gradient that traces the closure in a graph of its
own and carries the traced ops over with every captured tensor replaced by its copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

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
from geutil.graph.state import slot
from geutil.graph.types import Graph, IdentityMap, Operation, Tensor
from geutil.select import selections, walks
from geutil.select.queries import make_view
from geutil.transform.state import Copier, TransformerInfo, TransformState

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
            # Its tensors are looked up when it is built, when all copies are known.
            copies = info.transformed_ts
            copied = carried_gradient(
                op, gradient, info.graph_, copies, info.copy_replacing
            )
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
        lives = v1_control_flow.output_while_context(t_.op)
        for op in selections.get_consuming_ops([t]):
            reads = v1_control_flow.reading_while_context(op)
            # A copied loop has its own frame, with no tensors of the original in it.
            if op not in info.ops or (reads is lives and id(reads) not in copied):
                continue
            place, home = v1_control_flow.where(reads), v1_control_flow.where(lives)
            if id(reads) in copied:
                place = place.replace("in ", "in the copy of ", 1)
            raise TransformError(
                f"'{t_.name}' cannot stand in for '{t.name}': the copy of '{op.name}' "
                f"would read {place}, but '{t_.name}' lives {home}; replace what "
                "enters the loop, or what comes out of it"
            )


def name_contexts(
    info: TransformState, whole: Iterable[v1_control_flow.ContextMembers]
) -> None:
    """Choose names, and with them frames, for the contexts that will be copied."""
    for members in whole:
        name = members.context.name
        if name not in info.context_names:
            info.context_names[name] = types.absolute_unique_name(
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
    names = types.absolute_unique_names(info.graph_, candidate_names)
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

    def connect(self, op: Operation, node_def: Any, keep_control_inputs: bool) -> None:
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
            node_def.input.extend(f"^{self.name(c)}" for c in inner_controls)
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


class _GradientCopies(dict[str, IdentityMap[Tensor]]):
    """For each gradient of ops copied into a graph, the copies of its tensors."""


class GradientReads(dict[str, list[Tensor]]):
    """The tensors of a graph that its closures and carried gradients read."""


def carried_gradient(
    op: Operation,
    gradient: str,
    graph_: Graph,
    copies: IdentityMap[Tensor],
    copy_replacing: Copier,
) -> str:
    """Register a gradient for the copy of `op` in `graph_`; return its name."""
    source = op.graph
    target = weakref.ref(graph_)

    # TensorFlow traces it for a SavedModel, and would rewrite all that it calls.
    @tf.autograph.experimental.do_not_convert
    def gradient_of_copy(op_: Operation | None, *grads_: Tensor | None) -> list[Any]:
        # TensorFlow passes no op when it traces the gradient for a SavedModel.
        copy_graph = target() if op_ is None else op_.graph
        copies = _copies_for(name, copy_graph, op)
        current = tf.compat.v1.get_default_graph()

        def copy_of(outside: Any) -> Tensor:
            return _copy_of(outside, copies, source, copy_graph, current, op)

        traced = _traced(op, gradient, grads_)
        return _rebuilt(traced, grads_, copy_of, current, copy_replacing)

    name = gradient_functions.register(gradient_of_copy)
    # The registry lives as long as the process. The tensors hang on the destination
    # graph instead of on the closure, so that the graph can die before.
    slot(graph_, _GradientCopies)[name] = copies
    return name


def gradient_by_names(
    op_name: str, gradient: str, copy_replacing: Copier, traced_body: Graph | None
) -> str:
    """Register a gradient that reads tensors by name; return its name."""
    # TensorFlow traces it in `traced_body` for a SavedModel; without one in the body
    # that the closure is of.
    # TensorFlow makes the bodies of functions anew from their definitions, so that the
    # tensors that a closure reads are not those of the body that is differentiated.
    body = None if traced_body is None else weakref.ref(traced_body)

    # TensorFlow traces it for a SavedModel, and would rewrite all that it calls.
    @tf.autograph.experimental.do_not_convert
    def gradient_in_body(op_: Operation | None, *grads_: Tensor | None) -> list[Any]:
        if op_ is None:
            # So it is when TensorFlow traces the gradient for a SavedModel.
            if body is None:
                return _listed(gradient_functions.lookup(gradient)(None, *grads_))
            graph = body()
            if graph is None:
                raise TransformError(
                    f"the function is gone in whose body '{op_name}' is; save the "
                    "model that it was saved with"
                )
            op_ = graph.get_operation_by_name(op_name)
        graph_ = op_.graph
        current = tf.compat.v1.get_default_graph()
        traced = _traced(op_, gradient, grads_)
        origin = _origin(traced, op_name, gradient)

        def copy_of(outside: Any) -> Tensor:
            copy = _namesake(outside, graph_, origin, op_name)
            if copy.graph is not current and types.is_func_graph(current):
                return creation.capture(current, copy)
            return copy

        return _rebuilt(traced, grads_, copy_of, current, copy_replacing)

    return gradient_functions.register(gradient_in_body)


def closures_of(definition: Any) -> dict[str, str]:
    """Return the nodes of a function whose gradient is a closure, with its name."""
    attribute = gradient_functions.ATTRIBUTE
    named = {
        node.name: node.attr[attribute].s.decode()
        for node in definition.node_def
        if attribute in node.attr
    }
    return {n: g for n, g in named.items() if gradient_functions.is_closure(g)}


def read_by_names(definition: Any, copy_replacing: Copier) -> None:
    """Let the closures in the copy of a function read the tensors of that copy."""
    closures = closures_of(definition)
    for node in definition.node_def if closures else ():
        if node.name in closures:
            by_names = gradient_by_names(
                node.name, closures[node.name], copy_replacing, None
            )
            node.attr[gradient_functions.ATTRIBUTE].s = by_names.encode()


def _origin(traced: _Traced, op_name: str, gradient: str) -> Graph | None:
    """Return the body, with the op, whose tensors a closure reads; None if unknown."""
    # A closure that was made for a conditional also reads tensors around it.
    read = [outside for outside, _ in traced.read]
    leaves = tf.nest.flatten(traced.results, expand_composites=True)
    tensors = [t for t in (*read, *leaves) if types.is_tensor(t)]
    for graph in {id(t.graph): t.graph for t in tensors if not _is_eager(t)}.values():
        try:
            op = graph.get_operation_by_name(op_name)
        except KeyError:
            continue
        if gradient_functions.gradient_of(op) == gradient:
            return graph
    return None


def _is_eager(tensor: Any) -> bool:
    return hasattr(tensor, "numpy")


def _namesake(outside: Any, graph: Graph, origin: Graph | None, op_name: str) -> Tensor:
    """Return the tensor of a body for one that a closure reads."""
    # A closure may also read numbers and eager tensors, which are in no graph.
    if not types.is_tensor(outside) or _is_eager(outside):
        return tf.convert_to_tensor(outside)
    if outside.graph is graph:
        return outside
    inside = outside
    # The tensor may come from around the body, which then holds it by a capture.
    if origin is not None and outside.graph is not origin:
        captures = gradient_functions.captures_of(origin)
        inside = next((i for o, i in captures if o is outside), outside)
    if origin is None or inside.graph is not origin:
        raise TransformError(
            f"the gradient of '{op_name}', in the body of a function, reads "
            f"'{outside.name}' of another graph; pass that to what "
            "tf.custom_gradient wraps"
        )
    # A body that was made anew gives its arguments other names: their places stay.
    for place, argument in enumerate(origin.inputs):
        if argument is inside:
            return graph.inputs[place]
    return graph.get_tensor_by_name(inside.name)


def _rebuilt(
    traced: _Traced,
    grads_: Sequence[Tensor | None],
    copy_of: Callable[[Any], Tensor],
    current: Graph,
    copy_replacing: Copier,
) -> list[Any]:
    """Build a traced gradient in the current graph, of other tensors."""
    body, results = traced.body, traced.results
    inputs: types.MutableIdentityMap[Tensor] = types.MutableIdentityMap()
    for stand_in, grad in zip(traced.stand_ins, grads_, strict=True):
        if stand_in is not None:
            inputs[stand_in] = grad
    for outside, inside in traced.read:
        inputs[inside] = copy_of(outside)
    carried = _carry_over(body, inputs, current, copy_replacing)

    def final(leaf: Any) -> Any:
        if not types.is_tensor(leaf):
            return leaf
        # A gradient may return a tensor from outside as it is.
        return carried[leaf] if leaf.graph is body else copy_of(leaf)

    flat = tf.nest.flatten(results, expand_composites=True)
    mapped = tf.nest.pack_sequence_as(
        results, [final(leaf) for leaf in flat], expand_composites=True
    )
    return list(mapped)


def read_by_gradient(op: Operation) -> list[Tensor]:
    """Return the tensors of its graph that the gradient of an op reads."""
    # None if the gradient is no closure: then it reads the inputs and outputs of the
    # op. None, too, if it cannot be built; whoever differentiates learns why.
    gradient = gradient_functions.gradient_of(op) if op.type == "IdentityN" else None
    if gradient is None or not gradient_functions.is_closure(gradient):
        return []
    rewired = slot(op.graph, gradient_functions.RewiredOps).get(gradient)
    if rewired is not None:
        gradient = rewired.gradient
    known = slot(op.graph, GradientReads)
    if gradient not in known:
        known[gradient] = _read_by_closure(op, gradient)
    reads = known[gradient]
    if rewired is None:
        return reads
    now = [(t, rewired.stand_ins().get(t, t)) for t in reads]
    return [t if t_ is None else t_ for t, t_ in now]


def _read_by_closure(op: Operation, gradient: str) -> list[Tensor]:
    try:
        traced = _traced(op, gradient, op.outputs)
    except Exception:  # It is anybody's code.
        return []
    leaves = tf.nest.flatten(traced.results, expand_composites=True)
    met = (*(outside for outside, _ in traced.read), *leaves)
    return types.unique(t for t in met if types.is_tensor(t) and t.graph is op.graph)


@dataclass(frozen=True, eq=False)
class _Traced:
    """A gradient, built in a graph of its own."""

    body: Graph
    # Its placeholder for each incoming gradient, None where there is none.
    stand_ins: Sequence[Tensor | None]
    results: list[Any]
    # (outside tensor, placeholder inside) for each that the gradient reads.
    read: Sequence[tuple[Any, Tensor]]


def _traced(op: Operation, gradient: str, grads: Iterable[Tensor | None]) -> _Traced:
    body = gradient_functions.new_body("copied_gradient")
    with body.as_default():
        stand_ins = [None if g is None else _stand_in(g) for g in grads]
        results = gradient_functions.lookup(gradient)(op, *stand_ins)
    results = _listed(results)
    read = types.IdentitySet(t for o in body.get_operations() for t in o.inputs)
    for leaf in tf.nest.flatten(results, expand_composites=True):
        read.add(leaf)
    # A capture that nothing reads needs no copy, and may have none.
    captures = gradient_functions.captures_of(body)
    return _Traced(body, stand_ins, results, [c for c in captures if c[1] in read])


def _listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, list | tuple) else [results]


def _copies_for(name: str, graph_: Graph | None, op: Operation) -> IdentityMap[Tensor]:
    copies: IdentityMap[Tensor] | None = None
    if graph_ is not None:
        copies = slot(graph_, _GradientCopies).get(name)
    if copies is None:
        raise TransformError(
            f"the gradient of '{op.name}' was made for a copy in another graph; copy "
            "that graph with geutil.copy instead of importing its GraphDef"
        )
    return copies


def _stand_in(grad: Tensor) -> Tensor:
    return tf.compat.v1.placeholder(grad.dtype, grad.shape)


def _copy_of(
    outside: Any,
    copies: IdentityMap[Tensor],
    source: Graph,
    copy_graph: Graph,
    current: Graph,
    op: Operation,
) -> Tensor:
    """Return the tensor that stands in `current` for one that the closure reads."""
    if not types.is_tensor(outside):
        with current.as_default():
            return tf.convert_to_tensor(outside)
    copy = copies.get(outside)
    if copy is None:
        # In the graph of the original, the copy can read the original tensor.
        if outside.graph is source and copy_graph is not source:
            raise TransformError(
                f"the gradient of '{op.name}' reads '{outside.name}', which was not "
                "copied with it; copy the ops that make it too"
            )
        copy = outside
    if copy.graph is not current and types.is_func_graph(current):
        return creation.capture(current, copy)
    return copy


def _carry_over(
    body: Graph,
    inputs: IdentityMap[Tensor],
    graph_: Graph,
    copy_replacing: Copier,
) -> IdentityMap[Tensor]:
    """Copy the ops of `body` into `graph_` and return the copies of its tensors."""
    stand_ins = {t.op for t in inputs}
    ops = [op for op in body.get_operations() if op not in stand_ins]
    carried = types.MutableIdentityMap(inputs.items())
    # A gradient that only hands tensors on has no ops, and an empty view is refused.
    if ops:
        scope = types.scope_finalize(graph_.get_name_scope())
        _, info = copy_replacing(
            make_view(ops), inputs, graph_, scope, "", reuse_dst_scope=True
        )
        for t, t_ in info._transformed_ts.items():
            carried[t] = t_
        _carry_waits(ops, inputs, info)
    return carried


def _carry_waits(
    ops: Iterable[Operation], inputs: IdentityMap[Tensor], info: TransformerInfo
) -> None:
    """Let copies wait for replacements of placeholders that originals wait for."""
    # The gradient of `tf.nn.silu` waits so for the gradient that comes in, lest its
    # recomputed values are there from the forward pass on.
    stands_for = {t.op: t_.op for t, t_ in inputs.items()}
    for op in ops:
        waits = [stands_for[p] for p in op.control_inputs if p in stands_for]
        if waits:
            copy = info.transformed(op)
            here = [p for p in types.unique(waits) if p.graph is copy.graph]
            creation.add_control_edges(copy, here)
