"""Cross-layer equalization of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.graph.edits import InputEdit, apply_edits, transaction
from geutil.graph.identity import MutableIdentityMap
from geutil.graph.kinds import Graph, Operation, Tensor, is_func_graph, type_name
from geutil.graph.surroundings import surroundings_of
from geutil.quantize.copying import values_of
from geutil.quantize.equalization.links import Link, Obstacle, find_links
from geutil.quantize.equalization.report import Equalized, EqualizeReport, NotEqualized
from geutil.quantize.equalization.scaling import Weights, equalized, spread
from geutil.quantize.finding.kernels import FAKE_QUANT
from geutil.quantize.finding.network import Network
from geutil.select.networks.layers import Layer
from geutil.select.networks.origins import Origin

Array = np.ndarray[Any, Any]

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
    (Nagel et al. 2019, arXiv 1906.04721, section 4.1). What the model computes stays,
    but for rounding. Fold batch norms first, and quantize afterwards.

    Constants become other constants. Variables stay as they are, and so do other
    models that read them: new ops multiply what is read by constant scales, which are
    right for the values of now. Each signature is equalized by itself.

    Args:
        model: a `geutil.model.Model`.
        replace_relu6: use Relu in place of a Relu6 that stands between two layers.
            What the model computes stays only where that does not clip.

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
    graph, signatures = (getattr(model, name, None) for name in ("graph", "signatures"))
    if signatures is None or graph is None or not is_func_graph(graph):
        raise ArgumentTypeError(
            f"a geutil.model.Model is equalized, not a {type_name(model)}; open it "
            "with geutil.model.open"
        )
    models = {model.signature: model}
    models |= {n: signatures[n] for n in signatures if n != model.signature}
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
    network = Network(graph, results)
    links: list[Link] = []
    refused: list[NotEqualized] = []
    found = find_links(network, replace_relu6)
    for layer, link in zip(network.layers, found, strict=True):
        if isinstance(link, Obstacle):
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
    scales = equalized(
        [
            (weights[link.first.op], [weights[second.op] for second in link.seconds])
            for link in links
        ]
    )
    _apply(network, _scaled(links, scales))
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


def _scaled(links: Sequence[Link], scales: Sequence[Array]) -> list[_Scaled]:
    """Return what is multiplied by what, each input of an op once."""
    factors: dict[Operation, tuple[Layer, Array]] = {}

    def multiply(layer: Layer, by: Array, axes: tuple[int, ...]) -> None:
        shape = layer.kernel.shape.as_list()
        _, total = factors.get(layer.op, (layer, np.ones([1] * len(shape))))
        factors[layer.op] = layer, total * spread(by, shape, axes)

    found = []
    for link, by in zip(links, scales, strict=True):
        multiply(link.first, 1 / by, link.first.outputs)
        for second in link.seconds:
            multiply(second, by, second.inputs)
        for op, slot in link.biases:
            behind = 0 if op.type == "BiasAdd" else -1 - link.first.axis
            found.append(_Scaled(op, slot, (1 / by).reshape([-1] + [1] * behind)))
    kernels = [_Scaled(op, la.weights, total) for op, (la, total) in factors.items()]
    return [*kernels, *found]


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
    with surroundings_of(op):
        if value is not None:
            return tf.constant((value * entry.factors).astype(dtype), name=_SUFFIX)
        factors = tf.constant(entry.factors.astype(dtype), name=f"{_SUFFIX}_scales")
        return tf.multiply(tensor, factors, name=_SUFFIX)


def _replace_clips(graph: Graph, clips: Sequence[Operation]) -> None:
    edits = []
    for op in dict.fromkeys(clips):
        with surroundings_of(op):
            relu = tf.nn.relu(op.inputs[0], name="Relu")
        for reader in dict.fromkeys(op.outputs[0].consumers()):
            edits += [
                InputEdit(reader, index, relu)
                for index, t in enumerate(reader.inputs)
                if t is op.outputs[0]
            ]
    apply_edits(graph, edits)
