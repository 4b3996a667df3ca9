"""A training step: forward ops, backward ops, and the segments that may run again.

The backward graph is TensorFlow's own, built by one call of its gradients, or that of a
tape. Later edits that save memory only change which tensors that graph reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, Protocol

import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.gradients.tape.engine import TapeEngine, tape_gradients
from geutil.graph import (
    adjacency,
    creation,
    op_types,
    runtime,
    state,
    types,
    v1_control_flow,
)
from geutil.graph.op_types import types_in
from geutil.graph.types import IdentityMap, MutableIdentityMap, Operation, Tensor
from geutil.graph.walks import closure
from geutil.memory.costs import Times, op_times
from geutil.memory.kernels import cpu
from geutil.memory.read import Called, calls_of
from geutil.select.walks import get_backward_walk_ops

RECOMPUTED = "recomputed"
"""The scope of ops that run again."""


class LoopEdit(Protocol):
    """Other bodies for loops: for those of a `GraphDef`, or those themselves."""

    def write(self, graph_def: Any) -> None:
        """Edit the loops in a `GraphDef` of their ops."""

    def apply(self) -> None:
        """Edit the loops themselves."""


@dataclass(frozen=True, eq=False)
class Edits:
    """Planned edits of a graph: all inputs, or all awaited ops, of some ops."""

    inputs: Mapping[Operation, Sequence[Tensor]] = field(default_factory=dict)
    controls: Mapping[Operation, Sequence[Operation]] = field(default_factory=dict)
    loops: Sequence[LoopEdit] = ()


@dataclass(frozen=True, eq=False)
class TensorRead:
    """A backward op, and the forward tensor that plain gradients read at one input."""

    op: Operation
    index: int
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class BackwardEdges:
    """The edges of a backward pass, as plain gradients made it."""

    # In the order of the backward ops.
    reads: tuple[TensorRead, ...]
    # The backward ops that each backward op reads or waits for.
    producers: dict[Operation, tuple[Operation, ...]]
    readers: dict[Operation, list[Operation]]
    # The second op waits for all that the first waits for, although it comes before it.
    tied: tuple[tuple[Operation, Operation], ...]
    # The ops that run once whenever the step is run.
    awaitable: tuple[Operation, ...]
    # The forward ops behind `reads`, each with its place in a topological order. After
    # an edit the order of creation is none.
    forward: dict[Operation, int]


@dataclass(frozen=True, eq=False)
class PlainStep:
    """A training step with plain gradients."""

    graph: types.Graph
    ys: tuple[Tensor, ...]
    # Without variables.
    xs: tuple[Tensor, ...]
    # The results of `tf.gradients`: tensors, `tf.IndexedSlices` or None.
    gradients: tuple[Any, ...]
    # The ops that hand the gradient of each y to the backward pass.
    seeds: tuple[Operation, ...]
    # The ops that some gradient needs and that depend on a seed, by data or control
    # edges, in topological order.
    backward: tuple[Operation, ...]
    # True if all gradients are held until the step ends.
    holds_gradients: bool = False
    # Of each x the handle, if it is a resource variable, and the reference variable
    # that it is or shows.
    handles: tuple[Tensor | None, ...] = ()
    references: tuple[Tensor | None, ...] = ()
    # Forward ops that make the kept forms of larger tensors.
    encoders: tuple[Operation, ...] = ()
    # The creation index of the first op of the step, and those of later ops outside.
    first: int = 0
    gap: range = range(0)
    # The names of copies of ops, by the name that `StepProgram` gives them.
    copied: Mapping[str, str] = field(default_factory=dict)
    # The places of ops in the schedule that the step was built for, by name.
    places: Mapping[str, int] = field(default_factory=dict)
    # The names of ops whose results a schedule has on another device.
    elsewhere: frozenset[str] = frozenset()
    # All that its graph lacks of the step.
    edits: Edits = field(default_factory=Edits)

    @cached_property
    def edges(self) -> BackwardEdges:
        """The edges of the backward pass, to be asked for before the graph changes."""
        return _look_up(self)

    def covers(self, op: Operation) -> bool:
        """Return whether an op is part of the step; results of others are given."""
        index = adjacency.creation_index(op)
        return index >= self.first and index not in self.gap

    def ops(self) -> list[Operation]:
        """Return the ops of the step. Cost: linear in them and their edges."""
        ends = (t.op for t in (*self.ys, *tensors_of(self.gradients)))
        return list(closure(ends, lambda op: filter(self.covers, self.producers(op))))

    def inputs(self, op: Operation) -> Sequence[Tensor]:
        """Return the inputs of an op when all edits are made."""
        return self.edits.inputs.get(op) or op.inputs

    def control_inputs(self, op: Operation) -> Sequence[Operation]:
        """Return the control inputs of an op when all edits are made."""
        return self.edits.controls.get(op) or adjacency.control_inputs(op)

    def producers(self, op: Operation) -> Iterator[Operation]:
        """Yield the ops that one reads or waits for, also along back edges of loops."""
        yield from (t.op for t in self.inputs(op))
        yield from self.control_inputs(op)

    def predecessors(self, op: Operation) -> Iterable[Operation]:
        """Return the ops that must run before one: its producers, no back edges."""
        return self.rewired.get(op) or adjacency.predecessors(op)

    @cached_property
    def rewired(self) -> Mapping[Operation, Sequence[Operation]]:
        """The predecessors of the ops that are going to be edited, in no loop."""
        edited = {**self.edits.inputs, **self.edits.controls}
        return {op: list(self.producers(op)) for op in edited}

    def is_helper(self, op: Operation) -> bool:
        """Return whether a gradient function made an op that the forward pass runs."""
        return adjacency.creation_index(op) > self.start

    def unawaited_helpers(self, ops: Iterable[Operation]) -> list[Operation]:
        """Return those `ops` that a gradient function made and no seed leads to."""
        # Masks, for example. In a graph that a Session runs the forward pass does not
        # wait for them, so their inputs are there until it has ended, except for those
        # that the executor reads at once, such as shapes.
        if types.is_func_graph(self.graph):
            # A function runs all of its ops.
            return []
        forward = get_backward_walk_ops(
            list(self.ys), within_ops_fn=self.covers, control_inputs=True
        )
        # Lists that a loop of the forward pass fills are made by gradient functions.
        # And the forward pass may wait for encoding ops.
        others = {*forward, *self.seeds, *self.backward, *self.encoders}
        return [
            op
            for op in ops
            if self.is_helper(op) and op not in others and op.type not in cpu.CHEAP
        ]

    @cached_property
    def calls(self) -> Mapping[Operation, Called]:
        """The functions that ops of the step run, with their memory and time."""
        return calls_of(self.ops(), self.edits.loops)

    def op_times(self, *, measured: bool = False, in_seconds: bool = False) -> Times:
        """Return the times of the ops of the step; see `times.op_times`."""
        called = {op: call.time for op, call in self.calls.items()}
        return op_times(self.ops(), called, measured=measured, in_seconds=in_seconds)

    @property
    def total_time(self) -> float:
        """The time of the ops of the step."""
        return sum(map(self.op_times(), self.ops()))

    @cached_property
    def start(self) -> int:
        """The creation index from which on gradients were built."""
        return min(map(adjacency.creation_index, self.seeds), default=0)


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
    if types.is_stateful(op):
        # Side effects happen once: random draws, assignments, prints, queues.
        return f"a {op.type} must run only once"
    if any(types.is_reference(t) for t in op.inputs):
        # TensorFlow does not call the assignments of version 1 stateful.
        return "it reads or changes a variable of version 1"
    if op.type in _PRIMITIVE_FLOW or v1_control_flow.is_inside(op):
        return "it belongs to a loop or conditional of version 1"
    if cpu.is_held(forwarded_op(op)):
        return "it is given"
    if runtime.is_determinism_enabled() and is_left_to_chance(op):
        return "the order in which it adds is left to chance"
    return None


def forwarded_op(op: Operation) -> Operation:
    """Return the op whose first output an op forwards; itself if it forwards none."""
    # A read of a version 1 variable is an Identity that forwards the variable's buffer.
    while cpu.passes_on(op.type) and op.type not in _PRIMITIVE_FLOW:
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
    return forwarded_op(op).type in PARAMETERS


def is_left_to_chance(op: Operation) -> bool:
    """Return whether TensorFlow may add an op's inputs in any order."""
    return (
        op.type == "AddN"
        and len(op.inputs) > 2
        and bool(op.outputs[0].dtype.is_floating or op.outputs[0].dtype.is_complex)
        # XLA has an order of its own, always the same.
        and not runtime.is_compiled_by_xla(op.graph)
    )


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
    return f"{RECOMPUTED}/{op.name}:{turn}" if turn else f"{RECOMPUTED}/{op.name}"


