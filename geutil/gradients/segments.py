"""Which forward ops are run again, in which portions, and who reads the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from geutil.gradients.edges import Read, backward_edges
from geutil.gradients.step import Step
from geutil.gradients.waits import awaited_by_stage
from geutil.graph.adjacency import creation_index
from geutil.graph.identity import IdentitySet
from geutil.graph.kinds import Operation, Tensor
from geutil.graph.order import topological_sort

Keeps = Callable[[Tensor], bool]
"""Tells whether a forward tensor is kept until the backward pass has read it."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Forward ops that are run again together.

    Attributes:
        ops: the ops, in topological order.
        kept: the kept tensors that they read.
        reads: who reads their results.
        direct: where backward ops of the same time read kept tensors as they are.
        awaited: the ops that must have run before any op of the segment is run again.
            With the last of them gone, nothing of the segment before is held.
    """

    ops: tuple[Operation, ...]
    kept: tuple[Tensor, ...]
    reads: tuple[Read, ...]
    direct: tuple[Read, ...]
    awaited: tuple[Operation, ...]


@dataclass(frozen=True, eq=False)
class Recomputation:
    """What of a step is recomputed.

    Attributes:
        step: the step with plain gradients.
        kept: the forward tensors that are held for the backward pass, in graph order.
            It reads them, or others are recomputed from them.
        segments: in the order in which the backward pass needs them.
    """

    step: Step
    kept: tuple[Tensor, ...]
    segments: tuple[Segment, ...]


def plan_recomputation(
    step: Step, keeps: Keeps, *, spare_last: bool = True
) -> Recomputation:
    """Divide what must be recomputed into segments, when some tensors are kept.

    A forward tensor that a backward op reads and that is not kept is recomputed: its
    op, and all ops behind it up to kept tensors, once. Ops that hang together by
    tensors that are not kept make up a segment, which waits for what the backward pass
    does with the segment before. What the backward pass starts with is not recomputed,
    since run again at once it would save nothing.

    Args:
        step: the step.
        keeps: tells whether a tensor is kept. Of an op that must not run twice, every
            output has to be.
        spare_last: whether the backward pass follows on the forward pass. If much else
            runs in between, what it starts with is recomputed as well.

    Cost: linear in the backward ops, the recomputed ops and their inputs.
    """
    groups = _groups(step, keeps)
    if spare_last and groups and _ends_last(step, groups):
        last = frozenset(groups[0].ops)
        return _plan(step, lambda t: t.op in last or keeps(t))
    return _finish(step, keeps, groups)


def _plan(step: Step, keeps: Keeps) -> Recomputation:
    return _finish(step, keeps, _groups(step, keeps))


@dataclass(frozen=True, eq=False)
class _Group:
    """Ops that hang together, and who reads them."""

    ops: list[Operation]
    reads: list[Read]


def _groups(step: Step, keeps: Keeps) -> list[_Group]:
    """Return the segments to be, in the order in which the backward pass needs them."""
    reads = [read for read in backward_edges(step).reads if not keeps(read.tensor)]
    leader = _connected(ops_behind((read.tensor.op for read in reads), keeps), keeps)
    groups: dict[Operation, _Group] = {}
    for read in reads:
        # The reads are in the order of the backward pass.
        group = groups.setdefault(leader[read.tensor.op], _Group([], []))
        group.reads.append(read)
    for op, first in leader.items():
        groups[first].ops.append(op)
    return list(groups.values())


def forward_inputs(step: Step) -> Iterable[tuple[Operation, int, Tensor]]:
    """Yield the forward tensors that backward ops read: (op, index, tensor)."""
    for read in backward_edges(step).reads:
        yield read.op, read.index, read.tensor


def ops_behind(roots: Iterable[Operation], keeps: Keeps) -> list[Operation]:
    """Return what must be run again to have the outputs of the roots."""
    waiting = list(roots)
    met = dict.fromkeys(waiting)
    while waiting:
        for t in waiting.pop().inputs:
            if t.op not in met and not keeps(t):
                met[t.op] = None
                waiting.append(t.op)
    return topological_sort(met)


def _connected(ops: Sequence[Operation], keeps: Keeps) -> dict[Operation, Operation]:
    """Map each op to one that stands for all that hang together with it."""
    leader = {op: op for op in ops}

    def find(op: Operation) -> Operation:
        while leader[op] is not op:
            leader[op] = leader[leader[op]]
            op = leader[op]
        return op

    for op in ops:
        for t in op.inputs:
            if t.op in leader and not keeps(t):
                leader[find(op)] = find(t.op)
    return {op: find(op) for op in ops}


def _ends_last(step: Step, groups: Sequence[_Group]) -> bool:
    """Tell whether the forward pass ends in the group that is needed first.

    Helpers of gradient functions count in the forward pass, but come after it.
    """
    place = backward_edges(step).forward
    ends = [
        max((place[op] for op in group.ops if not step.is_helper(op)), default=-1)
        for group in groups
    ]
    return ends[0] == max(ends)


def _finish(step: Step, keeps: Keeps, groups: Sequence[_Group]) -> Recomputation:
    newest = _newest_dependencies(step, groups)
    direct: dict[int, list[Read]] = {}
    held = IdentitySet()
    for read in backward_edges(step).reads:
        if keeps(read.tensor):
            held.add(read.tensor)
            direct.setdefault(newest[read.op], []).append(read)
    reading = {read.op for group in groups for read in group.reads}
    waits = awaited_by_stage(step, [group.ops for group in groups], reading, newest)
    segments = []
    for stage, group in enumerate(groups):
        inputs = IdentitySet(t for op in group.ops for t in op.inputs if keeps(t))
        for t in inputs:
            held.add(t)
        segments.append(
            Segment(
                tuple(group.ops),
                tuple(inputs),
                tuple(group.reads),
                tuple(direct.get(stage, ())),
                waits[stage],
            )
        )
    kept = sorted(held, key=lambda t: (creation_index(t.op), t.value_index))
    return Recomputation(step, tuple(kept), tuple(segments))


def _newest_dependencies(step: Step, groups: Sequence[_Group]) -> dict[Operation, int]:
    """Return the last segment that each backward op depends on; -1 for none.

    Cost: linear, and as much again for each level of nested loops of version 1, and
    once more where oneDNN merges gradients.
    """
    newest = dict.fromkeys(step.backward, -1)
    for stage, group in enumerate(groups):
        for read in group.reads:
            newest[read.op] = max(newest[read.op], stage)
    edges = backward_edges(step)
    rising = True
    while rising:
        for op, producers in edges.producers.items():
            stage = newest[op]
            for producer in producers:
                stage = max(stage, newest[producer])
            newest[op] = stage
        rising = False
        for source, raised in edges.tied:
            if newest[source] > newest[raised]:
                newest[raised] = newest[source]
                rising = True
    return newest
