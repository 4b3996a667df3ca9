"""Edges of a planned step: copies of the ops that run again, and the step's order.

A plan is carried out by edges. Forward ops are copied, and backward ops read the
copies. The executor runs any ready op, in an order that depends on threads, load and
addresses; so the whole step, updates included, is planned, and its large ops wait for
the ops that the plan has before them (`geutil.memory.schedule`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from types import MappingProxyType
from typing import TypeAlias

import tensorflow as tf

from geutil.gradients import barriers
from geutil.gradients.segments import executed
from geutil.gradients.step import (
    PLACES_TO_WAIT,
    RECOMPUTED,
    Edits,
    PlainStep,
    Recomputation,
    changed,
    edits_of,
    first_results,
    is_left_to_chance,
    is_parameter,
    long_sums,
    make_edits,
    name_of_copy,
    name_of_sent,
    order_of_addition,
    tensors_of,
    with_replaced,
)
from geutil.gradients.tape.engine import add_in_pairs
from geutil.graph import (
    adjacency,
    creation,
    function_calls,
    op_types,
    runtime,
    state,
    types,
    v1_control_flow,
)
from geutil.graph.types import IdentityMap, MutableIdentityMap, Operation, Tensor
from geutil.graph.walks import closure
from geutil.memory import costs
from geutil.memory.buffers import Simulation
from geutil.memory.costs import tensor_bytes
from geutil.memory.executor import simulate_with_copies
from geutil.memory.kernels import cpu, onednn
from geutil.memory.program import Node, Program
from geutil.memory.read import ITERATIONS, calls_of, equal_constants, read_ops
from geutil.memory.schedule import OrderPlan, negligible_size, plan_order
from geutil.select.queries import make_view
from geutil.select.walks import get_backward_walk_ops
from geutil.transform.transformer import copy_replacing

_SUMMED = "summed"
"""The scope of sums of two gradients."""


def build_recomputation(
    plan: Recomputation, offload: barriers.Offload | None = None
) -> PlainStep:
    """Make all planned edits of a step, with recomputation."""
    # Under XLA, which knows one device, no tensor is offloaded.
    plan = replace(plan, step=applied(plan.step))
    if not plan.segments:
        return plan.step
    if runtime.is_compiled_by_xla(plan.step.graph):
        # XLA fuses sums, and has an order of its own.
        _recompute(plan, barriers.DataDelays(plan))
        return _run_pools_in_time(plan.step)
    if runtime.is_determinism_enabled():
        # Sums and turns would change which ops Grappler joins, and so how it rounds.
        readers = readers_of(plan.step)
        delays = barriers.ControlDelays(_parted(plan), offload)
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
    earlier = types.IdentitySet(offload.sent if offload else ())
    delays = barriers.ControlDelays(plan, offload)
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


def limit_sending(
    step: PlainStep, sent: Iterable[tuple[Tensor, Tensor]], *, when_complete: bool
) -> None:
    """Delay the forward pass until `sent` tensors have arrived."""
    # To be called when all copies are made, which would read the ops' waits. A GPU's
    # ops are enqueued far ahead of those that it runs, and a tensor that is sent is
    # held until its copy has ended. So the op that makes another one waits, or its
    # first reader that can. Nothing waits in a graph that a Session runs: who asks for
    # the ys alone would have all tensors sent. Nor with op determinism, where waiting
    # would change roundings.
    if not types.is_func_graph(step.graph) or runtime.is_determinism_enabled():
        return
    pairs = sorted(sent, key=lambda pair: adjacency.creation_index(pair[0].op))

    def wait(use: state.Use | None = None) -> None:
        # Two may be on the way at once: meanwhile the device computes the ops between.
        for (_, arrived), (t, there) in zip(pairs, pairs[2:], strict=False):
            readers = (r for r in adjacency.consumers(t) if r is not there.op)
            for op in (t.op, *filter(step.edges.forward.__contains__, readers)):
                place = place_to_wait(op)
                if place is not None:
                    add_order_dependency(op, place, [arrived.op])
                    break
        # A graph can be complete more than once.
        pairs.clear()

    if when_complete:
        # The order of the whole step is planned with these waits.
        state.on_completion(step.graph, wait, ahead=True)
    else:
        wait()


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
        with creation.neutral(step.graph), step.graph.name_scope(f"{RECOMPUTED}/"):
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
    plan: Recomputation,
    delays: barriers.Delays,
    offload: barriers.Offload | None = None,
) -> Copies:
    """Copy forward ops, and let the backward pass read the copies."""
    stages = range(len(plan.segments))
    # Made first, so that the copies come after their inputs.
    stand_ins = [delays.copies(stage) for stage in stages]
    copies = Copies(plan)
    if offload is not None and isinstance(delays, barriers.ControlDelays):
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
            copy_replacing(
                make_view(ops), kept, plan.step.graph, RECOMPUTED, "", **options
            )[1]
            for ops in turns
        ]

    def fetch(self, gates: Sequence[Operation], offload: barriers.Offload) -> None:
        """Bring offloaded tensors back when their segment begins."""
        elsewhere: list[Operation] = []
        for stage, segment in enumerate(self._plan.segments):
            for op in segment.ops:
                if op not in segment.fetched:
                    continue
                (tensor,) = op.outputs
                sent = self._sent[op] = barriers.send_once(tensor, offload)
                back = barriers.fetch(tensor, sent, [gates[stage]], offload.device)
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

_JOINED_ALONE = frozenset(("Add", "AddN", "AddV2", "Mul"))
"""Ops that Grappler joins with their reader where that is the only one."""

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
                apart = creation.make_stand_in(t, RECOMPUTED, "apart")
                creation.add_control_edges(later, [apart.op])
            readers = after.get(copied, ())
            # oneDNN computes the gradient of a pool that it reads itself.
            if len(readers) == 1 and "PoolGrad" not in readers[0][0].type:
                apart = creation.make_stand_in(copied, RECOMPUTED, "apart")
                creation.set_new_input(*readers[0], apart)


def without_joined(
    step: PlainStep, awaited: Iterable[Operation]
) -> tuple[Operation, ...]:
    """Replace backward ops that Grappler may join by their backward inputs."""
    backward = frozenset(step.backward)

    def joined_with(op: Operation) -> list[Operation]:
        producers = [t.op for t in op.inputs if t.op in backward]
        is_joined = op.type in _JOINED_ALONE and len(op.outputs[0].consumers()) == 1
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
        if is_left_to_chance(sum_) and sum_ not in backward
        # With plain gradients the backward pass holds its input.
        if any(reader in backward for _, reader in _reads(output, before))
    }
    for (_, sum_), (t, later) in summands.items():
        (total,) = sum_.outputs
        # Grappler may join a sum with a single reader, which a second one would stop.
        readers = before.get(total, ())
        if len(readers) == 1 and readers[0][0].type in _JOINED_ALONE:
            continue
        if total not in added:
            added[total] = creation.make_stand_in(total, RECOMPUTED, "added")
        holder = creation.make_stand_in(t, RECOMPUTED, "held").op
        creation.add_control_edges(holder, [added[total].op])
        creation.add_control_edges(later, [holder])


def _reads(tensor: Tensor, before: Readers) -> Iterator[tuple[Tensor, Operation]]:
    """Yield the reads of a tensor, and of forwards of its buffer, with the reader."""
    waiting = [tensor]
    for t in waiting:
        for reader, index in before.get(t, ()):
            yield t, reader
            if cpu.passes_on(reader.type) and index == 0:
                waiting.append(reader.outputs[0])


ORDERED = "ordered"
"""The scope of ops that make others wait."""

_SUMS = frozenset(("Add", "AddN", "AddV2", "Sub"))
_PRODUCTS = frozenset(("Div", "Mul", "Neg", "RealDiv", "Square"))
_JOINED = _SUMS | _PRODUCTS
_GELU = frozenset(("Erf", "Tanh"))
"""The input of the sum in a GELU besides a constant."""
_REORDERED = frozenset(("Add", "AddV2", "Mul"))
"""Ops of two inputs that Grappler's constant push-down reorders."""
_POOLS = frozenset(("MaxPool", "MaxPoolV2", "MaxPool3D"))
_MONOTONIC = {"Elu", "Erf", "Exp", "Expm1", "Log", "Log1p", "Relu", "Relu6", "Selu"}
_MONOTONIC |= {"Sigmoid", "Softplus", "Softsign", "Sqrt", "Tanh"}
"""Activations that Grappler moves behind a pool of maxima."""
_NEVER_WAIT = frozenset(("AddN", "BiasAddGrad"))
"""Grappler adds up a chain of AddN in one; oneDNN merges the gradient of a bias with
the filter gradient that reads the same."""

