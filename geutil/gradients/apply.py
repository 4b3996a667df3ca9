"""Applying a choice: edits of the step, and copies of the ops that run again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from geutil.gradients import barriers, segments
from geutil.gradients.barriers import (
    ControlDelays,
    DataDelays,
    Delays,
    Offload,
    fetch,
    limit_sending,
    send_once,
)
from geutil.gradients.segments import SCOPE, Recomputation, name_of_copy, name_of_sent
from geutil.gradients.step import (
    Edits,
    PlainStep,
    changed,
    edits_of,
    first_results,
    long_sums,
    order_of_addition,
    tensors_of,
    with_replaced,
)
from geutil.gradients.tape.engine import add_in_pairs
from geutil.graph import adjacency, creation, op_types, runtime, state
from geutil.graph.creation import add_control_edges, make_stand_in, set_new_input
from geutil.graph.types import (
    Graph,
    IdentityMap,
    IdentitySet,
    MutableIdentityMap,
    Operation,
    Tensor,
)
from geutil.graph.walks import closure
from geutil.memory import cpu
from geutil.select.queries import make_view
from geutil.select.walks import get_backward_walk_ops
from geutil.transform.transformer import copy_replacing

_SUMMED = "summed"
"""The scope of sums of two gradients."""


def build_recomputation(
    plan: Recomputation, offload: Offload | None = None
) -> PlainStep:
    """Make all planned edits of a step, with recomputation."""
    # Under XLA, which knows one device, no tensor is offloaded.
    plan = replace(plan, step=applied(plan.step))
    if not plan.segments:
        return plan.step
    if runtime.is_compiled_by_xla(plan.step.graph):
        # XLA fuses sums, and has an order of its own.
        _recompute(plan, DataDelays(plan))
        return _run_pools_in_time(plan.step)
    if runtime.is_determinism_enabled():
        # Sums and turns would change which ops Grappler joins, and so how it rounds.
        readers = readers_of(plan.step)
        delays = ControlDelays(_parted(plan), offload)
        copies = _recompute(plan, delays, offload)
        delayed = [
            (op, copies.op(stage, op), gate)
            for stage, gate in enumerate(delays.gates)
            for op in plan.segments[stage].ops
            if op not in plan.fetched
        ]
        pin_sum_inputs(plan.step, readers, [(op, gate) for op, _, gate in delayed])
        keep_apart(plan.step, readers, delayed)
        return plan.step
    earlier = IdentitySet(offload.sent if offload else ())
    delays = ControlDelays(plan, offload)
    copies = _recompute(plan, delays, offload)
    sent = offload.sent.items() if offload else ()
    limit_sending(
        plan.step,
        [(t, there) for t, there in sent if t not in earlier],
        when_complete=bool(offload and offload.is_counted),
    )
    copied = copies.names()
    places = {copied.get(name, name): place for name, place in plan.places.items()}
    return replace(
        add_in_turn(plan.step),
        copied=copied,
        places=places,
        elsewhere=copies.elsewhere | delays.elsewhere,
    )


def make_edits(edits: Edits) -> None:
    """Make edits that were planned."""
    for op, tensors in edits.inputs.items():
        for index, (old, new) in enumerate(zip(op.inputs, tensors, strict=True)):
            if new is not old:
                creation.set_new_input(op, index, new)
    for op, awaited in edits.controls.items():
        creation.set_control_inputs(op, awaited)
    for loop in edits.loops:
        loop.apply()


def edges_of(ops: Iterable[Operation]) -> Edits:
    """Return the current edges of some ops as edits that restore them."""
    ops = list(ops)
    return Edits(
        {op: list(op.inputs) for op in ops},
        {op: list(adjacency.control_inputs(op)) for op in ops},
    )


def set_back(edges: Edits) -> None:
    """Restore the edges that ops had before."""
    inputs = {
        op: tensors
        for op, tensors in edges.inputs.items()
        if any(new is not old for new, old in zip(tensors, op.inputs, strict=True))
    }
    controls = {
        op: awaited
        for op, awaited in edges.controls.items()
        if {*awaited} != {*adjacency.control_inputs(op)}
    }
    make_edits(Edits(inputs, controls))


def applied(step: PlainStep) -> PlainStep:
    """Make the edits of a step; return it with the edges known of it so far."""
    make_edits(step.edits)
    return changed(step, edits=Edits())


def add_in_turn(step: PlainStep) -> PlainStep:
    """Replace sums of more than two gradients by sums of two, equal to the last bit."""
    # `AddN` holds all terms until the last one has come; `add_in_pairs` names the rest.
    # The old sums are left without readers.
    replaced = {}
    for op in long_sums(step):
        tensors = [op.inputs[place] for place in order_of_addition(step, op)]
        replaced[op] = add_in_pairs(tensors, _SUMMED, op.device)
    make_edits(edits_of({}, replaced))
    return with_replaced(step, first_results(replaced))


def _run_pools_in_time(step: PlainStep) -> PlainStep:
    """Let XLA expand the gradients of pools no earlier than they are run."""
    replaced = {}
    for op in filter(barriers.is_expanded, step.backward):
        output = op.outputs[0]
        reads = [
            (r, i)
            for r in adjacency.consumers(output)
            for i in adjacency.input_indices(r, output)
        ]
        with creation.neutral(step.graph), step.graph.name_scope(f"{SCOPE}/"):
            replaced[op] = barriers.run_in_time(op)
        make_edits(edits_of(dict.fromkeys(reads, replaced[op]), {}))
    return with_replaced(step, first_results(replaced))


def _parted(plan: Recomputation) -> Recomputation:
    """Return the plan with segments that await no op that Grappler may join."""
    segments = (
        replace(
            segment,
            awaited=without_joined(plan.step, segment.awaited),
        )
        for segment in plan.segments
    )
    return replace(plan, segments=tuple(segments))


def _recompute(
    plan: Recomputation, delays: Delays, offload: Offload | None = None
) -> Copies:
    """Copy forward ops, and let the backward pass read the copies."""
    stages = range(len(plan.segments))
    # Made first, so that the copies come after their inputs.
    stand_ins = [delays.copies(stage) for stage in stages]
    copies = Copies(plan)
    if offload is not None and isinstance(delays, ControlDelays):
        copies.fetch(delays.gates, offload)
    for stage, segment in enumerate(plan.segments):
        earlier = delays.after(
            stage, [(t, copies.tensor(s, t)) for t, s in segment.sources.items()]
        )
        for op in segment.ops:
            if op not in segment.fetched:
                _reread(copies, stage, op, (stand_ins[stage], earlier))
        for read in segment.reads:
            copied = copies.tensor(stage, read.tensor)
            creation.set_new_input(read.op, read.index, copied)
        instead = delays.direct(stage)
        for read in segment.direct:
            if read.tensor in instead:
                creation.set_new_input(read.op, read.index, instead[read.tensor])
    return copies


class Copies:
    """Copies of the ops of all segments, imported once for each run."""

    # An import costs as much as looking through the graph, however little is imported.
    # Control inputs are left out: these ops have run by then, or, where ops are of a
    # backward pass themselves, lie in segments that come later.

    def __init__(self, plan: Recomputation) -> None:
        self._plan = plan
        # The names of ops whose results are on another device.
        self.elsewhere: frozenset[str] = frozenset()
        self._sent: dict[Operation, Tensor] = {}
        self._fetched: dict[tuple[int, Operation], Tensor] = {}
        self._turn: dict[tuple[int, Operation], int] = {}
        turns: list[list[Operation]] = []
        times: dict[Operation, int] = {}
        for stage, segment in enumerate(plan.segments):
            for op in segment.ops:
                # Ops that run for the same time are copied together.
                turn = self._turn[stage, op] = times.get(op, 0)
                times[op] = turn + 1
                if op in segment.fetched:
                    continue
                if turn == len(turns):
                    turns.append([])
                turns[turn].append(op)
        read = (t for s in plan.segments for t in s.kept)
        back = (t for op in plan.fetched for t in op.outputs)
        kept = IdentityMap((t, t) for t in (*read, *back))
        options = {"reuse_dst_scope": True, "keep_control_inputs": False}
        self._infos = [
            copy_replacing(make_view(ops), kept, plan.step.graph, SCOPE, "", **options)[
                1
            ]
            for ops in turns
        ]

    def fetch(self, gates: Sequence[Operation], offload: Offload) -> None:
        """Bring offloaded tensors back when their segment begins."""
        elsewhere: list[Operation] = []
        for stage, segment in enumerate(self._plan.segments):
            for op in segment.ops:
                if op not in segment.fetched:
                    continue
                (tensor,) = op.outputs
                sent = self._sent[op] = send_once(tensor, offload)
                back = fetch(tensor, sent, [gates[stage]], offload.device)
                self._fetched[stage, op] = back
                elsewhere += [sent.op, back.op.inputs[0].op]
        self.elsewhere = frozenset(op.name for op in elsewhere)

    def op(self, stage: int, op: Operation) -> Operation:
        """Return the copy of an op in a segment."""
        if (stage, op) in self._fetched:
            return self._fetched[stage, op].op
        copied: Operation = self._infos[self._turn[stage, op]].transformed(op)
        return copied

    def tensor(self, stage: int, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor whose op is in a segment."""
        if (stage, tensor.op) in self._fetched:
            return self._fetched[stage, tensor.op]
        turn = self._turn[stage, tensor.op]
        copied: Tensor = self._infos[turn].transformed(tensor)
        return copied

    def names(self) -> dict[str, str]:
        """Map the names that programs use for copies to the names of the copies."""
        copies = {
            name_of_copy(op, turn): self.op(stage, op).name
            for (stage, op), turn in self._turn.items()
        }
        sent = {name_of_sent(op): t.op.name for op, t in self._sent.items()}
        return copies | sent

    def has(self, stage: int, op: Operation) -> bool:
        """Return whether an op is in a segment."""
        return (stage, op) in self._turn


