"""The order in which a training step uses memory, enforced by edges.

The executor runs any ready op, in an order that depends on threads, load and addresses.
Here the whole step, updates included, is planned, and its large ops are made to wait
for the ops that the plan has before them (`geutil.memory.schedule`).
"""

# Loops run few iterations at once: each of 32 would hold gradients of all weights of
# its own.

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from types import MappingProxyType
from typing import TypeAlias

import tensorflow as tf

from geutil.gradients import segments
from geutil.gradients.prediction import executed
from geutil.graph import (
    adjacency,
    creation,
    function_calls,
    op_types,
    runtime,
    state,
    v1_control_flow,
)
from geutil.graph.types import MutableIdentityMap, Operation, Tensor, is_reference
from geutil.memory import costs, executor
from geutil.memory.buffers import Simulation
from geutil.memory.costs import tensor_bytes
from geutil.memory.executor import simulate_with_copies
from geutil.memory.program import Node, Program
from geutil.memory.read import ITERATIONS, calls_of, equal_constants, read_ops
from geutil.memory.schedule import OrderPlan, negligible_size, plan_order

SCOPE = "ordered"

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
        """The bytes that are taken at once, those beside the allocator among them."""
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
    groups = executor.fused_groups(program)
    places: dict[int, int] = {}

    @cache
    def can_wait(number: int) -> bool:
        first = groups[number][0]
        place = place_to_wait(ops[first])
        if place is not None:
            places[number] = place
        return place is not None

    fused = executor.with_groups_fused(program, groups)
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
            f"{SCOPE}/turn",
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
    stand_in = creation.make_stand_in(op.inputs[place], SCOPE, "turn")
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
                stand_in = creation.make_stand_in(gradient, SCOPE, "layer")
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
    # that does looks for each maximum anew, and holds eight bytes for each meanwhile.
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
    if op.type in segments.PLACES_TO_WAIT:
        return segments.PLACES_TO_WAIT[op.type]
    if op.type in _NEVER_WAIT:
        return None
    places = [i for i, t in enumerate(op.inputs) if _has_values(t)]
    if op.type in _JOINED:
        places = [i for i in places if not _is_joined(op, i)]
    # The first, of parameters only if there is nothing else.
    return min(
        places,
        key=lambda i: segments.is_parameter(op.inputs[i].op),
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
    return (numbers or lists) and not is_reference(tensor)