_NOTHING_KNOWN: Mapping[str, int] = MappingProxyType({})

Phase: TypeAlias = tuple[Sequence[Operation], Sequence[Operation]]
"""The first ops of a backward pass, and the last of the forward pass before it."""


@dataclass(frozen=True, eq=False)
class OrderedStep:
    """A step with ordered ops."""

    plan: OrderPlan
    # The ops that were added so that others wait.
    waits: tuple[Operation, ...]
    # The bytes held at once, in the order of the plan or in one that the executor has:
    # tensors that are small in all of the step are held to none.
    peak: int
    # The one of these orders that takes most, with the bytes that kernels take beside
    # TensorFlow's allocator.
    fullest: Simulation

    @property
    def resident(self) -> int:
        """The bytes in use at once, those beside the allocator among them."""
        return self.fullest.resident


@runtime.without_collector()
def order_step(
    ops: Sequence[Operation],
    fetched: Iterable[Tensor],
    may_await: Callable[[Operation, Operation], bool] = lambda *_: True,
    phases: Iterable[Phase] = (),
    known: Mapping[str, int] = _NOTHING_KNOWN,
    elsewhere: Collection[str] = (),
) -> OrderedStep:
    """Enforce a planned low-memory order of the ops of a step."""
    # `phases` are ops that begin, in the plan, only after others have run; `known` are
    # places in an order that was planned before, `elsewhere` ops on another device.
    for op in ops:
        if op.type in op_types.LOOPS:
            # Each of 32 iterations at once would hold gradients of all weights.
            function_calls.limit_parallel_iterations(op, ITERATIONS)
    ops = _with_layers_apart(ops, may_await)
    costs.settle_shapes(ops)
    calls, dims = calls_of(ops), costs.known_dims
    program = read_ops(ops, fetched, tensor_bytes, calls, dims=dims).program
    program = program.held_on(
        {i for i, op in enumerate(ops) if op.name not in elsewhere}
    )
    queues = _queues(ops)
    program = program.with_queues([queues.get(op) for op in ops])
    groups = onednn.fused_groups(program)
    places: dict[int, int] = {}

    @cache
    def can_wait(number: int) -> bool:
        first = groups[number][0]
        place = place_to_wait(ops[first])
        if place is not None:
            places[number] = place
        return place is not None

    fused = onednn.with_groups_fused(program, groups)
    number_of = {ops[i]: n for n, group in enumerate(groups) for i in group}
    later = {
        number_of[start]: [number_of[end] for end in ends if end in number_of]
        for starts, ends in phases
        for start in starts
        if start in number_of
    }
    plan = plan_order(
        fused,
        can_wait,
        lambda i, j: may_await(ops[groups[i][0]], ops[groups[j][-1]]),
        later,
        known=_places(known, [[ops[i] for i in group] for group in groups]),
    )
    waits = []
    turns: list[_Turn] = []
    for number, awaited in plan.dependencies.waits:
        first, place = groups[number][0], places[number]
        ends = [i for j in awaited for i in _ends(groups[j], ops)]
        waits.append(add_order_dependency(ops[first], place, [ops[i] for i in ends]))
        turns.append((first, place, ends))
    waits += _keep_constants_out(queues, negligible_size(fused), may_await)
    waits += _keep_pools_in_place(queues, may_await)
    if waits:
        state.forget_order(waits[0].graph)
    place_of = {op: i for i, op in enumerate(ops)}
    instead = equal_constants(ops, fetched).items()
    turned = _with_turns(program, turns).merged(
        {place_of[op]: place_of[same] for op, same in instead}
    )
    # The order of the plan is one of those that the executor may choose.
    runs = [plan.simulation, executed(turned)]
    if elsewhere and program.device.kind == "GPU":
        runs.append(_with_slow_copies(turned, elsewhere))
    peak, fullest = max(r.peak for r in runs), max(runs, key=lambda r: r.resident)
    return OrderedStep(plan, tuple(waits), peak, fullest)


