"""Batch norms: fused ops, roots of variances, and moments of a batch.

Clients define a batch norm differently, since they change different parts of it:

- a fold needs the run of ops that scale and shift channels, so as to replace it
  (`geutil.batchnorm.norms`);
- stripping needs the mean and the variance over the batch, whatever a norm does with
  them, so as to put other values in their place (`batch_moments`);
- re-estimation needs the variables of a norm at inference, and the data of these
  statistics, in folded layers too (`geutil.quantize.reestimation`).

Their common questions are answered here; the variables that follow moments are in
`geutil.select.networks.moving_averages`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from geutil.graph import adjacency
from geutil.graph.op_types import FUSED_NORMS, SELECTS
from geutil.graph.replicas import own_summand
from geutil.graph.types import Operation, Tensor
from geutil.select.networks.layers import data_format, origin_of, scalar_value
from geutil.select.walks import get_backward_walk_ops

# Where the shape of the data is known it is a constant; its product is not folded.
_LENGTHS = frozenset(("Prod", "Shape", "ShapeN", "Size"))


@dataclass(frozen=True, eq=False)
class FusedNorm:
    """A batch norm that is a single op."""

    op: Operation  # The op; it reads data, scale, offset, mean and variance.

    @property
    def trains(self) -> bool:
        """True if it normalizes by the statistics of the batch."""
        return bool(self.op.get_attr("is_training"))

    @property
    def axis(self) -> int:
        """The axis of the channels, counted from the end."""
        layout = data_format(self.op)
        return layout.index("C") - len(layout)

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """The mean and the variance that it returns: in training, of the batch."""
        return self.op.outputs[1], self.op.outputs[2]

    @property
    def given(self) -> tuple[Tensor, Tensor]:
        """The mean and the variance that it reads: at inference, to normalize by."""
        return self.op.inputs[3], self.op.inputs[4]

    @property
    def averaging_factor(self) -> float:
        """The part that the batch has in the moments, next to those that are given."""
        attribute_names = {attribute.name for attribute in self.op.op_def.attr}
        if "exponential_avg_factor" not in attribute_names:
            return 1.0
        return float(self.op.get_attr("exponential_avg_factor"))


def fused_norm(op: Operation) -> FusedNorm | None:
    """Return an op as a fused batch norm, else None; see `is_layer_norm`."""
    return FusedNorm(op) if op.type in FUSED_NORMS else None


def fused_in_training(op: Operation) -> FusedNorm | None:
    """Return an op as a fused batch norm in training, no layer norm, else None."""
    fused = fused_norm(op)
    if fused is None or not fused.trains or is_layer_norm(op):
        return None
    return fused


def is_layer_norm(op: Operation) -> bool:
    """Tell whether a fused batch norm normalizes each example by itself."""
    # So tf_keras writes a layer norm: examples become the channels of a batch of one,
    # scaled by ones and shifted by zeros, as many as there are examples. No parameter
    # and no moving average has such a length, so no batch norm looks like this.
    fused = fused_norm(op)
    if fused is None or not fused.trains or not data_format(op).startswith("NC"):
        return False
    data, scale, offset = op.inputs[:3]
    # The batch went into the channels.
    shape = data.shape
    if data.op.type != "Reshape" or shape.rank is None or shape[0] != 1:
        return False
    if any(moment.consumers() for moment in fused.moments):
        return False
    return _is_as_long_as_data(scale) and _is_as_long_as_data(offset)


def _is_as_long_as_data(t: Tensor) -> bool:
    """Tell whether a vector of one value has a length that is computed."""
    if t.op.type != "Fill":
        return False
    behind = get_backward_walk_ops([t.op.inputs[0].op])
    return any(op.type in _LENGTHS for op in behind)


def variance_below(root: Operation) -> Tensor | None:
    """Return the variance that a norm takes the root of, without epsilon; or None."""
    summands = [t for t in root.inputs[0].op.inputs if scalar_value(t) is None]
    return summands[0] if len(summands) == 1 else None


SHAPING = frozenset(
    ("Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient")
)
"""Ops that pass the numbers of their first input on."""


def behind_shaping(tensor: Tensor, passing: Collection[str] = SHAPING) -> Tensor:
    """Return the tensor whose numbers another one holds in another shape or dtype."""
    return adjacency.source_behind(tensor, passing)


def reduces_batch(op: Operation) -> bool:
    """Tell whether an op reduces over the first axis, but not over all axes."""
    # Where channels are one axis, `layers.is_statistic` asks for more: that all
    # axes but one are reduced.
    if op.type not in ("Mean", "Sum") or not is_constant(op.inputs[1]):
        return False
    rank = op.inputs[0].shape.rank
    value = tf.make_ndarray(origin_of(op.inputs[1]).get_attr("value"))
    axes = np.atleast_1d(value).tolist()
    if rank is None:
        return 0 in axes
    axes = {axis % rank for axis in axes} if rank else set()
    return 0 in axes and len(axes) < rank


def is_constant(tensor: Tensor) -> bool:
    """Tell whether a tensor is a constant, a few Identity ops looked through."""
    return origin_of(tensor).type == "Const"


def batch_mean(tensor: Tensor) -> Tensor | None:
    """Return the tensor that `tensor` is a mean of over the batch, or None."""
    # The mean may be weighted, as Keras does it under a mask: a sum over a sum. Both
    # may be summed over replicas.
    op = tensor.op
    if op.type == "Mean" and reduces_batch(op):
        return op.inputs[0]
    if op.type in ("RealDiv", "Div", "DivNoNan"):
        total = own_summand(op.inputs[0], _sums_batch).op
        return total.inputs[0] if _sums_batch(total) else None
    return None


def _sums_batch(op: Operation) -> bool:
    return op.type == "Sum" and reduces_batch(op)


def is_batch_moment(tensor: Tensor) -> bool:
    """Tell whether a tensor is a mean or variance over the batch."""
    fused = fused_in_training(tensor.op)
    if fused is not None:
        return any(tensor is moment for moment in fused.moments)
    if measured_moment(tensor) is not None:
        return True
    return batch_mean(tensor) is not None or mean_of_difference(tensor) is not None


def measured_moment(tensor: Tensor) -> Tensor | None:
    """Return the moment that another one is derived from, or None."""
    # Where a norm was folded for training in one pass, moments are taken of scaled
    # data, and divided by the scale, which has no gradients. So they are those of the
    # data.
    op = tensor.op
    if op.type != "RealDiv" or op.inputs[1].op.type != "StopGradient":
        return None
    moment = op.inputs[0]
    # The sums and products between the layer and the norm.
    for kind in ("AddV2", "Mul"):
        moment = moment.op.inputs[0] if moment.op.type == kind else moment
    return moment if batch_mean(moment) is not None else None


def _measured_mean(mean: Tensor) -> Tensor | None:
    """Return the moment that is derived from a mean, or None."""
    readers = [mean]
    for tensor in readers:
        for op in tensor.consumers():
            if op.type in ("AddV2", "Mul") and op.inputs[0] is tensor:
                readers.append(op.outputs[0])
            elif op.type == "RealDiv" and measured_moment(op.outputs[0]) is mean:
                return op.outputs[0]
    return None


def mean_of_difference(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return (x, mean of x) if a tensor is E[x * x] - E[x] * E[x], or None."""
    op = tensor.op
    if op.type != "Sub":
        return None
    of_squares, squared_mean = (behind_shaping(t) for t in op.inputs)
    squares = batch_mean(of_squares)
    if squares is None or squares.op.type != "Square":
        return None
    if squared_mean.op.type != "Square":
        return None
    mean = behind_shaping(squared_mean.op.inputs[0])
    return (squares.op.inputs[0], mean) if batch_mean(mean) is not None else None


