"""The rows of the table: each way measured, in processes of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from benchmarks.gradients.adding import NETWORKS as ADDED
from benchmarks.gradients.adding import adding_rows
from benchmarks.gradients.building import NETWORK as BUILT
from benchmarks.gradients.building import build_row
from benchmarks.gradients.cases import CASES, DEFAULT, Case
from benchmarks.gradients.child import ChildError, in_a_child
from benchmarks.gradients.peaks import Peak
from benchmarks.gradients.predictions import Prediction
from benchmarks.gradients.ways import MEMORY, PLAIN
from benchmarks.rows import Row

FAMILY = "gradients"
NETWORKS = (*dict.fromkeys(case.network for case in CASES), BUILT, *ADDED)


@dataclass(frozen=True)
class Outcome:
    """What came of one way.

    Attributes:
        peak: its peaks.
        seconds: the time of a step.
        prediction: the peak that was predicted.
        raised: what went wrong where one of them is None.
    """

    peak: Peak | None = None
    seconds: float | None = None
    prediction: Prediction | None = None
    raised: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int | None:
        """The peak: the allocator's, else the trace's, else the resident memory's."""
        if self.peak is None or self.peak.allocator is not None:
            return self.peak and self.peak.allocator
        return self.prediction.traced if self.prediction else self.peak.steady


@dataclass(frozen=True)
class StepRow:
    """One line of the table.

    Attributes:
        case: what was measured.
        outcomes: by the names of the ways; plain gradients are the baseline.
    """

    family: ClassVar[str] = FAMILY
    case: Case
    outcomes: dict[str, Outcome] = field(repr=False)

    def peak_ratio(self, way: str) -> float | None:
        return self._ratio(way, lambda o: o.peak_bytes)

    def resident_ratio(self, way: str) -> float | None:
        return self._ratio(way, lambda o: o.peak and o.peak.resident)

    def time_ratio(self, way: str) -> float | None:
        return self._ratio(way, lambda o: o.seconds)

    def _ratio(
        self, way: str, figure: Callable[[Outcome], float | None]
    ) -> float | None:
        ours, baseline = figure(self.outcomes[way]), figure(self.outcomes[PLAIN])
        return ours / baseline if ours is not None and baseline else None

    @property
    def peak_ok(self) -> bool:
        ratio = self.peak_ratio(MEMORY)
        return ratio is not None and ratio <= self.case.peak_limit

    @property
    def time_ok(self) -> bool:
        ratio = self.time_ratio(MEMORY)
        return ratio is not None and ratio <= self.case.time_limit

    @property
    def ok(self) -> bool:
        return self.peak_ok and self.time_ok

    def as_dict(self) -> dict[str, Any]:
        return {
            "family": self.family,
            **asdict(self),
            "ratios": {
                way: {
                    "peak": self.peak_ratio(way),
                    "resident": self.resident_ratio(way),
                    "time": self.time_ratio(way),
                }
                for way in self.outcomes
            },
            "ok": self.ok,
        }


def rows(quick: bool, networks: Sequence[str] = ()) -> Iterator[Row | StepRow]:
    """Measure everything, or what concerns some networks.

    Args:
        quick: leave out peers, predictions and other settings than the default.
        networks: some of `NETWORKS`; empty for all.
    """
    wanted = networks or NETWORKS
    for case in CASES:
        if case.network in wanted and not (quick and case.setting is not DEFAULT):
            _say(f"{case.network}, {case.setting.name}")
            yield measure_case(replace(case, peers=()) if quick else case, not quick)
    if BUILT in wanted:
        _say(f"the building of {BUILT}")
        yield build_row()
    for network in ADDED:
        if network in wanted and not quick:
            _say(f"sums ahead of time on {network}")
            yield from adding_rows(network)


def measure_case(case: Case, predicting: bool = True) -> StepRow:
    """Measure one row.

    Args:
        case: the row.
        predicting: whether to predict as well, and to trace. Not what XLA makes of a
            graph.
    """
    outcomes = {
        way: _measure(case, way, predicting and way not in case.peers)
        for way in (PLAIN, MEMORY, *case.peers)
    }
    running = [way for way, outcome in outcomes.items() if outcome.peak is not None]
    try:
        times = in_a_child("times", case.network, case.setting, *running)
    except ChildError as error:
        times = {}
        outcomes[PLAIN] = _with_error(outcomes[PLAIN], error)
    return StepRow(
        case,
        {way: replace(o, seconds=times.get(way)) for way, o in outcomes.items()},
    )


def _measure(case: Case, way: str, predicting: bool) -> Outcome:
    outcome = Outcome()
    try:
        peak = in_a_child("peak", case.network, case.setting, way)
        outcome = replace(outcome, peak=Peak(**peak))
        if predicting and not case.setting.xla:
            found = in_a_child("prediction", case.network, case.setting, way)
            outcome = replace(outcome, prediction=Prediction(**found))
    except ChildError as error:
        return _with_error(outcome, error)
    return outcome


def _with_error(outcome: Outcome, error: ChildError) -> Outcome:
    return replace(outcome, raised=(*outcome.raised, str(error)))


def _say(what: str) -> None:
    print(f"measuring {FAMILY} on {what} ...", file=sys.stderr, flush=True)
