"""Barriers that make a segment wait for its turn: control edges, or data under XLA.

XLA ignores control edges, merges an op with a copy that reads the same tensors, and
runs an op as soon as its inputs are there: it obeys data alone. So a barrier computes a
number from everything that must come first, and stand-ins that depend on it, though it
never changes their value.
"""

# How a stand-in is made decides which tensors are held until then. Measured on CPU with
# TensorFlow 2.21: ResNet50, batch 16, 224 px, 16 block outputs kept, the allocator's
# peak in a step; plain gradients need 1451 MB. With `where` for the kept tensors that
# copies read, 1211 MB; with `where` for those that gradient ops read, too, 858; with a
# loop that never turns for computed tensors, and `where` for variables, 794. Gradient
# ops that read a kept tensor itself make XLA transpose it right away, in the forward
# pass, and hold both. A `where` is fused with the ops that compute its input, so their
# inputs are held: two convolutions' outputs instead of the sum.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError, PlanError
from geutil.gradients.step import (
    PLACES_TO_WAIT,
    RECOMPUTED,
    Recomputation,
    Segment,
    forwarded_op,
    is_parameter,
)
from geutil.graph import adjacency, creation, types, v1_control_flow
from geutil.graph.types import IdentityMap, MutableIdentityMap, Operation, Tensor
from geutil.memory.costs import PRODUCTS

# Where offloaded tensors wait if nobody says otherwise.
HOST = "/device:CPU:0"
_AWAY = "offloaded"


@dataclass(frozen=True, eq=False)
class Offload:
    """Offloading: the kept tensors that wait on another device, and its rules."""

    takes: Callable[[Tensor], bool]
    device: str
    # How many segments ahead of its first use a tensor starts to come back.
    prefetch: int
    # The tensors that have gone, each with that on the device. TensorFlow builds the
    # gradients of a function again and again until they read nothing new.
    sent: MutableIdentityMap[Tensor] = field(default_factory=MutableIdentityMap)
    # True while TensorFlow differentiates the graph: it has counted the readers of
    # forward ops, and waits for a gradient from each, so these must not change yet.
    is_counted: bool = False


def with_returns(plan: Recomputation, offload: Offload | None) -> Recomputation:
    """Return a recomputation whose kept tensors wait on another device."""
    # Tensors that no segment needs stay: they are read before the first segment, and
    # would be back at once.
    if offload is None:
        return plan
    stages = enumerate(plan.segments)
    returns = [
        IdentityMap(
            (t, max(stage - offload.prefetch, -1))
            for t in types.IdentitySet(segment.needed)
            if not is_parameter(t.op)
            # A tensor in a loop or branch of version 1 cannot be read outside.
            and not v1_control_flow.is_inside(t.op)
            and offload.takes(t)
        )
        for stage, segment in stages
    ]
    pairs = zip(plan.segments, returns, strict=True)
    return replace(plan, segments=tuple(replace(s, returned=r) for s, r in pairs))


def bring_back(
    plan: Recomputation, gates: Sequence[Operation], offload: Offload | None
) -> list[IdentityMap[Tensor]]:
    """Send tensors away once made; map them to their returns for each segment."""
    returned: list[MutableIdentityMap[Tensor]] = [MutableIdentityMap() for _ in gates]
    if offload is None:
        return list(returned)
    step, away = plan.step, offload.sent
    for t in plan.offloaded:
        send_once(t, offload)
    for stage, segment in enumerate(plan.segments):
        for t, begin in segment.returned.items():
            # Before any stage, a return begins as the backward pass does.
            awaited = [gates[begin]] if begin >= 0 else list(step.seeds)
            returned[stage][t] = fetch(t, away[t], awaited, offload.device)
    return list(returned)


def send_once(tensor: Tensor, offload: Offload) -> Tensor:
    """Return a tensor on the other device, where it goes as soon as it is computed."""
    if tensor not in offload.sent:
        with _away(tensor, offload.device):
            offload.sent[tensor] = tf.identity(tensor, f"{tensor.op.name}/away")
    return offload.sent[tensor]


def fetch(
    tensor: Tensor, sent: Tensor, awaited: Sequence[Operation], device: str
) -> Tensor:
    """Return a sent tensor that comes back from a device once some ops have run."""
    # TensorFlow moves a tensor to the device of its reader as soon as it is there,
    # whatever the reader waits for: the ops that send and receive it bear no control
    # edges. So an op on the device where the tensor waits holds it back.
    with _away(tensor, device):
        held_back = tf.raw_ops.PlaceholderWithDefault(
            input=sent, shape=tensor.shape, name=f"{tensor.op.name}/wait"
        )
    creation.add_control_edges(held_back.op, awaited)
    with _away(tensor, tensor.op.device):
        return tf.identity(held_back, f"{tensor.op.name}/back")


