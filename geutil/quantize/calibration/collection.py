"""Statistics of batches for the methods of calibration.

A mask puts infinities there on purpose: `tf.where(mask, logits, -inf)`. They lie
outside of any range, and are rounded to its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import QuantizeError
from geutil.graph import op_types
from geutil.graph.adjacency import topological_sort
from geutil.graph.types import IdentitySet, Operation, Tensor
from geutil.graph.walks import closure
from geutil.quantize.calibration.observers import COUNTING, METHODS, Observer, Settings
from geutil.quantize.calibration.ranges import (
    Probe,
    RangeSite,
    find_followers,
    unquantized,
)
from geutil.quantize.calibration.trials import CANDIDATES, Chosen, Ranges, RangeTrials
from geutil.quantize.joined_inputs import JoinedInputs, NarrowInput
from geutil.quantize.planning.int8_kernels import FAKE_QUANT, KERNELS, Treatment
from geutil.quantize.planning.network import Network
from geutil.quantize.spec import MOST_BITS, Range, activation_format, symmetric


class Finiteness:
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
        """Tell whether infinities come from a parameter, or were there before."""
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


def measured(
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


Array = np.ndarray[Any, Any]

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
FAR = 6.25
"""So far below others the share that a softmax gives is less than half of 1/256."""
_MASKED = -5e3
"""Masks hold less, -1e4 for example, and logits that count hold more."""
_HANDING_ON = frozenset(
    (
        *FAKE_QUANT,
        "Select",
        "SelectV2",
        *(name for name, k in KERNELS.items() if k.treatment is Treatment.PASSES),
    )
)
_SOFTMAXES = frozenset(("LogSoftmax", "Softmax"))


class Collection:
    """The statistics of a model's activations, batch by batch."""

    # `progress`: whether choosing shows how far it is; None shows what takes long.

    def __init__(
        self,
        model: Any,
        sites: Sequence[RangeSite],
        method: str,
        settings: Settings,
        progress: bool | None,
    ) -> None:
        self.count = 0
        self._reach = _HEADROOM if method == BEST else 1.0
        self._sites = sites
        methods = CANDIDATES if method == BEST else (method,)
        counting = any(method in COUNTING for method in methods)
        self._joined = JoinedInputs(model.graph.get_operations(), sites)
        groups = {site.name: site.tensors for site in sites} | self._joined.groups
        bins = settings.bins if counting else 0
        # A masked logit such as -1e4 would stretch the range until all others round
        # to the same value.
        lowest = {s.name: _MASKED for s in sites if _is_masked(s, model)}
        outputs = list(model.outputs.values())

        def measure(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
            counted = 0 if name in self._joined.groups else bins
            return measured(counted, tensors, lowest.get(name, -np.inf))

        self._probe = Probe(model.graph, model.inputs, groups, measure, results=outputs)
        # The range of what a mask is in ends where the mask does not.
        self._followers = {
            name: follower
            for name, follower in find_followers(sites).items()
            if not {name, follower.source} & set(lowest)
        }
        self._trials = RangeTrials(model, sites, self._followers, progress)
        self._finiteness = Finiteness(model)
        self._masked: set[str] = set()
        self._values: Counter[str] = Counter()
        self._unseen = {site.name: site for site in sites}
        self._observers: dict[str, dict[str, Observer]] = {
            method: {site.name: METHODS[method](settings) for site in sites}
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

    def tried(self) -> dict[str, Ranges]:
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
        tried: Mapping[str, Ranges],
        weights: Sequence[RangeSite],
        ranges_of_weights: Ranges,
    ) -> Chosen:
        """Choose among the ranges that were tried; see `RangeTrials.best`."""
        if len(tried) > 1:
            few = {s.name for s in self._sites if self._values[s.name] < _FEWEST_VALUES}
            return self._trials.best(tried, weights, ranges_of_weights, few)
        ((method, ranges),) = tried.items()
        return Chosen(method, ranges)

    def narrow(self, ranges: Ranges) -> tuple[NarrowInput, ...]:
        """Return the inputs that get few steps of a range that they are joined in."""
        return self._joined.narrow(ranges)

    def _ends(self, site: RangeSite, observer: Observer) -> Range:
        low, high = observer.ends(site.form.bits)
        if site.name in self._masked and _feeds_softmax(site):
            # A masked value has to stay left out.
            low -= FAR
        # TFLite would divide by the width of a range.
        ends = _OF_ZEROS if low == high else Range(low, high)
        form = site.form
        if form != activation_format(MOST_BITS):
            return ends
        low, high = symmetric(*ends, form.bits, form.narrow_range)
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
    """Tell whether only softmaxes read a range's tensors, through passing ops."""

    # Values far below all else have no share there, infinite or not.
    def readers(op: Operation) -> list[Operation]:
        return [reader for t in op.outputs for reader in t.consumers()]

    def handed_to(op: Operation) -> list[Operation]:
        return [reader for reader in readers(op) if reader.type in _HANDING_ON]

    ops = closure(site.ops, handed_to)
    outputs = IdentitySet(model.outputs.values())
    if any(t in outputs for op in ops for t in op.outputs):
        return False
    types = {reader.type for op in ops for reader in readers(op)}
    return types - _HANDING_ON - op_types.VALUE_BLIND == {"Softmax"}


def _feeds_softmax(site: RangeSite) -> bool:
    """Tell whether a softmax reads the tensors of a range."""
    readers = (r for op in site.ops for r in op.outputs[0].consumers())
    return any(reader.type in _SOFTMAXES for reader in readers)
