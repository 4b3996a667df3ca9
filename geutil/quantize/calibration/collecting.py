"""What methods learn of batches, and which of them is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from geutil.errors import QuantizeError
from geutil.graph.identity import IdentitySet
from geutil.graph.kinds import Tensor
from geutil.quantize.arithmetic import Range
from geutil.quantize.calibration.finiteness import Finiteness
from geutil.quantize.calibration.measuring import measured
from geutil.quantize.calibration.observers import (
    COUNTING,
    METHODS,
    Observer,
    Settings,
)
from geutil.quantize.calibration.probing import Probe
from geutil.quantize.calibration.sites import Site
from geutil.quantize.calibration.trying import CANDIDATES, Trials
from geutil.quantize.finding.kernels import FAKE_QUANT, KERNELS, SHAPES, Treatment

Array = np.ndarray[Any, Any]
Ranges = dict[str, Range]

BEST = "best"
"""The method that tries several out."""
_OF_ZEROS = Range(0.0, 1.0)
"""The range of tensors that hold nothing but zeros, which any range stores exactly."""
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
    """What methods learn of the activations of a model, batch by batch.

    Args:
        model: a quantized model.
        sites: its ranges of activations.
        method: how to choose ranges.
        settings: the numbers of the methods.

    Attributes:
        count: how many batches there were.

    Cost: one copy of the graph.
    """

    def __init__(
        self, model: Any, sites: Sequence[Site], method: str, settings: Settings
    ) -> None:
        self.count = 0
        self._sites = sites
        methods = CANDIDATES if method == BEST else (method,)
        counting = any(method in COUNTING for method in methods)
        groups = {site.name: site.tensors for site in sites}
        bins = settings.bins if counting else 0
        lowest = {s.name: _MASKED for s in sites if _is_masked(s, model)}
        outputs = list(model.outputs.values())

        def measure(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
            return measured(bins, tensors, lowest.get(name, -np.inf))

        self._probe = Probe(model.graph, model.inputs, groups, measure, results=outputs)
        self._trials = Trials(model)
        self._finiteness = Finiteness(model)
        self._masked: set[str] = set()
        self._unseen = {site.name: site for site in sites}
        self._observers: dict[str, dict[str, Observer]] = {
            method: {site.name: METHODS[method](settings) for site in sites}
            for method in methods
        }

    def add(self, sample: Mapping[str, Any]) -> None:
        """Run the network on a batch.

        Raises:
            QuantizeError: what it computes is not finite, other than by a mask.

        Cost: one run; where results are not finite, another one.
        """
        seen = self._probe.run(sample)
        results = list(seen.get("", {}).values())
        self._check_finite(sample, seen, results)
        for site in self._sites:
            found = seen.get(site.name)
            if found is None:
                continue
            self._unseen.pop(site.name, None)
            if found["below"]:
                self._masked.add(site.name)
            for observers in self._observers.values():
                observers[site.name].add(found)
        if len(self._observers) > 1:
            self._trials.add(sample, results)
        self.count += 1

    def chosen(self) -> tuple[str, Ranges, dict[str, float]]:
        """Return a method, its ranges, and the noise of each method that was tried.

        Raises:
            QuantizeError: a branch was not taken for any batch.
        """
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
        method, noise = next(iter(tried)), dict[str, float]()
        if len(tried) > 1:
            method, noise = self._trials.best(self._sites, tried)
        return method, tried[method], noise

    def _ends(self, site: Site, observer: Observer) -> Range:
        low, high = observer.ends(site.form.bits)
        if site.name in self._masked and _feeds_softmax(site):
            # What a mask leaves out has to stay left out.
            low -= FAR
        # TFLite would divide by the width of a range.
        return _OF_ZEROS if low == high else Range(low, high)

    def _check_finite(
        self,
        sample: Mapping[str, Any],
        seen: Mapping[str, Mapping[str, Array]],
        results: Sequence[Array],
    ) -> None:
        """Refuse values that are not finite, and do not vanish on the way."""
        if all(seen[s.name]["finite"] for s in self._sites if s.name in seen):
            return
        if results and all(map(_is_finite, results)):
            return
        op = self._finiteness.culprit(sample)
        if op is not None:
            raise QuantizeError(
                f"'{op.outputs[0].name}' ({op.type}) is the first that holds NaN or "
                f"infinite values for batch {self.count}; no range was set. Look for "
                "them in the data first, then in the variables"
            )


def _is_finite(value: Array) -> bool:
    return not np.issubdtype(value.dtype, np.floating) or bool(np.isfinite(value).all())


def _is_masked(site: Site, model: Any) -> bool:
    """Tell whether only softmaxes read what is quantized, handed on and chosen from.

    What is far below all else has no share there, infinite or not.

    Cost: linear in the ops that hand it on.
    """
    outputs = IdentitySet(model.outputs.values())
    waiting = list(dict.fromkeys(site.ops))
    met = set(waiting)
    found = False
    for op in waiting:
        if any(t in outputs for t in op.outputs):
            return False
        for reader in (r for t in op.outputs for r in t.consumers()):
            if reader.type == "Softmax":
                found = True
            elif reader.type in _HANDING_ON and reader not in met:
                met.add(reader)
                waiting.append(reader)
            elif reader.type not in (*_HANDING_ON, *SHAPES):
                return False
    return found


def _feeds_softmax(site: Site) -> bool:
    """Tell whether a softmax reads what is quantized."""
    readers = (r for op in site.ops for r in op.outputs[0].consumers())
    return any(reader.type in _SOFTMAXES for reader in readers)
