"""Which gradient functions can do without the gradients of some outputs."""

from __future__ import annotations

from collections.abc import Mapping

_NORM = frozenset((1, 2, 3, 4, 5))

ACCEPTS_NONE: Mapping[str, frozenset[int]] = {
    "FusedBatchNorm": frozenset((1, 2, 3, 4)),
    "FusedBatchNormV2": frozenset((1, 2, 3, 4)),
    "FusedBatchNormV3": _NORM,
    "SoftmaxCrossEntropyWithLogits": frozenset((1,)),
    "SparseSoftmaxCrossEntropyWithLogits": frozenset((1,)),
}
"""By type of op the outputs whose gradients may be None.

They take the place of zeros that would cost memory: what the norms make besides their
result is statistics, and the second output of a cross entropy is its own gradient.
"""
