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
from geutil.gradients.preparing import Prepared, keep_all
from geutil.gradients.report import publish
from geutil.gradients.segments import SCOPE, Recomputation, plan_recomputation
from geutil.gradients.selection import AlwaysKept, Keeping, resolve
from geutil.gradients.step import PlainStep, build_step, reached, tensors_of
from geutil.graph import adjacency, creation, image_layouts, state, types
from geutil.graph.types import Graph, IdentitySet, Operation, Tensor
from geutil.memory.sizes import tensor_bytes
from geutil.select.queries import make_view
from geutil.select.walks import get_backward_walk_ops
from geutil.transform.transformer import copy_replacing

INPUTS = "inputs"
"""The mode that holds nothing of a call but what goes into it."""
_LITTLE = 0.1
"""What may come after a call, as a share of it, where it ends the forward pass."""
_NOTHING = (
    "the backward pass reads nothing of it that could be recomputed: these are plain "
    "gradients"
)


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
        """Return the ends of the calls whose backward pass comes just before ops."""

        def is_between(op: Operation) -> bool:
            return op not in self.ends and adjacency.creation_index(op) >= self.first

        between = get_backward_walk_ops(list(ops), within_ops_fn=is_between)
        read = (t.op for op in between for t in op.inputs)
        return tuple(types.unique(end for op in read for end in self.ends.get(op, ())))


def calls_in(graph: Graph) -> GraphCalls:
    """Return what is known of the checkpointed calls in a graph."""
    graph_state = state.state_of(graph)
    if graph_state.checkpointed_calls is None:
        graph_state.checkpointed_calls = GraphCalls()
    calls: GraphCalls = graph_state.checkpointed_calls
    return calls


class CallGradients:
    """Builds the gradients of one call, in its graph or in another.

    Another one it is where TensorFlow differentiates a whole function, a loop or a
    conditional: the backward pass is a function of its own, and what it reads of the
    forward pass is held in between. There the gradients are built in the graph of the
    call, where nothing runs them, and moved over; they read kept tensors only.

    Args:
        call: the call.
        options: how to choose and hold checkpoints; the mode may be "inputs".
    """

    def __init__(self, call: WrappedCall, options: Options) -> None:
        self._call = call
        self._options = options
        # The same for all gradients of the call.
        self._offload = options.offloading()
        self._encoder = Encoder()

    def build(self, xs: Sequence[Tensor], grads: Sequence[Any]) -> list[Any]:
        """Return the gradient of each x, given that of each output."""
        flowing = [
            (y, tf.convert_to_tensor(grad))
            for y, grad in zip(self._call.ys, grads, strict=True)
            if not (grad is None or _is_made_up(grad, len(grads)))
        ]
        if not flowing:
            return [None] * len(xs)
        ys, grad_ys = zip(*flowing, strict=True)
        graph = tf.compat.v1.get_default_graph()
        if graph is self._call.graph:
            return list(self._step(ys, xs, grad_ys).gradients)
        with creation.neutral(self._call.graph):
            stand_ins = [_like(y) for y in ys]
            before = state.count_ops(self._call.graph)
            step = self._step(ys, xs, stand_ins)
        return _move_gradients(
            step, before, zip(stand_ins, grad_ys, strict=True), graph
        )

    def _step(
        self, ys: Sequence[Tensor], xs: Sequence[Tensor], grad_ys: Sequence[Tensor]
    ) -> PlainStep:
        """Build the gradients in the graph of the call."""
        step, report = self._planned(ys, xs, grad_ys).build()
        publish(report, step.graph)
        updates.order_when_complete(step)
        return step

    def _planned(
        self, ys: Sequence[Tensor], xs: Sequence[Tensor], grad_ys: Sequence[Tensor]
    ) -> Prepared:
        """Build plain gradients of the call, and plan what is recomputed."""
        call, options = self._call, self._options
        later = state.ops_since(call.graph, call.end)
        indices = [adjacency.creation_index(op) for op in (*later[:1], *later[-1:])]
        # One x may depend on another around the call: that is not its part.
        step = build_step(ys, xs, grad_ys, {"stop_gradients": list(xs)})
        gap = range(indices[0], indices[1] + 1) if later else range(0)
        step = replace(step, first=call.first, gap=gap)
        tensor_sizes.settle_shapes(step.ops())

        def choose(step: PlainStep, kept: Any) -> tuple[Keeping, Recomputation]:
            return self._choose(step, kept, later)

        chosen = choose_all(step, options, self._encoder, choose)
        calls = calls_in(call.graph)
        plan = _after(chosen.plan, calls.before(step.seeds))
        calls.add(plan.step)
        return Prepared(
            replace(chosen, plan=plan),
            self._offload,
            f"the checkpointed call that yields '{call.ys[0].name}': ",
            encode=options.encode,
            encoder=self._encoder,
            smallest=options.min_checkpoint_size,
        )

    def _choose(
        self, step: PlainStep, checkpoints: Any, later: Iterable[Operation]
    ) -> tuple[Keeping, Recomputation]:
        """Choose what the call keeps, given the ops that were made after it."""
        alone = self._call.alone
        inputs = Keeping(INPUTS, IdentitySet(), AlwaysKept(step))
        whole = plan_recomputation(step, inputs, spare_last=False)
        if not whole.segments:
            inputs.warnings.append(_NOTHING)
            return inputs, whole
        if checkpoints == INPUTS:
            return inputs, whole
        size = sum(_bytes(segment.ops) for segment in whole.segments)
        ends = not alone and _is_little(later, _LITTLE * size)
        # In a graph of its own, a call may be one of any number.
        smallest = self._options.min_checkpoint_size
        keeping = resolve(step, checkpoints, smallest, among_others=alone)
        if not keeping.recomputes:
            # Order alone is within the budget.
            return keeping, plan_recomputation(step, keep_all)
        if keeping.plan is not None:
            return keeping, keeping.plan
        if len(keeping.chosen):
            plan = plan_recomputation(step, keeping, spare_last=ends)
            # What is chosen is held by each of the calls, and one works at a time.
            held = sum(map(tensor_bytes, keeping.chosen))
            held *= calls_in(self._call.graph).count
            working = max((_bytes(s.ops) for s in plan.segments), default=0)
            if checkpoints != "memory" or ends or held + working < size:
                return keeping, plan
        elif ends:
            return keeping, plan_recomputation(step, keep_all)
        elif checkpoints != "memory":
            inputs.warnings.append(
                f"{keeping.mode} keeps no tensor of it: it holds what goes into it"
            )
        return inputs, whole