@contextmanager
def _away(tensor: Tensor, device: str) -> Iterator[None]:
    """Make ops on a device, in the scope of offloaded tensors."""
    graph = tensor.graph
    with creation.neutral(graph), graph.name_scope(f"{_AWAY}/"), graph.device(device):
        yield


def measured_bandwidth(source: str, destination: str) -> float:
    """Return the measured bytes per second between two devices, each way."""

    def measure() -> float:
        numbers = np.zeros(1 << 24, np.float32)
        with tf.device(source):
            sent = tf.identity(tf.constant(numbers))
        seconds = []
        for _ in range(4):
            began = perf_counter()
            with tf.device(destination):
                there = tf.identity(sent)
            with tf.device(source):
                back = tf.identity(there)
                # Reading one element waits for all that comes before.
                back[0].numpy()
            seconds.append(perf_counter() - began)
        return 2 * numbers.nbytes / min(seconds[1:])

    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise PlanError(
            "how fast transfers are can be measured only where TensorFlow runs "
            "eagerly: pass bandwidth="
        )
    # A thread of its own is in no graph.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(measure).result()


_GIVEN = frozenset(("Const", "Placeholder", "ReadVariableOp", "Variable", "VariableV2"))
_PASSING_ON = frozenset(("Identity", "StopGradient"))
_GRADIENT = "GeutilDataBarrier"
_OF_POOLS = frozenset(("MaxPoolGrad", "MaxPoolGradV2", "MaxPool3DGrad"))


def data_barrier(tensors: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor]:
    """Return stand-ins of the same values that XLA cannot compute before `after`."""
    # A stand-in passes its gradient on. Its readers neither run before all of `after`
    # nor merge with those of the tensor itself. Infinities and NaNs in `after` do not
    # matter.
    # A computed tensor goes through a loop that never turns. XLA does not fuse a loop,
    # so that the tensor itself is held, and gives its results the memory of its inputs,
    # so that nothing is copied, unless an op that can run after the loop reads the
    # tensor, too. So where several barriers hold back the same tensor, let each read
    # the stand-in of the one before. XLA may not write to the memory of an input of the
    # step, and a loop would have it copied: `where` is for those.
    for tensor in (*tensors, *after):
        _require_data(tensor)
    if not tensors or not after:
        return list(tensors)
    never = _never(after)
    looped = _loop(never, [t for t in tensors if not is_given(t)])
    stand_ins = [
        tf.where(never, tf.zeros_like(t), t) if is_given(t) else next(looped)
        for t in tensors
    ]
    return _passing_gradients_on(tensors, stand_ins)


def is_expanded(op: Operation) -> bool:
    """Return whether XLA makes large tensors for an op that read nothing."""
    return op.type in _OF_POOLS


def run_in_time(op: Operation) -> Tensor:
    """Return a stand-in for the gradient of a maximum pooling, run when it is due."""
    # XLA expands this gradient into numbered positions, four tensors as large as the
    # padded input and one of zeros, and makes them when the step begins, since they
    # read nothing: 266 MB of the 794 above. Inside a loop that turns once they are made
    # when the loop runs: 537 MB. The first input becomes the result, so there is no
    # other buffer.
    run = getattr(tf.raw_ops, op.type)
    names = [argument.name for argument in op.op_def.input_arg]
    attributes = {
        attribute.name: op.get_attr(attribute.name)
        for attribute in op.op_def.attr
        if attribute.type != "type"
    }
    first, *others = op.inputs

    def turns(done: Tensor, _: Tensor) -> Tensor:
        return tf.logical_not(done)

    def turn(_: Tensor, first_input: Tensor) -> list[Tensor]:
        read = dict(zip(names, [first_input, *others], strict=True))
        return [tf.constant(True), run(**read, **attributes)]

    _, result = tf.while_loop(turns, turn, [_never(op.inputs[2:3]), first])
    (stand_in,) = _passing_gradients_on(op.outputs, [result])
    return stand_in


def can_wait(tensor: Tensor) -> bool:
    """Return whether a tensor can pass a barrier: it has numbers or truth values."""
    kind = tensor.dtype
    return kind.is_floating or kind.is_integer or kind.is_bool or kind.is_complex


