"""Segments of forward ops that run again: their members, readers and waits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from geutil.gradients.step import PlainStep, TensorRead
from geutil.graph import adjacency, runtime, v1_control_flow
from geutil.graph.op_types import types_in
from geutil.graph.types import (
    IdentityMap,
    IdentitySet,
    MutableIdentityMap,
    Operation,
    Tensor,
    is_reference,
    is_stateful,
)
from geutil.graph.walks import DisjointSets, closure
from geutil.memory.costs import Times
from geutil.memory.cpu import is_held, passes_on

SCOPE = "recomputed"
"""The scope of ops that run again."""

PARAMETERS = frozenset(("Const", "ReadVariableOp", "VariableV2", "Variable"))
"""Types of ops that yield variables and constants."""

_GIVEN = PARAMETERS | types_in(
    "IteratorGetNext Placeholder PlaceholderWithDefault VarHandleOp _Arg"
)
_PRIMITIVE_FLOW = frozenset(
    prefix + name
    for prefix in ("", "Ref")
    for name in ("Enter", "Exit", "Merge", "Switch", "NextIteration")
) | {"LoopCond"}


def why_kept(op: Operation) -> str | None:
    """Return why an op cannot be run again, or None if it can."""
    if op.type in _GIVEN or not op.inputs:
        return "it is given"
    if is_stateful(op):
        # Side effects happen once: random draws, assignments, prints, queues.
        return f"a {op.type} must run only once"
    if any(is_reference(t) for t in op.inputs):
        # TensorFlow does not call the assignments of version 1 stateful.
        return "it reads or changes a variable of version 1"
    if op.type in _PRIMITIVE_FLOW or v1_control_flow.is_inside(op):
        return "it belongs to a loop or conditional of version 1"
    if is_held(source_of(op)):
        return "it is given"
    if runtime.is_determinism_enabled() and is_left_to_chance(op):
        return "the order in which it adds is left to chance"
    return None


def source_of(op: Operation) -> Operation:
    """Return the op whose first output an op forwards; itself if it forwards none."""
    # A read of a version 1 variable is an Identity that forwards the variable's buffer.
    while passes_on(op.type) and op.type not in _PRIMITIVE_FLOW:
        op = op.inputs[0].op
    return op


PLACES_TO_WAIT = {
    "EmptyTensorList": 1,
    "StatelessRandomNormalV2": 1,
    "StatelessRandomUniformV2": 1,
    "TensorListReserve": 1,
}
"""Where ops that read only integers can wait: inputs that are no shape."""


def is_parameter(op: Operation) -> bool:
    """Return whether an op yields a variable or constant, or forwards one."""
    return source_of(op).type in PARAMETERS


def is_left_to_chance(op: Operation) -> bool:
    """Return whether TensorFlow may add an op's inputs in any order."""
    return (
        op.type == "AddN"
        and len(op.inputs) > 2
        and bool(op.outputs[0].dtype.is_floating or op.outputs[0].dtype.is_complex)
        # XLA has an order of its own, always the same.
        and not runtime.is_compiled_by_xla(op.graph)
    )


_ANYWHERE = frozenset(("",))
_NO_TRANSFERS: Mapping[Operation, float] = MappingProxyType({})


def _awaited(
    step: PlainStep, groups: Sequence[_Group], newest: Mapping[Operation, int]
) -> list[tuple[Operation, ...]]:
    """Return the ops that each segment waits for."""
    # Those are all backward ops between the segment before it on the same device and
    # itself: the ones that depend on that segment, on none needed later, and that no
    # other such op reads. Weight gradients are among them: the executor runs those
    # late, and tensors that they have not read yet cannot be freed. Where there is no
    # such op (in a branch of version 1, which nothing outside can wait for), they are
    # those of the segment before. No wait can close a cycle, since segments only wait
    # for ops that depend on earlier ones.
    # Helpers of gradient functions are on no device.
    devices = [
        frozenset(op.device for op in group.ops) - _ANYWHERE or _ANYWHERE
        for group in groups
    ]
    reading = {read.op for group in groups for read in group.reads}
    joining = _joining(step, reading, newest, devices)
    sinks = _sinks(step, newest, joining)
    last: dict[str, int] = {}
    waits: list[tuple[Operation, ...]] = []
    for stage, places in enumerate(devices):
        # An op on no device in particular may be on any.
        near = last.keys() if places == _ANYWHERE else places | _ANYWHERE
        previous = sorted({last[place] for place in near if place in last})
        awaited = [op for i in previous for op in sinks.get(i, waits[i])]
        if not previous:
            # Backward ops that run before anything is needed again.
            awaited = [
                op
                for op in sinks.get(-1, ())
                if places == _ANYWHERE or op.device in places | _ANYWHERE
            ]
        waits.append(tuple(dict.fromkeys(awaited)) or step.seeds)
        last.update(dict.fromkeys(places, stage))
    return waits


