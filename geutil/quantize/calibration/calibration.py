"""Calibration: the ranges of a quantized model, set by the data that it runs on.

`_Collection` collects the statistics of batches that a method asks for. A mask puts
infinities there on purpose: `tf.where(mask, logits, -inf)`. They lie outside of any
range, and are rounded to its end.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from geutil.data_files import is_unscaled, unscaled
from geutil.errors import QuantizeError
from geutil.graph import op_types
from geutil.graph.adjacency import topological_sort
from geutil.graph.types import Graph, IdentitySet, Operation, Tensor, as_model
from geutil.graph.walks import closure
from geutil.lazy import Shown
from geutil.progress import counted
from geutil.quantize import fake_quants, partial_copy, spec
from geutil.quantize.calibration import rounding_targets, trials
from geutil.quantize.calibration.ranges import (
    JoinedInputs,
    NarrowInput,
    Probe,
    RangeSite,
    find_followers,
    find_sites,
    unquantized,
)
from geutil.quantize.calibration.rounding import (
    Choice,
    Rounded,
    check_flow,
    default_rounding,
    round_weights,
)
from geutil.quantize.calibration.rounding_targets import NotRounded
from geutil.quantize.planning.int8_kernels import FAKE_QUANT, KERNELS, Treatment
from geutil.quantize.planning.network import Network
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
    methods = (BEST, *trials.METHODS)
    if method not in methods:
        raise QuantizeError(
            f"there is no method '{method}'; the methods are {', '.join(methods)}"
        )
    settings = trials.Settings(decay, percentile, bins)
    usual = default_rounding(model.graph, sites)
    choice = Choice.of(rounding, clipping, correct_bias, usual)
    if not choice.is_plain:
        check_flow(model.graph)
    with rounding_targets.cleared(model.graph, model.variables):
        return _calibrated(model, sites, dataset, method, settings, choice, progress)


def _calibrated(
    model: Any,
    sites: Sequence[RangeSite],
    dataset: Any,
    method: str,
    settings: trials.Settings,
    choice: Choice,
    progress: bool | None,
) -> CalibrationReport:
    """Decide on the ranges of a model and on its weights, then set them."""
    weights = [site for site in sites if site.is_weights]
    others = [site for site in sites if not site.is_weights]
    collection = _Collection(model, others, method, settings, progress)
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
    ranges_of_weights = _ranges_of_weights(weights, max(widths, default=0.0) + _FAR)
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
        # Headers of files were reported before.
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
            remedy=f"quantize it first, with {spec.QUANTIZE}",
        )
    return sites


def set_ranges_of_weights(graph: Graph, variables: Mapping[str, Any]) -> None:
    """Let the weights of a quantized FuncGraph have the ranges of their values."""
    weights = [site for site in find_sites(graph, variables) if site.is_weights]
    range_by_name = _ranges_of_weights(weights, _FAR)
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
            fake_quants.range_of(_within(next(weight_values), reach), site.form)
            for _ in site.tensors
        ]
        ranges[site.name] = Range(
            np.minimum.reduce([part.low for part in parts]),
            np.maximum.reduce([part.high for part in parts]),
        )
    return ranges


def _within(values: Array, reach: float) -> Array:
    return np.where(np.isinf(values), np.float32(np.sign(values) * reach), values)


class _Finiteness:
    """Finds the op that first makes values which are not finite."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @cached_property
    def _network(self) -> Network:
        return Network(self._model.graph, self._model.outputs.values())

    @cached_property
    def _looked_at(self) -> dict[Operation, list[Tensor]]:
        """The floats that each op makes, in topological order."""
        read = {t.op for op in self._network.ops for t in op.inputs}
        ops = topological_sort({*self._network.ops, *read})
        floats = {op: _floats(op) for op in ops if unquantized(op) is None}
        return {op: tensors for op, tensors in floats.items() if tensors}

    @cached_property
    def _probe(self) -> Probe:
        groups = {op.name: tensors for op, tensors in self._looked_at.items()}
        return Probe(self._model.graph, self._model.inputs, groups, _look)

    def culprit(self, sample: Mapping[str, Any]) -> Operation | None:
        """Return the first op that makes infinities or NaN, other than by a mask."""
        measurements = self._probe.run(sample)
        masking: set[Operation] = set()
        for op in self._looked_at:
            measurement = measurements.get(op.name)
            if (
                measurement is None
                or measurement["finite"]
                or op not in self._network.place
            ):
                continue
            if measurement["nan"] or not self._is_masked(op, measurements, masking):
                return op
            masking.add(op)
        return None

    def _is_masked(
        self, op: Operation, seen: Mapping[str, Any], masking: set[Operation]
    ) -> bool:
        """Return whether infinities come from a parameter, or were there before."""
        infinite = [t.op for t in op.inputs if not self._finite(t, seen)]
        data = [o for o in infinite if not self._network.is_parameter(o.outputs[0])]
        return bool(infinite) and all(o in masking for o in data)

    def _finite(self, tensor: Tensor, seen: Mapping[str, Any]) -> bool:
        measurement = seen.get(tensor.op.name)
        return measurement is None or bool(measurement["finite"])