def _require_data(tensor: Tensor) -> None:
    types.require_tensor(tensor)
    if not can_wait(tensor):
        raise ArgumentTypeError(
            f"'{tensor.name}' ({tensor.dtype.name}) cannot go through a barrier of "
            "data, nor can anything wait for it: XLA has numbers and truth values "
            "only; leave it out, and pass what is read from it"
        )


def is_given(tensor: Tensor) -> bool:
    """Return whether a tensor exists when a step begins."""
    return adjacency.source_behind(tensor, _PASSING_ON).op.type in _GIVEN


def _never(after: Iterable[Tensor]) -> Tensor:
    """Return a truth value that depends on all of `after`, and is false."""
    # XLA simplifies what it can prove. It does not know that n (n + 1) is even, which
    # also holds where the product overflows.
    number = tf.reduce_max(tf.stack([_number(t) for t in after]))
    return tf.equal(tf.bitwise.bitwise_and(number * (number + 1), 1), 1)


def _number(tensor: Tensor) -> Tensor:
    """Return a whole number that depends on every element of a tensor."""
    if tensor.dtype.is_complex:
        tensor = tf.math.real(tensor)
    if tensor.dtype.is_floating:
        # The bits of a NaN are a number like any other.
        return tf.bitcast(tf.reduce_max(tf.cast(tensor, tf.float32)), tf.uint32)
    return tf.reduce_max(tf.cast(tensor, tf.uint32))


