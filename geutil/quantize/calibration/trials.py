"""The ranges that methods of calibration make, and the choice among these by noise.

An observer is the memory of a method, and makes a range of it. Methods of calibration
look at the values of a tensor alone. The effect of an error on the outputs differs from
value to value: small variances count for more in a layer norm, and large logits in a
softmax. To first order the outputs y change by the sum of g e over all values, where e
is the error of a value and g the gradient of y there. Errors of rounding are nearly
independent, so a range adds the sum of g^2 e^2 to the squared error of y; calibration
by the error of values alone minimizes that of e^2 (Choukroun et al. 2019, arXiv
1902.06822). The squares of the gradients of all outputs are estimated together: their
sum is the mean of (v^T dy/dx)^2 over random signs v (Hutchinson 1990, "A stochastic
estimator of the trace of the influence matrix").
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from geutil.errors import QuantizeError
from geutil.graph import creation, functions, op_types, runtime
from geutil.graph.types import Tensor
from geutil.progress import counted
from geutil.quantize.calibration.ranges import (
    Follower,
    Probe,
    RangeSite,
    frozen,
    unquantized,
)
from geutil.quantize.partial_copy import PartialCopy
from geutil.quantize.spec import Range, nudged, step, with_zero

Array = np.ndarray[Any, Any]

_SHARES = np.linspace(0.02, 1.0, 99)
"""How much of the whole range is tried."""
_GRID = _SHARES[::5]
_AT_ONCE = 16
"""How many ranges are tried at once: of 1 to 625 for 1,575 bins, the fastest."""


class Histogram:
    """How often values occur, in bins of one width."""

    # Zeros are counted apart: any range stores them exactly.

    def __init__(self, bins: int) -> None:
        self.low, self.high = 0.0, 0.0
        self.counts: Array = np.zeros(bins)  # how many values there are in each bin
        self.zeros = 0.0

    def add(self, low: float, high: float, counts: Array, zeros: float) -> None:
        """Take in a histogram of other values, with as many bins."""
        # Where bins do not coincide a bin's values are counted at its middle: they move
        # by half a bin at most, each time the range grows.
        self.zeros += zeros
        if not counts.any():
            return
        if not self.counts.any():
            self.low, self.high, self.counts = low, high, counts.astype(float)
            return
        whole = min(low, self.low), max(high, self.high)
        self.counts = _spread(self.counts, self.low, self.high, whole)
        self.counts += _spread(counts, low, high, whole)
        self.low, self.high = whole

    @property
    def edges(self) -> Array:
        """Where bins begin and end."""
        return np.linspace(self.low, self.high, len(self.counts) + 1)

    @property
    def centers(self) -> Array:
        """The middles of the bins."""
        edges = self.edges
        return (edges[:-1] + edges[1:]) / 2


def _spread(
    counts: Array, low: float, high: float, whole: tuple[float, float]
) -> Array:
    if (low, high) == whole:
        return counts.astype(float)
    edges = np.linspace(low, high, len(counts) + 1)
    centers = (edges[:-1] + edges[1:]) / 2
    spread, _ = np.histogram(centers, len(counts), whole, weights=counts)
    return spread


def percentile_range(histogram: Histogram, percentile: float) -> Range:
    """Return the range that all but a share of the values are in, on either side."""
    # `percentile`: the share in percent, such as 99.99: as much lies below the high
    # end, and above the low end.
    counts = np.append(histogram.counts, histogram.zeros)
    values = np.append(histogram.centers, 0.0)
    order = np.argsort(values, kind="stable")
    values, counts = values[order], counts[order]
    # Shares such as 99.9 % are no floats; counts are whole.
    needed = counts.sum() * percentile / 100 - 1e-6
    high = values[np.searchsorted(np.cumsum(counts), needed)]
    low = values[::-1][np.searchsorted(np.cumsum(counts[::-1]), needed)]
    return Range(min(float(low), 0.0), max(float(high), 0.0))


def squared_error_range(histogram: Histogram, bits: int) -> Range:
    """Return the range with the least squared error, of rounding and of clipping."""
    # Banner et al. (2019, arXiv 1810.05723) do so for known distributions.
    # Hundreds of ranges are tried, and with a long tail most bins are empty.
    filled = histogram.counts > 0
    values, counts = histogram.centers[filled], histogram.counts[filled]

    def errors(ranges: Sequence[Range]) -> Array:
        parts = []
        for start in range(0, len(ranges), _AT_ONCE):
            tried = ranges[start : start + _AT_ONCE]
            low, high = np.transpose(tried)[..., np.newaxis]
            rounded = _rounded(values, low, high, bits)
            parts.append((counts * (values - rounded) ** 2).sum(-1))
        return np.concatenate(parts)

    return _best(histogram, errors)


def entropy_range(histogram: Histogram, bits: int) -> Range:
    """Return the range whose values tell most about the exact ones."""
    # The divergence of Kullback and Leibler between the distribution of values, with
    # those outside the range at its ends, and that of quantized values (Migacz 2017,
    # "8-bit inference with TensorRT").

    def divergence(low: float, high: float) -> float:
        """Return the divergence of the quantized distribution in a range."""
        values, counts = histogram.centers, histogram.counts
        inside = (values >= low) & (values <= high)
        if not inside.any():
            return float("inf")
        exact = np.where(inside, counts, 0.0)
        first, last = np.flatnonzero(inside)[[0, -1]]
        clipped = exact.copy()
        clipped[first] += counts[:first].sum()
        clipped[last] += counts[last + 1 :].sum()
        places = _places(values[inside], low, high, bits)
        filled = exact[inside] > 0
        # Clipped values count in the exact distribution only, so clipping has a cost.
        sums = np.bincount(places, exact[inside])
        sizes = np.bincount(places, filled)
        with np.errstate(invalid="ignore", divide="ignore"):
            quantized = np.where(filled, (sums / sizes)[places], 0.0)
        return _divergence(clipped[inside], quantized)

    return _best(histogram, lambda tried: np.array([divergence(*r) for r in tried]))


def _divergence(exact: Array, quantized: Array) -> float:
    p, q = exact / exact.sum(), quantized / max(quantized.sum(), 1e-300)
    support = p > 0
    return float(
        (p[support] * np.log(p[support] / np.maximum(q[support], 1e-12))).sum()
    )


def _best(histogram: Histogram, costs: Callable[[Sequence[Range]], Array]) -> Range:
    """Return the range of least cost."""
    # The ends are tried together, then on a grid, then each again with the other fixed.
    low, high = min(histogram.low, 0.0), max(histogram.high, 0.0)
    if low == high:
        return Range(low, high)

    def least(tried: Sequence[Range]) -> Range:
        return tried[int(np.argmin(costs(tried)))]

    tried = [Range(low * s, high * s) for s in _SHARES]
    if low and high:
        tried += [Range(low * s, high * t) for s in _GRID for t in _GRID]
    best = least(tried)
    if low:
        best = least([Range(low * s, best.high) for s in _SHARES])
    if high:
        best = least([Range(best.low, high * s) for s in _SHARES])
    return best


def _rounded(values: Array, low: float, high: float, bits: int) -> Array:
    ends = nudged(low, high, bits)
    width = step(low, high, bits)
    clipped = np.clip(values, ends.low, ends.high)
    return np.round((clipped - ends.low) / width) * width + ends.low


def _places(values: Array, low: float, high: float, bits: int) -> Array:
    """Return which levels values within a range are next to."""
    return np.round((values - low) / step(low, high, bits)).astype(int)


@dataclass(frozen=True)
class Settings:
    """The numbers of the methods."""

    decay: float = 0.9  # how much of a moving average a batch keeps
    # The share in percent of the values that are within the range.
    percentile: float = 99.99
    bins: int = 2048  # the number of bins of histograms

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        if not 0 <= self.decay < 1:
            raise QuantizeError(f"decay={self.decay}; pass 0 <= decay < 1")
        if not 50 < self.percentile <= 100:
            raise QuantizeError(
                f"percentile={self.percentile}; pass more than 50, and 100 at most"
            )
        if self.bins < 256:
            raise QuantizeError(f"bins={self.bins}; pass 256 or more")


class Observer:
    """The memory of a method: the smallest and the largest value of all batches."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ends: tuple[float, float] | None = None

    def add(self, seen: Mapping[str, Array]) -> None:
        """Take in the measurements of a batch."""
        low, high = self._ends or (0.0, 0.0)
        self._ends = min(low, float(seen["low"])), max(high, float(seen["high"]))

    def ends(self, bits: int) -> Range:
        """Return the range."""
        del bits
        return Range(*(self._ends or (0.0, 0.0)))