def _floats(op: Operation) -> list[Tensor]:
    return [t for t in op.outputs if t.dtype.is_floating]


def _look(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    del name
    finite = [tf.reduce_all(tf.math.is_finite(t)) for t in tensors]
    nan = [tf.reduce_any(tf.math.is_nan(t)) for t in tensors]
    return {"finite": tf.reduce_all(finite), "nan": tf.reduce_any(nan)}


def _measured(
    bins: int, tensors: Sequence[Tensor], lowest: float = -float("inf")
) -> dict[str, Tensor]:
    """Measure tensors that share a range, by their finite values."""
    # Returns `low` and `high`, with zero in between; whether all is `finite`; whether
    # there is anything `below`, a negative infinity at least; and of a histogram the
    # `counts`, with `zeros` counted apart.
    flat = [tf.reshape(t, [-1]) for t in tensors]
    values = flat[0] if len(flat) == 1 else tf.concat(flat, 0)
    statistics: dict[str, Tensor] = _statistics(bins)(values, lowest)
    return statistics


@cache
def _statistics(bins: int) -> Any:
    """Return the function that measures values."""
    # A graph calls it for each range: to make its ops each time takes 10 ms.

    def compute(values: Tensor, lowest: Tensor) -> dict[str, Tensor]:
        is_finite = tf.math.is_finite(values)
        is_below = values <= lowest
        counted = tf.where(is_finite & ~is_below, values, 0.0)
        low = tf.minimum(tf.reduce_min(counted), 0.0)
        high = tf.maximum(tf.reduce_max(counted), 0.0)
        statistics = {
            "low": low,
            "high": high,
            "finite": tf.reduce_all(is_finite),
            "below": tf.reduce_any(is_below),
        }
        if bins:
            others = tf.boolean_mask(counted, counted != 0.0)
            # A width of zero cannot be divided by.
            ends = tf.stack([low, tf.where(high > low, high, low + 1.0)])
            statistics["counts"] = tf.histogram_fixed_width(others, ends, bins)
            statistics["zeros"] = tf.math.count_nonzero(values == 0.0)
        return statistics

    signature = [tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.float32)]
    return tf.function(compute, input_signature=signature, autograph=False)


BEST = "best"
"""The method that tries several out."""
_OF_ZEROS = Range(0.0, 1.0)
"""The range of tensors that hold nothing but zeros, which any range stores exactly."""
_FEWEST_VALUES = 4 * 256
"""Fewer do not tell how many values lie far out: 4 for each level of 8 bits. Logits of
20 images clipped at 0.995 of their reach made 0.5 dB more noise for others."""
_HEADROOM = 2.0
"""How far 16 bits reach beyond the data: values of other data would be clipped there,
for 4.3 dB more noise than weights of 8 bits make (`benchmarks.quantized`, glyphs ViT).
A bit of 15 costs nothing beside that."""
_FAR = 6.25
"""So far below others the share that a softmax gives is less than half of 1/256."""
_MASKED = -5e3
"""Masks hold less, -1e4 for example, and logits that count hold more."""
_FORWARDING = frozenset(
    (
        *FAKE_QUANT,
        "Select",
        "SelectV2",
        *(name for name, k in KERNELS.items() if k.treatment is Treatment.PASSES),
    )
)
_SOFTMAXES = frozenset(("LogSoftmax", "Softmax"))


