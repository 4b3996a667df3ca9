"""Cross-layer equalization of a model: its scales and its report.

Channels of two layers with homogeneous ops between them can be scaled by any s > 0:
the first layer's result by 1/s, and the second one's data by s. With

    s = sqrt(r1 * r2) / r2

for the ranges r1 and r2 of a channel's weights in the two layers, both ranges become
sqrt(r1 * r2) (Nagel et al. 2019, arXiv 1906.04721, section 4.1, equation 11).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import QuantizeError
from geutil.graph import creation, types
from geutil.graph.edits import InputEdit, apply_edits, reader_edits, transaction
from geutil.graph.op_types import FUSED_NORMS, SHIFTS, types_in
from geutil.graph.types import Graph, IdentitySet, MutableIdentityMap, Operation, Tensor
from geutil.quantize.partial_copy import values_of
from geutil.quantize.planning.int8_kernels import FAKE_QUANT
from geutil.quantize.planning.network import Edge, Network
from geutil.quantize.spec import FOLD
from geutil.select.networks.layers import Layer, Origin, reduced_axes

# f(s * x) = s * f(x) for s > 0, channel by channel.
_HOMOGENEOUS = types_in(
    """
    AddN AvgPool BatchToSpaceND Identity LeakyRelu MaxPool MaxPoolV2 Neg Pad Relu
    SpaceToBatchND StopGradient
    """
)


class _Link:
    """A layer, the layers that read its result, and the ops between them."""

    def __init__(self, layer: Layer, network: Network, replace_relu6: bool) -> None:
        self.first = layer
        self.seconds: dict[Operation, Layer] = {}
        self.channels = int(np.prod(layer.sizes(layer.outputs) or [0]))
        self.biases: list[Edge] = []  # inputs that are added to the channels
        self.clips: list[Operation] = []  # Relu6 ops
        self._network = network
        self._replace_relu6 = replace_relu6
        self._inside: IdentitySet = IdentitySet()
        self._waiting: list[tuple[int, Operation]] = []

    def obstacle(self) -> tuple[Operation, str] | None:
        """Walk on to the next layers; return the op in the way and why, or None."""
        layer = self.first
        if not self.channels:
            return layer.op, "has weights of unknown shape"
        reason, op = self._enter(layer.result), layer.op
        # In topological order: what an op reads was decided on before it.
        while self._waiting and not reason:
            _, op = heapq.heappop(self._waiting)
            reason = self._take(op)
        if reason:
            return op, reason
        return None if self.seconds else (layer.op, "has no layer behind it")

    def _enter(self, tensor: Tensor) -> str:
        if tensor in self._network.results:
            return "makes an output of the model"
        if tensor.dtype != tf.float32:
            return f"computes in {tensor.dtype.name}, not in float32"
        self._inside.add(tensor)
        for edge in self._network.readers(tensor):
            entry = (self._network.place[edge.op], edge.op)
            if entry not in self._waiting:
                heapq.heappush(self._waiting, entry)
        return ""

    def _take(self, op: Operation) -> str:
        """Take a reader in; return why that cannot be, or nothing."""
        second = self._network.layers.get(op)
        if second is not None:
            return self._end(second)
        data = [t for t in op.inputs if self._network.is_data(t)]
        if any(t not in self._inside for t in data):
            return f"({op.type}) reads data that comes from elsewhere, too"
        reason = self._refusal(op, data)
        return reason or self._enter(op.outputs[0])

    def _end(self, second: Layer) -> str:
        kind, sizes = second.op.type, second.sizes(second.inputs)
        if sizes is None:
            return f"({kind}) has weights of unknown shape"
        count = int(np.prod(sizes))
        if count != self.channels:
            return (
                f"({kind}) has {count} input channels in its weights, and there are "
                f"{self.channels}: it is grouped"
            )
        self.seconds[second.op] = second
        return ""

    def _refusal(self, op: Operation, data: list[Tensor]) -> str:
        """Return why an op does not keep the scale of channels, or nothing."""
        kind = op.type
        if kind in FUSED_NORMS:
            return f"is a batch norm; fold it first, with {FOLD}"
        if kind == "Relu6":
            if self._replace_relu6:
                self.clips.append(op)
                return ""
            return (
                "(Relu6) clips at 6, whatever the scale; pass replace_relu6=True to "
                "use Relu instead, which changes what the model computes"
            )
        if kind == "Mean":
            return "(Mean) may average over channels" if self._mixes(op) else ""
        if kind in SHIFTS:
            return self._summed(op, data)
        # By a parameter, a product keeps the scale of its channels.
        if kind in _HOMOGENEOUS or (kind == "Mul" and len(data) == 1):
            return ""
        return f"({kind}) does not keep the scale of channels"

    def _mixes(self, op: Operation) -> bool:
        axes, rank = reduced_axes(op), op.inputs[0].shape.rank
        if axes is None or rank is None or self.first.axis != -1:
            return True
        return rank - 1 in axes

    def _summed(self, op: Operation, data: list[Tensor]) -> str:
        if len(data) == len(op.inputs):
            return ""
        ((slot, bias),) = (
            (i, t) for i, t in enumerate(op.inputs) if not self._network.is_data(t)
        )
        sizes = bias.shape.as_list() if bias.shape.rank is not None else [None]
        axis = -1 if op.type == "BiasAdd" else self.first.axis
        of_channels = len(sizes) >= -axis and sizes[axis] == self.channels
        if bias.shape.num_elements() != (self.channels if of_channels else 1):
            return f"({op.type}) adds something else than a bias"
        self.biases.append(Edge(op, slot))
        return ""


Array = np.ndarray[Any, Any]

_MOST_SWEEPS = 1000  # ten times those of a chain of 20 layers
_CLOSE = 1e-7  # below 2^-23, a step of float32


@dataclass(eq=False)
class Weights:
    """The weights of a layer, being scaled."""

    values: Array
    outputs: tuple[int, ...]  # the axes that together count the channels of the result
    inputs: tuple[int, ...]  # those that count the channels of the data

    def ranges(self, axes: tuple[int, ...]) -> Array:
        """Return the largest magnitude in each channel."""
        others = tuple(a for a in range(self.values.ndim) if a not in axes)
        magnitudes: Array = np.abs(self.values).max(others).reshape(-1)
        return magnitudes

    def scale(self, factors: Array, axes: tuple[int, ...]) -> None:
        """Multiply each channel by a factor."""
        self.values = self.values * spread(factors, self.values.shape, axes)


def spread(factors: Array, shape: Sequence[int], axes: tuple[int, ...]) -> Array:
    """Return factors of channels in a shape that broadcasts over weights."""
    sizes = [shape[axis] if axis in axes else 1 for axis in range(len(shape))]
    return factors.reshape(sizes)


def equalized(pairs: Sequence[tuple[Weights, Sequence[Weights]]]) -> list[Array]:
    """Scale the weights of pairs of layers until the ranges of each pair are alike."""
    # `pairs`: a layer, and those that read what it makes. Of several the largest range
    # of a channel counts.
    # Returns for each pair the s of its channels. Channels that are zero in a layer
    # keep 1.
    totals = [np.ones(first.ranges(first.outputs).size) for first, _ in pairs]
    for _ in range(_MOST_SWEEPS):
        change = 0.0
        for total, (first, seconds) in zip(totals, pairs, strict=True):
            scales = _scales(
                first.ranges(first.outputs),
                np.max([second.ranges(second.inputs) for second in seconds], 0),
            )
            first.scale(1 / scales, first.outputs)
            for second in seconds:
                second.scale(scales, second.inputs)
            total *= scales
            change = max(change, float(np.abs(np.log(scales)).max()))
        if change < _CLOSE:
            break
    return totals


def _scales(first: Array, second: Array) -> Array:
    used = (first > 0) & (second > 0)
    scales = np.ones(first.shape)
    scales[used] = np.sqrt(first[used] / second[used])
    return scales


@dataclass(frozen=True)
class Equalized:
    """A layer whose channels were scaled.

    Attributes:
        first: the layer, by the name of its op.
        seconds: the layers that scale its channels back.
        channels: the number of channels.
        before: the ratio of the largest to the smallest range of a channel's weights in
            the first layer, without all-zero channels.
        after: the same ratio afterwards.
        replaced: the Relu6 ops that were replaced with Relu.
        signature: the signature whose graph it is in.
    """

    first: str
    seconds: tuple[str, ...]
    channels: int
    before: float
    after: float
    replaced: tuple[str, ...] = ()
    signature: str = ""


@dataclass(frozen=True)
class NotEqualized:
    """A layer whose channels were left as they are.

    Attributes:
        layer: the layer, by the name of its op.
        op: the op that prevents it.
        reason: why the channels were not scaled.
        signature: the signature whose graph it is in.
    """

    layer: str
    op: str
    reason: str
    signature: str = ""


@dataclass(frozen=True)
class EqualizeReport:
    """Every layer of a model: equalized with the next layers, or not and why.

    Attributes:
        equalized: the layers whose channels were scaled.
        refused: the layers whose channels were not scaled.
    """

    equalized: tuple[Equalized, ...]
    refused: tuple[NotEqualized, ...]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the text: the layers equalized, then those refused."""
        yield f"{len(self.equalized)} layer(s) equalized, {len(self.refused)} not"
        signatures = {e.signature for e in self.equalized}
        several = len(signatures | {e.signature for e in self.refused}) > 1
        if self.equalized:
            yield "equalized:"
        for entry in self.equalized:
            where = f"{entry.signature}: " if several else ""
            yield (
                f"  {where}{entry.first} with {', '.join(entry.seconds)}: "
                f"{entry.channels} channels, largest range {entry.before:.3g} times "
                f"the smallest, now {entry.after:.3g}"
            )
        if self.refused:
            yield "not:"
        for missed in self.refused:
            where = f"{missed.signature}: " if several else ""
            yield f"  {where}{missed.layer}: '{missed.op}' {missed.reason}"


