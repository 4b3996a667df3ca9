"""Ranges kept in a TFLite file, with the choices by which its model was quantized.

A file has the steps of its tensors, and no FakeQuant ops. With the ranges beside them
the model in float is quantized again as it was, without data.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from geutil import tflite
from geutil.errors import QuantizeError
from geutil.quantize.bits.bit_plan import overrides_of
from geutil.quantize.calibration.calibration import set_ranges_of_weights
from geutil.quantize.calibration.ranges import find_sites
from geutil.quantize.simulation import quantize
from geutil.quantize.spec import Range
from geutil.tflite import LiteFile
from geutil.tflite.effects import without
from geutil.tflite.parts import Buffer

NAME = "geutil_quantization"
"""The name of the metadata."""
# The version of the format of ranges in a file.
_VERSION = 1


@dataclass(frozen=True)
class KeptRanges:
    """Everything that quantizes a model again, but the model."""

    folded: bool  # whether batch norms were folded before
    # Those of `quantize` but overrides: scheme, bits, scope.
    arguments: Mapping[str, Any]
    skipped: tuple[str, ...] = ()  # regular expressions of ops that were left in float
    # The bits of the weights of some ops, by their names.
    bits: Mapping[str, int] = field(default_factory=dict)
    # The two ends of the range of each activation, by the name of the range.
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def quantize(self, model: Any, *, strict: bool = False) -> Any:
        """Quantize a model by the choices; return the report of `quantize`."""
        overrides: dict[str, Any] = dict.fromkeys(self.skipped, "skip")
        return quantize(
            model,
            is_training=False,
            overrides=overrides | overrides_of(self.bits),
            strict=strict,
            **self.arguments,
        )

    def restore(self, model: Any) -> None:
        """Quantize a model, with the ranges that were kept."""
        self.quantize(model)
        sites = find_sites(model.graph, model.variables)
        activations = {site.name: site for site in sites if not site.is_weights}
        if activations.keys() != self.ranges.keys():
            apart = sorted(activations.keys() ^ self.ranges.keys())
            raise QuantizeError(
                f"the file was made from another model: '{apart[0]}' is a range of one "
                "of the two alone; pass the model that it was made from"
            )
        set_ranges_of_weights(model.graph, model.variables)
        for name, site in activations.items():
            site.set(Range(*map(np.float32, self.ranges[name])))

    def within(self, model: Any, blob: bytes) -> bytes:
        """Return a TFLite file with these choices and a model's ranges in it."""
        sites = find_sites(model.graph, model.variables)
        ranges = {s.name: s.read() for s in sites if not s.is_weights}
        content = asdict(self) | {
            "version": _VERSION,
            "ranges": {n: [float(r.low), float(r.high)] for n, r in ranges.items()},
        }
        file = tflite.open(blob)
        text = json.dumps(content, separators=(",", ":")).encode()
        file.metadata[NAME] = Buffer(np.frombuffer(text, np.uint8))
        return file.to_bytes()


def ranges_kept(file: LiteFile) -> KeptRanges | None:
    """Return the ranges and choices that a file keeps; None if it keeps none."""
    entry = file.metadata.get(NAME)
    if entry is None or entry.data is None:
        return None
    try:
        content = json.loads(entry.data.tobytes())
        if content.pop("version") != _VERSION:
            return None
        kept = KeptRanges(**content)
        call = inspect.signature(quantize).bind
        call(None, is_training=False, overrides={}, strict=False, **kept.arguments)
        for low, high in kept.ranges.values():
            Range(np.float32(low), np.float32(high))
    # Anybody may have written them: text that is no JSON, other fields, other types.
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise QuantizeError(
            f"the metadata '{NAME}' of the file are damaged ({error}); make the file "
            f"again, or leave them out with {without(NAME)}"
        ) from error
    return kept