class _Collection:
    """The statistics of a model's activations, batch by batch."""

    # `progress`: whether choosing shows how far it is; None shows what takes long.

    def __init__(
        self,
        model: Any,
        sites: Sequence[RangeSite],
        method: str,
        settings: trials.Settings,
        progress: bool | None,
    ) -> None:
        self.count = 0
        self._reach = _HEADROOM if method == BEST else 1.0
        self._sites = sites
        methods = trials.CANDIDATES if method == BEST else (method,)
        counting = any(method in trials.COUNTING for method in methods)
        self._joined = JoinedInputs(model.graph.get_operations(), sites)
        groups = {site.name: site.tensors for site in sites} | self._joined.groups
        bins = settings.bins if counting else 0
        # A masked logit such as -1e4 would stretch the range until all others round
        # to the same value.
        lowest = {s.name: _MASKED for s in sites if _is_masked(s, model)}
        outputs = list(model.outputs.values())

        def measure(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
            counted = 0 if name in self._joined.groups else bins
            return _measured(counted, tensors, lowest.get(name, -np.inf))

        self._probe = Probe(model.graph, model.inputs, groups, measure, results=outputs)
        # The range of what a mask is in ends where the mask does not.
        self._followers = {
            name: follower
            for name, follower in find_followers(sites).items()
            if not {name, follower.source} & set(lowest)
        }
        self._trials = trials.RangeTrials(model, sites, self._followers, progress)
        self._finiteness = _Finiteness(model)
        self._masked: set[str] = set()
        self._values: Counter[str] = Counter()
        self._unseen = {site.name: site for site in sites}
        self._observers: dict[str, dict[str, trials.Observer]] = {
            method: {site.name: trials.METHODS[method](settings) for site in sites}
            for method in methods
        }

    def add(self, sample: Mapping[str, Any]) -> None:
        """Run the network on a batch."""
        measurements = self._probe.run(sample)
        results = list(measurements.get("", {}).values())
        self._check_finite(sample, measurements, results)
        self._joined.add(measurements)
        for site in self._sites:
            measurement = measurements.get(site.name)
            # The range lies in a branch that this batch does not take.
            if measurement is None:
                continue
            self._unseen.pop(site.name, None)
            if measurement["below"]:
                self._masked.add(site.name)
            if len(self._observers) > 1:
                self._values[site.name] += int(measurement["counts"].sum())
            for observers in self._observers.values():
                observers[site.name].add(measurement)
        if len(self._observers) > 1:
            self._trials.add(sample, results)
        self.count += 1

    def tried(self) -> dict[str, trials.Ranges]:
        """Return by method the ends of each range by name."""
        if self._unseen:
            op = next(iter(self._unseen.values())).ops[0]
            raise QuantizeError(
                f"{len(self._unseen)} range(s), that of '{op.name}' among them, lie in "
                f"a branch which none of the {self.count} batches takes; no range was "
                "set. Give batches that take it, or strip the branch"
            )
        tried = {
            method: {s.name: self._ends(s, of[s.name]) for s in self._sites}
            for method, of in self._observers.items()
        }
        for ranges in tried.values():
            for name, follower in self._followers.items():
                ranges[name] = follower.ends(ranges[follower.source])
        return tried

    def chosen(
        self,
        tried: Mapping[str, trials.Ranges],
        weights: Sequence[RangeSite],
        ranges_of_weights: trials.Ranges,
    ) -> trials.Chosen:
        """Choose among the ranges that were tried; see `RangeTrials.best`."""
        if len(tried) > 1:
            few = {s.name for s in self._sites if self._values[s.name] < _FEWEST_VALUES}
            return self._trials.best(tried, weights, ranges_of_weights, few)
        ((method, ranges),) = tried.items()
        return trials.Chosen(method, ranges)

    def narrow(self, ranges: trials.Ranges) -> tuple[NarrowInput, ...]:
        """Return the inputs that get few steps of a range that they are joined in."""
        return self._joined.narrow(ranges)

    def _ends(self, site: RangeSite, observer: trials.Observer) -> Range:
        low, high = observer.ends(site.form.bits)
        if site.name in self._masked and _feeds_softmax(site):
            # A masked value has to stay left out.
            low -= _FAR
        # TFLite would divide by the width of a range.
        ends = _OF_ZEROS if low == high else Range(low, high)
        form = site.form
        if form != spec.activation_format(spec.MOST_BITS):
            return ends
        low, high = spec.symmetric(*ends, form.bits, form.narrow_range)
        return Range(low * self._reach, high * self._reach)

    def _check_finite(
        self,
        sample: Mapping[str, Any],
        seen: Mapping[str, Mapping[str, Array]],
        results: Sequence[Array],
    ) -> None:
        """Refuse values that are not finite, and do not vanish on the way."""
        if all(seen[s.name]["finite"] for s in self._sites if s.name in seen):
            return
        # An infinite value on the way, as in a mask, can be meant. Fused with a
        # convolution, a Relu6 makes zeros of NaN: data are looked at, too.
        if results and all(map(_is_finite, results)) and not _holds_nan(sample):
            return
        op = self._finiteness.culprit(sample)
        if op is not None:
            raise QuantizeError(
                f"'{op.outputs[0].name}' ({op.type}) is the first that holds NaN or "
                f"infinite values for batch {self.count}; no range was set. Look for "
                "them in the data first, then in the variables"
            )


def _holds_nan(sample: Mapping[str, Any]) -> bool:
    arrays = map(np.asarray, sample.values())
    return any(np.isnan(a).any() for a in arrays if a.dtype.kind == "f")


def _is_finite(value: Array) -> bool:
    return not np.issubdtype(value.dtype, np.floating) or bool(np.isfinite(value).all())


def _is_masked(site: RangeSite, model: Any) -> bool:
    """Return whether only softmaxes read a range's tensors, through passing ops."""

    # Values far below all else have no share there, infinite or not.
    def readers(op: Operation) -> list[Operation]:
        return [reader for t in op.outputs for reader in t.consumers()]

    def forwarded_to(op: Operation) -> list[Operation]:
        return [reader for reader in readers(op) if reader.type in _FORWARDING]

    ops = closure(site.ops, forwarded_to)
    outputs = IdentitySet(model.outputs.values())
    if any(t in outputs for op in ops for t in op.outputs):
        return False
    types = {reader.type for op in ops for reader in readers(op)}
    return types - _FORWARDING - op_types.VALUE_BLIND == {"Softmax"}


def _feeds_softmax(site: RangeSite) -> bool:
    """Return whether a softmax reads the tensors of a range."""
    readers = (r for op in site.ops for r in op.outputs[0].consumers())
    return any(reader.type in _SOFTMAXES for reader in readers)