def _with_slow_copies(program: Program, elsewhere: Collection[str]) -> Simulation:
    """Simulate a step on a GPU that waits for each copy to another device, and back."""
    nodes, makers = program.nodes, program.makers
    is_there = [node.name in elsewhere for node in nodes]
    copies = {
        i
        for i, node in enumerate(nodes)
        if any(is_there[makers[t]] is not is_there[i] for t in node.inputs)
    }
    seconds = [float(i in copies) for i in range(len(nodes))]
    return simulate_with_copies(program, copies, seconds)[0]


_Turn: TypeAlias = tuple[int, int, Sequence[int]]
"""A node that waits on one of its inputs, the place of that, and the awaited nodes."""


def _with_turns(program: Program, turns: Iterable[_Turn]) -> Program:
    """Return a program with the nodes by which others wait, as in the graph."""
    nodes, sizes = list(program.nodes), list(program.sizes)
    for i, place, ends in turns:
        inputs = list(nodes[i].inputs)
        turn = Node(
            f"{ORDERED}/turn",
            "PlaceholderWithDefault",
            [inputs[place]],
            [len(sizes)],
            ends,
            aliases=((0, 0),),
            cheap=True,
        )
        sizes.append(sizes[inputs[place]])
        (inputs[place],) = turn.outputs
        nodes[i] = nodes[i].changed(inputs=inputs)
        nodes.append(turn)
    return replace(program, nodes=nodes, sizes=sizes)


