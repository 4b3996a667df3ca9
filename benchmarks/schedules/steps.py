"""The steps that are measured: networks in sizes that many Sessions can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from benchmarks.networks import ALL_NETWORKS, Step
from geutil.gradients import Report, gradients, last_report

SIZES: dict[str, dict[str, Any]] = {
    "ResNet50": {"batch": 8, "pixels": 96},
    "ResNet152": {"batch": 4, "pixels": 64},
    "MobileNetV2": {"batch": 8, "pixels": 96},
    "DenseNet121": {"batch": 4, "pixels": 96},
    "EfficientNetB0": {"batch": 8, "pixels": 96},
    "InceptionV3": {"batch": 4, "pixels": 128},
    "U-Net": {"batch": 2, "pixels": 128},
    "NASNetMobile": {"batch": 8, "pixels": 96},
    "ConvNeXtTiny": {"batch": 4, "pixels": 64},
    "encoder": {"batch": 2, "length": 128},
    "decoder": {},
    "LSTM": {},
}
OPTIMIZERS = ("sgd", "adam")
PLAIN = {"checkpoints": None, "order": False}
ORDERED = {"checkpoints": None}
MEMORY = {"checkpoints": "memory"}
Update = Callable[[Sequence[Any]], None]


@dataclass(frozen=True)
class Traced:
    """A step as a function.

    Attributes:
        step: the network.
        function: a ConcreteFunction of forward pass, backward pass and updates.
        report: what its gradients keep and recompute.
        kept: what the function needs alive.
    """

    step: Step
    function: Any
    report: Report
    kept: Any

    @property
    def fetches(self) -> list[Any]:
        """What a Session would be asked for."""
        return [*self.function.graph.outputs, *self.function.graph.control_outputs]


def traced(
    network: str, optimizer: str, how: dict[str, Any], *, full: bool = False
) -> Traced:
    """Trace a step.

    Args:
        network: a name in `SIZES`.
        optimizer: one of `OPTIMIZERS`.
        how: arguments of `gradients`.
        full: whether in the size in which it is trained.
    """
    step = ALL_NETWORKS[network](**({} if full else SIZES[network]))
    update = (_descent if optimizer == "sgd" else _adam)(step.variables)

    @tf.function(autograph=False)
    def run(*batch: tf.Tensor) -> tf.Tensor:
        loss = step.loss(*batch)
        slopes = gradients(loss, step.variables, **how)
        update([tf.convert_to_tensor(slope) for slope in slopes])
        return loss

    function = run.get_concrete_function(*step.specs)
    report = last_report()
    if report is None:
        raise RuntimeError("gradients left no report")
    return Traced(step, function, report, update)


def _descent(variables: Sequence[tf.Variable]) -> Update:
    def apply(slopes: Sequence[Any]) -> None:
        for variable, slope in zip(variables, slopes, strict=True):
            variable.assign_sub(1e-4 * slope)

    return apply


def _adam(variables: Sequence[tf.Variable]) -> Update:
    import keras

    optimizer = keras.optimizers.Adam(1e-4)
    wrapped = [keras.Variable(variable.numpy()) for variable in variables]
    for keras_variable, variable in zip(wrapped, variables, strict=True):
        # The optimizer updates the very variables that the network reads.
        keras_variable._value = variable
    optimizer.build(wrapped)
    return lambda slopes: optimizer.apply(slopes, wrapped)
