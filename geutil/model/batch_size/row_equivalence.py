"""Equality of rows, up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from geutil.model.random_samples import Arrays
from geutil.select.networks.outputs import Array, distances, farthest

_EPS = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float32": 2.0**-23,
    "float64": 2.0**-52,
    "complex64": 2.0**-23,
    "complex128": 2.0**-52,
}
_TRIALS = 3
"""Perturbations of the inputs, of which the largest effect counts."""
_MARGIN = 32
"""Times the measured effect of one rounding that a result may be off."""
_PLAIN = 256
"""Units in the last place where no effect of rounding could be measured."""


def eps(dtype: Any) -> float:
    """Return the spacing of a dtype at 1, 0 for exact ones."""
    return _EPS.get(np.dtype(dtype).name, 0.0)


def same_bits(a: Array, b: Array) -> bool:
    """Tell whether two arrays are the same, signs of zero and NaNs' payloads aside."""
    return a.dtype == b.dtype and distance(a, b) == 0.0


def noise(
    run: Callable[[Arrays], Arrays],
    inputs: Arrays,
    results: Arrays,
    rng: np.random.Generator,
) -> dict[str, float]:
    """Measure how much each result changes when the inputs change in the last bit."""
    # Kernels add in another order for another batch size. Its effect on a result is of
    # the size of the effect of rounding the inputs: both are perturbations of one unit
    # in the last place, carried through the same ops.
    floats = [name for name, a in inputs.items() if eps(a.dtype)]
    if not floats:
        return dict.fromkeys(results, float("nan"))
    largest = dict.fromkeys(results, 0.0)
    for _ in range(_TRIALS):
        perturbed_inputs = dict(inputs)
        for name in floats:
            a = inputs[name]
            unit = eps(a.dtype) * rng.choice([-1.0, 1.0], a.shape)
            perturbed_inputs[name] = (a * (1 + unit)).astype(a.dtype)
        for name, changed in run(perturbed_inputs).items():
            if eps(changed.dtype) and changed.shape == results[name].shape:
                difference = np.abs(changed - results[name]).astype(np.float64)
                finite = difference[np.isfinite(difference)]
                largest[name] = max(largest[name], float(finite.max(initial=0.0)))
    return largest


def tolerance(references: Sequence[Array], measured: float) -> float:
    """Return how far a result may be from the references."""
    # Units of the last place; 256 where nothing could be measured. Exact dtypes are
    # compared exactly.
    unit = eps(references[0].dtype)
    if not unit:
        return 0.0
    finite = [np.abs(r[np.isfinite(r)]).astype(np.float64) for r in references]
    largest = max(float(f.max(initial=0.0)) for f in finite)
    if np.isnan(measured):
        return _PLAIN * unit * largest
    return _MARGIN * measured + 8 * unit * largest


_MOST_WINDOWS = 6
"""Windows of a batch that are compared, evenly spread: each costs a run."""


class RowVerdict(Enum):
    """The outcome of a comparison."""

    MATCHES = "the rows match, and differ from each other"
    SILENT = "the rows match, and are all the same"
    CONSTANT = "it is the same for any batch"
    DIFFERS = "a row does not match"
    UNGROUPED = "there is no axis with a row for each input"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison."""

    kind: RowVerdict
    row: int = 0  # The first row that was compared where it fails.
    distance: float = 0.0  # How far the row is off.
    allowed: float = 0.0  # How far rounding may take it.


def windows(size: int, old: int) -> list[Array]:
    """Return the rows that the old model is run on: at most six windows of `old` rows.

    A window that is longer than the batch begins anew at its start; of such there are
    two, so that rows change their places.

    Example:
        >>> [w.tolist() for w in windows(5, 2)]
        [[0, 1], [2, 3], [3, 4]]
        >>> [w.tolist() for w in windows(1, 2)]
        [[0, 0]]
        >>> [w.tolist() for w in windows(2, 3)]
        [[0, 1, 0], [1, 0, 1]]
    """
    return list(_windows(size, old))


def _windows(size: int, old: int) -> Iterator[Array]:
    starts = list(range(0, size, old))
    if size > old:
        starts[-1] = size - old
    elif size > 1:
        starts.append(1)
    picked = np.linspace(0, len(starts) - 1, min(len(starts), _MOST_WINDOWS))
    for index in dict.fromkeys(int(i) for i in picked):
        yield (starts[index] + np.arange(old)) % size


def judge(
    references: Sequence[Array],
    actual: Array,
    rows: Sequence[Array],
    size: int,
    rounding: float,
) -> Verdict:
    """Compare a result for a batch with results for windows of it."""
    first, old = references[0], len(rows[0])
    allowed = tolerance(references, rounding)
    axis = batch_axis(first.shape, actual.shape, old, size)
    if axis is None:
        constant = all(distance(r, actual) <= allowed for r in references)
        return Verdict(RowVerdict.CONSTANT if constant else RowVerdict.UNGROUPED)
    factor = first.shape[axis] // old
    for window, reference in zip(rows, references, strict=True):
        places = (window[:, None] * factor + np.arange(factor)).ravel()
        apart = distance(reference, np.take(actual, places, axis))
        if not apart <= allowed:
            return Verdict(RowVerdict.DIFFERS, int(window[0]), apart, allowed)
    # A batch of one row has nothing to mix up.
    telling = size == 1 or any(distance(first, r) > allowed for r in references)
    return Verdict(RowVerdict.MATCHES if telling else RowVerdict.SILENT)


def batch_axis(
    before: Sequence[int], after: Sequence[int], old: int, new: int
) -> int | None:
    """Return the one axis that is as much longer as the batch is."""
    if len(before) != len(after):
        return None
    pairs = zip(before, after, strict=True)
    differing = [i for i, (a, b) in enumerate(pairs) if a != b]
    if len(differing) != 1:
        return None
    axis = differing[0]
    grown = before[axis] % old == 0 and after[axis] == before[axis] // old * new
    return axis if grown else None


def distance(a: Array, b: Array) -> float:
    """Return the largest difference; infinite where shapes, NaNs or texts differ."""
    if a.shape != b.shape:
        return float("inf")
    return farthest(distances(a, b))[0] if a.size else 0.0