class _MovingAverage(Observer):
    """Moving averages of the ends of batches; the first batch is the start."""

    def add(self, seen: Mapping[str, Array]) -> None:
        """Take in the measurements of a batch."""
        batch = float(seen["low"]), float(seen["high"])
        low, high = self._ends or batch
        stays = self._settings.decay
        self._ends = (
            stays * low + (1 - stays) * batch[0],
            stays * high + (1 - stays) * batch[1],
        )


class _Counted(Observer):
    """A histogram of all batches, and the range that a method chooses by it."""

    def __init__(
        self, settings: Settings, choose: Callable[[Histogram, int], Range]
    ) -> None:
        super().__init__(settings)
        self._histogram = Histogram(settings.bins)
        self._choose = choose

    def add(self, seen: Mapping[str, Array]) -> None:
        """Take in the measurements of a batch."""
        self._histogram.add(
            float(seen["low"]),
            float(seen["high"]),
            seen["counts"],
            float(seen["zeros"]),
        )

    def ends(self, bits: int) -> Range:
        """Return the range."""
        if not self._histogram.counts.any():
            return Range(0.0, 0.0)
        low, high = self._choose(self._histogram, bits)
        return with_zero(low, high)


METHODS: dict[str, Callable[[Settings], Observer]] = {
    "moving_average": _MovingAverage,
    "min_max": Observer,
    "percentile": lambda s: _Counted(
        s, lambda histogram, _: percentile_range(histogram, s.percentile)
    ),
    "entropy": lambda s: _Counted(s, entropy_range),
    "mse": lambda s: _Counted(s, squared_error_range),
}
COUNTING = frozenset(("percentile", "entropy", "mse"))
"""The methods that need histograms."""


