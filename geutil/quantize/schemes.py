"""Schemes: in how many bits weights and activations are stored, by the field's names.

A scheme is named after its activations and its weights: "int16x8" has activations of 16
bits and weights of 8. The kernels that TFLite has are measured in
`tests/quantize/test_int16_kernels.py` and `tests/quantize/test_kernels.py`.

| scheme | weights | activations | computes in |
|---|---|---|---|
| int8 | 8 | 8 | integers |
| int8x4 | 4, depthwise ones 8 | 8 | integers |
| int16x8 | 8 | 16, symmetric | integers |
| dynamic_range | 8 | float | integers, rounded as the file runs |
| dynamic_range_int4 | of products 4 by blocks, else 8 | float | likewise |
| weight_only_int8 | 8 | float | floats |
| weight_only_int4 | 4, depthwise ones 8 | float | floats |
| float16 | float16 | float | floats |

Depthwise convolutions have few weights, one filter for each channel, which few bits
hurt most; TFLite's fast kernels (XNNPACK) have no 4-bit ones for them either.

Weights by blocks have a range for each 32 inputs of a channel. LiteRT computes with
them in one kernel only, FULLY_CONNECTED on data that it rounds as the file runs: where
it is to unpack them it makes zeros, so that no scheme in floats has blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from geutil.errors import QuantizeError, Words

FOLD = Words("geutil.batchnorm.fold_batch_norms")
QUANTIZE = Words("geutil.quantize.quantize(model, is_training=False)")

FEWEST_ROUNDED = 1024
"""Layers with fewer weights take longer to round their data than that saves; TFLite's
converter leaves as many in float."""


@dataclass(frozen=True)
class Scheme:
    """How a network is stored and computed."""

    name: str
    weight_bits: int = 8  # bits of the weights of layers that are not in blocks
    activation_bits: int | None = 8  # bits of activations; None leaves them in float
    depthwise_bits: int = 8  # bits of the weights of depthwise convolutions
    # True if TFLite rounds activations while it runs, in ranges that it finds then.
    at_run_time: bool = False
    is_float: bool = False  # whether nothing is stored in integers
    # How many inputs of a product have a range together, in each channel; None is all.
    # Weights in blocks have 4 bits (`geutil.quantize.spec`).
    block: int | None = None

    @property
    def fewest_weights(self) -> int:
        """How many weights a layer needs to be stored in integers."""
        return FEWEST_ROUNDED if self.at_run_time else 0

    @property
    def weights_only(self) -> bool:
        """True if activations stay in float until the file runs."""
        return self.activation_bits is None


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8"),
        Scheme("int8x4", weight_bits=4),
        Scheme("int16x8", activation_bits=16),
        Scheme("dynamic_range", activation_bits=None, at_run_time=True),
        Scheme("dynamic_range_int4", 8, None, at_run_time=True, block=32),
        Scheme("weight_only_int8", activation_bits=None),
        Scheme("weight_only_int4", weight_bits=4, activation_bits=None),
        Scheme("float16", activation_bits=None, is_float=True),
    )
}


def scheme_named(name: str) -> Scheme:
    """Return a scheme.

    Example:
        >>> from geutil.quantize.schemes import scheme_named
        >>> scheme_named("int16x8").activation_bits
        16
    """
    if name not in SCHEMES:
        raise QuantizeError(
            f"there is no scheme '{name}'; the schemes are {', '.join(SCHEMES)}"
        )
    return SCHEMES[name]
