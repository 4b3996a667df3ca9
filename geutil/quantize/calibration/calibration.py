"""Calibration: the ranges of a quantized model, set by the data that it runs on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from geutil.data_files import is_unscaled, unscaled
from geutil.errors import QuantizeError
from geutil.graph.types import Graph, Tensor, as_model
from geutil.lazy import Shown
from geutil.progress import counted
from geutil.quantize import partial_copy, range_variables
from geutil.quantize.calibration.collection import BEST, FAR, Collection
from geutil.quantize.calibration.observers import METHODS, Settings
from geutil.quantize.calibration.ranges import RangeSite, find_sites, unquantized
from geutil.quantize.joined_inputs import NarrowInput
from geutil.quantize.rounding import targets
from geutil.quantize.rounding.layer_runs import check_flow
from geutil.quantize.rounding.rounding import (
    Choice,
    Rounded,
    default_rounding,
    round_weights,
)
from geutil.quantize.rounding.targets import NotRounded
from geutil.quantize.schemes import QUANTIZE
from geutil.quantize.spec import Range
from geutil.select.networks import data

_logger = logging.getLogger("geutil")

Sample = dict[str, Any]


def batches(
    dataset: Any, inputs: Mapping[str, Tensor], seen: data.InputsSeen | None = None
) -> Iterator[Sample]:
    """Yield the batches of a dataset as tensors by the name of the input."""
    for index, batch in enumerate(data.batches(dataset, inputs, QuantizeError)):
        if seen is not None:
            for name, t in inputs.items():
                seen.add(name, batch[name], t.dtype.name)
        yield {n: _fitting(n, t, batch[n], index) for n, t in inputs.items()}


def _fitting(name: str, t: Tensor, value: Any, index: int) -> Any:
    """Return a value as a tensor of an input's type; refuse another shape."""
    try:
        tensor = tf.convert_to_tensor(value)
        if tensor.dtype != t.dtype:
            # A cast to integers would drop fractions without a word.
            if tensor.dtype.is_floating and not t.dtype.is_floating:
                raise TypeError(f"{tensor.dtype.name} would be cut to {t.dtype.name}")
            tensor = tf.cast(tensor, t.dtype)
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise QuantizeError(
            f"input '{name}' of batch {index} is no {t.dtype.name} tensor: {error}"
        ) from error
    if not t.shape.is_compatible_with(tensor.shape):
        raise QuantizeError(
            f"input '{name}' of batch {index} has shape {tensor.shape}, and the model "
            f"takes {t.shape}"
        )
    return tensor


T = TypeVar("T")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class CalibrationReport(Shown):
    """The ranges that were set.

    Attributes:
        ranges: the two ends of each range, by name; arrays for weights with a range per
            channel.
        batches: the number of batches that were run.
        method: the method for the ranges of activations; "per_range" if it differs
            between them.
        noise: the mean squared quantization error of the results for each choice that
            was tried, as a fraction of their variance.
        rounding: how weights were rounded.
        layers: each layer whose weights are quantized: rounded by data, or not and why.
            Empty if all weights are rounded to the nearest levels.
        by_range: the method of each range of activations, where they differ.
        whole: why "best" used one method for all ranges without comparing them range by
            range; "" if it compared them.
        in_blocks: the names of block-wise ranges.
        narrow: the inputs of ops such as a concat that share a range with far larger
            values, so that they get fewer than 16 of its steps.
        inputs: the statistics of the values of each input, and their type in the
            network; a mean near 127 indicates images that were not scaled.
    """

    ranges: Mapping[str, Range]
    batches: int
    method: str
    noise: Mapping[str, float] = field(default_factory=dict)
    rounding: str = "nearest"
    layers: tuple[Rounded | NotRounded, ...] = ()
    by_range: Mapping[str, str] = field(default_factory=dict)
    whole: str = ""
    in_blocks: tuple[str, ...] = ()
    narrow: tuple[NarrowInput, ...] = ()
    inputs: tuple[data.InputSeen, ...] = ()

    def __str__(self) -> str:
        """Return the report as lines: how, then each range, then each layer."""
        of = f"{self.method} of {self.batches} batch(es)"
        lines = [f"{len(self.ranges)} range(s) set, {of}"]
        if self.noise:
            tried = (f"{name} {share:.3g}" for name, share in self.noise.items())
            lines.append(f"  noise / variance: {', '.join(tried)}")
        if self.whole:
            lines.append(f"  one method for all ranges: {self.whole}")
        lines += [f"  input '{entry.name}': {entry}" for entry in self.inputs]
        lines += [f"  too narrow: {entry}" for entry in self.narrow]
        width = max(map(len, self.ranges), default=0)
        for name in self.ranges:
            method = f" ({self.by_range[name]})" if name in self.by_range else ""
            lines.append(f"  {name:<{width}}  {self.range_text(name)}{method}")
        if self.layers:
            count = sum(isinstance(entry, Rounded) for entry in self.layers)
            lines.append(
                f"weights of {count} layer(s) rounded by {self.rounding}, "
                f"{len(self.layers) - count} not:"
            )
            lines += [f"  {e.op} ({e.op_type}): {e}" for e in self.layers]
        return "\n".join(lines)

    def range_text(self, name: str) -> str:
        """Return a range as text; of many channels, from the lowest to the highest."""
        low, high = self.ranges[name]
        parts = "blocks" if name in self.in_blocks else "channels"
        count = f", {np.size(low)} {parts}" if np.ndim(low) else ""
        return f"{np.min(low):.6g} to {np.max(high):.6g}{count}"


