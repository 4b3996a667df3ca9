"""The peak that geutil predicts, beside the one that it measures."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gradients.cases import Setting
from benchmarks.gradients.ways import WAYS, traced
from benchmarks.networks import NETWORKS
from geutil.memory import measure, predict


@dataclass(frozen=True)
class Prediction:
    """Two peaks of one step in a Session with one thread, in bytes.

    Attributes:
        predicted: from the graph.
        traced: from the allocation records.
    """

    predicted: int
    traced: int

    @property
    def ratio(self) -> float:
        return self.predicted / self.traced


def measure_prediction(network: str, setting: Setting, way: str) -> Prediction:
    """Return both peaks; the step runs in yet another process."""
    chosen = WAYS[way]
    step = chosen.make(NETWORKS[network])
    function = traced(chosen, step, setting)
    predicted = predict(
        function.graph.outputs, grappler=setting.grappler, onednn=setting.onednn
    )
    measured = measure(
        function,
        step.tensors(),
        steps=1,
        grappler=setting.grappler,
        onednn=setting.onednn,
    )
    if measured.trace_peak is None:
        raise RuntimeError(f"no allocation records, but {measured.source}")
    return Prediction(predicted.peak, measured.trace_peak)
