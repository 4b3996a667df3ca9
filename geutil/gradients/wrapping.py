"""Functions, Keras layers and models whose gradients hold less."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.gradients.choices import MIN_CHECKPOINT_SIZE, Options
from geutil.gradients.offloading import HOST
from geutil.gradients.planning import Budget, Plan
from geutil.gradients.policies import Policy
from geutil.gradients.wrapped_call import INPUTS, CallGradients, WrappedCall, calls_in
from geutil.graph import adjacency, gradient_functions, runtime, state, types
from geutil.graph.keras_losses import LosingLayer, losses_taken
from geutil.graph.types import Graph, IdentityMap, IdentitySet, Operation, Tensor

_logger = logging.getLogger("geutil")
_FORWARD = (
    "a checkpointed call that a tf.autodiff.ForwardAccumulator follows is computed "
    "plainly: there is no forward mode to save memory for"
)
_GIVEN = frozenset(("Placeholder", "VarHandleOp"))


class _Running(threading.local):
    """Whether this thread is inside a checkpointed call."""

    inside = False


_running = _Running()


def _call_in_graph(
    function: Callable[[], Any], options: Options, *, alone: bool
) -> Any:
    """Call a function in a graph, so that its gradients save memory.

    The function runs where it is, and everything it does happens as if it had been
    called plainly. Only what its outputs have to do with its inputs is told anew, to
    the tapes and to the graph: the gradients between them are built by geutil. What
    leaves the function on other ways (losses added to a Keras layer) keeps its plain
    gradients.

    Args:
        function: takes nothing; what it reads from outside is found in the graph.
        options: how to choose and hold checkpoints.
        alone: whether the graph was made for this call.
    """
    graph = tf.compat.v1.get_default_graph()
    before = state.count_ops(graph)
    _running.inside = True
    try:
        result = function()
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
    call = WrappedCall(graph, tuple(ys), inputs, first, state.count_ops(graph), alone)
    calls_in(graph).count += 1
    stand_ins = IdentityMap(zip(ys, _tell(call, options), strict=True))
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
    found = IdentitySet()
    waiting, met = list(ys), set()
    while waiting:
        t = waiting.pop()
        if t.op not in new_ops or _is_given(t):
            if runtime.is_differentiable(t):
                found.add(t)
        elif t.op not in met:
            met.add(t.op)
            waiting.extend(t.op.inputs)
    return tuple(found)


def _is_given(t: Tensor) -> bool:
    """Tell whether an op made in the call stands for what comes from outside.

    A small eager tensor becomes a constant, and a tape may watch where it comes from.
    """
    return t.op.type in _GIVEN or (t.op.type == "Const" and runtime.is_watched(t))


def _tell(call: WrappedCall, options: Options) -> Sequence[Tensor]:
    """Return stand-ins for the outputs of a call whose gradients save memory.

    Tapes that are open now are told directly. Gradients that are built from the graph
    later (of a function that contains the call, of a loop around it) find the op.
    """
    gradients = CallGradients(call, options)
    count = len(call.ys)
    with tf.device(call.ys[0].device):
        read = [*call.ys, *call.inputs]
        identities = runtime.without_recording(
            lambda: tf.raw_ops.IdentityN(input=read, name="checkpointed")
        )
    stand_ins = identities[:count]
    for t, t_ in zip(call.ys, stand_ins, strict=True):
        runtime.carry_marks(t, t_)

    def of_op(op: Operation, *grads: Any) -> list[Any]:
        del op
        return [*[None] * count, *gradients.build(call.inputs, grads[:count])]

    runtime.set_gradient(stand_ins[0].op, of_op)
    watched = _watched(call)
    if watched:
        xs = list(watched)
        runtime.record_on_tapes(
            "checkpointed",
            stand_ins,
            list(watched.values()),
            lambda *grads: gradients.build(xs, grads),
        )
    return stand_ins


def _watched(call: WrappedCall) -> IdentityMap[Any]:
    """Return the inputs that tapes watch, and what they know each by.

    A function that is called inside hides its captures from the tapes: of a placeholder
    that stands for something outside, they may know only that.
    """
    watched = types.MutableIdentityMap(
        (t, t) for t in call.inputs if runtime.is_watched(t)
    )
    if len(watched) < len(call.inputs) and types.is_func_graph(call.graph):
        others = IdentitySet(t for t in call.inputs if t not in watched)
        captures = gradient_functions.captures_of(call.graph)
        watched.update(
            (inside, outside)
            for outside, inside in captures
            if inside in others and runtime.is_watched(outside)
        )
    return watched


F = TypeVar("F", bound=Callable[..., Any])

_MODES = ("collection", INPUTS, "memory", "speed")
_KERAS = ("keras", "tf_keras")


@runtime.not_converted
def checkpointed(
    fn: F,
    checkpoints: str | Policy | Budget = "memory",
    *,
    budget: Budget | int | float | str | None = None,
    min_checkpoint_size: int = MIN_CHECKPOINT_SIZE,
    offload: bool | Policy = False,
    offload_device: str = HOST,
    prefetch: int = 1,
    encode: str | None = None,
) -> F:
    """Return `fn` with gradients that recompute what would need memory to hold.

    The result is called as `fn` is, and does the same. `tf.GradientTape`,
    `tf.gradients` and `model.fit` get the same gradients from it, built as by
    `geutil.gradients.gradients`: with respect to arguments, to variables (also those
    made in the first call) and to whatever else `fn` reads from outside. It runs once
    for each call: moving averages move once, and dropout draws once. It can be called
    several times, in loops and branches, and with `jit_compile=True`. Of checkpointed
    calls inside each other, the outermost chooses.

    A `tf.autodiff.ForwardAccumulator` gets the values of `fn` itself: a call that one
    follows is computed plainly, and a warning says so.

    `last_report` tells what the gradients built last hold and recompute. Where a call
    gets plain gradients after all, a warning that names it says why.

    A Keras layer or model is changed in place, and returned: from now on its `call` is
    checkpointed, wherever the layer is already in use. Class, name, weights and saved
    files stay what they were, and `del layer.call` undoes it.

    Outside `tf.function`, a call is traced like one while a tape is open, with what
    this means: Python code runs once for each kind of arguments, arrays arrive as
    tensors, and an output that nothing reads has a gradient of zeros. Losses that Keras
    layers add are given to them again.

    Args:
        fn: a function, method, Keras layer or Keras model. Arguments and results may be
            nested, and need not be tensors.
        checkpoints: what each call holds for the backward pass. "memory": what gives
            the least predicted peak, or, in a call among several that has no use for
            checkpoints inside, only what goes into it. "inputs": always only what goes
            into the call. "speed", "collection", a policy or a `Budget`, which is then
            that of each call: as in `gradients`.
        budget: what each call may hold, in the place of `checkpoints`: a `Budget`, or
            the limit of one.
        min_checkpoint_size: as in `gradients`.
        offload: as in `gradients`.
        offload_device: as in `gradients`.
        prefetch: as in `gradients`.
        encode: as in `gradients`.

    Raises:
        ArgumentTypeError: `fn` cannot be called, it is a Keras layer whose backend is
            not TensorFlow, or an option is of a wrong type.
        SelectionError: `checkpoints` is a string that is no mode.
        PlanError: when gradients are taken, if no choice is within a budget.

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
    options = Options(
        checkpoints,
        min_checkpoint_size,
        offload,
        offload_device,
        prefetch,
        encode=encode,
    )
    if _is_layer(fn):
        # Past Keras, which would track what is assigned.
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
    """Refuse what says nothing of a call that is yet to come."""
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
    elif not (callable(checkpoints) or isinstance(checkpoints, Budget)) or isinstance(
        checkpoints, tf.Tensor
    ):
        raise ArgumentTypeError(
            "expected a mode, a policy or a Budget, got "
            f"{types.type_name(checkpoints)}; there are no tensors to choose before "
            "the call: name them by a policy such as by_name(...)"
        )


