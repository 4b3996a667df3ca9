"""Barriers that make a segment wait for its turn: control edges, or data under XLA.

XLA leaves control edges out of account, merges an op with a copy that reads the same,
and runs an op as soon as its inputs are there. What it must obey is data. So a barrier
makes a number from all that shall come first, and stand-ins that depend on the number,
though it never changes their value.

What a stand-in is made with decides what is held in memory until then. Measured on CPU
with TensorFlow 2.21: ResNet50, batch 16, 224 px, 16 block outputs kept, the allocator's
peak in a step, where plain gradients need 1451 MB.

| what makes the recomputation wait | MB |
| --- | --- |
| `where`, for the kept tensors that the copies read | 1211 |
| `where`, for all that the copies and the gradient ops beside them read | 858 |
| a loop that never turns for what is computed, `where` for variables | 794 |

Gradient ops that read a kept tensor as it is make XLA transpose it right away, in the
forward pass, and hold both. A `where` is fused with the ops that compute its input, and
so it is their inputs that are held: two convolutions' outputs instead of the sum.

Nor does XLA wait with what it makes of nothing. It expands the gradient of a maximum
pooling into numbered positions, four tensors as large as the padded input and one of
zeros, and since they read nothing it makes them when the step begins: 266 MB of those
794. Inside a loop that turns once they are made when the loop is run: 537 MB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.gradients.offloading import Offload, bring_back
from geutil.gradients.segments import (
    PLACES_TO_WAIT,
    SCOPE,
    Recomputation,
    Segment,
    is_parameter,
    source_of,
)
from geutil.graph import creation, types
from geutil.graph.types import Graph, IdentityMap, IdentitySet, Operation, Tensor
from geutil.memory.times import PRODUCTS

_GIVEN = frozenset(("Const", "Placeholder", "ReadVariableOp", "Variable", "VariableV2"))
_PASSING_ON = frozenset(("Identity", "StopGradient"))
_GRADIENT = "GeutilDataBarrier"
_OF_POOLS = frozenset(("MaxPoolGrad", "MaxPoolGradV2", "MaxPool3DGrad"))


def data_barrier(tensors: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor]:
    """Return stand-ins for `tensors` that XLA cannot compute before `after`.

    A stand-in has the value of its tensor, bit for bit, and passes its gradient on.
    What reads it is neither run before all of `after` is computed nor merged with what
    reads the tensor itself. Infinities and NaNs in `after` do not matter.

    A tensor that is computed goes through a loop that never turns, together with the
    others. XLA does not fuse a loop, so that the tensor itself is held, and gives its
    results the memory of what goes in, so that nothing is copied: unless something that
    is not computed before the loop reads the tensor as well. So where several barriers
    hold back the same tensor, let each read the stand-in of the one before.

    An input of the step (variable, placeholder, constant) is chosen by `where`, since
    XLA may not write to its memory: a loop would have it copied when the step begins.

    Args:
        tensors: what to hold back; of any type that XLA has: numbers and truth values,
            of any shape, which need not be known.
        after: what must be computed before; of any such type. With none, the tensors
            are returned as they are.

    Returns:
        A stand-in for each of `tensors`, in the same order.

    Raises:
        ArgumentTypeError: something is no tensor of a graph, or has a type that cannot
            depend on data: a resource, variant, string or quantized number.

    Cost: a dozen ops, and three for each tensor and each of `after`. When the step
    runs, each of `after` is read once, and each of `tensors` that is an input.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients.barriers import data_barrier
        >>> @tf.function(jit_compile=True)
        ... def step(x):
        ...     kept = tf.exp(x)
        ...     gradient = tf.cos(x)
        ...     (later,) = data_barrier([kept], after=[gradient])
        ...     return gradient, tf.sin(later)
        >>> [float(t) for t in step(tf.constant(0.0))]
        [1.0, 0.8414...]
    """
    for tensor in (*tensors, *after):
        _require_data(tensor)
    if not tensors or not after:
        return list(tensors)
    never = _never(after)
    are_inputs = [is_given(t.op) for t in tensors]
    looped = _loop(
        never, [t for t, g in zip(tensors, are_inputs, strict=True) if not g]
    )
    stand_ins = [
        _choose(never, t) if g else next(looped)
        for t, g in zip(tensors, are_inputs, strict=True)
    ]
    return _passing_gradients_on(tensors, stand_ins)


def is_expanded(op: Operation) -> bool:
    """Tell whether XLA makes large tensors for an op that read nothing."""
    return op.type in _OF_POOLS


def run_in_time(op: Operation) -> Tensor:
    """Return a stand-in for what an op yields, made when its inputs are there.

    The op is run by a loop that turns once, since what XLA makes for it of nothing is
    made inside the loop then. The first input becomes the result, so that there is no
    other buffer. Values are the same, bit for bit, and gradients pass to the op itself.

    Args:
        op: the gradient of a maximum pooling (see `is_expanded`).

    Cost: some 15 ops. When the step runs, the last input is read once more.
    """
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
    """Tell whether a tensor can go through a barrier: it is numbers or truth values."""
    dtype = tensor.dtype
    return bool(
        dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex
    )


def _require_data(tensor: Tensor) -> None:
    types.require_tensor(tensor)
    dtype = tensor.dtype
    if can_wait(tensor):
        return
    raise ArgumentTypeError(
        f"'{tensor.name}' ({dtype.name}) cannot go through a barrier of data, nor can "
        "anything wait for it: XLA has numbers and truth values only; leave it out, "
        "and pass what is read from it"
    )


def is_given(op: Operation) -> bool:
    """Tell whether an op yields what is there when a step begins."""
    while op.type in _PASSING_ON:
        op = op.inputs[0].op
    return op.type in _GIVEN


def _never(after: Iterable[Tensor]) -> Tensor:
    """Return a truth value that depends on all of `after`, and is false.

    XLA simplifies what it can prove. It does not know that n (n + 1) is even, which
    also holds where the product overflows.
    """
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
    """Yield what a loop that never turns makes of the tensors: the tensors."""
    if not tensors:
        return

    def turns(turn: Tensor, *_: Tensor) -> Tensor:
        return turn

    def clear(_: Tensor, *values: Tensor) -> list[Tensor]:
        return [tf.constant(False), *(tf.zeros_like(t) for t in values)]

    _, *results = tf.while_loop(turns, clear, [never, *tensors])
    yield from results


def _choose(never: Tensor, tensor: Tensor) -> Tensor:
    return tf.where(never, tf.zeros_like(tensor), tensor)


def _passing_gradients_on(
    tensors: Sequence[Tensor], stand_ins: Sequence[Tensor]
) -> list[Tensor]:
    """Return `stand_ins`, with the gradient of a stand-in that of the tensor."""
    graph = stand_ins[0].graph
    with graph.gradient_override_map({"IdentityN": _GRADIENT}):
        both = tf.identity_n([*tensors, *stand_ins])
    return list(both[len(tensors) :])


@tf.RegisterGradient(_GRADIENT)
def _barrier_gradient(op: Operation, *gradients: Tensor) -> list[Tensor | None]:
    """Give the gradients of the stand-ins to the tensors, none to what made them."""
    count = len(gradients) // 2
    return [*gradients[count:], *[None] * count]


_SHAPE_ELEMENTS = 64
"""More than shapes, axes and paddings have."""


class Delays(Protocol):
    """Gives stand-ins for kept tensors that are there when the time has come."""

    def copies(self, stage: int) -> IdentityMap[Tensor]:
        """Return what the copies of a segment read instead of kept tensors."""

    def direct(self, stage: int) -> IdentityMap[Tensor]:
        """Return what backward ops of the same time read instead of kept tensors."""

    def after(
        self, stage: int, earlier: Sequence[tuple[Tensor, Tensor]]
    ) -> IdentityMap[Tensor]:
        """Return what the copies of a segment read of what ran again before.

        Args:
            stage: the segment.
            earlier: kept tensors, each with its copy in an earlier segment.
        """


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
        stand_ins: types.MutableIdentityMap[Tensor] = types.MutableIdentityMap()
        replacements, segment = self._moved[stage], self._segments[stage]
        for t in _delayed(segment):
            if t not in segment.sources:
                stand_ins[t] = _wait(t, replacements.get(t, t), self.gates[stage])
        return stand_ins

    def direct(self, stage: int) -> IdentityMap[Tensor]:
        """Return what backward ops of the same time read instead of kept tensors.

        Only what was offloaded: otherwise they wait for what they read besides.
        """
        return self._moved[stage]

    def after(
        self, stage: int, earlier: Sequence[tuple[Tensor, Tensor]]
    ) -> IdentityMap[Tensor]:
        """Return what the copies of a segment read of what ran again before."""
        gate = self.gates[stage]
        return IdentityMap((t, _wait(t, copy, gate)) for t, copy in earlier)


def _gate(graph: Graph, awaited: Sequence[Operation]) -> Operation:
    """Return the op behind which a segment begins."""
    # A control edge from another machine is a transfer.
    device = next((op.device for op in awaited if op.device), "")
    with creation.neutral(graph), graph.name_scope(f"{SCOPE}/"), graph.device(device):
        gate = tf.raw_ops.NoOp(name="gate")
    creation.add_control_edges(gate, awaited)
    return gate


def _wait(tensor: Tensor, source: Tensor, gate: Operation) -> Tensor:
    stand_in = creation.make_stand_in(tensor, SCOPE, "barrier", reads=source)
    creation.add_control_edges(stand_in.op, [gate])
    return stand_in


def _delayed(segment: Segment) -> IdentitySet:
    """Return the kept tensors that need a stand-in, so that each op has to wait.

    Variables and constants are read directly where something else delays the op.
    Constant integers come last: they may be a shape, which shape functions need.
    """
    kept_tensors = IdentitySet(segment.kept)
    delayed = IdentitySet(t for t in kept_tensors if not is_parameter(t.op))
    for op in segment.ops:
        if all(t in kept_tensors and t not in delayed for t in op.inputs):
            numbers = [t for t in op.inputs if not _is_constant_integer(t)]
            delayed.add([*numbers, op.inputs[PLACES_TO_WAIT.get(op.type, 0)]][0])
    return delayed


def _is_constant_integer(tensor: Tensor) -> bool:
    return tensor.dtype.is_integer and source_of(tensor.op).type == "Const"


class DataDelays:
    """Stand-ins that depend on data, since XLA leaves control edges out of account.

    XLA runs an op as soon as its inputs are there, also one of the backward pass that
    reads a kept tensor (to transpose it for a weight gradient, say). So whatever the
    backward pass does at the time of a segment reads stand-ins as well.
    """

    def __init__(self, plan: Recomputation) -> None:
        self._plan = plan
        self._newest: types.MutableIdentityMap[Tensor] = types.MutableIdentityMap()
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
        tensors = _held_back(segment)
        # One barrier after the other over the same tensor, so that XLA needs no copy.
        newest = [self._newest.get(t, t) for t in tensors]
        stand_ins = list(zip(tensors, self._barrier(segment, newest), strict=True))
        self._newest.update((t, s) for t, s in stand_ins if not is_given(t.op))
        return IdentityMap(stand_ins)

    def _barrier(self, segment: Segment, tensors: Sequence[Tensor]) -> list[Tensor]:
        after = [t for op in segment.awaited for t in op.outputs if can_wait(t)]
        graph = self._plan.step.graph
        with creation.neutral(graph), graph.name_scope(f"{SCOPE}/"):
            return data_barrier(tensors, after)

    def after(
        self, stage: int, earlier: Sequence[tuple[Tensor, Tensor]]
    ) -> IdentityMap[Tensor]:
        """Return what the copies of a segment read of what ran again before."""
        waiting = [(t, copy) for t, copy in earlier if _may_be_held_back(t)]
        segment = self._plan.segments[stage]
        stand_ins = self._barrier(segment, [copy for _, copy in waiting])
        delayed = zip((t for t, _ in waiting), stand_ins, strict=True)
        return IdentityMap((*earlier, *delayed))


def _held_back(segment: Segment) -> list[Tensor]:
    """Return the tensors that must not be read before the time of a segment.

    Matrix products read variables as they are. For convolutions XLA transposes them
    first, and it would do so when the step begins.
    """
    readers = [(op, t) for op in segment.ops for t in op.inputs]
    readers += [(read.op, read.tensor) for read in segment.direct]
    kept_tensors = IdentitySet(
        (*segment.originals, *(read.tensor for read in segment.direct))
    )
    read_tensors = IdentitySet(
        t
        for op, t in readers
        if t in kept_tensors and not (is_parameter(t.op) and op.type in PRODUCTS)
    )
    return [t for t in read_tensors if t.op.type != "Const" and _may_be_held_back(t)]


def _may_be_held_back(tensor: Tensor) -> bool:
    """Tell whether a barrier may hold back a tensor, and XLA still compile its readers.

    Shapes, axes, paddings and the ends of ranges must be known when XLA compiles, and
    would not be behind a barrier. They are few integers, or a number of any type.
    """
    if not can_wait(tensor) or tensor.shape.rank == 0:
        return False
    elements = tensor.shape.num_elements()
    if elements is None:
        # The axes that a gradient is summed over are so many, for example.
        few = tensor.shape.rank in (None, 1)
    else:
        few = elements <= _SHAPE_ELEMENTS
    return not (few and tensor.dtype.is_integer)
