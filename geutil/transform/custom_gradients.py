"""Copies of ops made by `tf.custom_gradient` that have a gradient of their own.

Such an op's gradient is a Python closure over tensors of the original's graph. Left
alone, the gradient of a copy would be computed from the original's tensors: wrong as
soon as the copy has other inputs, impossible when it lies in another graph. So a copy
gets a gradient that traces the closure in a graph of its own and carries the traced ops
over with every captured tensor replaced by its copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.errors import TransformError
from geutil.graph import creation, gradient_functions, types
from geutil.graph.state import slot
from geutil.graph.types import Graph, IdentityMap, MutableIdentityMap, Operation, Tensor
from geutil.select.queries import make_view
from geutil.transform.state import Copier, TransformerInfo, TransformState


def copied_gradient(info: TransformState, op: Operation, gradient: str) -> str:
    """Register the gradient for a copy of `op` and return its name."""
    # The tensors of `info` are looked up when the gradient is built, when all are
    # known.
    return carried_gradient(
        op, gradient, info.graph_, info.transformed_ts, info.copy_replacing
    )


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
    inputs: MutableIdentityMap[Tensor] = MutableIdentityMap()
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
    carried = MutableIdentityMap(inputs.items())
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
