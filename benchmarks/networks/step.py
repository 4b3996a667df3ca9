"""What a network is here: a loss of a batch, and the variables to differentiate by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

Call = Callable[..., tf.Tensor]
# Puts a way of recomputing around a block, as `tf.recompute_grad` does.
Wrap = Callable[[Call], Call]


@dataclass(frozen=True)
class Step:
    """The forward part of a training step.

    Attributes:
        loss: computes the scalar loss of a batch, as in training.
        variables: the trainable variables, all of which the loss depends on.
        state: the others: moving averages, and the seeds of dropout. A call of `loss`
            may move them.
        batch: the arguments of `loss`.
    """

    loss: Call = field(repr=False)
    variables: list[tf.Variable] = field(repr=False)
    state: list[tf.Variable] = field(repr=False)
    batch: tuple[np.ndarray, ...] = field(repr=False)

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """The shapes and types of `batch`."""
        return [tf.TensorSpec(x.shape, x.dtype) for x in self.batch]

    def tensors(self) -> list[tf.Tensor]:
        """The batch as tensors."""
        return [tf.constant(x) for x in self.batch]


def unwrapped(block: Call) -> Call:
    return block


def training_step(
    layers: Iterable[Any], loss: Call, *batch: np.ndarray[Any, Any]
) -> Step:
    """Return the step of a loss that uses these Keras layers or models.

    Args:
        layers: Keras layers, built.
        loss: as in `Step`.
        batch: as in `Step`.
    """
    layers = list(layers)
    return Step(
        loss,
        [v.value for layer in layers for v in layer.trainable_variables],
        [v.value for layer in layers for v in layer.variables if not v.trainable],
        batch,
    )


def seeded(seed: int = 0) -> np.random.Generator:
    """Seed all that draws weights, and return what batches are drawn with."""
    tf.keras.utils.set_random_seed(seed)
    return np.random.default_rng(seed)