def _reread(
    copies: Copies,
    stage: int,
    original: Operation,
    stand_ins: Sequence[IdentityMap[Tensor]],
) -> None:
    """Let a copy read copies of its segment, or stand-ins."""
    copy = copies.op(stage, original)
    for index, t in enumerate(original.inputs):
        if copies.has(stage, t.op):
            wanted = copies.tensor(stage, t)
        else:
            # A tensor without a stand-in is always kept, so the original is read.
            wanted = next((s[t] for s in stand_ins if t in s), t)
        if copy.inputs[index] is not wanted:
            creation.set_new_input(copy, index, wanted)


def move_gradients(
    step: PlainStep,
    before: int,
    stand_in_gradients: Iterable[tuple[Tensor, Tensor]],
    graph: Graph,
) -> tuple[list[Any], list[Operation]]:
    """Copy a backward pass made since `before` to another graph; return the copies."""
    # The other graph, of a function, captures the forward tensors that the backward
    # pass reads, and TensorFlow holds these for it: kept tensors, if the step
    # recomputes others.
    there = MutableIdentityMap(stand_in_gradients)
    new_ops = frozenset(state.ops_since(step.graph, before))
    late = closure(
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
    copies: list[Operation] = []
    if ops:
        _, info = copy_replacing(
            make_view(ops), there, graph, SCOPE, "", reuse_dst_scope=True
        )
        copies = list(map(info.transformed, ops))
        there.update((t, info.transformed(t)) for op in ops for t in op.outputs)

    def moved(t: Tensor | None) -> Tensor | None:
        return None if t is None else there[t]

    gradients = tf.nest.map_structure(
        moved, list(step.gradients), expand_composites=True
    )
    return gradients, copies


# Gradients of the same bits as plain ones. Grappler joins an op that has a single
# reader with that reader: sums of sums (AddOpsRewrite), products of products
# (MinimizeBroadcasts), which it computes in an order of its own, and, for oneDNN, a Pad
# with the convolution behind it. In plain gradients the backward pass reads much of the
# forward pass, which keeps those ops apart. With recomputation an original and its copy
# may be left with one reader each. Grappler joins no op that another one waits for.

# `AddN` adds into the buffer of the first input that nothing else holds any more, and
# begins with that input. Of three or more terms this decides how the sum is rounded. An
# input that another op reads is free if that op happens to have run: so one graph with
# one seed yields two results, even where `enable_op_determinism` was called, and more
# of the second where the machine is busy. Plain gradients have it, too. If the backward
# pass reads inputs of such a sum, it holds them, and the order is fixed. It must not
# change where the backward pass reads copies instead. So such a sum is not run a second
# time, and its inputs are held in another way. Left to chance are sums that Grappler
# joins with their readers, those whose inputs are read by forward ops alone, some of
# which run again, and products of several constants and tensors: Grappler joins the
# constants (ConstantPushDown) in an order that depends on the whole graph.

JOINED = frozenset(("Add", "AddN", "AddV2", "Mul"))

Readers = IdentityMap[list[tuple[Operation, int]]]


def readers_of(step: PlainStep) -> Readers:
    """Return the ops of a step that read the values of each tensor, by input."""
    readers: MutableIdentityMap[list[tuple[Operation, int]]] = MutableIdentityMap()
    for op in get_backward_walk_ops([*step.ys, *tensors_of(step.gradients)]):
        # Grappler makes a constant of such an op, which is then no reader.
        if op.type in op_types.VALUE_BLIND:
            continue
        for index, t in enumerate(op.inputs):
            if t not in readers:
                readers[t] = []
            readers[t].append((op, index))
    return readers


def keep_apart(
    step: PlainStep,
    before: Readers,
    copies: Iterable[tuple[Operation, Operation, Operation]],
) -> None:
    """Keep Grappler from joining ops with a single reader that had several `before`."""
    # `copies` are forward ops that run again, each with a copy and an op that runs
    # later.
    # A copy's last reader reads an op in between. Originals get a second reader
    # instead: TensorFlow may be differentiating them just now, and their edges must not
    # change.
    after = readers_of(step)
    for op, copy, later in copies:
        for t, copied in zip(op.outputs, copy.outputs, strict=True):
            if len(before.get(t, ())) < 2:
                continue
            if len(after.get(t, ())) == 1:
                apart = make_stand_in(t, segments.SCOPE, "apart")
                add_control_edges(later, [apart.op])
            readers = after.get(copied, ())
            # oneDNN computes the gradient of a pool that it reads itself.
            if len(readers) == 1 and "PoolGrad" not in readers[0][0].type:
                apart = make_stand_in(copied, segments.SCOPE, "apart")
                set_new_input(*readers[0], apart)


def without_joined(
    step: PlainStep, awaited: Iterable[Operation]
) -> tuple[Operation, ...]:
    """Replace backward ops that Grappler may join by their backward inputs."""
    backward = frozenset(step.backward)

    def joined_with(op: Operation) -> list[Operation]:
        producers = [t.op for t in op.inputs if t.op in backward]
        is_joined = op.type in JOINED and len(op.outputs[0].consumers()) == 1
        return producers if is_joined else []

    return tuple(op for op in closure(awaited, joined_with) if not joined_with(op))


def pin_sum_inputs(
    step: PlainStep, before: Readers, copies: Iterable[tuple[Operation, Operation]]
) -> None:
    """Hold the inputs of sums as long as the backward pass held them `before`."""
    # `copies` are forward ops that run again, with an op that runs after the forward
    # pass.
    backward = frozenset(step.backward)
    added: MutableIdentityMap[Tensor] = MutableIdentityMap()
    summands = {
        (id(t), sum_): (t, later)
        for op, later in copies
        for output in op.outputs
        for t, sum_ in _reads(output, before)
        if segments.is_left_to_chance(sum_) and sum_ not in backward
        # With plain gradients the backward pass holds its input.
        if any(reader in backward for _, reader in _reads(output, before))
    }
    for (_, sum_), (t, later) in summands.items():
        (total,) = sum_.outputs
        # Grappler may join a sum with a single reader, which a second one would stop.
        readers = before.get(total, ())
        if len(readers) == 1 and readers[0][0].type in JOINED:
            continue
        if total not in added:
            added[total] = make_stand_in(total, segments.SCOPE, "added")
        holder = make_stand_in(t, segments.SCOPE, "held").op
        add_control_edges(holder, [added[total].op])
        add_control_edges(later, [holder])


def _reads(tensor: Tensor, before: Readers) -> Iterator[tuple[Tensor, Operation]]:
    """Yield the reads of a tensor, and of forwards of its buffer, with the reader."""
    waiting = [tensor]
    for t in waiting:
        for reader, index in before.get(t, ()):
            yield t, reader
            if cpu.passes_on(reader.type) and index == 0:
                waiting.append(reader.outputs[0])
