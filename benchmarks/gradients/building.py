"""How long memory-saving gradients take to build, against plain ones."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import tensorflow as tf

from benchmarks.gradients.ways import MEMORY, PLAIN, WAYS
from benchmarks.networks import Step
from benchmarks.networks.networks import application
from benchmarks.rows import Row
from geutil.gradients import last_report

NETWORK = "ResNet152"
LIMIT = 4.0
ROUNDS = 3


def build_row() -> Row:
    step = application(NETWORK, batch=16, pixels=224)
    times: dict[str, list[float]] = {PLAIN: [], MEMORY: []}
    for _ in range(ROUNDS):
        for way, seconds in times.items():
            seconds.append(_seconds(step, WAYS[way].gradients))
    plain, memory = (median(times[way]) * 1e3 for way in (PLAIN, MEMORY))
    report = last_report()
    segments = report.segments if report else 0
    note = f"{segments} segments; baseline: tf.gradients"
    return Row("gradients", "build gradients", NETWORK, memory, plain, LIMIT, note=note)


def _seconds(step: Step, gradients: Callable[..., list[Any]]) -> float:
    """Return how long the gradients of a newly traced loss take to build."""
    taken = 0.0

    def build(*batch: tf.Tensor) -> list[Any]:
        nonlocal taken
        loss = step.loss(*batch)
        start = perf_counter()
        results = gradients(loss, step.variables)
        taken = perf_counter() - start
        return results

    tf.function(build, autograph=False).get_concrete_function(*step.specs)
    return taken
