"""The noise that weights of few bits make at the outputs of a network.

A network is copied twice with its weights as inputs: as it is in float, and with its
activations quantized. So the bits of each layer are switched by the feed, and
nothing is traced again. The fed values are those that FakeQuant ops make, which is why
the noise is that of the network as `quantize` assembles it.

Noise is the mean square of the difference to the outputs in float, as a share of their
variance; of several outputs the mean. In dB, signal to noise is -10 log10 of it. Shares
of independent errors add up, which lets a choice be predicted layer by layer (Zhou et
al. 2018, Adaptive Quantization for Deep Neural Network, arXiv 1712.01048).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from geutil.errors import QuantizeError
from geutil.graph.types import Tensor
from geutil.quantize.bits.plan import BitOption
from geutil.quantize.bits.weights import BYTE, WeightLayer, values_by_bits
from geutil.quantize.calibration.ranges import Probe, frozen, range_values, unquantized
from geutil.quantize.calibration.trials import noise_share
from geutil.quantize.partial_copy import Replace

Array = np.ndarray[Any, Any]
Sample = Mapping[str, Any]
Outputs = dict[str, Array]
Bits = tuple[int, ...]
"""The bits of each layer; 0 leaves its weights in float."""


class Noise:
    """Tells how far outputs are from those in float."""

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
        self._feeds = _names_besides(model.inputs, len(kernels))
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


def _names_besides(names: Mapping[str, Tensor], count: int) -> list[str]:
    """Return names of inputs that no input has yet."""
    prefix = "weights"
    while any(name.startswith(prefix) for name in names):
        prefix += "_"
    return [f"{prefix}{index}" for index in range(count)]