T = TypeVar("T")

Results = list[Array]
Ranges = dict[str, Range]
Sample = Mapping[str, Any]

CANDIDATES = ("mse", "min_max", "percentile")
"""The methods that are tried; the first one is taken if no other is clearly better."""
SAFE = "min_max"
"""The one that clips nothing that was seen."""
PER_RANGE = "per_range"
"""The name of a choice range by range."""
_KEPT = 8
"""How many batches they are tried on."""
_CLEARLY = 0.7
"""Another choice has to cost so much less: few images tell noise within 1 dB or so."""
_DIRECTIONS = 4  # random signs: they halve the standard error of one
_MOST_VALUES = 2**27
"""Of each batch as many samples: gradients keep the results of all layers in memory,
here 512 MiB of float32."""
_UNKNOWN_SIZE = 256  # a guess: fewer or more samples of a batch are weighed for it


@dataclass(frozen=True)
class Chosen:
    """Ranges of activations."""

    method: str  # the method that they are by; `PER_RANGE` if that is not one
    ranges: Ranges
    # For each choice that was tried out, the mean square of what quantization changes
    # in the results, as a share of their variance.
    noise: dict[str, float] = field(default_factory=dict)
    # The method of each range, where they differ.
    by_range: dict[str, str] = field(default_factory=dict)
    # Why one method was taken for all ranges, if they were not looked at one by one.
    whole: str = ""