def _loop(never: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors, as results of a loop without iterations."""
    if not tensors:
        return

    def turns(turn: Tensor, *_: Tensor) -> Tensor:
        return turn

    def clear(_: Tensor, *values: Tensor) -> list[Tensor]:
        return [tf.constant(False), *(tf.zeros_like(t) for t in values)]

    _, *results = tf.while_loop(turns, clear, [never, *tensors])
    yield from results


def _passing_gradients_on(
    tensors: Sequence[Tensor], stand_ins: Sequence[Tensor]
) -> list[Tensor]:
    """Return `stand_ins`, whose gradients pass on to the tensors."""
    graph = stand_ins[0].graph
    with graph.gradient_override_map({"IdentityN": _GRADIENT}):
        both = tf.identity_n([*tensors, *stand_ins])
    return list(both[len(tensors) :])


@tf.RegisterGradient(_GRADIENT)
def _barrier_gradient(op: Operation, *gradients: Tensor) -> list[Tensor | None]:
    """Pass the gradients of the stand-ins to the tensors, none to `after`."""
    count = len(gradients) // 2
    return [*gradients[count:], *[None] * count]


class ControlDelays:
    """Stand-ins that wait by control edges, which TensorFlow's executor obeys."""

    # The order hangs on these nodes, never on kernels: a control edge onto a
    # convolution keeps oneDNN's layout pass from merging it, or aborts the process.
    # They are of a type that no optimizer of TensorFlow removes. A gate runs before
    # each segment.

    def __init__(self, plan: Recomputation, offload: Offload | None) -> None:
        self._graph = plan.step.graph
        self._segments = plan.segments
        self.gates = [_gate(self._graph, s.awaited) for s in plan.segments]
        self._moved = bring_back(plan, self.gates, offload)
        waits = [back.op.inputs[0].op for m in self._moved for back in m.values()]
        # The names of ops whose results are on another device.
        self.elsewhere = frozenset(
            op.name for wait in waits for op in (wait, wait.inputs[0].op)
        )

    def copies(self, stage: int) -> IdentityMap[Tensor]:
        """Return a waiting stand-in for each tensor that no other segment yields."""
        back, segment = self._moved[stage], self._segments[stage]
        delayed = [t for t in _delayed(segment) if t not in segment.sources]
        return self.after(stage, [(t, back.get(t, t)) for t in delayed])

    def direct(self, stage: int) -> IdentityMap[Tensor]:
        """Return returned tensors; readers of other tensors wait already."""
        return self._moved[stage]

    def after(
        self, stage: int, earlier: Sequence[tuple[Tensor, Tensor]]
    ) -> IdentityMap[Tensor]:
        """Return stand-ins for tensors, each with its source, behind a gate."""
        stand_ins = MutableIdentityMap[Tensor]()
        for t, source in earlier:
            waiting = creation.make_stand_in(t, RECOMPUTED, "barrier", reads=source)
            creation.add_control_edges(waiting.op, [self.gates[stage]])
            stand_ins[t] = waiting
        return stand_ins


def _gate(graph: types.Graph, awaited: Sequence[Operation]) -> Operation:
    """Return the op behind which a segment begins."""
    # A control edge from another machine is a transfer.
    device = next((op.device for op in awaited if op.device), "")
    with (
        creation.neutral(graph),
        graph.name_scope(f"{RECOMPUTED}/"),
        graph.device(device),
    ):
        gate = tf.raw_ops.NoOp(name="gate")
    creation.add_control_edges(gate, awaited)
    return gate


def _delayed(segment: Segment) -> types.IdentitySet:
    """Return the kept tensors that need a stand-in so that each op waits."""
    # Variables and constants are read directly where another input delays the op.
    # Constant integers come last: they may be a shape, which shape functions need.
    kept_tensors = types.IdentitySet(segment.kept)
    delayed = types.IdentitySet(t for t in kept_tensors if not is_parameter(t.op))
    for op in segment.ops:
        if all(t in kept_tensors and t not in delayed for t in op.inputs):
            numbers = [
                t
                for t in op.inputs
                if not (t.dtype.is_integer and forwarded_op(t.op).type == "Const")
            ]
            delayed.add([*numbers, op.inputs[PLACES_TO_WAIT.get(op.type, 0)]][0])
    return delayed


class DataDelays:
    """Stand-ins that depend on data, since XLA ignores control edges."""

    # XLA runs an op as soon as its inputs are there, also one of the backward pass that
    # reads a kept tensor (to transpose it for a weight gradient, say). So all backward
    # ops of the time of a segment read stand-ins as well.

    def __init__(self, plan: Recomputation) -> None:
        self._plan = plan
        self._newest: MutableIdentityMap[Tensor] = MutableIdentityMap()
        self._stand_ins: dict[int, IdentityMap[Tensor]] = {}

    def copies(self, stage: int) -> IdentityMap[Tensor]:
        """Return stand-ins for all that a segment reads, made once."""
        if stage not in self._stand_ins:
            segment = self._plan.segments[stage]
            tensors = _held_back(segment)
            # One barrier after the other over a tensor, so that XLA needs no copy.
            newest = [self._newest.get(t, t) for t in tensors]
            pairs = list(zip(tensors, self._barrier(segment, newest), strict=True))
            self._newest.update((t, s) for t, s in pairs if not is_given(t))
            self._stand_ins[stage] = IdentityMap(pairs)
        return self._stand_ins[stage]

    # Backward ops of the same time: XLA would run them as soon as it can, too.
    direct = copies

    def _barrier(self, segment: Segment, tensors: Sequence[Tensor]) -> list[Tensor]:
        after = [t for op in segment.awaited for t in op.outputs if can_wait(t)]
        graph = self._plan.step.graph
        with creation.neutral(graph), graph.name_scope(f"{RECOMPUTED}/"):
            return data_barrier(tensors, after)

    def after(
        self, stage: int, earlier: Sequence[tuple[Tensor, Tensor]]
    ) -> IdentityMap[Tensor]:
        """Return the copies of segments before, held back where XLA allows it."""
        waiting = [(t, copy) for t, copy in earlier if _may_be_held_back(t)]
        segment = self._plan.segments[stage]
        stand_ins = self._barrier(segment, [copy for _, copy in waiting])
        delayed = zip((t for t, _ in waiting), stand_ins, strict=True)
        return IdentityMap((*earlier, *delayed))


# Give stand-ins for kept tensors that are there when the time has come: `copies` to the
# copies of a segment, `direct` to backward ops of the same time, `after` to copies that
# read others of a segment before.
Delays = ControlDelays | DataDelays


def _held_back(segment: Segment) -> list[Tensor]:
    """Return the tensors that must not be read before the time of a segment."""
    # Matrix products read variables as they are. For convolutions XLA transposes them
    # first, and it would do so when the step begins.
    readers = [(op, t) for op in segment.ops for t in op.inputs]
    readers += [(read.op, read.tensor) for read in segment.direct]
    kept_tensors = types.IdentitySet(segment.needed)
    read_tensors = types.IdentitySet(
        t
        for op, t in readers
        if t in kept_tensors and not (is_parameter(t.op) and op.type in PRODUCTS)
    )
    return [t for t in read_tensors if t.op.type != "Const" and _may_be_held_back(t)]


def _may_be_held_back(tensor: Tensor) -> bool:
    """Return whether XLA still compiles the readers of a tensor behind a barrier."""
    # Shapes, axes, paddings and the ends of ranges must be known when XLA compiles.
    # They are few integers, or a number of any type.
    if not can_wait(tensor) or tensor.shape.rank == 0:
        return False
    elements = tensor.shape.num_elements()
    # Of unknown length are the axes that a gradient is summed over, for example.
    is_vector = tensor.shape.rank in (None, 1)
    few = is_vector if elements is None else elements <= 64
    return not (few and tensor.dtype.is_integer)
