"""Statistics of batch norms re-estimated from data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import QuantizeError
from geutil.graph import creation, functions, strategy_variables
from geutil.graph.types import Graph, MutableIdentityMap, Operation, Tensor, as_model
from geutil.quantize import reestimated_norms
from geutil.quantize.calibration.calibrating import Sample, batches
from geutil.quantize.calibration.ranges import frozen, range_values
from geutil.quantize.partial_copy import PartialCopy
from geutil.quantize.planning.network import Network
from geutil.quantize.reestimated_norms import (
    InferenceNorm,
    Missed,
    Reestimated,
    ReestimateReport,
)
from geutil.select.walks import get_backward_walk_ops

Array = np.ndarray[Any, Any]


class ChannelMoments:
    """The mean and variance of all values of each channel.

    Batches are put together as if they were one (Chan, Golub and LeVeque 1979,
    "Updating formulae and a pairwise algorithm for computing sample variances").
    """

    def __init__(self) -> None:
        self._count = 0.0
        self.mean: Array = np.zeros(())
        self._squares: Array = np.zeros(())

    @property
    def variance(self) -> Array:
        """The mean of squared deviations, in float64."""
        return self._squares / self._count

    def add(self, count: float, mean: Array, variance: Array) -> None:
        """Take in a batch of so many values in each channel."""
        total = self._count + count
        apart = mean - self.mean
        self._squares = (
            self._squares + variance * count + apart**2 * (self._count * count / total)
        )
        self.mean = self.mean + apart * (count / total)
        self._count = total


@tf.autograph.experimental.do_not_convert
def reestimate_batch_norm(model: Any, dataset: Any) -> ReestimateReport:
    """Set the moving statistics of batch norms to those of data.

    Training for quantization, or a change of the weights, leaves moving averages
    behind that fit an earlier network. Here the mean and variance of the input of each
    batch norm are taken over all values of the data, as if it were one batch: there is
    no momentum. Batch norms are set in topological order, so that each one sees the
    results of those before it with their new statistics. FakeQuant ops count, with
    their ranges as they are, so that the statistics are those of the quantized network.

    Norms may be folded: the weights of their layers read the variables, and follow.
    Their ranges do not; calibrate a model again that is not quantized for training.
    Norms whose statistics are constants cannot be set, and are listed; of those that
    were folded as constants there is no trace left.

    Args:
        model: a `geutil.model.Model` at inference.
        dataset: the data, as `calibrate` takes it. It is gone through once, and held
            in memory.

    Returns:
        Every batch norm: with its new statistics, or left as it is and why.

    Raises:
        ArgumentTypeError: it is no model, or data of another type.
        QuantizeError: the data is empty or does not fit the inputs, or a norm is given
            NaN or infinite values; no variable is changed.

    Cost: runs of the model up to each batch norm, for each batch; batch norms that do
    not depend on each other run together.

    Example:
        >>> import tensorflow as tf
        >>> from geutil import model
        >>> from geutil.quantize import reestimate_batch_norm
        >>> layer = tf.keras.layers.BatchNormalization(name="norm")
        >>> layer.build([None, 2])
        >>> @tf.function(input_signature=[tf.TensorSpec([None, 2], name="x")])
        ... def f(x):
        ...     return {"y": layer(x, training=False)}
        >>> m = model.open(f)
        >>> report = reestimate_batch_norm(m, {"x": [[1.0, 5.0], [3.0, 5.0]]})
        >>> layer.moving_mean.numpy(), layer.moving_variance.numpy()
        (array([2., 5.], dtype=float32), array([1., 0.], dtype=float32))
    """
    verb = "batch norms are re-estimated in a geutil.model.Model, not in"
    graph = as_model(model, verb).graph
    network = Network(graph, model.outputs.values())
    handles = MutableIdentityMap(
        (inside, outside) for outside, inside in functions.bindings(graph)
    )
    norms_or_missed = reestimated_norms.find_norms(network, handles)
    norms = [norm for norm in norms_or_missed if isinstance(norm, InferenceNorm)]
    samples = list(batches(dataset, model.inputs))
    before = [(h, _read(h)) for norm in norms for h in (norm.mean, norm.variance)]
    entries: dict[InferenceNorm, Reestimated] = {}
    try:
        for level in _levels(norms):
            entries.update(_set(graph, model.inputs, level, samples))
    except BaseException:
        for handle, value in before:
            strategy_variables.assign(handle, value)
        raise
    missed = tuple(norm for norm in norms_or_missed if isinstance(norm, Missed))
    return ReestimateReport(tuple(entries[n] for n in norms), missed, len(samples))


def _levels(
    norms: Sequence[InferenceNorm],
) -> list[list[InferenceNorm]]:
    """Return the norms in groups, each depending on those before it only."""
    owner = {mark: norm for norm in norms for mark in norm.marks}
    before: dict[InferenceNorm, list[InferenceNorm]] = {}
    for norm in norms:
        behind: list[Operation] = get_backward_walk_ops([norm.source])
        before[norm] = [owner[op] for op in behind if op in owner]
    order = sorted(norms, key=lambda norm: len({id(n) for n in before[norm]}))
    depth: dict[InferenceNorm, int] = {}
    for norm in order:
        others = [other for other in before[norm] if other is not norm]
        depth[norm] = max((depth.get(other, 0) + 1 for other in others), default=0)
    count = max(depth.values(), default=-1) + 1
    return [[norm for norm in norms if depth[norm] == i] for i in range(count)]


def _set(
    graph: Graph,
    inputs: Mapping[str, Tensor],
    norms: Sequence[InferenceNorm],
    samples: Sequence[Sample],
) -> dict[InferenceNorm, Reestimated]:
    """Set the statistics of norms that do not depend on each other."""
    copy = PartialCopy(graph, inputs, frozen(range_values(graph)))
    tensors = [t for n in norms for t in (n.source, n.scale) if t is not None]
    copies = iter(copy.of(tensors))
    results: dict[str, Tensor] = {}
    with creation.neutral(copy.graph):
        for index, norm in enumerate(norms):
            values = tf.cast(next(copies), tf.float64)
            rank = values.shape.rank
            axes = [axis for axis in range(rank) if axis != rank + norm.axis]
            mean, variance = tf.nn.moments(values, axes)
            results[f"{index}/mean"], results[f"{index}/variance"] = mean, variance
            results[f"{index}/count"] = tf.size(values) / tf.size(mean)
            if norm.scale is not None:
                results[f"{index}/scale"] = tf.identity(next(copies))
    function = functions.build_function(copy.graph, copy.inputs, results, [], [])
    moments = [ChannelMoments() for _ in norms]
    statistics: dict[str, Any] = {}
    for sample in samples:
        statistics = {
            n: t.numpy() for n, t in functions.call_function(function, sample).items()
        }
        for index, entry in enumerate(moments):
            sample_moments = (
                statistics[f"{index}/{name}"] for name in ("count", "mean", "variance")
            )
            entry.add(*sample_moments)
    for norm, entry in zip(norms, moments, strict=True):
        if not (
            np.all(np.isfinite(entry.mean)) and np.all(np.isfinite(entry.variance))
        ):
            raise QuantizeError(
                f"'{norm.source.name}', which batch norm '{norm.name}' is given, holds "
                "NaN or infinite values; no variable was changed"
            )
    return {
        norm: _assigned(norm, entry, statistics.get(f"{index}/scale"))
        for index, (norm, entry) in enumerate(zip(norms, moments, strict=True))
    }


def _assigned(
    norm: InferenceNorm, moments: ChannelMoments, scale: Array | None
) -> Reestimated:
    """Assign new statistics to a norm, and return them."""
    mean, variance, kept_count = moments.mean, moments.variance, 0
    if scale is not None:
        factors = np.broadcast_to(scale.astype(np.float64).reshape(-1), mean.shape)
        # A factor of 0 hides the values of a channel: its old statistics stay.
        used = factors != 0
        safe = np.where(used, factors, 1.0)
        old_mean, old_variance = _read(norm.mean), _read(norm.variance)
        mean = np.where(used, mean / safe, old_mean.reshape(-1))
        variance = np.where(used, variance / safe**2, old_variance.reshape(-1))
        kept_count = int((~used).sum())
    for handle, value in ((norm.mean, mean), (norm.variance, variance)):
        strategy_variables.assign(handle, value.reshape(_read(handle).shape))
    return Reestimated(norm.name, mean, variance, scale is not None, kept_count)


def _read(handle: Any) -> Array:
    read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
    return np.asarray(read.numpy())