class RangeTrials:
    """Some of the data, and the results of the exact network on it."""

    def __init__(
        self,
        model: Any,
        sites: Sequence[RangeSite],
        followers: Mapping[str, Follower],
        progress: bool | None,
    ) -> None:
        self._shown = partial(_shown, progress=progress)
        self._model = model
        self._sites = sites
        self._followers = followers
        self._samples: list[Sample] = []
        self._exact: list[Results] = []

    def add(self, sample: Sample, results: Results) -> None:
        """Take in a batch, unless there are enough."""
        if len(self._samples) < _KEPT:
            self._samples.append(sample)
            self._exact.append(results)

    def best(
        self,
        tried: Mapping[str, Ranges],
        weights: Sequence[RangeSite],
        ranges_of_weights: Ranges,
        few: Collection[str],
    ) -> Chosen:
        """Choose a method for each range, or one for all."""
        # One batch does not tell the values beyond it, so that nothing is tried then;
        # nor do the ranges of few values, whose names are `few`.
        if not self._sites:
            return Chosen(SAFE, {}, whole="activations have none")
        if len(self._samples) < 2:
            return Chosen(SAFE, tried[SAFE], whole="one batch tells of no other")
        shares = self._shares(tried)
        if isinstance(shares, str):
            candidates = {name: Chosen(name, tried[name]) for name in CANDIDATES}
            whole = shares
        else:
            by_range = {
                name: SAFE if name in few else _least(of, _usual(of))
                for name, of in shares.items()
            }
            for name, follower in self._followers.items():
                by_range[name] = by_range[follower.source]
            mixed, whole = _mixed(tried, by_range), ""
            whole_ones = [Chosen(name, tried[name]) for name in (CANDIDATES[0], SAFE)]
            candidates = {chosen.method: chosen for chosen in (mixed, *whole_ones)}
        simulation = _Simulation(self._model, [*self._sites, *weights])
        results: dict[str, list[Results]] = {name: [] for name in candidates}
        runs = list(product(candidates.items(), self._samples))
        for (name, chosen), sample in self._shown(runs, "trying ranges"):
            ranges = chosen.ranges | ranges_of_weights
            results[name].append(simulation.run(sample, ranges))
        noise = {name: self._noise(found) for name, found in results.items()}
        best = candidates[_least(noise, next(iter(candidates)))]
        return Chosen(best.method, best.ranges, noise, best.by_range, whole)

    def _noise(self, quantized: Sequence[Results]) -> float:
        pairs = [
            (_joined(self._exact, index), _joined(quantized, index))
            for index, t in enumerate(self._model.outputs.values())
            if t.dtype.is_floating
        ]
        return float(np.sum([noise_share(*pair) for pair in pairs]))

    def _shares(self, tried: Mapping[str, Ranges]) -> dict[str, dict[str, float]] | str:
        """Return the noise that each range adds by each method, to first order."""
        # By name of the range and method. A text says why it is unknown.
        graph = self._model.graph
        if any(op.type in op_types.VERSION_1_FLOW for op in graph.get_operations()):
            return "the model has control flow of version 1"
        scales = [_scale(_joined(self._exact, i)) for i in range(len(self._exact[0]))]
        try:
            gradients = _WeighedErrors(self._model, self._sites, tried, scales)
            turns = list(product(enumerate(self._samples), range(_DIRECTIONS)))
            found = [
                gradients.run(sample, index, turn)
                for (index, sample), turn in self._shown(turns, "weighing errors")
            ]
        except _NoGradientsError as error:
            (first, *_) = str(error).splitlines() or [type(error).__name__]
            return f"TensorFlow builds no gradients of the model: {first}"
        except tf.errors.OpError as error:
            # The reason stands between the calls that built the op and its name.
            lines = [line.strip() for line in error.message.splitlines()]
            said = [line for line in lines if line and not line.startswith("[[")]
            return f"TensorFlow computes no gradients of the model: {said[-1]}"
        total = np.sum(found, 0)
        return {
            site.name: dict(zip(tried, map(float, row), strict=True))
            for site, row in zip(self._sites, total, strict=True)
        }