def _places(
    known: Mapping[str, int], groups: Iterable[Sequence[Operation]]
) -> dict[int, int]:
    """Return the known places of groups of ops, by the number of the group."""
    places = {}
    for number, group in enumerate(groups):
        of_ops = [known[op.name] for op in group if op.name in known]
        if of_ops:
            places[number] = max(of_ops)
    return places


def add_order_dependency(
    op: Operation, place: int, awaited: Sequence[Operation]
) -> Operation:
    """Make an op wait for others, by an op on one of its inputs, and return that."""
    # Kernels bear no control edges: one onto a convolution keeps oneDNN's layout pass
    # from merging it, or aborts the process.
    stand_in = creation.make_stand_in(op.inputs[place], ORDERED, "turn")
    creation.add_control_edges(stand_in.op, awaited)
    creation.set_new_input(op, place, stand_in)
    return stand_in.op


def _with_layers_apart(
    ops: Sequence[Operation], may_await: Callable[[Operation, Operation], bool]
) -> list[Operation]:
    """Let each layer's gradients of filter and bias read a tensor of their own."""
    # Where branches are summed, several layers have the same gradient, and oneDNN
    # merges the gradient of a bias with that of any of their filters, also of one that
    # has to wait for it. Returns the ops, with the tensors that are read instead of
    # gradients.
    filters: MutableIdentityMap[list[Operation]] = MutableIdentityMap()
    biases: MutableIdentityMap[list[Operation]] = MutableIdentityMap()
    for op in ops:
        is_filter = "BackpropFilter" in op.type
        if is_filter or op.type == "BiasAddGrad":
            gradient = op.inputs[2 if is_filter else 0]
            readers = filters if is_filter else biases
            readers[gradient] = [*readers.get(gradient, ()), op]
    stand_in_of: dict[Operation, Tensor] = {}
    for gradient, members in filters.items():
        # Both are in the order of the backward pass, which is that of the layers.
        layers = zip_longest(members[1:], biases.get(gradient, [])[1:])
        for layer in layers if gradient in biases and len(members) > 1 else ():
            parts = [op for op in layer if op and may_await(op, gradient.op)]
            if parts:
                stand_in = creation.make_stand_in(gradient, ORDERED, "layer")
                stand_in_of.update(dict.fromkeys(parts, stand_in))
    apart = []
    for op in ops:
        if op in stand_in_of:
            place = 0 if op.type == "BiasAddGrad" else 2
            creation.set_new_input(op, place, stand_in_of[op])
            apart.append(stand_in_of[op].op)
        apart.append(op)
    return list(dict.fromkeys(apart))


