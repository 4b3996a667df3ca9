"""Sets the ranges of a quantized model by what it computes on data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.graph.kinds import Tensor, is_func_graph, type_name
from geutil.quantize.applying.variables import range_of
from geutil.quantize.arithmetic import Range
from geutil.quantize.calibration.observers import COUNTING, METHODS, Settings
from geutil.quantize.calibration.probing import Probe, unquantized
from geutil.quantize.calibration.progress import counted
from geutil.quantize.calibration.sites import Site, find_sites
from geutil.quantize.copying import values_of
from geutil.quantize.samples import batches
from geutil.showing import Shown

Array = np.ndarray[Any, Any]

_OF_ZEROS = Range(0.0, 1.0)
"""The range of tensors that hold nothing but zeros, which any range stores exactly."""


@dataclass(frozen=True)
class CalibrationReport(Shown):
    """The ranges that were set.

    Attributes:
        ranges: for each range by name its two ends; of weights with a range for each
            channel they are arrays.
        batches: how many batches were run.
        method: how the ranges of activations were chosen.
    """

    ranges: Mapping[str, Range]
    batches: int
    method: str

    def __str__(self) -> str:
        of = f"{self.method} of {self.batches} batch(es)"
        lines = [f"{len(self.ranges)} range(s) set, {of}"]
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
    method: str = "moving_average",
    *,
    decay: float = 0.9,
    percentile: float = 99.99,
    bins: int = 2048,
    progress: bool | None = None,
) -> CalibrationReport:
    """Set the ranges of a quantized model from data, without training.

    The model is run on the data as if it were not quantized. Weights get the range of
    their values. Activations get, by the method,

    - "moving_average": moving averages of the smallest and the largest value of a
      batch, which start with the first batch;
    - "min_max": the smallest and the largest value of all batches;
    - "percentile": the range that all but a share of the values are in;
    - "entropy": the range whose quantized values diverge least from the exact ones
      (Migacz 2017);
    - "mse": the range with the least squared error of rounding and clipping.

    Activations that are zero throughout get the range from 0 to 1.

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
            is empty or does not fit the inputs; or a tensor that is to be quantized
            holds NaN or infinite values.

    Cost: one run of the model for each batch, and one copy of its graph.

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
    settings = Settings(decay, percentile, bins)
    if method not in METHODS:
        raise QuantizeError(
            f"there is no method '{method}'; the methods are {', '.join(METHODS)}"
        )
    activations = [site for site in sites if not site.is_weights]
    weights = [site for site in sites if site.is_weights]
    measure = partial(_measured, bins if method in COUNTING else 0)
    groups = {site.name: site.tensors for site in activations}
    probe = Probe(model.graph, model.inputs, groups, measure)
    observers = {site.name: METHODS[method](settings) for site in activations}
    count = 0
    for sample in counted(batches(dataset, model.inputs), dataset, progress):
        seen = probe.run(sample)
        # In the order of the graph: the first one is where it comes from.
        for site in activations:
            _check_finite(site, seen[site.name], count)
            observers[site.name].add(seen[site.name])
        count += 1
    found = {
        s.name: _not_empty(observers[s.name].ends(s.form.bits)) for s in activations
    }
    found.update(_ranges_of_weights(weights))
    for site in sites:
        site.set(found[site.name])
    return CalibrationReport({s.name: found[s.name] for s in sites}, count, method)


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


def _measured(bins: int, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Measure tensors that share a range."""
    flat = [tf.reshape(t, [-1]) for t in tensors]
    values = flat[0] if len(flat) == 1 else tf.concat(flat, 0)
    finite = tf.reduce_all(tf.math.is_finite(values))
    low = tf.minimum(tf.reduce_min(values), 0.0)
    high = tf.maximum(tf.reduce_max(values), 0.0)
    measured = {"low": low, "high": high, "finite": finite}
    if bins:
        others = tf.boolean_mask(values, (values != 0.0) & tf.math.is_finite(values))
        # A width of zero or NaN cannot be divided by.
        safe = tf.where(finite & (high > low), high, low + 1.0)
        ends = tf.where(finite, tf.stack([low, safe]), tf.constant([0.0, 1.0]))
        measured["counts"] = tf.histogram_fixed_width(others, ends, bins)
        measured["zeros"] = tf.size(values) - tf.size(others)
    return measured


def _check_finite(site: Site, seen: Mapping[str, Array], batch: int) -> None:
    if seen["finite"]:
        return
    shown = ", ".join(f"'{t.name}'" for t in site.tensors)
    raise QuantizeError(
        f"{shown} holds NaN or infinite values for batch {batch}; no range was set. "
        "Look for them in the data first, then in the variables"
    )


def _not_empty(ends: Range) -> Range:
    """Return a range, or another one if TFLite would divide by its width."""
    return _OF_ZEROS if ends.low == ends.high else ends


def _ranges_of_weights(sites: Sequence[Site]) -> dict[str, Range]:
    found = iter(values_of([t for site in sites for t in site.tensors], unquantized))
    ranges = {}
    for site in sites:
        parts = [range_of(next(found), site.form) for _ in site.tensors]
        ranges[site.name] = Range(
            np.minimum.reduce([part.low for part in parts]),
            np.maximum.reduce([part.high for part in parts]),
        )
    return ranges