def name_of_sent(op: Operation) -> str:
    """Return a program's name of the op that sends a result to another device."""
    return f"{RECOMPUTED}/{op.name}:sent"


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
        return list(types.IdentitySet(t for s in self.segments for t in s.returned))

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


def build_step(
    ys: Any,
    xs: Any,
    grad_ys: Any = None,
    options: Mapping[str, Any] | None = None,
    *,
    holds_gradients: bool = False,
    engine: TapeEngine | None = None,
) -> PlainStep:
    """Build plain gradients by `tf.gradients` with its `options`, or by an engine."""
    # Ops that TensorFlow's gradient functions make but that do not depend on the
    # gradient of a y (shapes, masks) run in the forward pass and count there. Some wait
    # for a gradient without reading it (the cosine in the gradient of a sine, `x -
    # mean` in that of a batch norm): they run in the backward pass, and are part of it.
    targets = require_targets(ys)
    graph = targets[0].graph
    output_gradients = [None] * len(targets) if grad_ys is None else as_list(grad_ys)
    if len(output_gradients) != len(targets):
        raise ArgumentTypeError(
            f"there are {len(targets)} ys and {len(output_gradients)} grad_ys; "
            "pass one for each y"
        )
    sources = [source_of(x) for x in as_list(xs)]
    seeds = [_seed(y, g) for y, g in zip(targets, output_gradients, strict=True)]
    before = state.count_ops(graph)
    arguments = (graph, targets, sources, seeds, options or {})
    if engine is None:
        gradients = runtime.plain_gradients(*arguments)
    else:
        gradients = tape_gradients(*arguments, engine)
    # Slices keep the caller's indices.
    new = (s.values if isinstance(s, tf.IndexedSlices) else s for s in seeds)
    starts = types.unique(t.op for t in new if t is not None)
    tensors = [x for x in sources if types.is_tensor(x)]
    step = PlainStep(
        graph,
        tuple(targets),
        tuple(tensors),
        tuple(gradients),
        tuple(starts),
        (),
        holds_gradients,
        tuple(map(partial(_handle_in, graph), sources, gradients)),
        tuple(map(_reference_of, sources)),
    )
    return replace(step, backward=_backward(step, state.ops_since(graph, before)))


