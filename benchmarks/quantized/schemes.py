"""The files that geutil makes of a network, by scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from geutil.batchnorm import fold_batch_norms
from geutil.quantize import calibrate, quantize, to_int8

Scheme = Callable[[Any, list[dict[str, Any]]], bytes]
"""Makes a file of an opened model, which it may change, and batches by input name."""


def simulated(method: str = "best", **choices: Any) -> Scheme:
    """Return a scheme of integers everywhere.

    Args:
        method: of `calibrate`.
        choices: what `quantize` takes.
    """

    def make(m: Any, data: list[dict[str, Any]]) -> bytes:
        fold_batch_norms(m)
        quantize(m, is_training=False, **choices)
        calibrate(m, data, method=method, progress=False)
        return to_int8(m)

    return make


# "family, variant"; families are compared with those of peers. The first variant of a
# family is the default.
SCHEMES: dict[str, Scheme] = {
    "int8, best": simulated(),
    "int8, mse": simulated("mse"),
    "int8, percentile": simulated("percentile"),
    "4/8, best": simulated(weight_bits=4),
    "4/8, mse": simulated("mse", weight_bits=4),
}
