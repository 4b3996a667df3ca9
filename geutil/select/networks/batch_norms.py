"""Batch norms: fused ops, roots of variances, moments of a batch, moving averages.

Clients define a batch norm differently, since they change different parts of it:

- a fold needs the run of ops that scale and shift channels, so as to replace it
  (`geutil.batchnorm.norms`);
- stripping needs the mean and the variance over the batch, whatever a norm does with
  them, so as to put other values in their place (`batch_moments`);
- re-estimation needs the variables of a norm at inference, and the data of these
  statistics, in folded layers too (`geutil.quantize.reestimation`).

Their common questions are answered here.

Moving averages are variables that follow statistics of a batch. An update reads the
statistic `s` and mostly the variable `v` itself: it is `assign(v, v * m + s * (1 -
m))`, `assign_sub(v, (v - s) * (1 - m))`, or an assignment of the averages of a fused
batch norm. Three questions are asked, by clients that rely on different things, so they
accept different updates:

| | `MovingStatistics.of` | `moving_average` | `moving_averages` |
| --- | --- | --- | --- |
| asked by | folds for inference | folds in training | stripping |
| given | what a norm reads | one statistic | the graph |
| statistics | whatever is taken of data | that one | means, variances |
| between `s` and `v` | anything, no other data | `+ - * /` | `+ - *`, choices |
| reads `v` | does not matter | must | must, or a fused norm |
| variables | resources, references | resources, references | resources |
| unclear | None | the reason | left out |

A fold for inference needs values for all that the norm reads of the batch, so it asks
for the whole of it. A fold in training divides by the average before the step, so it
needs where that is read. Stripping starts from no layer, and looks at all updates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from geutil.graph import adjacency, op_types
from geutil.graph.op_types import FUSED_NORMS, SELECTS
from geutil.graph.replicas import own_summand
from geutil.graph.types import Graph, Operation, Tensor, is_reference
from geutil.graph.walks import closure_by_identity, walk_by_identity
from geutil.select.networks.layers import (
    Origin,
    Origins,
    data_format,
    origin_of,
    scalar_value,
)
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
    """Return whether a fused batch norm normalizes each example by itself."""
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
    """Return whether a vector of one value has a length that is computed."""
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
    """Return whether an op reduces over the first axis, but not over all axes."""
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
    """Return whether a tensor is a constant, a few Identity ops looked through."""
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
    """Return whether a tensor is a mean or variance over the batch."""
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


_UPDATES = op_types.ASSIGNMENTS | op_types.INCREMENTS
_RESOURCE_UPDATES = frozenset(t for t in _UPDATES if t.endswith("VariableOp"))


@dataclass(frozen=True, eq=False)
class MovingVariable:
    """A variable that follows a statistic of the batch."""

    statistic: Tensor  # The mean or variance of the batch.
    # The ops that move the variable on, at least one; input 1 of each is the value that
    # it assigns, adds or subtracts.
    updates: tuple[Operation, ...]
    # The variable's value that the first update reads, the average before the step;
    # None if it does not, or if that was not asked for.
    value: Tensor | None = None

    @property
    def update(self) -> Operation:
        """The first of the updates: most variables have one."""
        return self.updates[0]

    @property
    def variable(self) -> Tensor:
        """The handle of the variable, or the reference to it."""
        return self.update.inputs[0]

    @property
    def replaces(self) -> bool:
        """True if the update assigns a new value, rather than a difference."""
        return self.update.type in op_types.ASSIGNMENTS

    @property
    def is_reference(self) -> bool:
        """True if it is a ref variable, whose readers may see its new value."""
        return is_reference(self.variable)


class MovingStatistics:
    """Finds the moving averages of batch norms in training."""

    # A variable follows a statistic if the graph assigns it a value that depends on the
    # statistic, and on no other data.

    def __init__(self, graph: Graph, origins: Origins) -> None:
        self._origins = origins
        self._updates: dict[int, list[tuple[Operation, dict[int, Tensor]]]] = {}
        for op in graph.get_operations():
            if op.type not in _UPDATES or origins.of(op.inputs[1]) is not Origin.BATCH:
                continue
            behind = self._behind([op.inputs[1]])
            for t in behind.values():
                if self._is_root(t):
                    self._updates.setdefault(id(t), []).append((op, behind))

    def of(
        self, parameters: Sequence[Tensor], fused: FusedNorm | None
    ) -> list[MovingVariable] | None:
        """Return the moving averages of a norm; None if they are not known."""
        if fused is not None:
            return self._of_fused(fused)
        used = self._behind(parameters)
        average_of: dict[int, MovingVariable] = {}
        for root in [t for t in used.values() if self._is_root(t)]:
            for update, behind in self._updates.get(id(root), ()):
                # The last statistic that the norm and the update share is followed.
                statistic = _last([t for key, t in used.items() if key in behind])
                if statistic is None:
                    return None
                average = average_of.get(id(statistic))
                if average is None:
                    average_of[id(statistic)] = MovingVariable(statistic, (update,))
                elif average.variable is not update.inputs[0]:
                    return None
                elif update not in average.updates:
                    updates = (*average.updates, update)
                    average_of[id(statistic)] = MovingVariable(statistic, updates)
        rest = self._behind(parameters, average_of)
        covered = all(
            key in average_of or not self._is_root(t) for key, t in rest.items()
        )
        return list(average_of.values()) if covered else None

    def _of_fused(self, norm: FusedNorm) -> list[MovingVariable] | None:
        """Return the variables that follow a fused norm's moments, if it reads none."""
        like = norm.op.inputs[1].shape
        shapes = [t.shape for t in norm.given]
        # A fused norm that trains may be given empty moments, which it does not read.
        if all(s.rank == 1 and s.as_list() == like.as_list() for s in shapes):
            are_parameters = all(self._origins.is_parameter(t) for t in norm.given)
            return [] if are_parameters else None
        averages = []
        for statistic in norm.moments:
            updates = self._updates.get(id(statistic), ())
            if len(updates) != 1:
                return None
            averages.append(MovingVariable(statistic, (updates[0][0],)))
        return averages

    def _behind(
        self, tensors: Iterable[Tensor], ends: Iterable[int] = ()
    ) -> dict[int, Tensor]:
        """Return the statistics behind tensors by id, roots included."""
        stop = frozenset(ends)

        def inputs_of(t: Tensor) -> list[Tensor]:
            ended = id(t) in stop or self._is_root(t)
            return [] if ended else self._of_batch(self._origins.sources(t.op))

        return closure_by_identity(self._of_batch(tensors), inputs_of)

    def _of_batch(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [t for t in tensors if self._origins.of(t) is Origin.BATCH]

    def _is_root(self, t: Tensor) -> bool:
        """Return whether a statistic is taken of the data there."""
        return fused_norm(t.op) is not None or any(
            self._origins.of(source) is None for source in self._origins.sources(t.op)
        )


def _last(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor that no other one is computed from, if there is just one."""
    read = {id(t) for last in tensors for t in last.op.inputs}
    ends = [t for t in tensors if id(t) not in read]
    return ends[0] if len(ends) == 1 else None


_UNARY = SHAPING | {"Snapshot"}
_BINARY = op_types.ADDITIONS | op_types.SCALINGS | {"Sub"}


def base_of(tensor: Tensor) -> Tensor:
    """Return the statistic or handle behind reshapes and copies."""
    return behind_shaping(tensor, _UNARY)


@dataclass(frozen=True, eq=False)
class NoAverage:
    """Why a statistic has no moving average that is known."""

    reason: str
    op: Operation  # The op that the reason is about.


def moving_average(
    statistic: Tensor, kind: str, stops: Collection[Operation], origins: Origins
) -> MovingVariable | NoAverage:
    """Return the moving average of a statistic of the batch, or why there is none."""
    # Its update reads the variable and the statistic, and nothing but arithmetic lies
    # between.
    update_by_variable: dict[Operation, Operation] = {}
    for op, tensor in _readers_onwards(statistic, stops, origins):
        if op.type in _UPDATES and op.inputs[1] is tensor:
            update_by_variable.setdefault(base_of(op.inputs[0]).op, op)
    if not update_by_variable:
        return NoAverage(
            f"is the {kind} of the batch, and no moving {kind} is kept of it",
            statistic.op,
        )
    if len(update_by_variable) > 1:
        names = ", ".join(f"'{variable.name}'" for variable in update_by_variable)
        return NoAverage(
            f"is the {kind} of the batch, and goes into several variables: {names}",
            statistic.op,
        )
    variable, update = next(iter(update_by_variable.items()))
    for tensor in walk_by_identity([update.inputs[1]], _channelwise_inputs):
        if _reads(tensor, variable):
            return MovingVariable(statistic, (update,), tensor)
    return NoAverage(
        f"({update.type}) keeps the {kind} of the last batch, and no moving average",
        update,
    )


def _readers_onwards(
    start: Tensor, stops: Collection[Operation], origins: Origins
) -> Iterator[tuple[Operation, Tensor]]:
    """Yield the readers of a statistic and of tensors computed from it."""
    reached: set[Operation] = set()
    queue = [start]
    for tensor in queue:
        for op in tensor.consumers():
            yield op, tensor
            if op in reached or op in stops:
                continue
            # Mixed with another tensor of the batch, it would be no statistic any more.
            if op.type in _UNARY or (
                op.type in _BINARY
                and all(
                    t is tensor
                    or t.op in reached
                    or t.shape.rank == 0
                    or origins.of(t) is not None
                    for t in op.inputs
                )
            ):
                reached.add(op)
                queue.append(op.outputs[0])


def _channelwise_inputs(tensor: Tensor) -> list[Tensor]:
    """Return the operands of a value that is computed channel by channel."""
    # A fused batch norm adds a part of its mean or variance input, if its averaging
    # factor is not 1.
    op = tensor.op
    if op.type in _UNARY:
        return [op.inputs[0]]
    if op.type in _BINARY:
        return list(op.inputs)
    fused = fused_norm(op)
    if fused is not None and fused.averaging_factor != 1.0:
        return [op.inputs[tensor.value_index + 2]]
    return []


def _reads(tensor: Tensor, variable: Operation) -> bool:
    op = tensor.op
    if op.type == "ReadVariableOp":
        return base_of(op.inputs[0]).op is variable
    return op.type in op_types.REF_VARIABLES and op is variable


_ARITHMETIC = op_types.ADDITIONS | {"Mul", "Sub"}
_MAX_OPS = 64
"""Ops of an update that are looked at; those of real layers are some ten."""


def moving_averages(graph: Graph) -> list[MovingVariable]:
    """Return the moving averages of a graph, in the order of their updates."""
    # The assigned value must be made of the variable itself, one statistic of the batch
    # and coefficients, by sums, differences, products and choices alone.
    averages = []
    for op in graph.get_operations():
        if op.type in _RESOURCE_UPDATES:
            average = _average_of(op)
            if average is not None:
                averages.append(average)
    return averages


def unknown_averages(
    graph: Graph, live: frozenset[Operation], known_averages: Iterable[MovingVariable]
) -> Iterator[tuple[Operation, Tensor]]:
    """Yield (update, tensor) where a variable tracks an ancestor of outputs."""
    # Nothing live reads the variable, as with the moving average of a batch norm in
    # training; but the tensor is no statistic that is known.
    left_out = frozenset(
        update for average in known_averages for update in average.updates
    )
    for op in graph.get_operations():
        if op.type not in _RESOURCE_UPDATES or op in left_out:
            continue
        handle, value = op.inputs[:2]
        if any(c in live for c in handle.consumers()):
            continue
        parts = _parts(value, handle)
        if parts is None or not parts.reads:
            continue
        for tensor in (*parts.statistics, *parts.others):
            if tensor.op in live and _is_scaled(value):
                yield op, tensor


@dataclass(frozen=True, eq=False)
class _Parts:
    """The operands of a linear combination, coefficients left out."""

    reads: list[Tensor]
    statistics: list[Tensor]
    others: list[Tensor]


def _parts(value: Tensor, handle: Tensor) -> _Parts | None:
    """Return the operands of an update's value; None if it is too much."""
    parts = _Parts([], [], [])
    leaves = walk_by_identity([value], _linear_inputs)
    for count, leaf in enumerate(leaves, 1):
        if count > _MAX_OPS:
            return None
        if _linear_inputs(leaf):
            continue
        if is_batch_moment(leaf):
            parts.statistics.append(leaf)
        elif leaf.op.type == "ReadVariableOp" and leaf.op.inputs[0] is handle:
            parts.reads.append(leaf)
        # Scalars and constants are the factors of the average.
        elif leaf.shape.rank != 0 and not is_constant(leaf):
            parts.others.append(leaf)
    return parts


def _linear_inputs(tensor: Tensor) -> list[Tensor]:
    """Return the operands of a linear combination, down to statistics."""
    op = tensor.op
    if is_batch_moment(tensor):
        return []
    if op.type in SHAPING:
        return [op.inputs[0]]
    if op.type in _ARITHMETIC:
        return list(op.inputs)
    # The first input of a select is its condition.
    if op.type in op_types.SELECTS:
        return list(op.inputs)[1:]
    return []


def _is_scaled(value: Tensor) -> bool:
    """Return whether a value is a product or a sum of products: sums only count up."""
    value = behind_shaping(value)
    return value.op.type == "Mul" or any(t.op.type == "Mul" for t in value.op.inputs)


def _average_of(update: Operation) -> MovingVariable | None:
    """Return the moving average that an update moves on, if it is one."""
    handle, value = update.inputs[:2]
    parts = _parts(value, handle)
    if parts is None or len(parts.statistics) != 1 or parts.others:
        return None
    (statistic,) = parts.statistics
    if not parts.reads and not _averages_itself(statistic, handle):
        return None
    return MovingVariable(statistic, (update,), next(iter(parts.reads), None))


def _averages_itself(statistic: Tensor, handle: Tensor) -> bool:
    """Return whether a fused batch norm gives the new average, not the statistic."""
    fused = fused_norm(statistic.op)
    return fused is not None and any(
        t.op.type == "ReadVariableOp" and t.op.inputs[0] is handle for t in fused.given
    )