def _after(plan: Recomputation, ends: Sequence[Operation]) -> Recomputation:
    """Let what is recomputed at first wait for the calls that come before as well.

    The executor runs weight gradients late, and what they have not read yet is held.
    """
    if not plan.segments or not ends:
        return plan
    # The first segment on other devices waits for the same.
    first = plan.segments[0].awaited
    segments = [
        replace(s, awaited=(*first, *ends)) if s.awaited == first else s
        for s in plan.segments
    ]
    return replace(plan, segments=tuple(segments))


def _is_little(ops: Iterable[Operation], limit: float) -> bool:
    """Tell whether ops make so many bytes at most; passing on makes none."""
    total = 0
    for op in ops:
        total += 0 if op.type in ("Identity", "IdentityN") else _bytes((op,))
        if total > limit:
            return False
    return True


def _bytes(ops: Iterable[Operation]) -> int:
    return sum(tensor_bytes(t) for op in ops for t in op.outputs)


def _move_gradients(
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
    """
    there = types.MutableIdentityMap(stand_in_gradients)
    new_ops = frozenset(state.ops_since(step.graph, before))
    late = reached(
        step.seeds, lambda op: new_ops.intersection(adjacency.successors(op))
    )

    def is_copied(t: Tensor) -> bool:
        return t not in there and (t.op in late or t.op.type == "Const")

    wanted = tensors_of(step.gradients)
    ops = get_backward_walk_ops(
        list(filter(is_copied, wanted)),
        within_ops_fn=lambda op: op in late or op.type == "Const",
        stop_at_ts=list(there),
        control_inputs=True,
    )
    for t in [*wanted, *(t for op in ops for t in op.inputs)]:
        if t not in there and not is_copied(t):
            there[t] = creation.capture(graph, t)
    if ops:
        _, info = copy_replacing(
            make_view(ops), there, graph, SCOPE, "", reuse_dst_scope=True
        )
        image_layouts.hold_when_complete(graph)
        updates.order_moved(graph, map(info.transformed, ops))
        there.update((t, info.transformed(t)) for op in ops for t in op.outputs)

    def moved(t: Tensor | None) -> Tensor | None:
        return None if t is None else there[t]

    return [
        tf.nest.map_structure(moved, gradient, expand_composites=True)
        for gradient in step.gradients
    ]


def _like(y: Tensor) -> Tensor:
    """Return a tensor that can stand for the gradient of `y`."""
    return tf.zeros_like(y) if y.dtype == tf.variant else tf.ones_like(y)


def _is_made_up(grad: Any, outputs: int) -> bool:
    """Tell whether TensorFlow made a zero just now for an output that nothing reads.

    To differentiate by it would compute zeros, or NaN where a derivative is infinite,
    and inputs that no gradient reaches would not get None.
    """
    if not types.is_tensor(grad) or grad.op.type not in ("Const", "ZerosLike"):
        return False
    start = state.count_ops(grad.graph) - outputs
    if grad.op not in state.ops_since(grad.graph, start):
        return False
    return grad.op.type == "ZerosLike" or not np.any(tf.get_static_value(grad))