def _sinks(
    step: PlainStep, newest: Mapping[Operation, int], joining: Set[Operation]
) -> dict[int, list[Operation]]:
    """Return the backward ops without readers in their own stage, by stage."""
    edges = step.edges
    sinks: dict[int, list[Operation]] = {}
    for op in edges.awaitable:
        stage = newest[op]
        if op not in joining and all(
            newest[reader] != stage or reader in joining for reader in edges.readers[op]
        ):
            sinks.setdefault(stage, []).append(op)
    return sinks


def _joining(
    step: PlainStep,
    reading: Set[Operation],
    newest: Mapping[Operation, int],
    devices: Sequence[frozenset[str]],
) -> set[Operation]:
    """Return the ops that only combine the results of segments on several devices."""
    # They add up the gradients of tensors that two towers share, and go on from there.
    # A tower that waited for that would wait for the other tower.
    joining: set[Operation] = set()
    if len(frozenset(devices)) < 2:
        return joining

    def are_apart(first: frozenset[str], second: frozenset[str]) -> bool:
        return first.isdisjoint(second) and _ANYWHERE not in (first, second)

    for op, producers in step.edges.producers.items():
        stage = newest[op]
        if op not in reading and any(
            producer in joining
            if newest[producer] == stage
            else newest[producer] >= 0
            and are_apart(devices[newest[producer]], devices[stage])
            for producer in producers
        ):
            joining.add(op)
    return joining


Keeps = Callable[[Tensor], bool]
"""Tells whether a forward tensor is kept until the backward pass has read it."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Forward ops that are run again together, in topological order."""

    ops: tuple[Operation, ...]
    # The kept tensors that they read, and who reads their results.
    kept: tuple[Tensor, ...]
    reads: tuple[TensorRead, ...]
    # Where backward ops of the same time read kept tensors as they are.
    direct: tuple[TensorRead, ...]
    # The ops that must have run before: then nothing of the segment before is held.
    awaited: tuple[Operation, ...]
    # For those of `kept` that have run again before, the segment that is read.
    sources: IdentityMap[int] = field(default_factory=IdentityMap)
    # Those of `ops` that do not run: their results come back from another device.
    fetched: frozenset[Operation] = frozenset()
    # The kept tensors that come back from there, each with the segment at whose gate
    # that begins; -1 is the beginning of the backward pass.
    returned: IdentityMap[int] = field(default_factory=IdentityMap)

    @cached_property
    def originals(self) -> tuple[Tensor, ...]:
        """The kept tensors that are those of the forward pass."""
        return tuple(t for t in self.kept if t not in self.sources)

    @property
    def needed(self) -> tuple[Tensor, ...]:
        """The kept tensors that they, or the backward pass at their time, read."""
        return (*self.originals, *(read.tensor for read in self.direct))


def name_of_copy(op: Operation, turn: int) -> str:
    """Return a program's name of an op's copy, after it has run again `turn` times."""
    # No op has a colon in its name.
    return f"{SCOPE}/{op.name}:{turn}" if turn else f"{SCOPE}/{op.name}"


def name_of_sent(op: Operation) -> str:
    """Return a program's name of the op that sends a result to another device."""
    return f"{SCOPE}/{op.name}:sent"


