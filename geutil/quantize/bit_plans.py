"""The bits of weights: the layers where they can be chosen, measured; plans of bits.

The bits of a weight in a file depend on the scheme and on the kernel that reads it:

- "int8" has bytes, and 4 bits for weights of CONV_2D and FULLY_CONNECTED on levels from
  -7 to 7 (see `geutil.quantize.tflite.stored_weights`), but for convolutions by groups.
  No kernel reads integers of more than 8 bits;
- "weight_only_int8" has 4 bits, bytes, and 16 bits, whatever reads them.

Weights that several ops read are stored once.

Only the weights are counted. Scales and biases do not depend on the bits.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError, QuantizeError, Words
from geutil.formats import check_free, written_atomically
from geutil.graph.types import MutableIdentityMap, Operation, Tensor, as_model
from geutil.lazy import Shown
from geutil.quantize.calibration.calibration import batches as batches_of
from geutil.quantize.calibration.calibration import calibrate
from geutil.quantize.calibration.ranges import Probe, frozen, range_values, unquantized
from geutil.quantize.calibration.trials import free_name, noise_share
from geutil.quantize.fake_quants import fake_quant, range_of
from geutil.quantize.partial_copy import Replace, values_of
from geutil.quantize.planning.int8_kernels import FAKE_QUANT, PRODUCTS
from geutil.quantize.planning.network import BODIES, live_simulations
from geutil.quantize.report import QuantizeReport
from geutil.quantize.simulation import quantize
from geutil.quantize.spec import (
    Format,
    Override,
    Spec,
    check_bits,
    format_of,
    scheme_named,
)
from geutil.select.networks.layers import (
    DATA_SLOTS,
    Layer,
    Origins,
    is_by_groups,
    layer_of,
)

Array = np.ndarray[Any, Any]
T = TypeVar("T")

BYTE = 8
"""Bits of the weights of a file of int8."""
# Bits that a file stores in half a byte, and in two.
_HALF_BYTE, _TWO_BYTES = 4, 16
CHOICES = {"int8": (4, BYTE), "weight_only_int8": (4, BYTE, _TWO_BYTES)}
"""The bits that a layer may have if nothing else is said, by the scheme."""
_FORWARDING = FAKE_QUANT | {"Identity", "ReadVariableOp", "Reshape"}
"""Types of ops between a variable and a layer behind which all of its values are."""
_PACKED = PRODUCTS | {"Conv2D"}


def checked_bits(bits: Any, scheme: str) -> tuple[int, ...]:
    """Return the bits that layers may have, fewest first."""
    if scheme not in CHOICES:
        raise QuantizeError(
            f"bits are chosen for files of the schemes {' and '.join(CHOICES)}, not of "
            f"'{scheme}'; pass one of them"
        )
    given = CHOICES[scheme] if bits is None else bits
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ArgumentTypeError(
            f"bits are several numbers, such as (4, 8), not {given!r}"
        )
    chosen = tuple(given)
    if not chosen:
        raise QuantizeError("bits holds no number of bits; pass (4, 8) for example")
    for each in chosen:
        check_bits(each, "bits")
        if each > BYTE and each not in CHOICES[scheme]:
            raise QuantizeError(
                f"a file of the scheme '{scheme}' cannot store weights of {each} bits: "
                + (
                    "TFLite's int8 kernels read bytes; pass 8 at most, or "
                    "scheme='weight_only_int8', which stores 16"
                    if scheme == "int8"
                    else "it stores up to 8, or 16"
                )
            )
    return tuple(sorted({int(each) for each in chosen}))


@dataclass(frozen=True, eq=False)
class ReadWeights:
    """The weights that one or more ops read."""

    tensor: Tensor  # what they read, in the quantized graph
    value: Array  # its values, not quantized
    layers: tuple[Layer, ...]
    # True if `quantize` may give each channel a range: not if others read the same
    # variable along other axes, with which it shares one.
    by_channel: bool

    def form(self, bits: int) -> Format:
        """Return how `quantize` stores them in so many bits."""
        spec = Spec(weight_bits=bits, symmetric_weights=True, per_channel=True)
        form = format_of(self.layers[0], spec)
        return form if self.by_channel else replace(form, axes=())

    def rounded(self, bits: int) -> Array:
        """Return the values that FakeQuant ops make of them."""
        form = self.form(bits)
        low, high = (np.float32(end) for end in range_of(self.value, form))
        made = fake_quant(tf.constant(self.value), (low, high), form)
        return np.asarray(made.numpy())

    @property
    def is_packed(self) -> bool:
        """True if int8 kernels read them in 4 bits."""
        return all(map(_is_packed, self.layers))

    def stored_bytes(self, bits: int, is_packed: bool) -> int:
        """Return the bytes that a file has of them."""
        count = int(self.value.size)
        # Weights that are all zero have few levels in any number of bits.
        is_small = bits <= _HALF_BYTE or (bits <= BYTE and not self.value.any())
        if is_packed and is_small:
            return -(-count // 2)
        return count * (1 if bits <= BYTE else 2)


def _is_packed(layer: Layer) -> bool:
    """Return whether int8 kernels of a layer read weights of 4 bits."""
    op = layer.op
    if op.type == "Einsum":
        # With a label in data, weights and result it is a product of batches.
        operands, _, result = op.get_attr("equation").decode().partition("->")
        first, second = (set(labels.strip()) for labels in operands.split(","))
        return not first & second & set(result)
    if op.type.startswith("BatchMatMul"):
        return bool(layer.kernel.shape.rank == 2)
    return op.type in _PACKED and not is_by_groups(op)


@dataclass(frozen=True, eq=False)
class WeightLayer:
    """Ops that read the same variable or constant: their weights have equal bits."""

    ops: tuple[str, ...]
    op_type: str
    # One for each place where the weights are quantized.
    kernels: tuple[ReadWeights, ...]

    @property
    def count(self) -> int:
        """The number of weights."""
        return sum(int(kernel.value.size) for kernel in self._stored)

    def stored_bytes(self, bits: int, scheme: str) -> int:
        """Return the bytes that a file has of them."""
        is_packed = scheme != "int8" or all(k.is_packed for k in self.kernels)
        return sum(kernel.stored_bytes(bits, is_packed) for kernel in self._stored)

    @property
    def _stored(self) -> list[ReadWeights]:
        """The kernels that a file holds: of equal ones it holds one."""
        different: dict[Any, ReadWeights] = {}
        for kernel in self.kernels:
            layer = kernel.layers[0]
            key = layer.op.type, kernel.value.shape, layer.outputs
            different.setdefault(key, kernel)
        return list(different.values())


def find_weights(
    model: Any, report: QuantizeReport
) -> tuple[list[WeightLayer], list[tuple[str, str]]]:
    """Return the layers of a quantized model, and those that were left in float."""
    # Returns the layers whose weights are quantized, in the order of the graph; and the
    # names of the others with the reasons, and of ops that run bodies, which may hold
    # some.
    graph = model.graph
    origins = Origins(graph)
    by_name = {op.name: op for op in graph.get_operations() if op.type in DATA_SLOTS}
    quantized = [
        by_name[entry.op]
        for entry in report.quantized
        if entry.weights is not None and entry.op in by_name
    ]
    layers = {name for name, op in by_name.items() if layer_of(op, origins) is not None}
    left = [
        (entry.op, entry.reason)
        for entry in report.skipped
        if entry.op in layers or entry.op_type in BODIES
    ]
    one_range = {
        entry.op
        for entry in report.quantized
        if entry.weights and not entry.weights.axes
    }
    kernels = _kernels(quantized, origins, one_range)
    groups = _grouped((_storage(kernel.tensor), kernel) for kernel in kernels)
    return [_layer(group) for _, group in groups], left


def _kernels(
    ops: Sequence[Operation], origins: Origins, one_range: set[str]
) -> list[ReadWeights]:
    """Return the weights of ops, each tensor once."""
    layers = [layer for op in ops if (layer := layer_of(op, origins)) is not None]
    readers = _grouped((layer.kernel, layer) for layer in layers)
    values = values_of([tensor for tensor, _ in readers], unquantized)
    return [
        ReadWeights(tensor, value, tuple(group), group[0].op.name not in one_range)
        for (tensor, group), value in zip(readers, values, strict=True)
    ]


def _grouped(pairs: Iterable[tuple[Tensor, T]]) -> list[tuple[Tensor, list[T]]]:
    """Group elements by their tensors, in order."""
    groups: MutableIdentityMap[list[T]] = MutableIdentityMap()
    for tensor, element in pairs:
        if tensor not in groups:
            groups[tensor] = []
        groups[tensor].append(element)
    return [(tensor, groups[tensor]) for tensor in groups]


def _storage(kernel: Tensor) -> Tensor:
    """Return the constant or the handle of the variable that weights come from."""
    tensor = kernel
    while tensor.op.type in _FORWARDING:
        tensor = tensor.op.inputs[0]
    return tensor


def _layer(kernels: Sequence[ReadWeights]) -> WeightLayer:
    ops = [layer.op for kernel in kernels for layer in kernel.layers]
    return WeightLayer(tuple(op.name for op in ops), ops[0].type, tuple(kernels))


def values_by_bits(layer: WeightLayer, bits: Sequence[int]) -> Mapping[int, list[Any]]:
    """Return the values of a layer's kernels as tensors, by their bits; 0 is float."""
    rounded = {0: [kernel.value for kernel in layer.kernels]} | {
        each: [kernel.rounded(each) for kernel in layer.kernels] for each in bits
    }
    return {each: [tf.constant(v) for v in values] for each, values in rounded.items()}


