"""Sets the ranges of a quantized model by what it computes on data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.graph.kinds import is_func_graph, type_name
from geutil.quantize.applying.variables import range_of
from geutil.quantize.arithmetic import Range
from geutil.quantize.calibration.collecting import BEST, FAR, Collection
from geutil.quantize.calibration.observers import METHODS, Settings
from geutil.quantize.calibration.probing import unquantized
from geutil.quantize.calibration.progress import counted
from geutil.quantize.calibration.sites import Site, find_sites
from geutil.quantize.copying import values_of
from geutil.quantize.samples import batches
from geutil.showing import Shown

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class CalibrationReport(Shown):
    """The ranges that were set.

    Attributes:
        ranges: for each range by name its two ends; of weights with a range for each
            channel they are arrays.
        batches: how many batches were run.
        method: how the ranges of activations were chosen.
        noise: for each method that was tried out, the mean square of what quantization
            changes in the results, as a share of their variance.
    """

    ranges: Mapping[str, Range]
    batches: int
    method: str
    noise: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        of = f"{self.method} of {self.batches} batch(es)"
        lines = [f"{len(self.ranges)} range(s) set, {of}"]
        if self.noise:
            tried = (f"{name} {share:.3g}" for name, share in self.noise.items())
            lines.append(f"  noise / variance: {', '.join(tried)}")
        width = max(map(len, self.ranges), default=0)
        lines += [f"  {n:<{width}}  {range_text(r)}" for n, r in self.ranges.items()]
        return "\n".join(lines)


def range_text(ends: Range) -> str:
    """Return a range in words; of many channels, from the lowest to the highest."""
    low, high = ends
    count = f", {np.size(low)} channels" if np.ndim(low) else ""
    return f"{np.min(low):.6g} to {np.max(high):.6g}{count}"


def calibrate(
    model: Any,
    dataset: Any,
    method: str = "best",
    *,
    decay: float = 0.9,
    percentile: float = 99.99,
    bins: int = 2048,
    progress: bool | None = None,
) -> CalibrationReport:
    """Set the ranges of a quantized model from data, without training.

    The model is run on the data as if it were not quantized. Weights get the range of
    their values. Activations get, by the method,

    - "best": what "min_max", "mse" and "percentile" choose is tried out on the first
      eight batches, and what changes the results least is kept: "min_max" unless
      another one is better by a tenth, or if there is but one batch;
    - "moving_average": moving averages of the smallest and the largest value of a
      batch, which start with the first batch;
    - "min_max": the smallest and the largest value of all batches;
    - "percentile": the range that all but a share of the values are in;
    - "entropy": the range whose quantized values diverge least from the exact ones
      (Migacz 2017);
    - "mse": the range with the least squared error of rounding and clipping.

    Activations that are zero throughout get the range from 0 to 1. Infinities that a
    mask puts into them, or that leave no trace in the results, do not count; where a
    softmax reads them, the range goes on so far below the other values that masked ones
    get no share.

    Args:
        model: a `geutil.model.Model` that was quantized.
        dataset: an iterable of mappings from input names to batches, a
            `tf.data.Dataset` of the same, or one such mapping. It is gone through once.
        method: how to choose ranges.
        decay: how much of a moving average each batch keeps.
        percentile: the share in percent of values within the range, on either side.
        bins: the number of bins of histograms.
        progress: show a progress bar on stderr; None does so on a terminal, if rich is
            installed.

    Returns:
        The ranges.

    Raises:
        ArgumentTypeError: it is no model, or data of another type.
        QuantizeError: the model has no ranges to set; the method is not known; the data
            is empty or does not fit the inputs; or the model computes NaN or
            infinite values, and something that is to be quantized holds some: the
            message names the op that makes them; or no batch takes a branch of a
            version 1 conditional.

    Cost: one run of the model for each batch, and one copy of its graph; "best" three
    more copies, and up to 24 runs.

    Example:
        >>> import tensorflow as tf
        >>> from geutil import model
        >>> from geutil.quantize import calibrate, quantize
        >>> kernel = tf.eye(3)
        >>> @tf.function(input_signature=[tf.TensorSpec([None, 3], name="x")])
        ... def f(x):
        ...     return {"y": tf.matmul(x, kernel, name="dense")}
        >>> m = model.open(f)
        >>> _ = quantize(m, is_training=False)
        >>> print(calibrate(m, [{"x": [[-1.0, 0.0, 3.0]]}], method="min_max"))
        3 range(s) set, min_max of 1 batch(es)
          dense/weights_quant  -1 to 1
          x/input_quant        -1 to 3
          dense/act_quant      -1 to 3
    """
    sites = _sites(model)
    known = (BEST, *METHODS)
    if method not in known:
        raise QuantizeError(
            f"there is no method '{method}'; the methods are {', '.join(known)}"
        )
    weights = [site for site in sites if site.is_weights]
    others = [site for site in sites if not site.is_weights]
    settings = Settings(decay, percentile, bins)
    collection = Collection(model, others, method, settings)
    for sample in counted(batches(dataset, model.inputs), dataset, progress):
        collection.add(sample)
    chosen, found, noise = collection.chosen()
    # Whatever a mask is added to is below all else then.
    widths = [high - low for low, high in found.values()]
    found |= _ranges_of_weights(weights, max(widths, default=0.0) + FAR)
    for site in sites:
        site.set(found[site.name])
    ranges = {s.name: found[s.name] for s in sites}
    return CalibrationReport(ranges, collection.count, chosen, noise)


def _sites(model: Any) -> list[Site]:
    graph = getattr(model, "graph", None)
    if not hasattr(model, "inputs") or graph is None or not is_func_graph(graph):
        raise ArgumentTypeError(
            "ranges are calibrated in a geutil.model.Model, not in a "
            f"{type_name(model)}; open it with geutil.model.open"
        )
    sites = find_sites(graph, model.variables)
    if not sites:
        raise QuantizeError(
            "the model reads no range from a variable; quantize it first, with "
            "geutil.quantize.quantize(model, is_training=False)"
        )
    return sites


def _ranges_of_weights(sites: Sequence[Site], reach: float) -> dict[str, Range]:
    """Return the ranges of weights; infinities in them lie so far away."""
    found = iter(values_of([t for site in sites for t in site.tensors], unquantized))
    ranges = {}
    for site in sites:
        parts = [range_of(_within(next(found), reach), site.form) for _ in site.tensors]
        ranges[site.name] = Range(
            np.minimum.reduce([part.low for part in parts]),
            np.maximum.reduce([part.high for part in parts]),
        )
    return ranges


def _within(values: Array, reach: float) -> Array:
    return np.where(np.isinf(values), np.float32(np.sign(values) * reach), values)