class _Simulation:
    """The quantized network, with ranges that are given."""

    def __init__(self, model: Any, sites: Sequence[RangeSite]) -> None:
        # The ends of ranges are fed, so that one trace serves all methods.
        ends = {
            end.op: (end, site.name, index)
            for site in sites
            for op in site.ops
            for index, end in enumerate(list(op.inputs)[1:])
        }
        self._ends = {
            free_name(f"range_end_{number}", model.inputs): (name, index)
            for number, (_, name, index) in enumerate(ends.values())
        }
        given = dict(zip(self._ends, (end for end, *_ in ends.values()), strict=True))
        self._probe = Probe(
            model.graph,
            {**model.inputs, **given},
            {},
            lambda *_: {},
            frozen({}),
            list(model.outputs.values()),
        )

    def run(self, sample: Sample, ranges: Ranges) -> Results:
        """Return the network's results on a batch, in the order of its outputs."""
        ends = {
            given: tf.constant(ranges[name][index], tf.float32)
            for given, (name, index) in self._ends.items()
        }
        found = self._probe.run({**sample, **ends}, optimized=False)
        return list(found[""].values())


def _shown(items: Sequence[T], doing: str, progress: bool | None) -> Iterator[T]:
    return counted(items, len(items), progress, doing)


class _NoGradientsError(Exception):
    """An op of a model has no gradient."""


