"""Ops that hand on a tensor, so that edges can be put between it and its readers."""

from __future__ import annotations

import tensorflow as tf

from geutil.graph.importing import neutral
from geutil.graph.kinds import Tensor


def make_stand_in(
    tensor: Tensor, scope: str, name: str, *, reads: Tensor | None = None
) -> Tensor:
    """Return what can be read instead of a tensor.

    The op hands on what it reads, without a copy, on the tensor's device. No optimizer
    of TensorFlow removes it.

    Args:
        tensor: the tensor.
        scope: the name scope of the op.
        name: its name there.
        reads: what it reads; None is the tensor itself.
    """
    graph, device = tensor.graph, tensor.op.device
    with neutral(graph), graph.name_scope(f"{scope}/"), graph.device(device):
        return tf.raw_ops.PlaceholderWithDefault(
            input=tensor if reads is None else reads, shape=tensor.shape, name=name
        )
