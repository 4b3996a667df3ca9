"""Statistics of batch norms re-estimated from data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import QuantizeError
from geutil.graph import creation, functions, replicas, types
from geutil.graph.types import Graph, MutableIdentityMap, Operation, Tensor
from geutil.graph.walks import walk_by_identity
from geutil.quantize.calibration.calibration import Sample, batches
from geutil.quantize.calibration.ranges import frozen, range_values
from geutil.quantize.partial_copy import PartialCopy
from geutil.quantize.planning.int8_kernels import FAKE_QUANT
from geutil.quantize.planning.network import Network, delayed_input
from geutil.select.networks import batch_norms
from geutil.select.networks.batch_norms import SHAPING, FusedNorm
from geutil.select.networks.layers import Layer, Origin
from geutil.select.walks import get_backward_walk_ops

# Through StopGradient neither variables nor weights are looked for.
_FORWARDING = SHAPING - {"StopGradient"}


@dataclass(frozen=True, eq=False)
class InferenceNorm:
    """A batch norm whose statistics are variables."""

    name: str  # its name scope, or the name of its op
    mean: Any  # the handle of the variable of its mean
    variance: Any
    # The tensor whose statistics they are; of a folded norm that tensor times `scale`.
    source: Tensor
    axis: int  # the axis of the channels of the source, counted from the end
    marks: tuple[Operation, ...]  # the ops that change with its statistics first
    # The factor of the weights of a folded norm; None for others.
    scale: Tensor | None = None


@dataclass(frozen=True)
class Missed:
    """A batch norm that keeps its statistics.

    Attributes:
        norm: its name.
        reason: why it keeps them.
    """

    norm: str
    reason: str


def find_norms(
    network: Network, handles: Mapping[Any, Any]
) -> list[InferenceNorm | Missed]:
    """Return the batch norms of a network, in topological order."""
    # `handles`: for each tensor that stands for a variable's handle in the graph the
    # handle itself, by identity.
    finder = _NormFinder(network, handles)
    norm_by_root: dict[Operation, InferenceNorm | Missed] = {}
    for op in network.ops:
        fused = batch_norms.fused_norm(op)
        if fused is not None:
            norm_by_root[op] = finder.fused(fused)
        for t in op.inputs:
            for root in sorted(network.origins.spreads(t), key=lambda r: r.name):
                if root not in norm_by_root:
                    norm_by_root[root] = finder.norm(root)
    return list(norm_by_root.values())


class _NormFinder:
    def __init__(self, network: Network, handles: Mapping[Any, Any]) -> None:
        self._network = network
        self._handles = handles

    def fused(self, norm: FusedNorm) -> InferenceNorm | Missed:
        """Return the norm that is a single op."""
        op = norm.op
        if norm.trains:
            return Missed(op.name, "normalizes by the statistics of the batch")
        mean, variance = (self._variable(t) for t in norm.given)
        if mean is None or variance is None:
            return Missed(op.name, "has constants for statistics, which are frozen")
        return InferenceNorm(op.name, mean, variance, op.inputs[0], norm.axis, (op,))

    def norm(self, root: Operation) -> InferenceNorm | Missed:
        """Return the norm that takes a root of a variance."""
        name = types.scope_dirname(root.name).rstrip("/") or root.name
        if self._network.origins.of(root.outputs[0]) is Origin.BATCH:
            return Missed(name, "normalizes by the statistics of the batch")
        below = batch_norms.variance_below(root)
        variance = None if below is None else self._variable(below)
        if variance is None:
            return Missed(name, "has a constant for its variance, which is frozen")
        scaled = list(self._scaled(root))
        mean = self._mean(scaled)
        if mean is None:
            return Missed(name, "has no variable for its mean that could be found")
        uses = [use for use in self._uses(scaled) if use is not None]
        if len(uses) != 1:
            return Missed(
                name,
                f"scales {len(uses)} tensors or layers, and not one: it was folded "
                "into the layer behind it, or is shared",
            )
        source, axis, scale = uses[0]
        return InferenceNorm(name, mean, variance, source, axis, (root,), scale)

    def _variable(self, tensor: Tensor) -> Any:
        """Return the handle of the variable that a tensor has the value of."""
        tensor = batch_norms.behind_shaping(tensor, _FORWARDING)
        if tensor.op.type != "ReadVariableOp":
            return None
        return self._handles.get(tensor.op.inputs[0])

    def _scaled(self, root: Operation) -> Iterator[tuple[Operation, int]]:
        """Yield the ops that multiply or divide by a root, with the slot."""
        # And go on from those that make parameters.
        network = self._network

        def parameters(tensor: Tensor) -> list[Tensor]:
            readers = (op for op in tensor.consumers() if op.type not in FAKE_QUANT)
            made = (op.outputs[0] for op in readers if op.outputs)
            return [t for t in made if network.origins.is_parameter(t)]

        for tensor in walk_by_identity(root.outputs, parameters):
            for op in tensor.consumers():
                for slot, t in enumerate(op.inputs):
                    if t is tensor and not network.live.is_retired(op):
                        yield op, slot

    def _mean(self, scaled: list[tuple[Operation, int]]) -> Any:
        """Return the tensor that is scaled and subtracted, or subtracted from data."""
        for op, slot in scaled:
            if op.type != "Mul":
                continue
            other = op.inputs[1 - slot]
            handle = self._variable(other)
            if handle is not None and _is_subtracted(op.outputs[0]):
                return handle
            if other.op.type == "Sub" and self._network.is_data(other):
                return self._variable(other.op.inputs[1])
        return None

    def _uses(
        self, scaled: list[tuple[Operation, int]]
    ) -> Iterator[tuple[Tensor, int, Tensor | None] | None]:
        """Yield the data that is scaled, or the results of layers whose weights are."""
        for op, slot in scaled:
            # A root that is divided by something scales no data.
            if op.type not in ("Mul", "RealDiv") or (op.type == "RealDiv" and not slot):
                continue
            scale, other = op.inputs[slot], op.inputs[1 - slot]
            if self._network.is_data(other) and op in self._network.place:
                # Of (x - mean) * scale, the statistics are those of x.
                if other.op.type == "Sub":
                    other = other.op.inputs[0]
                yield other, _last_axis(scale), None
                continue
            # A folded norm scales the weights of its layer in place of data.
            if op.type == "Mul":
                for layer in self._network.layers.values():
                    if _weights(layer) is op.outputs[0]:
                        yield _folded(layer, scale)


def _weights(layer: Layer) -> Tensor:
    """Return the weights of a layer before they are quantized."""
    tensor = layer.kernel
    while True:
        op = tensor.op
        delayed = delayed_input(op)
        if delayed is not None:
            tensor = delayed
        elif op.type in FAKE_QUANT or op.type in _FORWARDING:
            tensor = op.inputs[0]
        else:
            return tensor


def _folded(layer: Layer, scale: Tensor) -> tuple[Tensor, int, Tensor] | None:
    """Return the result of a layer; None if its inputs are scaled, and not that."""
    rank, shape = layer.kernel.shape.rank, scale.shape.as_list()
    axes = [rank - len(shape) + i for i, size in enumerate(shape) if size != 1]
    if not set(axes) <= set(layer.outputs):
        return None
    return layer.result, layer.axis, scale


def _last_axis(scale: Tensor) -> int:
    """Return the axis of channels that a scale is for, counted from the end."""
    shape = scale.shape.as_list()
    axes = [i - len(shape) for i, size in enumerate(shape) if size != 1]
    return axes[0] if axes else -1


def _is_subtracted(tensor: Tensor) -> bool:
    def forwarded_to(t: Tensor) -> list[Tensor]:
        return [op.outputs[0] for op in t.consumers() if op.type in _FORWARDING]

    return any(
        op.type == "Neg" or (op.type == "Sub" and op.inputs[1] is t)
        for t in walk_by_identity([tensor], forwarded_to)
        for op in t.consumers()
    )


Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Reestimated:
    """A batch norm with new statistics.

    Attributes:
        norm: its name.
        mean: the new mean of each channel.
        variance: the new variance of each channel.
        folded: whether it is folded into a layer.
        kept: the number of channels that kept their statistics, since a folded norm
            multiplies them by zero.
    """

    norm: str
    mean: Array
    variance: Array
    folded: bool
    kept: int = 0


@dataclass(frozen=True)
class ReestimateReport:
    """Every batch norm of a model: with new statistics, or not and why.

    Attributes:
        reestimated: the batch norms with new statistics, in topological order.
        missed: the batch norms that keep their statistics.
        batches: the number of batches.
    """

    reestimated: tuple[Reestimated, ...]
    missed: tuple[Missed, ...]
    batches: int

    def __str__(self) -> str:
        done, missed = len(self.reestimated), len(self.missed)
        total = f"{done} of {done + missed} batch norm(s)"
        lines = [f"{total} re-estimated from {self.batches} batch(es)"]
        for entry in self.reestimated:
            where = "folded" if entry.folded else "not folded"
            kept_note = f", {entry.kept} kept" if entry.kept else ""
            lines.append(
                f"  {entry.norm}: {entry.mean.size} channels, {where}{kept_note}"
            )
        lines += [f"  {entry.norm}: left, {entry.reason}" for entry in self.missed]
        return "\n".join(lines)


class ChannelMoments:
    """The mean and variance of all values of each channel."""

    # Batches are put together as if they were one (Chan, Golub and LeVeque 1979,
    # "Updating formulae and a pairwise algorithm for computing sample variances").

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
    """Re-estimate the moving statistics of batch norms from data.

    After training for quantization, or a change of the weights, moving averages fit an
    earlier network. This function computes the mean and variance of the input of each
    batch norm over all data, as if it were one batch, without momentum. Batch norms are
    updated in topological order, so that each one sees the results of earlier ones with
    their new statistics. FakeQuant ops are applied with their current ranges, so that
    the statistics are those of the quantized network.

    Norms may be folded: the weights of their layers read the variables, and follow.
    Their ranges do not; recalibrate a model that is not quantized for training. Norms
    whose statistics are constants cannot be updated, and are listed, except those that
    were folded as constants, which leave no trace.

    Args:
        model: a `geutil.model.Model` at inference.
        dataset: the data, as `calibrate` takes it. It is iterated once, and kept in
            memory.

    Returns:
        Every batch norm: with its new statistics, or unchanged and why.

    Raises:
        ArgumentTypeError: `model` is not a model, or the data has another type.
        QuantizeError: the data is empty or does not fit the inputs, or a norm reads NaN
            or infinite values; no variable is changed.

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
    graph = types.as_model(model, verb).graph
    network = Network(graph, model.outputs.values())
    handles = MutableIdentityMap(
        (inside, outside) for outside, inside in functions.bindings(graph)
    )
    norms_or_missed = find_norms(network, handles)
    norms = [norm for norm in norms_or_missed if isinstance(norm, InferenceNorm)]
    samples = list(batches(dataset, model.inputs))
    before = [(h, _read(h)) for norm in norms for h in (norm.mean, norm.variance)]
    entries: dict[InferenceNorm, Reestimated] = {}
    try:
        # The data of a norm depend on the norms before it.
        for level in _levels(norms):
            entries.update(_set(graph, model.inputs, level, samples))
    # An interrupt, too, must not leave some of the norms changed.
    except BaseException:
        for handle, value in before:
            replicas.assign(handle, value)
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
            # In float32, sums over many values would lose digits.
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
        replicas.assign(handle, value.reshape(_read(handle).shape))
    return Reestimated(norm.name, mean, variance, scale is not None, kept_count)


def _read(handle: Any) -> Array:
    read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
    return np.asarray(read.numpy())