def with_edited_backward(
    step: PlainStep,
    gradients: Iterable[Any],
    encoders: Iterable[Operation],
    edits: Edits | None = None,
) -> PlainStep:
    """Return a step whose backward ops were edited, or are going to be by `edits`."""
    new_ops = [
        op
        for op in step.graph.get_operations()
        if adjacency.creation_index(op) >= step.start and op not in step.seeds
    ]
    edited = replace(
        step,
        gradients=tuple(gradients),
        encoders=(*step.encoders, *encoders),
        edits=edits or step.edits,
    )
    return replace(edited, backward=_backward(edited, new_ops))


def tensors_of(gradients: Iterable[Any]) -> list[Tensor]:
    """Return the tensors of gradients; `IndexedSlices` have up to three."""
    tensors = []
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            parts = (gradient.values, gradient.indices, gradient.dense_shape)
            tensors += [part for part in parts if part is not None]
        elif gradient is not None:
            tensors.append(gradient)
    return tensors


def as_list(value: Any) -> list[Any]:
    """Return a list or tuple as a list, and anything else as a list of one."""
    return list(value) if isinstance(value, list | tuple) else [value]


def require_targets(ys: Any) -> list[Tensor]:
    """Return ys as tensors of a graph, or raise `ArgumentTypeError`."""
    targets = [require_target(y) for y in as_list(ys)]
    if not targets:
        raise ArgumentTypeError("there is nothing to differentiate: ys is empty")
    return targets


