"""The bits of each layer of a network: chosen, shown, saved, taken by `quantize`."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from geutil.errors import QuantizeError, Words
from geutil.formats import check_free, written_atomically
from geutil.lazy import Shown
from geutil.quantize.spec import Override, Spec, check_bits

_SAVING = Words("geutil.quantize.choose_bits(...).save(path)")
_KIND, _VERSION = "geutil.quantize.BitPlan", 1


def decibels(noise: float) -> float:
    """Return signal to noise in dB; infinity without noise.

    Example:
        >>> from geutil.quantize.bits.bit_plan import decibels
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
        >>> from geutil.quantize.bits.bit_plan import BitOption, BitPlan, LayerBits
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