def calibrate(
    model: Any,
    dataset: Any,
    method: str = "best",
    *,
    rounding: str | None = None,
    clipping: str | None = None,
    correct_bias: bool | None = None,
    decay: float = 0.9,
    percentile: float = 99.99,
    bins: int = 2048,
    progress: bool | None = None,
) -> CalibrationReport:
    """Set the ranges of a quantized model from data, without training.

    The model is run on the data as if it were not quantized. Weights get the range of
    their values. The ranges of activations depend on the method:

    - "best": for a range of fewer than 1,024 values that of "min_max"; for others that
      of "mse", unless "min_max" gives less noise at the outputs, or "percentile" less
      than 0.7 times as much. This noise is the sum of the squared errors of the values,
      weighted by the squared gradients of the outputs, estimated from the first eight
      batches. On these the network is also run with these ranges, and with all ranges
      by "mse" or "min_max": one method is used for all if its noise is less than 0.7
      times as large. Without gradients, the three methods are compared this way. With
      only one batch it is "min_max". Ranges of 16 bits are twice as wide, for later
      data;
    - "moving_average": moving averages of the smallest and the largest value of a
      batch, which start with the first batch;
    - "min_max": the smallest and the largest value of all batches;
    - "percentile": the range that contains all but a fraction of the values;
    - "entropy": the range with the least divergence of quantized from exact values
      (Migacz 2017);
    - "mse": the range with the least squared error of rounding and clipping.

    Two kinds of ops derive their ranges from those of their inputs, since finer steps
    would add no information: Relus with their own kernel, from 0 on in the same steps,
    and products with a number. Ranges learnt in training are kept.

    Activations that are always zero get the range from 0 to 1. Infinities that come
    from a mask, or that do not affect the results, are ignored; if a softmax reads
    them, the range extends so far below the other values that masked ones get no
    weight.

    Weights are rounded to the nearest levels, or, layer by layer, to those that change
    the layer's results on the data least. This helps if weights have fewer bits than
    activations, and gains nothing if both have 8:

    - "gptq": each weight compensates the errors of those before it (Frantar et al.
      2022, arXiv 2210.17323). It takes seconds, and is usually better;
    - "adaround": gradient descent decides whether each weight is rounded up or down
      (Nagel et al. 2020, arXiv 2004.10568).

    A few hundred representative samples are enough. The decisions are stored in
    variables, `<range>/correction` of weights and `<layer>/bias/correction`, which are
    added before rounding; the weights themselves are unchanged. Calibrating again
    replaces the decisions. Other signatures do not read them.

    Args:
        model: a `geutil.model.Model` that was quantized.
        dataset: the data, as `geutil.model.Model.run` takes it: a batch (a mapping from
            input names, an array, a tuple `(x, y)`), an iterable or `tf.data.Dataset`
            of batches, or the path of a `.npz` file. It is iterated once; if weights
            are rounded by data, the first batches, up to 128 samples, are kept in
            memory, with the results of two layers at a time.
        method: how to choose the ranges of activations.
        rounding: how to round weights: "nearest", "gptq" or "adaround". None is "gptq"
            if weights have fewer bits than activations and the model is not trained,
            else "nearest".
        clipping: the ranges of weights: "min_max" contains all values; "mse" clips
            outliers, channel by channel, if that reduces the error of all weights,
            weighted by the data they multiply; "octav" minimizes the error for evenly
            spread weights (Sakr et al. 2022, arXiv 2206.06501). None is "mse" if
            weights are rounded by data, else "min_max". Weights that share a range with
            others keep it.
        correct_bias: whether biases correct the shift of a layer's mean results by
            rounding (Nagel et al. 2019, arXiv 1906.04721, section 4.2). None does so if
            weights are rounded by data. Layers without a bias get none.
        decay: the decay factor of moving averages, for each batch.
        percentile: the percentage of values within the range, on either side.
        bins: the number of bins of histograms.
        progress: whether to show a progress bar on stderr; None shows one on a
            terminal, if rich is installed.

    Returns:
        The ranges. Inputs of ops such as a concat that get fewer than 16 steps of the
        shared range are in `narrow`, and logged as warnings.

    Raises:
        ArgumentTypeError: `model` is not a model, or the data has another type.
        QuantizeError: the model has no ranges to set; the method is not known; the data
            is empty or does not fit the inputs; or the model computes NaN or infinite
            values in a tensor to be quantized: the message names the op that computes
            them; or no batch takes a branch of a version 1 conditional; or weights are
            to be rounded by data, and the model has a version 1 loop.

    Cost: one run of the model for each batch, and one copy of its graph; "best" adds
    four copies, one of them with its gradients four times, and up to 32 runs. Rounding
    by data adds two runs, and for each layer with n inputs and m outputs about n^2 (n /
    3 + m / 2) products with "gptq", 800 n^2 m with "adaround".

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
          input 'x': given float64, -1 to 3, mean 0.6667; the network saw float32
          dense/weights_quant  -1 to 1, 3 channels
          x/input_quant        -1 to 3
          dense/act_quant      -1 to 3
    """
    sites = _sites(model)
    methods = (BEST, *METHODS)
    if method not in methods:
        raise QuantizeError(
            f"there is no method '{method}'; the methods are {', '.join(methods)}"
        )
    settings = Settings(decay, percentile, bins)
    usual = default_rounding(model.graph, sites)
    choice = Choice.of(rounding, clipping, correct_bias, usual)
    if not choice.is_plain:
        check_flow(model.graph)
    with targets.cleared(model.graph, model.variables):
        return _calibrated(model, sites, dataset, method, settings, choice, progress)