def require_target(y: Any) -> Tensor:
    """Return a y as a tensor of a graph, or raise `ArgumentTypeError`."""
    if types.is_tensor(y):
        return y
    try:
        converted = tf.convert_to_tensor(y)
    except (TypeError, ValueError):  # TensorFlow raises one or the other.
        converted = None
    if not types.is_tensor(converted):
        raise ArgumentTypeError(
            "expected a tensor of a graph to differentiate, got "
            f"{types.type_name(y)}; call this in a graph or inside tf.function"
        )
    return converted


def source_of(x: Any) -> Any:
    """Return the x that TensorFlow can differentiate by: a Keras variable holds one."""
    if isinstance(x, tf.Variable | tf.Tensor | tf.IndexedSlices):
        return x
    value = getattr(x, "value", None)
    return value if isinstance(value, tf.Variable) else x


def _handle_in(graph: types.Graph, x: Any, gradient: Any) -> Tensor | None:
    """Return the handle in a graph of a variable that there is a gradient for."""
    handle = getattr(x, "handle", None) if isinstance(x, tf.Variable) else None
    if gradient is None or handle is None:
        return None
    return creation.capture(graph, handle) if types.is_func_graph(graph) else handle


def _reference_of(x: Any) -> Tensor | None:
    """Return the reference variable that is an x, or that it shows."""
    # A resource variable is known by its handle and has no reference.
    if isinstance(x, tf.Variable) and not hasattr(x, "handle"):
        return runtime.variable_handle(x)
    tensor = x if types.is_tensor(x) else None
    while tensor is not None and not types.is_reference(tensor):
        shown = dict(cpu.aliases(tensor.op)).get(tensor.value_index)
        tensor = None if shown is None else tensor.op.inputs[shown]
    return tensor


def _seed(y: Tensor, gradient: Any) -> Any:
    """Return the gradient of `y` as a tensor that nothing in the graph reads yet."""
    with tf.name_scope("gradients/"):
        if gradient is None:
            # TensorFlow has its own error for a y without a real gradient.
            if not y.dtype.is_floating:
                return None
            # Like TensorFlow's own: an AddN that can take over the buffer of an input
            # begins with that one, and no constant's can be taken over.
            return tf.identity(tf.fill(tf.shape(y), tf.ones([], y.dtype)))
        if isinstance(gradient, tf.IndexedSlices):
            values, shape = tf.identity(gradient.values), gradient.dense_shape
            if shape is not None:
                # It may be a list, of which slices cannot tell their shape.
                shape = tf.convert_to_tensor(shape)
            return tf.IndexedSlices(values, gradient.indices, shape)
        return tf.identity(gradient)


def _backward(step: PlainStep, new_ops: Sequence[Operation]) -> tuple[Operation, ...]:
    """Return, in order, new ops that depend on a seed and that a gradient needs."""
    # A gradient function may have edited ops that it made.
    readers: dict[Operation, list[Operation]] = {}
    for op in new_ops:
        for producer in step.producers(op):
            readers.setdefault(producer, []).append(op)
    dependent = closure(step.seeds, lambda op: readers.get(op, ()))
    members = frozenset(op for op in new_ops if op in dependent)
    needed = closure(
        (t.op for t in tensors_of(step.gradients)),
        lambda op: (p for p in step.producers(op) if p in members),
    )
    ops = (op for op in new_ops if op in members and op in needed)
    return tuple(adjacency.topological_sort(ops, step.rewired))


