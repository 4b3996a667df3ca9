"""Functions, Keras layers and models with memory-saving gradients.

The gradients of each call are planned, and built in its graph or moved to another.
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.gradients import choices, lifecycle
from geutil.gradients.barriers import HOST, Offload, with_returns
from geutil.gradients.choices import Keeping, Options
from geutil.gradients.encodings import Encoder
from geutil.gradients.plans import Budget, Plan
from geutil.gradients.policies import Policy
from geutil.gradients.report import publish
from geutil.gradients.segments import plan_recomputation
from geutil.gradients.step import (
    RECOMPUTED,
    PlainStep,
    Recomputation,
    build_step,
    tensors_of,
)
from geutil.graph import adjacency, creation, gradient_functions, runtime, state, types
from geutil.graph.keras_calls import LosingLayer, losses_taken
from geutil.graph.types import Graph, IdentityMap, IdentitySet, Operation, Tensor
from geutil.graph.walks import closure
from geutil.memory import costs
from geutil.memory.costs import tensor_bytes
from geutil.select.queries import make_view
from geutil.select.walks import get_backward_walk_ops
from geutil.transform.transformer import copy_replacing

_logger = logging.getLogger("geutil")
_FORWARD = (
    "a checkpointed call that a tf.autodiff.ForwardAccumulator follows is computed "
    "plainly: there is no forward mode to save memory for"
)
_GIVEN = frozenset(("Placeholder", "VarHandleOp"))
# The mode that holds nothing of a call but its inputs.
INPUTS = "inputs"
_NOTHING = (
    "the backward pass reads nothing of it that could be recomputed: these are plain "
    "gradients"
)
_MODES = ("collection", INPUTS, "memory", "speed")

F = TypeVar("F", bound=Callable[..., Any])


@runtime.not_converted
def checkpointed(
    fn: F,
    checkpoints: str | Policy | Budget = "memory",
    *,
    budget: Budget | int | float | str | None = None,
    min_checkpoint_size: int = choices.MIN_CHECKPOINT_SIZE,
    offload: bool | Policy = False,
    offload_device: str = HOST,
    prefetch: int = 1,
    encode: str | None = None,
    device: str | None = None,
) -> F:
    """Return `fn` with gradients that recompute tensors instead of holding them.

    The result is called like `fn`, and computes the same. `tf.GradientTape`,
    `tf.gradients` and `model.fit` get the same gradients from it, built as by
    `geutil.gradients.gradients`: with respect to arguments, to variables (also those
    made in the first call) and to all other tensors that `fn` reads from outside. It
    runs once for each call: moving averages move once, and dropout draws once. It can
    be called several times, in loops and branches, and with `jit_compile=True`. Of
    nested checkpointed calls, the outermost chooses.

    A call that a `tf.autodiff.ForwardAccumulator` watches runs `fn` unchanged, and a
    warning says so.

    `last_report` reports the tensors that the last gradients hold and recompute. Where
    a call gets plain gradients after all, a warning gives its name and the reason.

    A Keras layer or model is changed in place and returned: from then on its `call` is
    checkpointed, also where the layer is already in use. Class, name, weights and saved
    files stay as they were, and `del layer.call` undoes it.

    Outside `tf.function`, a call under an open tape is traced as a `tf.function` is:
    Python code runs once for each kind of arguments, arrays arrive as tensors, and an
    output that nothing reads has a gradient of zeros. Losses that Keras layers add are
    handed back to them.

    Args:
        fn: a function, method, Keras layer or Keras model. Arguments and results may be
            nested, and need not be tensors.
        checkpoints: the tensors that each call holds for the backward pass. "memory":
            those of the least predicted peak, or, in one of several calls that gains
            nothing by checkpoints inside, only its inputs. "inputs": always only the
            inputs of the call. "speed", "collection", a policy, or a `Budget`, which
            applies to each call: as in `gradients`.
        budget: the limit of each call, instead of `checkpoints`: a `Budget`, or the
            limit of one.
        min_checkpoint_size: as in `gradients`.
        offload: as in `gradients`.
        offload_device: as in `gradients`.
        prefetch: as in `gradients`.
        encode: as in `gradients`.
        device: as in `gradients`.

    Raises:
        ArgumentTypeError: `fn` cannot be called, it is a Keras layer whose backend is
            not TensorFlow, or an option is of a wrong type.
        SelectionError: `checkpoints` is a string that is not a mode.
        PlanError: when gradients are computed, if no choice is within a budget.

    Cost: none before the first gradient; then that of `gradients` for the ops of the
    call.

    Source: Chen et al., "Training deep nets with sublinear memory cost", 2016,
        arXiv 1604.06174.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import checkpointed
        >>> block = checkpointed(lambda x: tf.square(tf.square(x)), "inputs")
        >>> x = tf.Variable([1.0, 2.0])
        >>> with tf.GradientTape() as tape:
        ...     y = block(x)
        >>> tape.gradient(y, x).numpy().tolist()
        [4.0, 32.0]
    """
    if budget is not None:
        if checkpoints != "memory":
            raise ArgumentTypeError("pass either checkpoints or a budget, not both")
        checkpoints = budget if isinstance(budget, Budget) else Budget(budget)
    _check_checkpoints(checkpoints)
    where = (offload, offload_device, prefetch)
    options = Options(
        checkpoints, min_checkpoint_size, *where, encode=encode, device=device
    )
    if _is_layer(fn):
        # Past Keras, which would track an assigned attribute.
        layer: Any = fn
        object.__setattr__(layer, "call", _wrapped(layer.call, options))
        return fn
    if not callable(fn):
        raise ArgumentTypeError(
            "expected a function, a Keras layer or a Keras model, "
            f"got {types.type_name(fn)}"
        )
    return _wrapped(fn, options)


def _check_checkpoints(checkpoints: Any) -> None:
    """Refuse checkpoints that cannot apply to a call yet to come."""
    if isinstance(checkpoints, str):
        if checkpoints not in _MODES:
            raise SelectionError(
                f"'{checkpoints}' is no mode of checkpoints; pass one of "
                f"{', '.join(_MODES)}, or a policy"
            )
    elif isinstance(checkpoints, Plan):
        raise ArgumentTypeError(
            "a plan is for one step, and a checkpointed function may be called in "
            "many; pass budget= or a Budget, which plans each call"
        )
    elif isinstance(checkpoints, tf.Tensor) or not (
        callable(checkpoints) or isinstance(checkpoints, Budget)
    ):
        raise ArgumentTypeError(
            "expected a mode, a policy or a Budget, got "
            f"{types.type_name(checkpoints)}; there are no tensors to choose before "
            "the call: name them by a policy such as by_name(...)"
        )


def _is_layer(fn: Any) -> bool:
    """Return whether `fn` is a Keras layer or model, without importing Keras."""
    for name in ("keras", "tf_keras"):
        keras = sys.modules.get(name)
        if keras is not None and isinstance(fn, keras.layers.Layer):
            backend = keras.backend.backend()
            if backend != "tensorflow":
                raise ArgumentTypeError(
                    f"the backend of Keras is {backend}; checkpointed works on layers "
                    "of the TensorFlow backend"
                )
            return True
    return False


def _wrapped(fn: F, options: Options) -> F:
    """Return a function that does the same as `fn`."""
    owner: Any = getattr(fn, "__self__", None)
    # The layers that were given losses in traces.
    losing: list[LosingLayer] = []

    @runtime.not_converted
    def run(args: Any, kwargs: Any, alone: bool) -> Any:
        function = runtime.converted_as_here(fn)
        return _call_in_graph(lambda: function(*args, **kwargs), options, alone=alone)

    @runtime.not_converted
    def run_alone(args: Any, kwargs: Any) -> tuple[Any, dict[int, list[Tensor]]]:
        with losses_taken(owner if _is_layer(owner) else None) as found:
            result = run(args, kwargs, True)
        first = len(losing)
        losing.extend(found)
        return result, {first + i: [*one.losses] for i, one in enumerate(found)}

    @tf.function
    def traced(*args: Any, **kwargs: Any) -> Any:
        return run_alone(args, kwargs)

    @runtime.not_converted
    def call(args: Any, kwargs: Any) -> Any:
        """Run the function as it is, or recomputed for the gradient."""
        # A call inside of another runs again with that.
        if _running.inside:
            return runtime.converted_as_here(fn)(*args, **kwargs)
        if not tf.executing_eagerly():
            return run(args, kwargs, False)
        # Without a tape, nobody will ask for gradients.
        if not runtime.a_tape_is_open():
            return fn(*args, **kwargs)
        weights = owner.variables if _is_layer(owner) else []
        given = tf.nest.flatten((args, kwargs), expand_composites=True)
        if runtime.has_tangents([*given, *weights]):
            _logger.warning(_FORWARD)
            return fn(*args, **kwargs)
        result, losses_by_place = traced(*args, **kwargs)
        # The trace took the losses off the layers: each call hands over its own.
        for place, losses in losses_by_place.items():
            losing[place].hold(losses)
        return result

    # Autograph may convert this one, and so knows that its callees are in its reach.
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(args, kwargs)

    return wrapper  # type: ignore[return-value]


class _Running(threading.local):
    """The state of a thread: whether it is inside a checkpointed call."""

    inside = False


_running = _Running()


def _call_in_graph(call: Callable[[], Any], options: Options, *, alone: bool) -> Any:
    """Make a call with memory-saving gradients."""
    # The function runs in the default graph as if it had been called plainly. Tapes and
    # the graph are given another dependency of its outputs on its inputs: the gradients
    # between them are built by geutil. Results that leave in other ways
    # (losses added to a Keras layer) keep their plain gradients. `alone`: the graph was
    # made for this call.
    graph = tf.compat.v1.get_default_graph()
    before = state.count_ops(graph)
    _running.inside = True
    try:
        result = call()
    finally:
        _running.inside = False
    leaves = tf.nest.flatten(result, expand_composites=True)
    ys = IdentitySet(t for t in leaves if _is_output(t, graph))
    if runtime.has_tangents(ys):
        _logger.warning(_FORWARD)
        return result
    new_ops = state.ops_since(graph, before)
    inputs = _read_from_outside(ys, frozenset(new_ops))
    if not inputs:
        return result
    first = adjacency.creation_index(new_ops[0]) if new_ops else 0
    runtime.plan_for(graph, options.device)
    # TensorFlow asks for the gradient of a call while it differentiates the graph.
    offload = options.offloading(is_counted=True)
    ends = (first, state.count_ops(graph), alone, offload)
    differentiated = _Call(options, graph, tuple(ys), inputs, *ends)
    state.slot(graph, _GraphCalls).count += 1
    stand_ins = IdentityMap(zip(ys, differentiated.stand_ins(), strict=True))
    return tf.nest.pack_sequence_as(
        result, [stand_ins.get(t, t) for t in leaves], expand_composites=True
    )


def _is_output(leaf: Any, graph: Graph) -> bool:
    return (
        types.is_tensor(leaf)
        and leaf.graph is graph
        and leaf.dtype != tf.resource
        and runtime.is_differentiable(leaf)
    )


def _read_from_outside(
    ys: IdentitySet, new_ops: frozenset[Operation]
) -> tuple[Tensor, ...]:
    """Return the differentiable tensors from outside that `ys` depend on."""

    def is_made(t: Tensor) -> bool:
        # A tape may watch the small eager tensor that became a constant.
        is_known = t.op.type == "Const" and runtime.is_watched(t)
        return t.op in new_ops and not (is_known or t.op.type in _GIVEN)

    ops = closure(
        (y.op for y in ys if is_made(y)),
        lambda op: (t.op for t in op.inputs if is_made(t)),
    )
    read = IdentitySet((*ys, *(t for op in ops for t in op.inputs)))
    return tuple(t for t in read if not is_made(t) and runtime.is_differentiable(t))


@dataclass(frozen=True, eq=False)
class _Call:
    """The gradients of a call, built in its graph or moved to another one."""

    # Where TensorFlow differentiates a whole function, a loop or a conditional, the
    # backward pass is a function of its own, and the forward tensors that it reads are
    # held in between. Then gradients are built in the graph of the call, where nothing
    # runs them, and moved; they read kept tensors only.

    options: Options
    graph: Graph
    ys: tuple[Tensor, ...]
    # The differentiable tensors from outside that the ys depend on: arguments,
    # captures of the function, handles of variables.
    inputs: tuple[Tensor, ...]
    # The creation index of the first op of the call, and the number of ops at its end.
    first: int
    end: int
    # The graph may hold nothing else, so that the ops after it are unknown.
    alone: bool
    # For all gradients of the call.
    offload: Offload | None
    encoder: Encoder = field(default_factory=Encoder)

    def stand_ins(self) -> Sequence[Tensor]:
        """Return stand-ins for the outputs, with memory-saving gradients."""
        # Open tapes are told directly. Gradients that are built from the graph later
        # (of a function that contains the call, of a loop around it) find the op.
        count = len(self.ys)
        with tf.device(self.ys[0].device):
            read = [*self.ys, *self.inputs]
            identities = runtime.without_recording(
                lambda: tf.raw_ops.IdentityN(input=read, name="checkpointed")
            )
        stand_ins: Sequence[Tensor] = identities[:count]
        for t, t_ in zip(self.ys, stand_ins, strict=True):
            runtime.carry_marks(t, t_)

        def of_op(op: Operation, *grads: Any) -> list[Any]:
            del op
            slopes = self._build(self.inputs, grads[:count], len(grads))
            return [*[None] * count, *slopes]

        runtime.set_gradient(stand_ins[0].op, of_op)
        watched = self._watched()
        if watched:
            xs, known = list(watched), list(watched.values())

            def backward(*grads: Any) -> list[Any]:
                return self._build(xs, grads, count)

            runtime.record_on_tapes("checkpointed", stand_ins, known, backward)
        return stand_ins

    def _watched(self) -> IdentityMap[Any]:
        """Return the inputs that tapes watch, and the tensors that tapes know."""
        # A function that is called inside hides its captures from the tapes: they may
        # know only a placeholder for an outer tensor by that.
        direct = filter(runtime.is_watched, self.inputs)
        watched = types.MutableIdentityMap((t, t) for t in direct)
        if len(watched) < len(self.inputs) and types.is_func_graph(self.graph):
            others = IdentitySet(t for t in self.inputs if t not in watched)
            captures = gradient_functions.captures_of(self.graph)
            watched.update(
                (inside, outside)
                for outside, inside in captures
                if inside in others and runtime.is_watched(outside)
            )
        return watched

    def _build(
        self, xs: Sequence[Tensor], grads: Sequence[Any], outputs: int
    ) -> list[Any]:
        """Return the gradient of each x, given that of each output."""
        # `outputs`: for so many TensorFlow may just have made up zeros.
        flowing = [
            (y, grad)
            for y, grad in zip(self.ys, grads, strict=True)
            if not (grad is None or _is_made_up(grad, outputs))
        ]
        if not flowing:
            return [None] * len(xs)
        ys = [y for y, _ in flowing]
        # No sooner: a conversion makes ops, and the newest tell which zeros are made
        # up.
        grad_ys = [tf.convert_to_tensor(grad) for _, grad in flowing]
        graph = tf.compat.v1.get_default_graph()
        if graph is self.graph:
            return list(self._step(ys, xs, grad_ys).gradients)
        with creation.neutral(self.graph):
            # A list of tensors has no ones.
            stand_ins = [
                tf.zeros_like(y) if y.dtype == tf.variant else tf.ones_like(y)
                for y in ys
            ]
            before = state.count_ops(self.graph)
            step = self._step(ys, xs, stand_ins)
        pairs = zip(stand_ins, grad_ys, strict=True)
        gradients, moved = _move_gradients(step, before, pairs, graph)
        if moved:
            runtime.keep_image_layouts(graph)
            lifecycle.order_moved(graph, moved)
        return gradients

    def _step(
        self, ys: Sequence[Tensor], xs: Sequence[Tensor], grad_ys: Sequence[Tensor]
    ) -> PlainStep:
        """Build the gradients in the graph of the call."""
        later = state.ops_since(self.graph, self.end)
        indices = [adjacency.creation_index(op) for op in (*later[:1], *later[-1:])]
        # One x may depend on another around the call: that is not its part.
        step = build_step(ys, xs, grad_ys, {"stop_gradients": list(xs)})
        gap = range(indices[0], indices[1] + 1) if later else range(0)
        step = replace(step, first=self.first, gap=gap)
        costs.settle_shapes(step.ops())

        def choose(step: PlainStep, kept: Any) -> tuple[Keeping, Recomputation]:
            return self._choose(step, kept, later)

        chosen = choices.choose_all(step, self.options, self.encoder, choose)
        calls = state.slot(self.graph, _GraphCalls)
        plan = calls.behind_others(chosen.plan, step.seeds)
        if not runtime.is_compiled_by_xla(self.graph):
            plan = with_returns(plan, self.offload)
        calls.add(plan.step)
        chosen = replace(chosen, plan=plan)
        where = f"the checkpointed call that yields '{self.ys[0].name}': "
        prepared = lifecycle.Prepared(
            chosen, self.options, self.offload, self.encoder, step, where
        )
        step, report = prepared.build()
        publish(report, step.graph)
        lifecycle.order_when_complete(step)
        return step

    def _choose(
        self, step: PlainStep, checkpoints: Any, later: Iterable[Operation]
    ) -> tuple[Keeping, Recomputation]:
        """Choose the tensors that the call keeps, given the ops made after it."""
        inputs = Keeping(INPUTS, IdentitySet(), choices.AlwaysKept(step))
        whole = plan_recomputation(step, inputs, spare_last=False)
        if not whole.segments:
            inputs.warnings.append(_NOTHING)
            return inputs, whole
        if checkpoints == INPUTS:
            return inputs, whole
        size = sum(_bytes(segment.ops) for segment in whole.segments)
        ends = not self.alone and _is_little(later, 0.1 * size)
        # In a graph of its own, a call may be one of any number.
        smallest = self.options.min_checkpoint_size
        keeping = choices.resolve(step, checkpoints, smallest, among_others=self.alone)
        if not keeping.recomputes:
            # Order alone is within the budget.
            return keeping, plan_recomputation(step, lifecycle.keep_all)
        if keeping.plan is not None:
            return keeping, keeping.plan
        if len(keeping.chosen):
            plan = plan_recomputation(step, keeping, spare_last=ends)
            # Each of the calls holds the chosen tensors, and one works at a time.
            held = sum(map(tensor_bytes, keeping.chosen))
            held *= state.slot(self.graph, _GraphCalls).count
            working = max((_bytes(s.ops) for s in plan.segments), default=0)
            if checkpoints != "memory" or ends or held + working < size:
                return keeping, plan
        elif ends:
            return keeping, plan_recomputation(step, lifecycle.keep_all)
        elif checkpoints != "memory":
            inputs.warnings.append(
                f"{keeping.mode} keeps no tensor of it: it holds what goes into it"
            )
        return inputs, whole


def _move_gradients(
    step: PlainStep,
    before: int,
    stand_in_gradients: Iterable[tuple[Tensor, Tensor]],
    graph: Graph,
) -> tuple[list[Any], list[Operation]]:
    """Copy a backward pass made since `before` to another graph; return the copies."""
    # The other graph, of a function, captures the forward tensors that the backward
    # pass reads, and TensorFlow holds these for it: kept tensors, if the step
    # recomputes others.
    there = types.MutableIdentityMap(stand_in_gradients)
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
            make_view(ops), there, graph, RECOMPUTED, "", reuse_dst_scope=True
        )
        copies = list(map(info.transformed, ops))
        there.update((t, info.transformed(t)) for op in ops for t in op.outputs)

    def moved(t: Tensor | None) -> Tensor | None:
        return None if t is None else there[t]

    gradients = tf.nest.map_structure(
        moved, list(step.gradients), expand_composites=True
    )
    return gradients, copies


@dataclass(eq=False)
class _GraphCalls:
    """Notes on the checkpointed calls in one graph."""

    count: int = 0
    # For each backward op of a call, the backward ops of the same call that no other
    # one of them reads: when these have run, it holds nothing more.
    ends: dict[Operation, tuple[Operation, ...]] = field(default_factory=dict)
    # The creation index of the oldest of those backward ops.
    first: int = 0

    def add(self, step: PlainStep) -> None:
        """Note the backward pass of a call."""
        edges = step.edges
        ends = tuple(op for op in edges.awaitable if not edges.readers[op])
        if step.backward and not self.ends:
            self.first = min(map(adjacency.creation_index, step.backward))
        self.ends.update(dict.fromkeys(step.backward, ends))

    def behind_others(
        self, plan: Recomputation, seeds: Iterable[Operation]
    ) -> Recomputation:
        """Make the first ops that run again also wait for the calls just before."""
        # The executor runs weight gradients late, and holds their inputs until then.

        def is_between(op: Operation) -> bool:
            return op not in self.ends and adjacency.creation_index(op) >= self.first

        between = get_backward_walk_ops(list(seeds), within_ops_fn=is_between)
        read = (t.op for op in between for t in op.inputs)
        ends = types.unique(end for op in read for end in self.ends.get(op, ()))
        # The first segment on other devices waits for the same.
        first = plan.segments[0].awaited if plan.segments else ()
        segments = (
            replace(s, awaited=(*first, *ends)) if s.awaited == first else s
            for s in plan.segments
        )
        return replace(plan, segments=tuple(segments)) if ends else plan


def _is_little(ops: Iterable[Operation], limit: float) -> bool:
    """Return whether the outputs of ops are within a limit; forwarding ops count 0."""
    sizes = (_bytes((op,)) for op in ops if op.type not in ("Identity", "IdentityN"))
    # As soon as there are too many, the rest is not looked at.
    return all(total <= limit for total in itertools.accumulate(sizes))


def _bytes(ops: Iterable[Operation]) -> int:
    return sum(tensor_bytes(t) for op in ops for t in op.outputs)


_OPS_OF_ZEROS = 4
"""The most ops by which TensorFlow makes the zeros of one output: the shape of a
variable, or one made flat, a constant, and their Fill."""


def _is_made_up(grad: Any, outputs: int) -> bool:
    """Return whether TensorFlow just made a zero for an output that nothing reads."""
    # To differentiate by it would compute zeros, or NaN where a derivative is infinite,
    # and inputs that no gradient reaches would not get None.
    if not types.is_tensor(grad) or not _is_zero(grad):
        return False
    start = state.count_ops(grad.graph) - _OPS_OF_ZEROS * outputs
    return grad.op in state.ops_since(grad.graph, max(start, 0))


def _is_zero(tensor: Tensor) -> bool:
    """Return whether a tensor is a zero, by the ops that TensorFlow makes zeros of."""
    if tensor.op.type == "ZerosLike":
        return True
    value = tensor.op.inputs[1] if tensor.op.type == "Fill" else tensor
    return value.op.type == "Const" and not np.any(tf.get_static_value(value))
