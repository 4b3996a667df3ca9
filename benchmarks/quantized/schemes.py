"""The files that geutil makes of a network, by scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from geutil.batchnorm import fold_batch_norms
from geutil.quantize import calibrate, quantize, to_tflite

Scheme = Callable[[Any, list[dict[str, Any]]], bytes]
"""Makes a file of an opened model, which it may change, and batches by input name."""


def simulated(
    method: str = "best", rounding: str | None = None, **choices: Any
) -> Scheme:
    """Return a scheme whose ranges and weights are found from data.

    Args:
        method: of `calibrate`.
        rounding: of `calibrate`.
        choices: what `quantize` takes.
    """

    def make(m: Any, data: list[dict[str, Any]]) -> bytes:
        fold_batch_norms(m)
        quantize(m, is_training=False, **choices)
        calibrate(m, data, method=method, rounding=rounding, progress=False)
        return to_tflite(m, scheme=choices.get("scheme"))

    return make


def stored(scheme: str) -> Scheme:
    """Return a scheme that needs no data."""

    def make(m: Any, data: list[dict[str, Any]]) -> bytes:
        del data
        fold_batch_norms(m)
        return to_tflite(m, scheme=scheme)

    return make


# "family, variant"; families are compared with those of peers. The first variant of a
# family is the default.
SCHEMES: dict[str, Scheme] = {
    "int8, best": simulated(),
    "int8, mse": simulated("mse"),
    "int8, percentile": simulated("percentile"),
    "4/8, gptq": simulated(scheme="int8x4"),
    "4/8, nearest": simulated(rounding="nearest", scheme="int8x4"),
    "4/8, adaround": simulated(rounding="adaround", scheme="int8x4"),
    "16x8, gptq": simulated(scheme="int16x8"),
    "16x8, nearest": simulated(rounding="nearest", scheme="int16x8"),
    "weights int8, no data": stored("weight_only_int8"),
    "weights int8, gptq": simulated(scheme="weight_only_int8"),
    "weights int4, gptq": simulated(scheme="weight_only_int4"),
    "weights int4, no data": stored("weight_only_int4"),
    "dynamic int8, no data": stored("dynamic_range"),
    "dynamic int8, gptq": simulated(scheme="dynamic_range"),
    "dynamic int4, no data": stored("dynamic_range_int4"),
    "dynamic int4, gptq": simulated(scheme="dynamic_range_int4"),
    "float16, nearest": stored("float16"),
}
