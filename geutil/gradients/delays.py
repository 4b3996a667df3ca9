"""What makes a segment wait for its turn: control edges, or data under XLA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from geutil.gradients.data_barriers import can_wait, data_barrier, is_given
from geutil.gradients.eligibility import is_parameter
from geutil.gradients.heavy import PRODUCTS
from geutil.gradients.offloading import Offload, bring_back
from geutil.gradients.segments import Recomputation, Segment
from geutil.gradients.stand_ins import make_stand_in
from geutil.graph.identity import IdentityMap, IdentitySet, MutableIdentityMap
from geutil.graph.importing import add_control_edges, neutral
from geutil.graph.kinds import Graph, Operation, Tensor

SCOPE = "recomputed"
_SHAPE_ELEMENTS = 64


class Delays(Protocol):
    """Gives stand-ins for kept tensors that are there when the time has come."""

    def copies(self, stage: int) -> IdentityMap[Tensor]:
        """Return what the copies of a segment read instead of kept tensors."""

    def direct(self, stage: int) -> IdentityMap[Tensor]:
        """Return what backward ops of the same time read instead of kept tensors."""


class ControlDelays:
    """Stand-ins that wait by control edges, which TensorFlow's executor obeys.

    The order hangs on these nodes, never on kernels: a control edge onto a convolution
    keeps oneDNN's layout pass from merging it, or aborts the process. They are of a
    type that no optimizer of TensorFlow removes.

    Attributes:
        gates: the op that runs before each segment.
    """

    def __init__(self, plan: Recomputation, offload: Offload | None) -> None:
        self._graph = plan.step.graph
        self._segments = plan.segments
        self.gates = [_gate(self._graph, s.awaited) for s in plan.segments]
        self._moved = bring_back(plan, self.gates, offload)

    def copies(self, stage: int) -> IdentityMap[Tensor]:
        """Return what the copies of a segment read instead of kept tensors."""
        stand_ins: MutableIdentityMap[Tensor] = MutableIdentityMap()
        moved = self._moved[stage]
        for t in _delayed(self._segments[stage]):
            stand_ins[t] = _wait(t, moved.get(t, t), self.gates[stage])
        return stand_ins

    def direct(self, stage: int) -> IdentityMap[Tensor]:
        """Return what backward ops of the same time read instead of kept tensors.

        Only what was offloaded: otherwise they wait for what they read besides.
        """
        return self._moved[stage]


def _gate(graph: Graph, awaited: Sequence[Operation]) -> Operation:
    """Return the op behind which a segment begins."""
    with neutral(graph), graph.name_scope(f"{SCOPE}/"):
        gate = tf.raw_ops.NoOp(name="gate")
    add_control_edges(gate, awaited)
    return gate


def _wait(tensor: Tensor, held: Tensor, gate: Operation) -> Tensor:
    stand_in = make_stand_in(tensor, SCOPE, "barrier", reads=held)
    add_control_edges(stand_in.op, [gate])
    return stand_in


def _delayed(segment: Segment) -> IdentitySet:
    """Return the kept tensors that need a stand-in, so that each op has to wait.

    Variables and constants are read directly where something else delays the op.
    """
    kept = IdentitySet(segment.kept)
    delayed = IdentitySet(t for t in kept if not is_parameter(t.op))
    for op in segment.ops:
        if all(t in kept and t not in delayed for t in op.inputs):
            delayed.add(op.inputs[0])
    return delayed


class DataDelays:
    """Stand-ins that depend on data, since XLA leaves control edges out of account.

    XLA runs an op as soon as its inputs are there, also one of the backward pass that
    reads a kept tensor (to transpose it for a weight gradient, say). So whatever the
    backward pass does at the time of a segment reads stand-ins as well.
    """

    def __init__(self, plan: Recomputation) -> None:
        self._plan = plan
        self._newest: MutableIdentityMap[Tensor] = MutableIdentityMap()
        self._stand_ins: dict[int, IdentityMap[Tensor]] = {}

    def copies(self, stage: int) -> IdentityMap[Tensor]:
        """Return what the copies of a segment read instead of kept tensors."""
        if stage not in self._stand_ins:
            self._stand_ins[stage] = self._make(self._plan.segments[stage])
        return self._stand_ins[stage]

    def direct(self, stage: int) -> IdentityMap[Tensor]:
        """Return what backward ops of the same time read instead of kept tensors."""
        return self.copies(stage)

    def _make(self, segment: Segment) -> IdentityMap[Tensor]:
        held = _held_back(segment)
        # One barrier after the other over the same tensor, so that XLA needs no copy.
        newest = [self._newest.get(t, t) for t in held]
        after = [t for op in segment.awaited for t in op.outputs if can_wait(t)]
        graph = self._plan.step.graph
        with neutral(graph), graph.name_scope(f"{SCOPE}/"):
            stand_ins = list(zip(held, data_barrier(newest, after), strict=True))
        self._newest.update((t, s) for t, s in stand_ins if not is_given(t.op))
        return IdentityMap(stand_ins)


def _held_back(segment: Segment) -> list[Tensor]:
    """Return the tensors that must not be read before the time of a segment.

    Matrix products read variables as they are. For convolutions XLA transposes them
    first, and it would do so when the step begins.
    """
    readers = [(op, t) for op in segment.ops for t in op.inputs]
    readers += [(read.op, read.tensor) for read in segment.direct]
    kept = IdentitySet((*segment.kept, *(read.tensor for read in segment.direct)))
    held = IdentitySet(
        t
        for op, t in readers
        if t in kept and not (is_parameter(t.op) and op.type in PRODUCTS)
    )
    return [
        t
        for t in held
        if t.op.type != "Const" and can_wait(t) and not _may_be_a_shape(t)
    ]


def _may_be_a_shape(tensor: Tensor) -> bool:
    """Tell whether XLA may have to know a tensor when it compiles: few integers.

    Shapes, axes and paddings are known then, and would not be behind a barrier.
    """
    elements = tensor.shape.num_elements()
    few = elements is not None and elements <= _SHAPE_ELEMENTS
    return few and bool(tensor.dtype.is_integer)