@dataclass(frozen=True, eq=False)
class Recomputation:
    """The ops of a step that are recomputed, by segments."""

    step: PlainStep
    # The forward tensors that the backward pass reads, or others are recomputed from,
    # in graph order.
    kept: tuple[Tensor, ...]
    # In the order in which the backward pass needs them.
    segments: tuple[Segment, ...]
    # The last segment that each backward op comes after, or -1.
    stages: Mapping[Operation, int] = field(default_factory=dict)
    # The places of ops and copies in a schedule, by a program's names of them.
    places: Mapping[str, int] = field(default_factory=dict)
    # The ops whose results wait on another device instead of running again, each with
    # how long its result is on the way there, or back.
    fetched: Mapping[Operation, float] = field(default_factory=dict)

    @property
    def offloaded(self) -> list[Tensor]:
        """The kept tensors that wait on another device."""
        return list(IdentitySet(t for s in self.segments for t in s.returned))

    @property
    def transfer_time(self) -> float:
        """How long results are on the way to another device and back, all in all."""
        back = (self.fetched[op] for s in self.segments for op in s.fetched)
        return sum(self.fetched.values()) + sum(back)

    def extra_time(self, time_of: Times) -> float:
        """Return the time of ops that run again and of transfers."""
        return sum(map(time_of, self.run_again)) + self.transfer_time

    def extra_share(self, time_of: Times) -> float:
        """Return the extra time as a fraction of the plain step's time."""
        return self.extra_time(time_of) / (sum(map(time_of, self.step.ops())) or 1.0)

    @cached_property
    def run_again(self) -> tuple[Operation, ...]:
        """The ops that run again, each as often as it does."""
        # A helper that gradient functions made of forward tensors alone, and whose
        # copies alone are read, does not run itself: one of its copies is not again.
        is_helper = self.step.is_helper
        copied = [op for s in self.segments for op in s.ops if op not in s.fetched]
        helpers = set(filter(is_helper, copied))
        ends = (t.op for t in self.kept) if helpers else ()
        as_they_are = closure(
            ends, lambda op: (t.op for t in op.inputs if is_helper(t.op))
        )
        moved = helpers - as_they_are.keys()
        again = []
        for op in copied:
            if op in moved:
                moved.remove(op)
            else:
                again.append(op)
        return tuple(again)


def plan_recomputation(
    step: PlainStep, keeps: Keeps, *, spare_last: bool = True
) -> Recomputation:
    """Divide the ops to recompute into segments, given the kept tensors."""
    # A forward tensor that a backward op reads and that is not kept is recomputed: its
    # op, and all ops behind it up to kept tensors, once. Ops connected by tensors that
    # are not kept make up a segment. With `spare_last` the backward pass follows on the
    # forward pass: ops that it starts with would save nothing, run again at once.
    groups = _groups(step, keeps)
    if spare_last and groups and _ends_last(step, groups):
        last = frozenset(groups[0].ops)
        return plan_recomputation(
            step, lambda t: t.op in last or keeps(t), spare_last=False
        )
    direct_reads = [r for r in step.edges.reads if keeps(r.tensor)]
    inputs = [
        IdentitySet(t for op in group.ops for t in op.inputs if keeps(t))
        for group in groups
    ]
    newest = dict.fromkeys(step.backward, -1)
    for stage, group in enumerate(groups):
        for read in group.reads:
            newest[read.op] = max(newest[read.op], stage)
    _raise_along(step, newest)
    return _with_waits(step, groups, direct_reads, inputs, newest)


@dataclass(frozen=True, eq=False)
class _Group:
    """Connected ops, and the reads of their results."""

    ops: list[Operation]
    reads: list[TensorRead]


def _groups(step: PlainStep, keeps: Keeps) -> list[_Group]:
    """Return the groups in the order in which the backward pass needs them."""
    reads = [read for read in step.edges.reads if not keeps(read.tensor)]
    leader = _connected(_behind(reads, keeps), keeps)
    groups: dict[Operation, _Group] = {}
    for read in reads:
        # The reads are in the order of the backward pass.
        group = groups.setdefault(leader[read.tensor.op], _Group([], []))
        group.reads.append(read)
    for op, first in leader.items():
        groups[first].ops.append(op)
    return list(groups.values())


def recomputable(step: PlainStep, keeps: Keeps) -> list[Operation]:
    """Return, sorted topologically, the ops that run again if `keeps` alone decides."""
    reads = [read for read in step.edges.reads if not keeps(read.tensor)]
    return _behind(reads, keeps)


def _behind(reads: Iterable[TensorRead], keeps: Keeps) -> list[Operation]:
    """Return the ops that run again for some reads."""
    roots = (read.tensor.op for read in reads)
    behind = closure(roots, lambda op: (t.op for t in op.inputs if not keeps(t)))
    return adjacency.topological_sort(behind)


