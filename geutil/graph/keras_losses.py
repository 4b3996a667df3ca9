"""Losses that Keras layers are given in a graph, and hold outside it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.graph.training_flags import keras_layers
from geutil.graph.types import Tensor, is_tensor

_HELD = ("_losses", "_eager_losses")
"""The lists of a layer: of Keras 3 the first, of tf_keras both; calls fill the last."""


@dataclass(frozen=True)
class LosingLayer:
    """A Keras layer that was given losses in a graph."""

    layer: weakref.ref[Any]
    losses: Sequence[Tensor]  # The losses, which it does not hold any more.
    # Whether it forgot those that it had before, as the outermost layer does.
    anew: bool

    def hold(self, losses: Sequence[Tensor]) -> None:
        """Let the layer, if it lives, hold its losses of one call."""
        for held in _lists(self.layer())[-1:]:
            if self.anew:
                held.clear()
            held.extend(losses)


@contextmanager
def losses_taken(owner: Any = None) -> Iterator[list[LosingLayer]]:
    """Take away the losses that Keras layers are given in a block."""
    graph = tf.compat.v1.get_default_graph()
    with tf.init_scope():
        mark = tf.zeros([])
    marked = [held for layer in _layers(owner) for held in _lists(layer)]
    for held in marked:
        held.append(mark)
    found: list[LosingLayer] = []
    try:
        yield found
    finally:
        for layer in _layers(owner):
            lists = _lists(layer)
            anew = not any(t is mark for held in lists[-1:] for t in held)
            losses = [t for held in lists for t in held if _is_of(t, graph)]
            if losses:
                found.append(LosingLayer(weakref.ref(layer), losses, anew))
            marked += lists
        for held in marked:
            held[:] = [t for t in held if t is not mark and not _is_of(t, graph)]


def _layers(owner: Any) -> list[Any]:
    return keras_layers() if owner is None else list(owner._flatten_layers())


def _lists(layer: Any) -> list[list[Any]]:
    found = (getattr(layer, name, None) for name in _HELD)
    return [held for held in found if isinstance(held, list)]


def _is_of(loss: Any, graph: Any) -> bool:
    return is_tensor(loss) and loss.graph is graph