Sample = Mapping[str, Any]
Outputs = dict[str, Array]
Bits = tuple[int, ...]
"""The bits of each layer; 0 leaves its weights in float."""


class Noise:
    """The distance of outputs from those in float."""

    def __init__(self, exact: Sequence[Outputs]) -> None:
        names = list(exact[0])
        joined = {n: np.concatenate([o[n].ravel() for o in exact]) for n in names}
        self._exact = {
            name: values
            for name, values in joined.items()
            if np.issubdtype(values.dtype, np.floating) and _varies(values)
        }
        if not self._exact:
            raise QuantizeError(
                "no output of the model is a float that varies over the data, so that "
                "there is no signal to tell noise from; pass other data"
            )

    def of(self, found: Sequence[Outputs]) -> float:
        """Return the noise of outputs, as a share of the signal."""
        shares = [
            noise_share(values, np.concatenate([o[name].ravel() for o in found]))
            for name, values in self._exact.items()
        ]
        share = float(np.mean(shares))
        if not np.isfinite(share):
            raise QuantizeError(
                "the outputs are not finite with weights of these bits; leave the op "
                "that makes infinities or NaN of rounded values float"
            )
        return share


Metric = Callable[[Mapping[str, Any], int], float]
"""Rates the outputs of a batch, given its place in the data; higher is better."""


