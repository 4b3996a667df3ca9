"""The ways to compute gradients that are held against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from benchmarks.gradients.cases import Setting
from benchmarks.networks import MakeStep, Step
from geutil.gradients import gradients


def _as_it_is(network: MakeStep) -> Step:
    return network()


def _in_wrapped_blocks(network: MakeStep) -> Step:
    return network(wrap=tf.recompute_grad)


def _in_a_remat_scope(mode: str, network: MakeStep) -> Step:
    import keras

    # Younger than the oldest Keras that geutil runs with.
    with keras.RematScope(mode=mode):
        return network()


@dataclass(frozen=True)
class Way:
    """A way to compute gradients.

    Attributes:
        make: makes the training step of a network.
        gradients: called as `tf.gradients` is.
    """

    make: Callable[[MakeStep], Step] = _as_it_is
    gradients: Callable[[tf.Tensor, Sequence[tf.Variable]], list[Any]] = tf.gradients


PLAIN, MEMORY = "plain", "memory"
WAYS = {
    PLAIN: Way(),
    MEMORY: Way(gradients=partial(gradients, checkpoints="memory")),
    "recompute_grad": Way(_in_wrapped_blocks),
    "RematScope full": Way(partial(_in_a_remat_scope, "full")),
    "RematScope activations": Way(partial(_in_a_remat_scope, "activations")),
}


RATE = 1e-4


def configure(setting: Setting) -> None:
    """Set what concerns the whole process; oneDNN is set before TensorFlow starts."""
    if not setting.grappler:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def traced(way: Way, step: Step, setting: Setting) -> Any:
    """Return a ConcreteFunction that does a step: forward, backward, update.

    The update is plain gradient descent, so each gradient is used up as it comes.
    """

    # AutoGraph would bury what a way raises.
    @tf.function(jit_compile=setting.xla or None, autograph=False)
    def run(*batch: tf.Tensor) -> tf.Tensor:
        loss = step.loss(*batch)
        results = way.gradients(loss, step.variables)
        missing = sum(result is None for result in results)
        if missing:
            raise ValueError(f"{missing} of {len(results)} gradients are None")
        for variable, gradient in zip(step.variables, results, strict=True):
            variable.assign_sub(RATE * tf.convert_to_tensor(gradient))
        return loss

    return run.get_concrete_function(*step.specs)
