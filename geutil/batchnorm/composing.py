"""What a run of steps does to each channel, from the parameters in the graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from geutil.batchnorm.arithmetic import Affine, Value, scale_and_offset
from geutil.batchnorm.moving import Moving, with_moving
from geutil.batchnorm.steps import Kind, Step
from geutil.batchnorm.values import as_vector, constant, unrounded, wide
from geutil.graph.kinds import Tensor
from geutil.select.networks.norms import FUSED


def composed(steps: Sequence[Step]) -> Affine | None:
    """Return what steps do to each channel, one after the other, as float64 arrays.

    None if a variable goes into them.
    """
    values: list[list[Value]] = []
    for step in steps:
        arrays = [constant(t) for t in step.parameters]
        if any(array is None for array in arrays):
            return None
        values.append([as_vector(array) for array in arrays])
    return _composed(steps, values)


def computed(steps: Sequence[Step], moving: Sequence[Moving] = ()) -> Affine:
    """Return what steps do to each channel, one after the other, as new tensors.

    Args:
        steps: the steps.
        moving: what stands in for statistics of the batch.
    """
    reads = [(entry.statistic, entry.read()) for entry in moving]
    new = {id(statistic): read for statistic, read in reads}

    def value(tensor: Tensor) -> Tensor:
        tensor = unrounded(with_moving(tensor, reads) if reads else tensor)
        return as_vector(tf.cast(tensor, wide(tensor.dtype)))

    values = []
    for step in steps:
        parameters = list(step.parameters)
        if step.op.type in FUSED:
            statistics = zip(parameters[2:], step.op.outputs[1:3], strict=True)
            parameters[2:] = [new.get(id(made), read) for read, made in statistics]
        values.append([value(t) for t in parameters])
    return _composed(steps, values)


def _composed(steps: Sequence[Step], values: Sequence[Sequence[Value]]) -> Affine:
    affine = Affine()
    for step, parameters in zip(steps, values, strict=True):
        if step.kind is Kind.NORMALIZE:
            gamma, beta, mean, variance = parameters
            epsilon = float(step.op.get_attr("epsilon"))
            scale, offset = scale_and_offset(mean, variance, epsilon, gamma, beta)
            affine = affine.times(scale).plus(offset)
            continue
        (value,) = parameters
        match step.kind:
            case Kind.MULTIPLY:
                affine = affine.times(value)
            case Kind.DIVIDE:
                affine = affine.times(1.0 / value)
            case Kind.ADD:
                affine = affine.plus(value)
            case Kind.SUBTRACT:
                affine = affine.plus(-value)
            case Kind.SUBTRACT_FROM:
                affine = affine.times(_minus_one(value)).plus(value)
    return affine


def _minus_one(value: Value) -> Value:
    return np.float64(-1.0) if isinstance(value, np.ndarray) else -tf.ones_like(value)