class FloatNetwork:
    """A float model, and the data that bits are chosen by."""

    def __init__(self, model: Any, data: Any, scheme: str, method: str) -> None:
        as_model(model, "bits are chosen for a geutil.model.Model, not for")
        simulations = live_simulations(model.graph)
        if simulations:
            raise QuantizeError(
                f"the model is quantized already, by '{simulations[0].name}'; choose "
                "bits for the float model, and pass them to quantize"
            )
        # With the inputs that are needed, and the one signature.
        self._model = model.cut()
        self.scheme = scheme
        self.samples: list[Sample] = [
            {name: sample[name] for name in self._model.inputs}
            for sample in batches_of(data, model.inputs)
        ]
        self._weights_only = scheme_named(scheme).weights_only
        # The method of calibration, the one that was found best by now; "" if
        # activations have no ranges.
        self.method = "" if self._weights_only else method

    def assembled(self, overrides: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return a quantized and calibrated copy, and the report of `quantize`."""
        copy = self._model.cut()
        report = quantize(
            copy, scheme=self.scheme, is_training=False, overrides=overrides
        )
        if not self._weights_only:
            # Rounding each plan by data would take far longer than it tells of bits.
            ranges = calibrate(
                *(copy, self.samples, self.method), rounding="nearest", progress=False
            )
            # The best method is kept, so that the bits alone differ; of methods
            # range by range that is "best", which chooses them without the bits.
            if not ranges.by_range:
                self.method = ranges.method
        return copy, report

    def score(self, outputs: Sequence[Outputs], metric: Metric) -> float:
        """Return the mean of a metric over all samples."""
        ratings = [float(metric(each, index)) for index, each in enumerate(outputs)]
        counts = []
        for sample in self.samples:
            first = next(iter(sample.values()))
            counts.append(len(first) if first.shape.rank else 1)
        return float(np.average(ratings, weights=counts))


class SwitchedNetwork:
    """A quantized network whose weights can be given other bits."""

    def __init__(
        self,
        model: Any,
        layers: Sequence[WeightLayer],
        bits: Sequence[int],
        samples: Sequence[Sample],
    ) -> None:
        self.layers = list(layers)
        self._samples = list(samples)
        self._values = [values_by_bits(layer, [*bits, BYTE]) for layer in layers]
        kernels = [kernel.tensor for layer in layers for kernel in layer.kernels]
        self._feeds = [
            free_name(f"weights{index}", model.inputs) for index in range(len(kernels))
        ]
        # A copy takes any tensor as an input, and nothing that is behind it.
        inputs = {**model.inputs, **dict(zip(self._feeds, kernels, strict=True))}
        self._names = list(model.outputs)
        self._in_float = _probe(model, inputs, unquantized)
        self._quantized = _probe(model, inputs, frozen(range_values(model.graph)))
        # The outputs in float, batch by batch.
        self.exact = self._run(self._in_float, (0,) * len(layers), len(samples))
        self._noise_by_count: dict[int, Noise] = {}

    def outputs(self, bits: Bits, count: int | None = None) -> list[Outputs]:
        """Return the outputs of the quantized network for the first batches."""
        return self._run(self._quantized, bits, count or len(self._samples))

    def noise(self, bits: Bits, count: int) -> float:
        """Return the noise of the quantized network in the first batches."""
        return self.noise_of(self.outputs(bits, count))

    def noise_alone(self, bits: Bits, count: int) -> float:
        """Return the noise that weights make by themselves, activations in float."""
        return self.noise_of(self._run(self._in_float, bits, count))

    def noise_of(self, outputs: Sequence[Outputs]) -> float:
        """Return the noise of outputs for the first batches."""
        count = len(outputs)
        if count not in self._noise_by_count:
            self._noise_by_count[count] = Noise(self.exact[:count])
        return self._noise_by_count[count].of(outputs)

    def _run(self, probe: Probe, bits: Bits, count: int) -> list[Outputs]:
        values = [
            tensor
            for by_bits, each in zip(self._values, bits, strict=True)
            for tensor in by_bits[each]
        ]
        fed = dict(zip(self._feeds, values, strict=True))
        return [
            _outputs(probe, {**sample, **fed}, self._names)
            for sample in self._samples[:count]
        ]


def outputs_of(model: Any, samples: Sequence[Sample]) -> list[Outputs]:
    """Return the outputs of a quantized model as it is, batch by batch."""
    probe = _probe(model, model.inputs, frozen(range_values(model.graph)))
    return [_outputs(probe, sample, list(model.outputs)) for sample in samples]


def measured_options(
    network: SwitchedNetwork, bits: Sequence[int], scheme: str, count: int
) -> list[tuple[BitOption, ...]]:
    """Return the bytes and the noise of each layer's options."""
    # Alone: all else in float. Together: all else quantized, in 8 bits.
    eight = (BYTE,) * len(network.layers)
    in_float = (0,) * len(network.layers)
    base = network.noise(eight, count)
    rows = []
    for index, layer in enumerate(network.layers):
        options = []
        for each in bits:
            alone = network.noise_alone(_with(in_float, index, each), count)
            together = (
                base
                if each == BYTE
                else network.noise(_with(eight, index, each), count)
            )
            size = layer.stored_bytes(each, scheme)
            options.append(BitOption(each, size, alone, together))
        rows.append(tuple(options))
    return rows


def _varies(values: Array) -> bool:
    finite = values[np.isfinite(values)]
    return bool(finite.size and finite.std() > 0)


def _with(bits: Bits, index: int, each: int) -> Bits:
    return (*bits[:index], each, *bits[index + 1 :])


def _probe(model: Any, inputs: Mapping[str, Tensor], replace: Replace) -> Probe:
    outputs = list(model.outputs.values())
    return Probe(model.graph, inputs, {}, lambda *_: {}, replace, outputs)


def _outputs(probe: Probe, sample: Sample, names: Sequence[str]) -> Outputs:
    found = probe.run(sample)[""]
    return {name: found[str(index)] for index, name in enumerate(names)}


_SAVING = Words("geutil.quantize.choose_bits(...).save(path)")
_KIND, _VERSION = "geutil.quantize.BitPlan", 1


def decibels(noise: float) -> float:
    """Return signal to noise in dB; infinity without noise.

    Example:
        >>> from geutil.quantize.bit_plans import decibels
        >>> decibels(0.01), decibels(0.0)
        (20.0, inf)
    """
    return -10.0 * math.log10(noise) if noise > 0 else math.inf


def overrides_of(bits: Mapping[str, int]) -> dict[str, Override]:
    """Return the overrides that give ops so many bits of weights, by their names."""
    return {f"^{re.escape(op)}$": Spec(weight_bits=each) for op, each in bits.items()}


@dataclass(frozen=True)
class BitOption:
    """A possible number of bits for a layer.

    Attributes:
        bits: the bits of its weights.
        size: the bytes of its weights in a file.
        alone: the noise at the outputs if nothing else is quantized, as a fraction of
            the signal.
        together: the noise with all activations quantized, and other weights in 8 bits.
    """

    bits: int
    size: int
    alone: float
    together: float


@dataclass(frozen=True)
class LayerBits:
    """The bits of a layer.

    Attributes:
        ops: its ops, by name; several if they share a variable.
        op_type: the type of the first op.
        weights: the number of weights.
        bits: the bits that were chosen.
        options: all possible numbers of bits.
    """

    ops: tuple[str, ...]
    op_type: str
    weights: int
    bits: int
    options: tuple[BitOption, ...]

    @property
    def chosen(self) -> BitOption:
        """The option that was chosen."""
        return next(option for option in self.options if option.bits == self.bits)

    @property
    def size(self) -> int:
        """The bytes of the weights in a file."""
        return self.chosen.size


@dataclass(frozen=True)
class CurvePoint:
    """The best choice for a size.

    Attributes:
        size: the bytes of all weights.
        noise: the measured noise, as a fraction of the signal.
        predicted: the noise as the sum of the layers' noise.
    """

    size: int
    noise: float
    predicted: float

    @property
    def decibels(self) -> float:
        """The measured signal-to-noise ratio, in dB."""
        return decibels(self.noise)


@dataclass(frozen=True)
class BitPlan(Shown):
    """The bit widths of the weights of each layer; see `choose_bits`.

    Sizes are the bytes of the layers' weights in a file; its other parts do not depend
    on the bits. Noise is a fraction of the signal: the mean squared difference from the
    float outputs, divided by their variance.

    Attributes:
        scheme: the scheme of the file.
        budget: the requested budget, as text.
        layers: the layers, in the order of the graph.
        left: the names of layers that `quantize` leaves in float, and of ops that run
            function bodies, which are not searched, with the reasons.
        size: the bytes of the weights.
        int8_size: their bytes in 8 bits each.
        noise: the noise of the network with these bits, quantized by `quantize`.
        predicted: the noise as the sum of the layers' noise.
        int8_noise: the noise with 8 bits for each layer.
        method: how ranges of activations were calibrated; "" if there are none.
        batches: the number of batches that the noise was measured on.
        curve: the best choices for several sizes, smallest first.
        scores: the caller's metric in float, and with these bits; None without a
            metric.

    Example:
        >>> from geutil.quantize.bit_plans import BitOption, BitPlan, LayerBits
        >>> options = (BitOption(4, 32, 0.01, 0.02), BitOption(8, 64, 0.0001, 0.01))
        >>> layer = LayerBits(("dense",), "MatMul", 64, 4, options)
        >>> plan = BitPlan("int8", "size 40", (layer,), (), 32, 64, 0.02, 0.02, 0.01)
        >>> plan.overrides["^dense$"].weight_bits
        4
    """

    scheme: str
    budget: str
    layers: tuple[LayerBits, ...]
    left: tuple[tuple[str, str], ...]
    size: int
    int8_size: int
    noise: float
    predicted: float
    int8_noise: float
    method: str = ""
    batches: int = 0
    curve: tuple[CurvePoint, ...] = ()
    scores: tuple[float, float] | None = None

    @property
    def decibels(self) -> float:
        """The signal-to-noise ratio of the assembled network, in dB."""
        return decibels(self.noise)

    @property
    def overrides(self) -> dict[str, Override]:
        """The `overrides` for `geutil.quantize.quantize`: the bits by name."""
        return overrides_of({op: la.bits for la in self.layers for op in la.ops})

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the plan to a file, as JSON.

        Args:
            path: the file to write.
            overwrite: whether to replace a file that exists.

        Returns:
            The path.

        Raises:
            QuantizeError: the file exists and `overwrite` is not set.

        Cost: linear in the layers.
        """
        path = Path(path)
        check_free(path, overwrite, QuantizeError)
        content = {"kind": _KIND, "version": _VERSION, **asdict(self)}
        with written_atomically(path, overwrite=True) as new:
            new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BitPlan:
        """Read a plan that `save` wrote.

        Args:
            path: the file.

        Returns:
            The plan.

        Raises:
            QuantizeError: the file is not a saved plan.

        Cost: linear in the layers.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content.pop("kind") != _KIND or content.pop("version") != _VERSION:
                raise ValueError("it is of another kind or version")
            return _read(content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise QuantizeError(
                f"'{path}' holds no plan of bits: {error}",
                remedy=f"write one with {_SAVING}",
            ) from error

    def __str__(self) -> str:
        share = self.size / self.int8_size if self.int8_size else 1.0
        in_8_bits, predicted = map(decibels, (self.int8_noise, self.predicted))
        size = f"{self.size:,} bytes of weights, {share:.1%} of those in 8 bits"
        others = f"predicted {predicted:.1f}, in 8 bits {in_8_bits:.1f}"
        lines = [
            f"{len(self.layers)} layer(s), {size}",
            f"  asked for: {self.budget}",
            f"  signal to noise: {self.decibels:.1f} dB, {others}",
        ]
        if self.scores is not None:
            before, after = self.scores
            lines.append(f"  metric: {after:.6g}, in float {before:.6g}")
        # One line for each layer; all its ops have the bits of the first.
        width = max((len(layer.ops[0]) for layer in self.layers), default=0)
        lines += [
            f"  {layer.ops[0]:<{width}}  {layer.bits:>2} bits {layer.size:>10,} bytes, "
            f"alone {decibels(layer.chosen.alone):.1f} dB, with others in 8 bits "
            f"{decibels(layer.chosen.together):.1f}"
            for layer in self.layers
        ]
        lines += [f"  left in float: {op}: {reason}" for op, reason in self.left]
        return "\n".join(lines)


def _read(content: Mapping[str, Any]) -> BitPlan:
    """Return a plan from JSON."""
    layers = tuple(
        LayerBits(
            **{
                **layer,
                "ops": tuple(layer["ops"]),
                "options": tuple(BitOption(**option) for option in layer["options"]),
            }
        )
        for layer in content["layers"]
    )
    for layer in layers:
        check_bits(layer.bits, "bits")
        if layer.bits not in [option.bits for option in layer.options]:
            raise ValueError(f"'{layer.ops[0]}' has bits that are no option of it")
    scores = content["scores"]
    return BitPlan(
        **{
            **content,
            "layers": layers,
            "left": tuple((op, reason) for op, reason in content["left"]),
            "curve": tuple(CurvePoint(**point) for point in content["curve"]),
            "scores": None if scores is None else tuple(scores),
        }
    )