_SUFFIX = "equalized"


@dataclass(frozen=True, eq=False)
class _Scaled:
    """An input of an op that will be multiplied by some factors."""

    op: Operation
    slot: int
    factors: Array

    @property
    def tensor(self) -> Tensor:
        return self.op.inputs[self.slot]


@tf.autograph.experimental.do_not_convert
def equalize(model: Any, *, replace_relu6: bool = False) -> EqualizeReport:
    """Equalize the ranges of channels across neighbouring layers, in place.

    If all channels of a layer share one range, a channel whose weights are much smaller
    than others loses most of its bits. If a layer is followed by Relu, LeakyRelu or no
    activation, its channels can be scaled, and scaled back by the weights of the next
    layer; the scales are chosen so that a channel has the same range in both (Nagel et
    al. 2019, arXiv 1906.04721, section 4.1). The results of the model stay the same, up
    to rounding. Fold batch norms first, and quantize afterwards.

    Constants are replaced. Variables do not change, nor do other models that read them:
    new ops multiply their values by constant scales, which fit the current values. Each
    signature is equalized separately.

    Args:
        model: a `geutil.model.Model`.
        replace_relu6: whether to replace a Relu6 between two layers by Relu. The
            results of the model stay the same only if the Relu6 does not clip.

    Returns:
        Every layer: equalized with the next layers, or not and why.

    Raises:
        ArgumentTypeError: `model` is not a model.
        QuantizeError: it is quantized already; nothing is changed.
        StaleGraphError, FinalizedGraphError: an edit would have no effect, or is
            forbidden.

    Cost: linear in ops and edges, and about a hundred sweeps over the weights.

    Example:
        >>> import tensorflow as tf
        >>> from geutil import model
        >>> from geutil.quantize import equalize
        >>> first, second = tf.constant([[4.0, 0.25]]), tf.constant([[1.0], [1.0]])
        >>> @tf.function(input_signature=[tf.TensorSpec([None, 1], name="x")])
        ... def f(x):
        ...     hidden = tf.nn.relu(tf.matmul(x, first, name="a"))
        ...     return {"y": tf.matmul(hidden, second, name="b")}
        >>> m = model.open(f)
        >>> print(equalize(m))
        1 layer(s) equalized, 1 not
        equalized:
          a with b: 2 channels, largest range 16 times the smallest, now 4
        not:
          b: 'b' makes an output of the model
        >>> float(m.run(x=[[2.0]])["y"][0, 0])
        8.5
    """
    places = _places(model)
    reports = []
    for name, graph, results in places:
        with transaction(graph):
            reports.append(_equalized(name, graph, results, replace_relu6))
    return EqualizeReport(
        tuple(entry for report in reports for entry in report.equalized),
        tuple(entry for report in reports for entry in report.refused),
    )


