"""How far results may be apart because of rounding alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from geutil.model.comparison.samples import Arrays

_EPS = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float32": 2.0**-23,
    "float64": 2.0**-52,
    "complex64": 2.0**-23,
    "complex128": 2.0**-52,
}
_TRIALS = 3
_MARGIN = 32
_PLAIN = 256


def eps(dtype: Any) -> float:
    """Return the spacing of a dtype at 1, 0 for exact ones."""
    return _EPS.get(np.dtype(dtype).name, 0.0)


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Tell whether two arrays are the same, signs of zero and NaNs' payloads aside."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype == object:
        return bool(np.all(a == b))
    return bool(np.all((a == b) | ((a != a) & (b != b))))


def noise(
    run: Callable[[Arrays], Arrays],
    inputs: Arrays,
    results: Arrays,
    rng: np.random.Generator,
) -> dict[str, float]:
    """Measure how much each result changes when the inputs change in the last bit.

    Kernels add in another order for another batch size. What that does to a result is
    of the size of what rounding the inputs does to it: both are perturbations of one
    unit in the last place, carried through the same ops.

    Returns:
        The largest change by output; NaN where the inputs cannot be perturbed.
    """
    floats = [name for name, a in inputs.items() if eps(a.dtype)]
    if not floats:
        return dict.fromkeys(results, float("nan"))
    largest = dict.fromkeys(results, 0.0)
    for _ in range(_TRIALS):
        moved = dict(inputs)
        for name in floats:
            a = inputs[name]
            unit = eps(a.dtype) * rng.choice([-1.0, 1.0], a.shape)
            moved[name] = (a * (1 + unit)).astype(a.dtype)
        for name, changed in run(moved).items():
            if eps(changed.dtype) and changed.shape == results[name].shape:
                difference = np.abs(changed - results[name]).astype(np.float64)
                finite = difference[np.isfinite(difference)]
                largest[name] = max(largest[name], float(finite.max(initial=0.0)))
    return largest


def tolerance(references: Sequence[np.ndarray[Any, Any]], measured: float) -> float:
    """Return how far a result may be from the references.

    32 times the measured effect of one rounding plus 8 units in the last place; 256
    units where nothing could be measured. Exact dtypes are compared exactly.
    """
    unit = eps(references[0].dtype)
    if not unit:
        return 0.0
    finite = [np.abs(r[np.isfinite(r)]).astype(np.float64) for r in references]
    largest = max(float(f.max(initial=0.0)) for f in finite)
    if np.isnan(measured):
        return _PLAIN * unit * largest
    return _MARGIN * measured + 8 * unit * largest
