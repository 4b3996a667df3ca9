"""Losses that Keras layers are given in a graph, and hold outside it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from geutil.graph.training_flags import keras_layers
from geutil.graph.types import Tensor, is_tensor

_HELD = ("_losses", "_eager_losses")
"""Lists of a layer of Keras 3, and of tf_keras."""


def take_losses(owner: Any = None) -> list[tuple[Any, list[Tensor]]]:
    """Take the losses of the default graph away from the Keras layers that hold them.

    Args:
        owner: the layer or model to look in; None is all layers that there are.

    Returns:
        The layers with their losses.

    Cost: linear in the layers; without an owner that of `keras_layers`.
    """
    graph = tf.compat.v1.get_default_graph()
    found = []
    for layer in keras_layers() if owner is None else owner._flatten_layers():
        taken = [
            loss for name in _HELD for loss in _taken(getattr(layer, name, []), graph)
        ]
        if taken:
            found.append((layer, taken))
    return found


def _taken(held: Any, graph: Any) -> list[Tensor]:
    """Remove the tensors of a graph from a list, and return them."""
    taken: list[Tensor] = []
    others: list[Any] = []
    for loss in held:
        of_graph = is_tensor(loss) and loss.graph is graph
        (taken if of_graph else others).append(loss)
    if taken:
        held[:] = others
    return taken