def _connected(ops: Sequence[Operation], keeps: Keeps) -> dict[Operation, Operation]:
    """Map each op to a representative of the ops connected with it."""
    groups = DisjointSets(ops)
    members = frozenset(ops)
    for op in ops:
        for t in op.inputs:
            if t.op in members and not keeps(t):
                groups.join(op, t.op)
    return {op: groups.leader(op) for op in ops}


def _ends_last(step: PlainStep, groups: Sequence[_Group]) -> bool:
    """Return whether the forward pass ends in the group that is needed first."""
    place = step.edges.forward
    # Helpers of gradient functions come after it.
    ends = [
        max((place[op] for op in group.ops if not step.is_helper(op)), default=-1)
        for group in groups
    ]
    return ends[0] == max(ends)


def _with_waits(
    step: PlainStep,
    groups: Sequence[_Group],
    direct_reads: Sequence[TensorRead],
    inputs: Sequence[IdentitySet],
    newest: Mapping[Operation, int],
    sources: Sequence[IdentityMap[int]] = (),
    fetched: Mapping[Operation, float] = _NO_TRANSFERS,
) -> Recomputation:
    """Return a recomputation, with the waits of each segment."""
    # `inputs` are the outer inputs of each segment, `newest` the last segment that each
    # op comes after, or -1.
    direct: dict[int, list[TensorRead]] = {}
    for read in direct_reads:
        # A read belongs to the newest segment that its reader depends on.
        direct.setdefault(newest[read.op], []).append(read)
    waits = _awaited(step, groups, newest)
    segments = [
        Segment(
            tuple(group.ops),
            tuple(inputs[stage]),
            tuple(group.reads),
            tuple(direct.get(stage, ())),
            waits[stage],
            sources[stage] if sources else IdentityMap(),
            frozenset(op for op in group.ops if op in fetched),
        )
        for stage, group in enumerate(groups)
    ]
    held = IdentitySet(
        (*(r.tensor for r in direct_reads), *(t for s in segments for t in s.originals))
    )
    kept = sorted(held, key=lambda t: (adjacency.creation_index(t.op), t.value_index))
    return Recomputation(step, tuple(kept), tuple(segments), newest, fetched=fetched)


def scheduled_recomputation(
    step: PlainStep,
    bursts: Sequence[Sequence[Operation]],
    bursts_before: Mapping[Operation, int],
    fetched: Mapping[Operation, float] = _NO_TRANSFERS,
) -> Recomputation:
    """Return a recomputation with each burst of ops at its place in a schedule."""
    # An op may be in several bursts. Readers of its result read that of the latest
    # burst before; ops of the forward pass, that of the forward pass. `bursts_before`
    # counts the bursts before backward ops; ops that need such an op come after them,
    # too.
    stages_of: dict[Operation, list[int]] = {}
    for stage, ops in enumerate(bursts):
        for op in ops:
            stages_of.setdefault(op, []).append(stage)

    def latest(op: Operation, before: int) -> int:
        """Return the last burst of an op among the first ones, or -1."""
        stages = stages_of.get(op, ())
        place = bisect_left(stages, before)
        return stages[place - 1] if place else -1

    newest = {op: bursts_before.get(op, 0) - 1 for op in step.backward}
    _raise_along(step, newest)
    groups = [_Group(list(ops), []) for ops in bursts]
    direct_reads = []
    for read in step.edges.reads:
        stage = latest(read.tensor.op, newest[read.op] + 1)
        if stage < 0:
            direct_reads.append(read)
        else:
            groups[stage].reads.append(read)
    sources: list[MutableIdentityMap[int]] = []
    inputs: list[IdentitySet] = []
    for stage, ops in enumerate(bursts):
        members = frozenset(ops)
        read_tensors = IdentitySet(
            t
            for op in ops
            if op not in fetched
            for t in op.inputs
            if t.op not in members
        )
        earlier = ((t, latest(t.op, stage)) for t in read_tensors)
        sources.append(MutableIdentityMap((t, s) for t, s in earlier if s >= 0))
        inputs.append(read_tensors)
    return _with_waits(step, groups, direct_reads, inputs, newest, sources, fetched)


def _raise_along(step: PlainStep, newest: dict[Operation, int]) -> None:
    """Propagate stages: a backward op inherits the latest stage of its inputs."""
    edges = step.edges
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
