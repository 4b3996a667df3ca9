"""One call of a checkpointed function in a graph: what it reads and what it returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from geutil.gradients.preparing import Options
from geutil.gradients.wrapped.building import CallGradients
from geutil.gradients.wrapped.call import Call, calls_in
from geutil.graph.adjacency import creation_index
from geutil.graph.gradient_registry import captures_of
from geutil.graph.identity import IdentityMap, IdentitySet, MutableIdentityMap
from geutil.graph.kinds import Graph, Operation, Tensor, is_func_graph, is_tensor
from geutil.graph.surroundings import count_ops, ops_since
from geutil.graph.tapes import (
    carry_marks,
    is_differentiable,
    is_watched,
    record_on_tapes,
    set_gradient,
    without_recording,
)

_GIVEN = frozenset(("Placeholder", "VarHandleOp"))


class _Running(threading.local):
    """Whether this thread is inside a checkpointed call."""

    inside = False


_running = _Running()


def inside_call() -> bool:
    """Tell whether this thread is inside a checkpointed call."""
    return _running.inside


@contextmanager
def _entered() -> Iterator[None]:
    _running.inside = True
    try:
        yield
    finally:
        _running.inside = False


def call_in_graph(
    function: Callable[[], Any], options: Options, *, alone: bool = False
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

    Returns:
        What the function returns, with stand-ins for its differentiable tensors.

    Cost: linear in the ops that the function makes.
    """
    graph = tf.compat.v1.get_default_graph()
    before = count_ops(graph)
    with _entered():
        result = function()
    leaves = tf.nest.flatten(result, expand_composites=True)
    ys = IdentitySet(t for t in leaves if _is_output(t, graph))
    made = ops_since(graph, before)
    inputs = _read_from_outside(ys, frozenset(made))
    if not inputs:
        return result
    first = creation_index(made[0]) if made else 0
    call = Call(graph, tuple(ys), inputs, first, count_ops(graph), alone)
    calls_in(graph).count += 1
    stand_ins = IdentityMap(zip(ys, _tell(call, options), strict=True))
    return tf.nest.pack_sequence_as(
        result, [stand_ins.get(t, t) for t in leaves], expand_composites=True
    )


def _is_output(leaf: Any, graph: Graph) -> bool:
    return (
        is_tensor(leaf)
        and leaf.graph is graph
        and leaf.dtype != tf.resource
        and is_differentiable(leaf)
    )


def _read_from_outside(
    ys: IdentitySet, made: frozenset[Operation]
) -> tuple[Tensor, ...]:
    """Return the differentiable tensors from outside that `ys` depend on."""
    found = IdentitySet()
    waiting = list(ys)
    met = set()
    while waiting:
        t = waiting.pop()
        if t.op not in made or _is_given(t):
            if is_differentiable(t):
                found.add(t)
        elif t.op not in met:
            met.add(t.op)
            waiting.extend(t.op.inputs)
    return tuple(found)


def _is_given(t: Tensor) -> bool:
    """Tell whether an op made in the call stands for what comes from outside.

    A small eager tensor becomes a constant, and a tape may watch where it comes from.
    """
    return t.op.type in _GIVEN or (t.op.type == "Const" and is_watched(t))


def _tell(call: Call, options: Options) -> Sequence[Tensor]:
    """Return stand-ins for the outputs of a call whose gradients save memory.

    Tapes that are open now are told directly. Gradients that are built from the graph
    later (of a function that contains the call, of a loop around it) find the op.
    """
    gradients = CallGradients(call, options)
    count = len(call.ys)
    with tf.device(call.ys[0].device):
        made = without_recording(
            lambda: tf.raw_ops.IdentityN(
                input=[*call.ys, *call.inputs], name="checkpointed"
            )
        )
    stand_ins = made[:count]
    for t, t_ in zip(call.ys, stand_ins, strict=True):
        carry_marks(t, t_)

    def of_op(op: Operation, *grads: Any) -> list[Any]:
        del op
        return [*[None] * count, *gradients.build(call.inputs, grads[:count])]

    set_gradient(stand_ins[0].op, of_op)
    watched = _watched(call)
    if watched:
        xs = list(watched)
        record_on_tapes(
            "checkpointed",
            stand_ins,
            list(watched.values()),
            lambda *grads: gradients.build(xs, grads),
        )
    return stand_ins


def _watched(call: Call) -> IdentityMap[Any]:
    """Return the inputs that tapes watch, and what they know each by.

    A function that is called inside hides its captures from the tapes: of a placeholder
    that stands for something outside, they may know only that.
    """
    watched = MutableIdentityMap((t, t) for t in call.inputs if is_watched(t))
    if len(watched) < len(call.inputs) and is_func_graph(call.graph):
        inputs = IdentitySet(call.inputs)
        for outside, inside in captures_of(call.graph):
            if inside in inputs and inside not in watched and is_watched(outside):
                watched[inside] = outside
    return watched