def _places(model: Any) -> list[tuple[str, Graph, list[Tensor]]]:
    """Return (name, graph, results) of each signature; refuse quantized ones."""
    models = types.signatures_of(model, "a geutil.model.Model is equalized, not")
    for other in models.values():
        for op in other.graph.get_operations():
            if op.type in FAKE_QUANT:
                raise QuantizeError(
                    f"'{op.name}' ({op.type}) quantizes already; call equalize before "
                    "geutil.quantize.quantize"
                )
    return [(n, m.graph, list(m.outputs.values())) for n, m in models.items()]


def _equalized(
    signature: str, graph: Graph, results: list[Tensor], replace_relu6: bool
) -> EqualizeReport:
    """Equalize the layers of one graph, and return a report on it."""
    network = Network(graph, results)
    links: list[_Link] = []
    refused: list[NotEqualized] = []
    for layer in network.layers.values():
        link = _Link(layer, network, replace_relu6)
        found = link.obstacle()
        if found is None:
            links.append(link)
        else:
            op, reason = found
            refused.append(NotEqualized(layer.op.name, op.name, reason, signature))
    if not links:
        return EqualizeReport((), tuple(refused))
    layers = dict.fromkeys(
        layer for link in links for layer in (link.first, *link.seconds.values())
    )
    values = values_of([layer.kernel for layer in layers])
    weights = {
        layer.op: Weights(value.astype(np.float64), layer.outputs, layer.inputs)
        for layer, value in zip(layers, values, strict=True)
    }
    before = [_ratio(weights[link.first.op]) for link in links]
    # Scales `weights` in place: their ratios are taken before and after.
    scales = equalized(
        [
            (weights[link.first.op], [weights[op] for op in link.seconds])
            for link in links
        ]
    )
    _apply(network, _scaled(links, scales))
    # A Relu6 would clip scaled channels at another value than before.
    _replace_clips(graph, [op for link in links for op in link.clips])
    entries = [
        Equalized(
            link.first.op.name,
            tuple(op.name for op in link.seconds),
            link.channels,
            ratio,
            _ratio(weights[link.first.op]),
            tuple(op.name for op in link.clips),
            signature,
        )
        for link, ratio in zip(links, before, strict=True)
    ]
    return EqualizeReport(tuple(entries), tuple(refused))