def _keep_constants_out(
    running: Collection[Operation],
    small: int,
    may_await: Callable[[Operation, Operation], bool],
) -> list[Operation]:
    """Keep Grappler from pushing constants into large products and sums."""
    # Of `(x * y) * c` and `(c * x) * y` it makes `x * (c * y)`, and of sums alike
    # (TensorFlow 2.21). Then `c * y` runs as soon as y is there, however late x comes,
    # or takes a buffer of its own where `x * y` had that of y; and an op that waits for
    # `x * y` waits for a constant. Returns the ops put between a product and its
    # reader.
    apart = []
    for op in running:
        if op.type not in _REORDERED:
            continue
        output = op.outputs[0]
        readers = [r for r in output.consumers() if r in running]
        if (
            len(readers) == 1
            and readers[0].type in _REORDERED
            and any(map(_is_constant, readers[0].inputs))
            is not any(map(_is_constant, op.inputs))
            and _has_values(output)
            and tensor_bytes(output) > small
            and may_await(readers[0], op)
        ):
            (place,) = adjacency.input_indices(readers[0], output)
            apart.append(add_order_dependency(readers[0], place, ()))
    return apart


def _keep_pools_in_place(
    running: Collection[Operation],
    may_await: Callable[[Operation, Operation], bool],
) -> list[Operation]:
    """Keep Grappler from pooling before an activation whose pool has a gradient."""
    # Of `max_pool(relu(x))` it makes `relu(max_pool(x))` if nothing else reads the
    # activation, as where the backward pass reads one that ran again (TensorFlow 2.21).
    # Then the pool's gradient reads no pool, and oneDNN cannot compute it: the kernel
    # that does searches for each maximum again, and holds eight bytes for each.
    # Returns the ops put between an activation and its pool.
    apart = []
    for op in running:
        if op.type not in _POOLS or op.inputs[0].op.type not in _MONOTONIC:
            continue
        producer = op.inputs[0].op
        alone = [r for r in producer.outputs[0].consumers() if r in running] == [op]
        has_gradient = any("PoolGrad" in r.type for r in op.outputs[0].consumers())
        if alone and has_gradient and may_await(op, producer):
            apart.append(add_order_dependency(op, 0, ()))
    return apart


def _is_constant(tensor: Tensor) -> bool:
    return adjacency.source_behind(tensor, ("Cast", "Identity")).op.type == "Const"


def _queues(ops: Sequence[Operation]) -> Mapping[Operation, str]:
    """Return the ops that can wait for each other, each with its device."""
    # Towers would wait for each other by ops that read from several devices.
    return {
        op: op.device
        for op in v1_control_flow.unconditional(ops)
        if len({op.device, *(t.op.device for t in op.inputs)} - {""}) < 2
    }


def _ends(group: Sequence[int], ops: Sequence[Operation]) -> list[int]:
    """Return the ops of a group with which all of it has run."""
    last = group[-1]
    return list(group) if ops[last].type == "BiasAddGrad" else [last]


def place_to_wait(op: Operation) -> int | None:
    """Return the input of an op on which it can wait, or None."""
    # Grappler joins sums, and products with constants or beside such; an op between
    # them would change how they round. So they wait on inputs that are neither.
    if op.type in PLACES_TO_WAIT:
        return PLACES_TO_WAIT[op.type]
    if op.type in _NEVER_WAIT:
        return None
    places = [i for i, t in enumerate(op.inputs) if _has_values(t)]
    if op.type in _JOINED:
        places = [i for i in places if not _is_joined(op, i)]
    # The first, of parameters only if there is nothing else.
    return min(
        places,
        key=lambda i: is_parameter(op.inputs[i].op),
        default=None,
    )


def _is_joined(op: Operation, place: int) -> bool:
    """Return whether Grappler may join a sum or product with the op of its input."""
    producer = op.inputs[place].op
    if producer.type == "Sigmoid":
        # A swish: the product of a tensor with its own sigmoid.
        return any(_value(t) is _value(producer.inputs[0]) for t in op.inputs)
    if producer.type in _GELU:
        # Another reader of the tangent, its gradient say, keeps Grappler from it.
        return op.type in _SUMS and len(producer.outputs[0].consumers()) == 1
    return producer.type == "Const" or producer.type in _JOINED


def _value(tensor: Tensor) -> Tensor:
    """Return the tensor that a chain of identities forwards."""
    return adjacency.source_behind(tensor, ("Identity", "PlaceholderWithDefault"))


def _has_values(tensor: Tensor) -> bool:
    """Return whether a tensor can be forwarded, and is not a shape to be known."""
    numbers = tensor.dtype.is_floating or tensor.dtype.is_complex
    # Lists, of which zeros are made that are as large.
    lists = tensor.dtype == tf.variant
    return (numbers or lists) and not types.is_reference(tensor)