def _look_up(step: PlainStep) -> BackwardEdges:
    readers: dict[Operation, list[Operation]] = {op: [] for op in step.backward}
    inside = frozenset((*readers, *step.seeds))
    reads = []
    producers = {}
    for op in step.backward:
        producers[op] = tuple(p for p in step.predecessors(op) if p in readers)
        for index, t in enumerate(step.inputs(op)):
            if t.op in readers:
                readers[t.op].append(op)
            elif t.op not in inside:
                reads.append(TensorRead(op, index, t))
    # The needs of an iteration are those of the loop.
    tied = [*v1_control_flow.back_edges_among(step.backward), *_merged(step)]
    awaitable = tuple(v1_control_flow.unconditional(step.backward))
    read_ops = types.unique(read.tensor.op for read in reads)
    behind = get_backward_walk_ops(
        read_ops, within_ops_fn=step.covers, control_inputs=True
    )
    forward = {op: i for i, op in enumerate(adjacency.topological_sort(behind))}
    return BackwardEdges(
        tuple(reads), producers, readers, tuple(tied), awaitable, forward
    )


def changed(step: PlainStep, **fields: Any) -> PlainStep:
    """Return the step with other fields, and with the edges known of it so far."""
    other = replace(step, **fields)
    vars(other)["edges"] = step.edges
    return other


def with_replaced(step: PlainStep, replaced: IdentityMap[Tensor]) -> PlainStep:
    """Return the step with the tensors that take the place of others."""
    return changed(step, gradients=tuple(renewed(g, replaced) for g in step.gradients))


def first_results(replaced: Mapping[Operation, Tensor]) -> IdentityMap[Tensor]:
    """Map the first results of replaced ops to those of their replacements."""
    return IdentityMap((op.outputs[0], t) for op, t in replaced.items())


def renewed(gradient: Any, replaced: IdentityMap[Tensor]) -> Any:
    """Return a gradient, or the one that takes its place."""
    if isinstance(gradient, tf.IndexedSlices) and gradient.values in replaced:
        values = replaced[gradient.values]
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    if isinstance(gradient, tf.Tensor):
        return replaced.get(gradient, gradient)
    return gradient


def _merged(step: PlainStep) -> list[tuple[Operation, Operation]]:
    """Return the filter gradients that oneDNN merges with gradients of a bias."""
    # A segment that waits for the first of them and is read by the second would close a
    # cycle (TensorFlow 2.21: "nodes in a cycle").
    filters: dict[int, list[Operation]] = {}
    for op in step.backward:
        for t in step.inputs(op) if "BackpropFilter" in op.type else ():
            filters.setdefault(id(t), []).append(op)
    return [
        (reader, op)
        for op in step.backward
        if op.type == "BiasAddGrad"
        for reader in filters.get(id(step.inputs(op)[0]), ())
    ]


def long_sums(step: PlainStep) -> list[Operation]:
    """Return the sums of more than two gradients that run once in every step."""
    # Products that share a factor are left out: Grappler adds up the other factors.
    return [
        op
        for op in step.edges.awaitable
        if op.type == "AddN"
        and len(op.inputs) > 2
        and op.outputs[0].dtype.is_numeric
        and not _has_common_factor(step, op)
    ]


def _has_common_factor(step: PlainStep, op: Operation) -> bool:
    producers = [t.op for t in step.inputs(op)]
    if any(p.type != "Mul" for p in producers):
        return False
    first, *others = (frozenset(map(id, step.inputs(p))) for p in producers)
    return bool(first.intersection(*others))


def order_of_addition(step: PlainStep, op: Operation) -> list[int]:
    """Return the places of a sum's terms, in the order in which Grappler adds them."""
    # Grappler sorts the terms of `AddN` by name.
    names = [t.name.removesuffix(":0") for t in step.inputs(op)]
    return sorted(range(len(names)), key=names.__getitem__)


def edits_of(
    reads: Mapping[tuple[Operation, int], Tensor], results: Mapping[Operation, Tensor]
) -> Edits:
    """Return the edits of single `reads`, or of all readers of some `results`."""
    inputs: dict[Operation, list[Tensor]] = {}
    controls: dict[Operation, list[Operation]] = {}
    for (op, index), tensor in reads.items():
        inputs.setdefault(op, list(op.inputs))[index] = tensor
    for op, tensor in results.items():
        (old,) = op.outputs
        for reader in adjacency.consumers(old):
            read = inputs.setdefault(reader, list(reader.inputs))
            read[:] = [tensor if t is old else t for t in read]
        for reader in adjacency.control_outputs(op):
            awaited = controls.setdefault(reader, adjacency.control_inputs(reader))
            awaited[:] = [tensor.op if c is op else c for c in awaited]
    return Edits(inputs, controls)


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