class _WeighedErrors:
    """A function that weighs the errors of ranges by their effect on outputs."""

    def __init__(
        self,
        model: Any,
        sites: Sequence[RangeSite],
        tried: Mapping[str, Ranges],
        scales: Sequence[float],
    ) -> None:
        """Give the ends of all ranges names, to be fed beside the inputs."""
        outputs = list(model.outputs.values())
        tensors = [t for site in sites for t in site.tensors]
        copy = PartialCopy(model.graph, model.inputs, unquantized)
        copies = copy.of([*outputs, *tensors])
        results, copied = copies[: len(outputs)], copies[len(outputs) :]
        self._seed = free_name("seed", copy.inputs)
        with creation.neutral(copy.graph):
            seed = tf.compat.v1.placeholder(tf.int32, [2], self._seed)
            squares = _squared_gradients(results, copied, scales, seed)
            pairs = iter(zip(copied, squares, strict=True))
            rows = []
            for site in sites:
                ends = [ranges[site.name] for ranges in tried.values()]
                of_site = [next(pairs) for _ in site.tensors]
                errors = [_errors(*pair, ends, site) for pair in of_site]
                rows.append(errors[0] if len(errors) == 1 else tf.add_n(errors))
            outputs_by_name = {"rows": tf.stack(rows)}
        inputs = {**copy.inputs, self._seed: seed}
        # Samples can be left out where their number is not known.
        self._most = None
        if all(t.shape.rank and t.shape[0] is None for t in copy.inputs.values()):
            self._most = max(_MOST_VALUES // sum(map(_size, tensors)), 1)
        self._function = functions.build_function(
            copy.graph, inputs, outputs_by_name, [], []
        )

    def run(self, sample: Sample, index: int, turn: int) -> Array:
        """Return the errors for a batch and a direction: [ranges, methods]."""
        if self._most is not None:
            sample = {name: x[: self._most] for name, x in sample.items()}
        fed = {**sample, self._seed: tf.constant([index, turn])}
        found = functions.call_function(self._function, fed, optimized=False)
        return np.asarray(found["rows"].numpy(), np.float64) / _DIRECTIONS


def free_name(name: str, inputs: Mapping[str, Any]) -> str:
    """Return a name that no input has."""
    while name in inputs:
        name += "_"
    return name


def _size(tensor: Tensor) -> int:
    """Return the number of values of a sample, unknown sizes guessed."""
    sizes = tensor.shape.as_list()[1:] if tensor.shape.rank else [None]
    return int(np.prod([size or _UNKNOWN_SIZE for size in sizes], dtype=np.int64))


def _squared_gradients(
    results: Sequence[Tensor],
    tensors: Sequence[Tensor],
    scales: Sequence[float],
    seed: Tensor,
) -> list[Tensor]:
    """Return the squares of the gradients of results along a direction."""
    chosen = [
        (index, result, scale)
        for index, (result, scale) in enumerate(zip(results, scales, strict=True))
        if scale
    ]
    if not chosen:
        return [tf.zeros_like(t) for t in tensors]
    batch, turn = tf.unstack(seed)
    directions = [
        scale * _signs(result, [batch, turn * len(results) + index])
        for index, result, scale in chosen
    ]
    ys = [result for _, result, _ in chosen]
    try:
        gradients = runtime.plain_gradients(
            ys[0].graph, ys, tensors, directions, {"unconnected_gradients": _ZERO}
        )
    except (LookupError, NotImplementedError, TypeError, ValueError) as error:
        # TensorFlow has no one error for it.
        raise _NoGradientsError(str(error)) from error
    return [tf.square(g) for g in gradients]


def _signs(like: Tensor, seed: Sequence[Any]) -> Tensor:
    """Return 1 or -1 for each value at random, whose squares tell no less than 1."""
    halves = tf.random.stateless_uniform(tf.shape(like), seed, dtype=like.dtype) - 0.5
    return tf.where(halves < 0.0, -tf.ones_like(halves), tf.ones_like(halves))


_ZERO = tf.UnconnectedGradients.ZERO


def _errors(
    values: Tensor, squares: Tensor, ends: Sequence[Range], site: RangeSite
) -> Tensor:
    """Return the sums of squared errors of values in ranges, weighed."""
    form = site.form
    values, squares = (tf.reshape(t, [1, -1]) for t in (values, squares))
    # Masked, infinite values have no share in the outputs.
    counts = tf.math.is_finite(values + squares)
    values, squares = (tf.where(counts, t, 0.0) for t in (values, squares))
    sums = []
    for low, high in ends:
        rounded = tf.quantization.fake_quant_with_min_max_args(
            values, float(low), float(high), form.bits, form.narrow_range
        )
        errors = tf.math.squared_difference(rounded, values)
        sums.append(tf.matmul(errors, squares, transpose_b=True))
    return tf.reshape(tf.concat(sums, 0), [-1])


def _scale(exact: Array) -> float:
    """Return the factor that makes an output's squares a share of its variance."""
    if not np.issubdtype(exact.dtype, np.floating):
        return 0.0
    finite = exact[np.isfinite(exact)].astype(np.float64)
    variance = finite.var() * finite.size if finite.size else 0.0
    return float(1.0 / np.sqrt(variance)) if variance else 0.0


def _least(noise: Mapping[str, float], usual: str) -> str:
    """Return the name of the least noise, or the usual one if none is clearly less."""
    least = min(noise, key=lambda name: noise[name])
    return least if noise[least] < _CLEARLY * noise[usual] else usual


def _usual(noise: Mapping[str, float]) -> str:
    """Return the method of a range that another has to be clearly better than.

    A method that clips nothing of the samples need not: data to come lie beyond a
    narrower range more often.
    """
    first, *_ = noise
    return SAFE if noise[SAFE] < noise[first] else first


def _mixed(tried: Mapping[str, Ranges], by_range: dict[str, str]) -> Chosen:
    """Return the ranges of the methods chosen for each."""
    ranges = {name: tried[method][name] for name, method in by_range.items()}
    methods = set(by_range.values())
    if len(methods) == 1:
        return Chosen(methods.pop(), ranges)
    return Chosen(PER_RANGE, ranges, by_range=by_range)


def noise_share(exact: Array, quantized: Array) -> float:
    """Return the mean square of a difference as a share of the variance."""
    # Values that are not finite do not count. Without variance it is 0.
    is_finite = np.isfinite(exact)
    exact, quantized = (v[is_finite].astype(np.float64) for v in (exact, quantized))
    variance = exact.var() if exact.size else 0.0
    return float(((quantized - exact) ** 2).mean() / variance) if variance else 0.0


def _joined(batches: Sequence[Results], index: int) -> Array:
    return np.concatenate([results[index].ravel() for results in batches])
