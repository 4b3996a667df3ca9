"""Cross-layer equalization of a model: its scales and its report.

Channels of two layers with homogeneous ops between them can be scaled by any s > 0:
what the first layer makes by 1/s, and what the second one reads by s. With

    s = sqrt(r1 * r2) / r2

for the ranges r1 and r2 of a channel's weights in the two layers, both ranges become
sqrt(r1 * r2) (Nagel et al. 2019, arXiv 1906.04721, section 4.1, equation 11).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import QuantizeError
from geutil.graph import creation
from geutil.graph.edits import InputEdit, apply_edits, transaction
from geutil.graph.types import (
    Graph,
    MutableIdentityMap,
    Operation,
    Tensor,
    signatures_of,
)
from geutil.quantize.partial_copy import values_of
from geutil.quantize.planning.int8_kernels import FAKE_QUANT
from geutil.quantize.planning.network import Network
from geutil.quantize.scalable_layers import ScalableLayer, ScalingObstacle, find_links
from geutil.select.networks.layers import Layer
from geutil.select.networks.provenance import Origin

Array = np.ndarray[Any, Any]

_MOST_SWEEPS = 1000
_CLOSE = 1e-7


@dataclass(eq=False)
class Weights:
    """The weights of a layer, being scaled.

    Attributes:
        values: the values, in float64.
        outputs: the axes that together count the channels of the result.
        inputs: those that count the channels of the data.
    """

    values: Array
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]

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
    """Scale the weights of pairs of layers until the ranges of each pair are alike.

    Args:
        pairs: a layer, and those that read what it makes. Of several the largest range
            of a channel counts.

    Returns:
        For each pair the s of its channels. Channels that are zero in a layer keep 1.

    Cost: a sweep over all weights for each iteration. A chain of 20 layers takes some
    100.
    """
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
        channels: how many channels there are.
        before: the largest range of a channel's weights in the first layer over the
            smallest one, those of zeros left out.
        after: the same, now.
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
        op: the op that stands in the way.
        reason: why.
        signature: the signature whose graph it is in.
    """

    layer: str
    op: str
    reason: str
    signature: str = ""


@dataclass(frozen=True)
class EqualizeReport:
    """Every layer of a model: equalized with those behind it, or not and why.

    Attributes:
        equalized: the layers whose channels were scaled.
        refused: those whose were not.
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
    """Give the channels of neighbouring layers like ranges, in place.

    A channel of a layer whose weights are small beside those of other channels loses
    most of its bits where all channels share one range. Behind Relu, LeakyRelu or
    nothing at all a layer's channels can be scaled, and scaled back by the weights of
    the next layer; the scales are chosen so that a channel has the same range in both
    (Nagel et al. 2019, arXiv 1906.04721, section 4.1). The results of the model stay,
    up to rounding. Fold batch norms first, and quantize afterwards.

    Constants become other constants. Variables stay as they are, and so do other
    models that read them: new ops multiply their values by constant scales, which fit
    the current values. Each signature is equalized by itself.

    Args:
        model: a `geutil.model.Model`.
        replace_relu6: use Relu in place of a Relu6 that stands between two layers.
            The results of the model stay only where the Relu6 does not clip.

    Returns:
        Every layer: equalized with those behind it, or not and why.

    Raises:
        ArgumentTypeError: it is no model.
        QuantizeError: it is quantized already; nothing is changed.
        StaleGraphError, FinalizedGraphError: an edit would have no effect, or is
            forbidden.

    Cost: linear in ops and edges, and some hundred sweeps over the weights.

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
    models = signatures_of(model, "a geutil.model.Model is equalized, not")
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
    links: list[ScalableLayer] = []
    refused: list[NotEqualized] = []
    links_or_obstacles = find_links(network, replace_relu6)
    for layer, link in zip(network.layers, links_or_obstacles, strict=True):
        if isinstance(link, ScalingObstacle):
            refused.append(NotEqualized(layer.name, link.op, link.reason, signature))
        else:
            links.append(link)
    if not links:
        return EqualizeReport((), tuple(refused))
    layers = dict.fromkeys(
        layer for link in links for layer in (link.first, *link.seconds)
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
            (weights[link.first.op], [weights[second.op] for second in link.seconds])
            for link in links
        ]
    )
    _apply(network, _scaled(links, scales))
    # A Relu6 would clip scaled channels at another value than before.
    _replace_clips(graph, [op for link in links for op in link.clips])
    entries = [
        Equalized(
            link.first.op.name,
            tuple(second.op.name for second in link.seconds),
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


def _scaled(links: Sequence[ScalableLayer], scales: Sequence[Array]) -> list[_Scaled]:
    """Return what is multiplied by what, each input of an op once."""
    factors: dict[Operation, tuple[Layer, Array]] = {}

    def multiply(layer: Layer, by: Array, axes: tuple[int, ...]) -> None:
        shape = layer.kernel.shape.as_list()
        _, total = factors.get(layer.op, (layer, np.ones([1] * len(shape))))
        factors[layer.op] = layer, total * spread(by, shape, axes)

    biases = []
    for link, by in zip(links, scales, strict=True):
        multiply(link.first, 1 / by, link.first.outputs)
        for second in link.seconds:
            multiply(second, by, second.inputs)
        for op, slot in link.biases:
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
        for reader in dict.fromkeys(op.outputs[0].consumers()):
            edits += [
                InputEdit(reader, index, relu)
                for index, t in enumerate(reader.inputs)
                if t is op.outputs[0]
            ]
    apply_edits(graph, edits)