def _ratio(weights: Weights) -> float:
    ranges = weights.ranges(weights.outputs)
    used = ranges[ranges > 0]
    return float(used.max() / used.min()) if used.size else 1.0


def _scaled(links: Sequence[_Link], scales: Sequence[Array]) -> list[_Scaled]:
    """Return the inputs to scale with their factors, each input of an op once."""
    factors: dict[Operation, tuple[Layer, Array]] = {}

    def multiply(layer: Layer, by: Array, axes: tuple[int, ...]) -> None:
        shape = layer.kernel.shape.as_list()
        # A layer can be the second one of a link and the first one of the next.
        _, total = factors.get(layer.op, (layer, np.ones([1] * len(shape))))
        factors[layer.op] = layer, total * spread(by, shape, axes)

    biases = []
    for link, by in zip(links, scales, strict=True):
        multiply(link.first, 1 / by, link.first.outputs)
        for second in link.seconds.values():
            multiply(second, by, second.inputs)
        for op, slot in link.biases:
            # BiasAdd takes a vector; other sums broadcast behind the axis of channels.
            behind = 0 if op.type == "BiasAdd" else -1 - link.first.axis
            biases.append(_Scaled(op, slot, (1 / by).reshape([-1] + [1] * behind)))
    kernels = [_Scaled(op, la.weights, total) for op, (la, total) in factors.items()]
    return [*kernels, *biases]


def _apply(network: Network, inputs: Sequence[_Scaled]) -> None:
    constants = [
        entry.tensor
        for entry in inputs
        if network.origins.of(entry.tensor) is Origin.CONSTANT
    ]
    values = MutableIdentityMap(zip(constants, values_of(constants), strict=True))
    edits = [
        InputEdit(entry.op, entry.slot, _product(entry, values.get(entry.tensor)))
        for entry in inputs
    ]
    apply_edits(edits[0].op.graph, edits)


def _product(entry: _Scaled, value: Array | None) -> Tensor:
    """Return an input multiplied by its factors: a constant if its value is known."""
    tensor, op = entry.tensor, entry.op
    dtype = tensor.dtype.as_numpy_dtype
    with creation.surroundings_of(op):
        if value is not None:
            return tf.constant((value * entry.factors).astype(dtype), name=_SUFFIX)
        factors = tf.constant(entry.factors.astype(dtype), name=f"{_SUFFIX}_scales")
        return tf.multiply(tensor, factors, name=_SUFFIX)


def _replace_clips(graph: Graph, clips: Sequence[Operation]) -> None:
    edits = []
    for op in dict.fromkeys(clips):
        with creation.surroundings_of(op):
            relu = tf.nn.relu(op.inputs[0], name="Relu")
        edits += reader_edits(op.outputs[0], relu)
    apply_edits(graph, edits)