def _is_layer(fn: Any) -> bool:
    """Tell whether `fn` is a Keras layer or model, without importing Keras."""
    for name in _KERAS:
        keras = sys.modules.get(name)
        if keras is None or not isinstance(fn, keras.layers.Layer):
            continue
        backend = keras.backend.backend()
        if backend != "tensorflow":
            raise ArgumentTypeError(
                f"the backend of Keras is {backend}; checkpointed works on layers of "
                "the TensorFlow backend"
            )
        return True
    return False


def _wrapped(fn: F, options: Options) -> F:
    """Return a function that does what `fn` does."""
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
        if _running.inside:
            return runtime.converted_as_here(fn)(*args, **kwargs)
        if not tf.executing_eagerly():
            return run(args, kwargs, False)
        if not runtime.a_tape_is_open():
            return fn(*args, **kwargs)
        weights = owner.variables if _is_layer(owner) else []
        given = tf.nest.flatten((args, kwargs), expand_composites=True)
        if runtime.has_tangents([*given, *weights]):
            _logger.warning(_FORWARD)
            return fn(*args, **kwargs)
        result, losses_by_place = traced(*args, **kwargs)
        for place, losses in losses_by_place.items():
            losing[place].hold(losses)
        return result

    # Autograph may convert this one, and so knows that what it calls is in its reach.
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(args, kwargs)

    return wrapper  # type: ignore[return-value]
