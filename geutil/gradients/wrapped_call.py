"""The gradients of one call of a checkpointed function.

Planned, built in a graph, moved to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.gradients import tensor_sizes, updates
from geutil.gradients.choices import Options, choose_all
from geutil.gradients.edges import backward_edges
from geutil.gradients.encoding_ops import Encoder
from geutil.gradients.offloading import Offload
from geutil.gradients.preparing import Prepared, keep_all
from geutil.gradients.report import publish
from geutil.gradients.segments import (
    SCOPE,
    Recomputation,
    Segment,
    plan_recomputation,
)
from geutil.gradients.selection import AlwaysKept, Keeping, resolve
from geutil.gradients.step import PlainStep, build_step, tensors_of
from geutil.graph import (
    adjacency,
    creation,
    image_layouts,
    state,
    types,
)
from geutil.graph.state import state_of
from geutil.graph.types import Graph, IdentityMap, IdentitySet, Operation, Tensor
from geutil.memory.sizes import tensor_bytes
from geutil.select.queries import make_view
from geutil.transform.transformer import copy_replacing


@dataclass(frozen=True, eq=False)
class WrappedCall:
    """A call of a function in a graph.

    Attributes:
        graph: the graph.
        ys: the differentiable tensors that the function returned.
        inputs: the differentiable tensors from outside that they depend on: arguments,
            what the function closes over, handles of variables.
        first: the creation index of the first op that the call made.
        end: how many ops the graph had after the call.
        alone: whether the graph holds the call and nothing else, so that what comes
            after it is unknown.
    """

    graph: Graph
    ys: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    first: int
    end: int
    alone: bool


@dataclass(eq=False)
class GraphCalls:
    """All that is known of the checkpointed calls in one graph.

    Attributes:
        count: how many there are.
        ends: for each backward op of a call, the backward ops of the same call that no
            other one of them reads: when these have run, it holds nothing more.
        first: the creation index of the oldest of those backward ops.
    """

    count: int = 0
    ends: dict[Operation, tuple[Operation, ...]] = field(default_factory=dict)
    first: int = 0

    def add(self, step: PlainStep) -> None:
        """Note the backward pass of a call."""
        edges = backward_edges(step)
        ends = tuple(op for op in edges.awaitable if not edges.readers[op])
        if step.backward and not self.ends:
            self.first = min(map(adjacency.creation_index, step.backward))
        self.ends.update(dict.fromkeys(step.backward, ends))

    def before(self, ops: Iterable[Operation]) -> tuple[Operation, ...]:
        """Return the ends of the calls whose backward pass comes just before ops.

        Cost: linear in the backward ops in between, and their inputs.
        """
        call_ends: dict[Operation, None] = {}
        waiting = list(ops)
        met = set(waiting)
        while waiting:
            op = waiting.pop()
            if op in self.ends:
                call_ends.update(dict.fromkeys(self.ends[op]))
                continue
            for t in op.inputs:
                if t.op not in met and adjacency.creation_index(t.op) >= self.first:
                    met.add(t.op)
                    waiting.append(t.op)
        return tuple(call_ends)


def calls_in(graph: Graph) -> GraphCalls:
    """Return what is known of the checkpointed calls in a graph."""
    state = state_of(graph)
    if state.checkpointed_calls is None:
        state.checkpointed_calls = GraphCalls()
    calls: GraphCalls = state.checkpointed_calls
    return calls


INPUTS = "inputs"
"""The mode that holds nothing of a call but what goes into it."""
_LITTLE = 0.1
"""What may come after a call, as a share of it, where it ends the forward pass."""

_NOTHING = (
    "the backward pass reads nothing of it that could be recomputed: these are plain "
    "gradients"
)


def plan_call(
    call: WrappedCall,
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    grad_ys: Sequence[Tensor],
    options: Options,
    offload: Offload | None,
    encoder: Encoder,
) -> Prepared:
    """Build plain gradients of a call, and plan what is recomputed.

    Args:
        call: the call.
        ys: the outputs of it that a gradient flows into.
        xs: the inputs of it to differentiate by.
        grad_ys: the gradient of each y.
        options: how to choose and hold checkpoints; the mode may be "inputs".
        offload: what is offloaded, and how; the same for all gradients of the call.
        encoder: makes what is kept of tensors; the same for all gradients of the call.
    """
    later = state.ops_since(call.graph, call.end)
    # One x may depend on another around the call: that is not its part.
    step = build_step(ys, xs, grad_ys, {"stop_gradients": list(xs)})
    step = replace(step, first=call.first, gap=_indices(later))
    tensor_sizes.settle_shapes(step.ops())

    def choose(step: PlainStep, kept: Any) -> tuple[Keeping, Recomputation]:
        return _choose(call, step, replace(options, checkpoints=kept), later)

    chosen = choose_all(step, options, encoder, choose)
    calls = calls_in(call.graph)
    plan = _after(chosen.plan, calls.before(step.seeds))
    calls.add(plan.step)
    where = f"the checkpointed call that yields '{call.ys[0].name}': "
    return Prepared(
        replace(chosen, plan=plan),
        offload,
        where,
        encode=options.encode,
        encoder=encoder,
        smallest=options.min_checkpoint_size,
    )


def _indices(ops: Sequence[Operation]) -> range:
    """Return the creation indices of ops that were made one after the other."""
    if not ops:
        return range(0)
    return range(
        adjacency.creation_index(ops[0]), adjacency.creation_index(ops[-1]) + 1
    )


def _after(plan: Recomputation, ends: Sequence[Operation]) -> Recomputation:
    """Let what is recomputed at first wait for the calls that come before as well.

    The executor runs weight gradients late, and what they have not read yet is held.
    """
    if not plan.segments or not ends:
        return plan
    # The first segment on other devices waits for the same.
    first = plan.segments[0].awaited
    segments = [
        replace(segment, awaited=(*first, *ends))
        if segment.awaited == first
        else segment
        for segment in plan.segments
    ]
    return replace(plan, segments=tuple(segments))


def _choose(
    call: WrappedCall,
    step: PlainStep,
    options: Options,
    later: Iterable[Operation],
) -> tuple[Keeping, Recomputation]:
    inputs = Keeping(INPUTS, IdentitySet(), AlwaysKept(step))
    whole = plan_recomputation(step, inputs, spare_last=False)
    if not whole.segments:
        inputs.warnings.append(_NOTHING)
        return inputs, whole
    if options.checkpoints == INPUTS:
        return inputs, whole
    size = sum(map(_bytes_of, whole.segments))
    ends = not call.alone and _is_little(later, _LITTLE * size)
    # In a graph of its own, a call may be one of any number.
    smallest = options.min_checkpoint_size
    keeping = resolve(step, options.checkpoints, smallest, among_others=call.alone)
    if not keeping.recomputes:
        # Order alone is within the budget.
        return keeping, plan_recomputation(step, keep_all)
    if keeping.plan is not None:
        return keeping, keeping.plan
    if len(keeping.chosen):
        plan = plan_recomputation(step, keeping, spare_last=ends)
        if options.checkpoints != "memory" or ends or _pays(call, keeping, plan, size):
            return keeping, plan
    elif ends:
        return keeping, plan_recomputation(step, keep_all)
    elif options.checkpoints != "memory":
        inputs.warnings.append(
            f"{keeping.mode} keeps no tensor of it: it holds what goes into it"
        )
    return inputs, whole


def _pays(call: WrappedCall, keeping: Keeping, plan: Recomputation, size: int) -> bool:
    """Tell whether to keep more than the inputs of a call saves memory.

    What is chosen is held by each of the calls, and one works at a time.
    """
    checkpoint_bytes = sum(map(tensor_bytes, keeping.chosen))
    working = max(map(_bytes_of, plan.segments), default=0)
    return calls_in(call.graph).count * checkpoint_bytes + working < size


def _bytes_of(segment: Segment) -> int:
    return _bytes(segment.ops)


def _is_little(ops: Iterable[Operation], limit: float) -> bool:
    """Tell whether ops make so many bytes at most; passing on makes none."""
    total = 0
    for op in ops:
        if op.type in ("Identity", "IdentityN"):
            continue
        total += _bytes((op,))
        if total > limit:
            return False
    return True


def _bytes(ops: Iterable[Operation]) -> int:
    return sum(tensor_bytes(t) for op in ops for t in op.outputs)


def move_gradients(
    step: PlainStep,
    before: int,
    stand_in_gradients: Iterable[tuple[Tensor, Tensor]],
    graph: Graph,
) -> list[Any]:
    """Copy the backward pass of a step, with what it recomputes, to another graph.

    The other graph captures what the backward pass reads of the forward pass, and that
    is what TensorFlow holds for it: kept tensors, if the step recomputes the others.

    Args:
        step: the step; its gradients depend on seeds that were made of stand-ins.
        before: how many ops its graph had before it was built.
        stand_in_gradients: the gradient in `graph` for each stand-in.
        graph: the other graph, a FuncGraph.

    Returns:
        The gradients of the step, in `graph`.

    Cost: linear in the ops that are copied and their inputs.
    """
    there = types.MutableIdentityMap(stand_in_gradients)
    moving = _ops_after(step.seeds, state.ops_since(step.graph, before))
    ops, read = _needed(tensors_of(step.gradients), moving, there)
    for t in read:
        there[t] = creation.capture(graph, t)
    if ops:
        _, info = copy_replacing(
            make_view(ops), there, graph, SCOPE, "", reuse_dst_scope=True
        )
        image_layouts.hold_when_complete(graph)
        updates.order_moved(graph, (info.transformed(op) for op in ops))
        there.update((t, info.transformed(t)) for op in ops for t in op.outputs)
    return [_mapped(gradient, there) for gradient in step.gradients]


def _ops_after(seeds: Iterable[Operation], ops: Iterable[Operation]) -> set[Operation]:
    """Return the seeds and those of the ops that run after one of them."""
    after = set(seeds)
    # Edits let backward ops read copies that were made later, never the reverse.
    waiting = list(after)
    readers: dict[Operation, list[Operation]] = {}
    for op in ops:
        for before in (*(t.op for t in op.inputs), *op.control_inputs):
            readers.setdefault(before, []).append(op)
    while waiting:
        for op in readers.get(waiting.pop(), ()):
            if op not in after:
                after.add(op)
                waiting.append(op)
    return after


def _needed(
    tensors: Iterable[Tensor],
    moving: set[Operation],
    there: IdentityMap[Tensor],
) -> tuple[list[Operation], IdentitySet]:
    """Return the ops to copy for some tensors, and the tensors to capture."""
    read = IdentitySet()
    met: dict[Operation, None] = {}
    waiting: list[Operation] = []

    def visit(op: Operation) -> None:
        if op not in met:
            met[op] = None
            waiting.append(op)

    def visit_tensor(t: Tensor) -> None:
        if t in there:
            return
        if t.op in moving or t.op.type == "Const":
            visit(t.op)
        else:
            read.add(t)

    for t in tensors:
        visit_tensor(t)
    while waiting:
        op = waiting.pop()
        for t in op.inputs:
            visit_tensor(t)
        for control in op.control_inputs:
            if control in moving:
                visit(control)
    return list(met), read


def _mapped(gradient: Any, there: IdentityMap[Tensor]) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            there[gradient.values],
            there[gradient.indices],
            None if gradient.dense_shape is None else there[gradient.dense_shape],
        )
    return None if gradient is None else there[gradient]


class CallGradients:
    """Builds the gradients of one call, in its graph or in another.

    Another one it is where TensorFlow differentiates a whole function, a loop or a
    conditional: the backward pass is a function of its own, and what it reads of the
    forward pass is held in between. There the gradients are built in the graph of the
    call, where nothing runs them, and moved over; they read kept tensors only.

    Args:
        call: the call.
        options: how to choose and hold checkpoints.
    """

    def __init__(self, call: WrappedCall, options: Options) -> None:
        self._call = call
        self._options = options
        self._offload = options.offloading()
        self._encoder = Encoder()

    def build(self, xs: Sequence[Tensor], grads: Sequence[Any]) -> list[Any]:
        """Return the gradient of each x, given that of each output."""
        flowing = [
            (y, grad)
            for y, grad in zip(self._call.ys, grads, strict=True)
            if not (grad is None or _is_made_up(grad, len(grads)))
        ]
        if not flowing:
            return [None] * len(xs)
        ys = [y for y, _ in flowing]
        grad_ys = [tf.convert_to_tensor(grad) for _, grad in flowing]
        graph = tf.compat.v1.get_default_graph()
        if graph is self._call.graph:
            return list(self._step(ys, xs, grad_ys).gradients)
        with creation.neutral(self._call.graph):
            stand_ins = [_like(y) for y in ys]
            before = state.count_ops(self._call.graph)
            step = self._step(ys, xs, stand_ins)
        return move_gradients(step, before, zip(stand_ins, grad_ys, strict=True), graph)

    def _step(
        self,
        ys: Sequence[Tensor],
        xs: Sequence[Tensor],
        grad_ys: Sequence[Tensor],
    ) -> PlainStep:
        """Build the gradients in the graph of the call."""
        prepared = plan_call(
            self._call, ys, xs, grad_ys, self._options, self._offload, self._encoder
        )
        step, report = prepared.build()
        publish(report, step.graph)
        updates.order_when_complete(step)
        return step


def _like(y: Tensor) -> Tensor:
    """Return a tensor that can stand for the gradient of `y`."""
    return tf.zeros_like(y) if y.dtype == tf.variant else tf.ones_like(y)


def _is_made_up(grad: Any, outputs: int) -> bool:
    """Tell whether TensorFlow made a zero just now for an output that nothing reads.

    To differentiate by it would compute zeros, or NaN where a derivative is infinite,
    and inputs that no gradient reaches would not get None.

    Args:
        grad: the gradient of an output.
        outputs: how many outputs the call has.
    """
    if not types.is_tensor(grad) or grad.op.type not in ("Const", "ZerosLike"):
        return False
    if grad.op not in state.ops_since(
        grad.graph, state.count_ops(grad.graph) - outputs
    ):
        return False
    return grad.op.type == "ZerosLike" or not np.any(tf.get_static_value(grad))