def _calibrated(
    model: Any,
    sites: Sequence[RangeSite],
    dataset: Any,
    method: str,
    settings: Settings,
    choice: Choice,
    progress: bool | None,
) -> CalibrationReport:
    """Decide on the ranges of a model and on its weights, then set them."""
    weights = [site for site in sites if site.is_weights]
    others = [site for site in sites if not site.is_weights]
    collection = Collection(model, others, method, settings, progress)
    kept_samples: list[Sample] = []
    total = data.count_of(dataset, model.inputs)
    seen = data.InputsSeen()
    samples = batches(dataset, model.inputs, seen)
    for sample in counted(samples, total, progress, "calibrating"):
        collection.add(sample)
        if not choice.is_plain and _size(kept_samples) < _MOST_SAMPLES:
            kept_samples.append(sample)
    tried = collection.tried()
    # Masked values are below all others then.
    widths = [high - low for of in tried.values() for low, high in of.values()]
    ranges_of_weights = _ranges_of_weights(weights, max(widths, default=0.0) + FAR)
    chosen = collection.chosen(tried, weights, ranges_of_weights)
    range_by_name = chosen.ranges | ranges_of_weights
    layers: list[Rounded | NotRounded] = []
    if not choice.is_plain:
        shown = partial(_layers_shown, progress=progress)
        layers = round_weights(model, sites, range_by_name, kept_samples, choice, shown)
    for site in sites:
        site.set(range_by_name[site.name])
    ranges = {s.name: range_by_name[s.name] for s in sites}
    in_blocks = tuple(s.name for s in sites if s.form.block is not None)
    narrow = collection.narrow(range_by_name)
    for entry in narrow:
        _logger.warning("calibrate: %s", entry)
    inputs = seen.entries()
    for given in inputs:
        # Headers of files were told of before.
        if not data.is_of_files(dataset) and is_unscaled(given.given, given.seen):
            _logger.warning("calibrate: %s", unscaled(given.name, given.given))
    return CalibrationReport(
        ranges,
        collection.count,
        chosen.method,
        chosen.noise,
        choice.rounding,
        tuple(layers),
        chosen.by_range,
        chosen.whole,
        in_blocks,
        narrow,
        inputs,
    )


_MOST_SAMPLES = 128
"""How many samples weights are rounded by."""


def _size(samples: Sequence[Sample]) -> int:
    """Return how many samples batches hold; one without inputs counts as one."""
    firsts = [next(iter(sample.values()), None) for sample in samples]
    return sum(1 if x is None or not x.shape.rank else x.shape[0] for x in firsts)


def _layers_shown(items: Sequence[T], progress: bool | None) -> Iterator[T]:
    return counted(items, len(items), progress, "rounding")


def _sites(model: Any) -> list[RangeSite]:
    as_model(model, "ranges are calibrated in a geutil.model.Model, not in")
    sites = find_sites(model.graph, model.variables)
    if not sites:
        raise QuantizeError(
            "the model reads no range from a variable",
            remedy=f"quantize it first, with {QUANTIZE}",
        )
    return sites


def set_ranges_of_weights(graph: Graph, variables: Mapping[str, Any]) -> None:
    """Let the weights of a quantized FuncGraph have the ranges of their values."""
    weights = [site for site in find_sites(graph, variables) if site.is_weights]
    range_by_name = _ranges_of_weights(weights, FAR)
    for site in weights:
        site.set(range_by_name[site.name])


def _ranges_of_weights(sites: Sequence[RangeSite], reach: float) -> dict[str, Range]:
    """Return the ranges of weights; infinities in them lie so far away."""
    weight_values = iter(
        partial_copy.values_of([t for site in sites for t in site.tensors], unquantized)
    )
    ranges = {}
    for site in sites:
        parts = [
            range_variables.range_of(_within(next(weight_values), reach), site.form)
            for _ in site.tensors
        ]
        ranges[site.name] = Range(
            np.minimum.reduce([part.low for part in parts]),
            np.maximum.reduce([part.high for part in parts]),
        )
    return ranges


def _within(values: Array, reach: float) -> Array:
    return np.where(np.isinf(values), np.float32(np.sign(values) * reach), values)
