"""Tries ranges out on data, and keeps those that rounding costs least with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from geutil.graph.kinds import Operation, Tensor
from geutil.quantize.arithmetic import Range
from geutil.quantize.calibration.probing import Probe
from geutil.quantize.calibration.sites import Site
from geutil.quantize.freezing import frozen

Array = np.ndarray[Any, Any]
Results = list[Array]

CANDIDATES = ("min_max", "mse", "percentile")
"""The methods that are tried; the first one clips nothing that was seen."""
_KEPT = 8
"""How many batches they are tried on."""
_CLEARLY = 0.9
"""To clip has to cost so much less: other data may hold larger values."""


class Trials:
    """Some of the data, and what the network computes of it when not quantized.

    Args:
        model: a quantized model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._samples: list[Mapping[str, Any]] = []
        self._exact: list[Results] = []

    def add(self, sample: Mapping[str, Any], results: Results) -> None:
        """Take in a batch, unless there are enough."""
        if len(self._samples) < _KEPT:
            self._samples.append(sample)
            self._exact.append(results)

    def best(
        self, sites: Sequence[Site], tried: Mapping[str, Mapping[str, Range]]
    ) -> tuple[str, dict[str, float]]:
        """Return the method to choose, and the noise of each that was tried.

        One batch does not tell what lies beyond it, so that nothing is tried then.

        Args:
            sites: the ranges.
            tried: by method the ends of each range by name.

        Cost: for each method one copy of the graph, and a run for each batch.
        """
        safe = CANDIDATES[0]
        if len(self._samples) < 2:
            return safe, {}
        noise = {name: self._noise(sites, ranges) for name, ranges in tried.items()}
        least = min(noise, key=lambda name: noise[name])
        return (least if noise[least] < _CLEARLY * noise[safe] else safe), noise

    def _noise(self, sites: Sequence[Site], ranges: Mapping[str, Range]) -> float:
        outputs = list(self._model.outputs.values())
        replace = frozen(_values(sites, ranges))
        graph, inputs = self._model.graph, self._model.inputs
        probe = Probe(graph, inputs, {}, lambda *_: {}, replace, outputs)
        found = [list(probe.run(sample)[""].values()) for sample in self._samples]
        pairs = [
            (_joined(self._exact, index), _joined(found, index))
            for index, t in enumerate(outputs)
            if t.dtype.is_floating
        ]
        return float(np.sum([noise_share(*pair) for pair in pairs]))


def noise_share(exact: Array, found: Array) -> float:
    """Return the mean square of a difference as a share of the variance.

    Values that are not finite do not count. Without variance it is 0.
    """
    counted = np.isfinite(exact)
    exact, found = (v[counted].astype(np.float64) for v in (exact, found))
    variance = exact.var() if exact.size else 0.0
    return float(((found - exact) ** 2).mean() / variance) if variance else 0.0


def _joined(batches: Sequence[Results], index: int) -> Array:
    return np.concatenate([results[index].ravel() for results in batches])


def _values(
    sites: Sequence[Site], ranges: Mapping[str, Range]
) -> dict[Operation, Array]:
    """Return the values of ranges, by the ops that FakeQuant ops read them from."""
    ends: list[tuple[Tensor, Any]] = [
        (end, value)
        for site in sites
        for op in site.ops
        for end, value in zip(list(op.inputs)[1:], ranges[site.name], strict=True)
    ]
    return {end.op: np.asarray(value, np.float32) for end, value in ends}