@dataclass(frozen=True, eq=False)
class BatchMoments:
    """A mean and a variance over the batch: those of a batch norm in training."""

    name: str  # The fused op, or the op that yields the variance.
    mean: Tensor  # The mean, as the reduction yields it.
    variance: Tensor
    fused: FusedNorm | None = None  # The op that also normalizes, if there is one.


def batch_moments(
    ops: Iterable[Operation], fed: frozenset[Operation]
) -> Iterator[BatchMoments]:
    """Yield the moments of the batch that some ops compute, in the order of the ops."""
    # Layer, group and instance norms do not reduce over the batch; tensors computed
    # from variables alone, such as the statistics of a kernel, have no batch.
    for op in ops:
        if op not in fed:
            continue
        fused = fused_in_training(op)
        if fused is not None:
            yield BatchMoments(op.name, *fused.moments, fused)
        elif len(op.outputs) == 1:
            # Of a moment that is measured, those of the scaled data do not count.
            variance = op.outputs[0]
            measured = measured_moment(variance)
            mean = _mean_below(variance if measured is None else measured)
            if mean is None:
                continue
            measured_mean = _measured_mean(mean)
            if measured is not None and measured_mean is not None:
                yield BatchMoments(op.name, measured_mean, variance)
            elif measured_mean is None:
                yield BatchMoments(op.name, mean, variance)


def _mean_below(variance: Tensor) -> Tensor | None:
    """Return the batch mean that a batch variance is the variance around, or None."""
    by_difference = mean_of_difference(variance)
    if by_difference is not None:
        return by_difference[1]
    squares = batch_mean(variance)
    if squares is None:
        return None
    for a, b in _differences(squares):
        # The square is the same from either side.
        for candidate in (behind_shaping(b), behind_shaping(a)):
            if batch_mean(candidate) is not None:
                return candidate
    return None


def _differences(squares: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (a, b) if a tensor holds (a - b)^2, perhaps weighted."""
    squares = _unmasked(squares)
    factors = [squares]
    if squares.op.type == "Mul":
        factors += [behind_shaping(t) for t in squares.op.inputs]
    for t in factors:
        if t.op.type == "SquaredDifference":
            yield t.op.inputs[0], t.op.inputs[1]
        elif t.op.type == "Square":
            difference = _unmasked(t.op.inputs[0])
            if difference.op.type == "Sub":
                yield difference.op.inputs[0], difference.op.inputs[1]


def _unmasked(tensor: Tensor) -> Tensor:
    """Return the tensor that a mask is applied to: Keras puts zeros for the rest."""
    tensor = behind_shaping(tensor)
    if tensor.op.type in SELECTS:
        return behind_shaping(tensor.op.inputs[1])
    return tensor