# An update of a reference variable of version 1 is done in its buffer, which readers
# share: `Identity` copies nothing. TensorFlow runs an update as soon as its gradient is
# there, and later reads of the backward pass get the new value. So
# `Optimizer.compute_gradients` gates gradients; here each waits for the readers of its
# own variable in the step. So who fetches one such gradient runs these reads, too.
# Reads of another call of `gradients` are not waited for, nor an argument that a
# function returns as it is. Resource variables need none of this.

_CALLING = op_types.LOOPS | op_types.BRANCHINGS | op_types.CALLS


def let_out_when_read(step: PlainStep) -> PlainStep:
    """Make gradients of reference variables wait for all reads of these in a step."""
    pairs = zip(step.gradients, step.references, strict=True)
    updated = [(g, r) for g, r in pairs if not (g is None or r is None)]
    if not updated:
        return step
    ops = adjacency.topological_sort(step.ops())
    needed = frozenset(ops)
    awaitable = frozenset(v1_control_flow.unconditional(ops, exits=True))
    makers = types.unique(t.op for t in tensors_of(step.gradients))
    # Several variables may have one gradient.
    reads: MutableIdentityMap[dict[Operation, None]] = MutableIdentityMap()
    for gradient, reference in updated:
        value = tensors_of([gradient])[0]
        readers = list(_readers(reference, needed))
        found = _behind(readers, needed, awaitable)
        if not awaitable.issuperset(readers):
            # In a loop other values of a turn may still be computed when one leaves it.
            found += [op for op in makers if op in awaitable]
        reads[value] = reads.get(value, {}) | dict.fromkeys(found)

    @cache
    def ends(op: Operation) -> list[Operation]:
        """Return the ops to wait for in the place of one that may call a function."""
        # Once TensorFlow has inlined a function, an op that waits for the call waits
        # for its stateful ops alone; so all results are awaited.
        if op.type not in _CALLING:
            return [op]
        with creation.surroundings_of(op):
            return [tf.identity(t, "read").op for t in op.outputs]

    let_out: MutableIdentityMap[Tensor] = MutableIdentityMap()
    for value, ops_behind in reads.items():
        if value.op not in awaitable:
            continue
        awaited = [end for op in ops_behind if op is not value.op for end in ends(op)]
        with (
            creation.neutral(step.graph),
            step.graph.device(value.op.device),
            step.graph.control_dependencies(awaited),
        ):
            let_out[value] = tf.identity(value, f"{value.op.name}_read")
    return with_replaced(step, let_out)


def _readers(reference: Tensor, needed: Collection[Operation]) -> Iterator[Operation]:
    """Yield the ops that read the buffer of a variable, views of it apart."""
    views = types.IdentitySet([reference])
    waiting = [reference]
    for tensor in waiting:
        for op in filter(needed.__contains__, adjacency.consumers(tensor)):
            shown = _shown(op, tensor)
            waiting += [t for t in shown if t not in views]
            for t in shown:
                views.add(t)
            if not shown or op.type in _CALLING:
                yield op


def _shown(op: Operation, tensor: Tensor) -> list[Tensor]:
    """Return the results of an op that may be the buffer of an input."""
    # A function may return an argument, and a loop one that it does not change.
    if op.type in _CALLING or v1_control_flow.is_loop_structure(op):
        return list(op.outputs)
    return [op.outputs[there] for there, i in cpu.aliases(op) if op.inputs[i] is tensor]


def _behind(
    ops: Iterable[Operation],
    needed: Collection[Operation],
    awaitable: Collection[Operation],
) -> list[Operation]:
    """Return the first ops behind others that run once and can be awaited."""

    def onwards(op: Operation) -> Iterable[Operation]:
        is_end = op in awaitable
        return () if is_end else filter(needed.__contains__, adjacency.successors(op))

    return [op for op in closure(ops, onwards) if op in awaitable]
