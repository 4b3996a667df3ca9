"""The gradients of one call of a checkpointed function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.gradients.last import publish
from geutil.gradients.preparing import Options
from geutil.gradients.recomputing import build_recomputation
from geutil.gradients.step import Step
from geutil.gradients.updates import order_when_complete
from geutil.gradients.wrapped.call import Call
from geutil.gradients.wrapped.moving import move_gradients
from geutil.gradients.wrapped.planning import plan_call
from geutil.graph.importing import neutral
from geutil.graph.kinds import Tensor, is_tensor
from geutil.graph.surroundings import count_ops, ops_since


class CallGradients:
    """Builds the gradients of one call, in its graph or in another.

    Another one it is where TensorFlow differentiates a whole function, a loop or a
    conditional: the backward pass is a function of its own, and what it reads of the
    forward pass is held in between. There the gradients are built in the graph of the
    call, where nothing runs them, and moved over; they read kept tensors only.

    Args:
        call: the call.
        options: how to choose and hold checkpoints.
    """

    def __init__(self, call: Call, options: Options) -> None:
        self._call = call
        self._options = options
        self._offload = options.offloading()

    def build(self, xs: Sequence[Tensor], grads: Sequence[Any]) -> list[Any]:
        """Return the gradient of each x, given that of each output."""
        flowing = [
            (y, grad)
            for y, grad in zip(self._call.ys, grads, strict=True)
            if not (grad is None or _is_made_up(grad, len(grads)))
        ]
        if not flowing:
            return [None] * len(xs)
        ys = [y for y, _ in flowing]
        grad_ys = [tf.convert_to_tensor(grad) for _, grad in flowing]
        graph = tf.compat.v1.get_default_graph()
        if graph is self._call.graph:
            return list(self._step(ys, xs, grad_ys).gradients)
        with neutral(self._call.graph):
            stand_ins = [_like(y) for y in ys]
            before = count_ops(self._call.graph)
            step = self._step(ys, xs, stand_ins)
        return move_gradients(step, before, zip(stand_ins, grad_ys, strict=True), graph)

    def _step(
        self, ys: Sequence[Tensor], xs: Sequence[Tensor], grad_ys: Sequence[Tensor]
    ) -> Step:
        """Build the gradients in the graph of the call."""
        prepared = plan_call(self._call, ys, xs, grad_ys, self._options, self._offload)
        report = prepared.report()
        step = build_recomputation(prepared.plan, prepared.offload)
        publish(report, step.graph)
        order_when_complete(step)
        return step


def _like(y: Tensor) -> Tensor:
    """Return a tensor that can stand for the gradient of `y`."""
    return tf.zeros_like(y) if y.dtype == tf.variant else tf.ones_like(y)


def _is_made_up(grad: Any, outputs: int) -> bool:
    """Tell whether TensorFlow made a zero just now for an output that nothing reads.

    To differentiate by it would compute zeros, or NaN where a derivative is infinite,
    and inputs that no gradient reaches would not get None.

    Args:
        grad: the gradient of an output.
        outputs: how many outputs the call has.
    """
    if not is_tensor(grad) or grad.op.type not in ("Const", "ZerosLike"):
        return False
    if grad.op not in ops_since(grad.graph, count_ops(grad.graph) - outputs):
        return False
    return grad.op.type == "ZerosLike" or not np.any(tf.get_static_value(grad))
