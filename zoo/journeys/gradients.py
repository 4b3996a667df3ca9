"""Takes memory-saving gradients of a training step, and fits one."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from geutil import memory
from geutil.gradients import checkpointed, gradients, last_report
from zoo.journeys.visit import Visit
from zoo.plain import fitted, gradients_of, repeated, step_of
from zoo.results import Cell, judged, none, ok
from zoo.subject import Function
from zoo.values import Array, Values

LIMIT = 1e-6
PREDICTED = 0.1
# What an allocation rounds up to; the least steps hold little else.
_SLACK = 1 << 16


def gradients_memory(visit: Visit) -> Cell:
    """Take gradients with checkpoints "memory"."""
    return _gradients(visit, "memory")


def gradients_speed(visit: Visit) -> Cell:
    """Take gradients with checkpoints "speed"."""
    return _gradients(visit, "speed")


def _gradients(visit: Visit, checkpoints: str) -> Cell:
    wanted = visit.made["gradients"]
    if isinstance(wanted, str):
        return none(f"tf.gradients fails: {wanted}"[:70])
    if all(g is None for g in wanted):
        return none("nothing to train")
    take = partial(gradients, checkpoints=checkpoints)
    found = gradients_of(visit.build(), visit.made["many"], take)
    report = last_report()
    difference = _apart(found, wanted)
    if difference > LIMIT:
        return judged(False, f"differs by {difference:.1e}")
    if report is None:
        return ok()
    text = f"{report.peak / max(report.plain_peak, 1):.2f} planned"
    text += "" if report.recomputed else ", by order alone"
    over = report.peak - report.plain_peak
    note = f"planned {over} bytes above plain gradients" if over > _SLACK else ""
    return judged(not note, text, note)


def _apart(found: list[Array | None], wanted: list[Array | None]) -> float:
    pairs = list(zip(found, wanted, strict=True))
    if any((a is None) != (b is None) for a, b in pairs):
        return float("inf")
    # By the largest of all gradients: many of a norm's are zero but for rounding.
    there = [(a, b) for a, b in pairs if a is not None and b is not None]
    largest = max(float(np.abs(b).max(initial=0.0)) for _, b in there) or 1.0
    return max(float(np.abs(a - b).max(initial=0.0)) / largest for a, b in there)


def fit(visit: Visit) -> Cell:
    """Fit one step with `checkpointed`."""
    wanted = visit.made["fitted"]
    if wanted is None:
        return none("no Keras model")
    if isinstance(wanted, str):
        return none(f"fit fails: {wanted}"[:70])
    subject = visit.build()
    checkpointed(subject.network)
    with _Warnings() as warnings:
        found = fitted(subject, visit.made["many"])
    difference = _weights_apart(found or {}, wanted)
    plain = any("these are plain gradients" in said for said in warnings.said)
    text = "ok, plain gradients" if plain else "ok"
    if difference > LIMIT:
        text = f"differs by {difference:.1e}"
    return judged(difference <= LIMIT, text)


def _weights_apart(found: Values, wanted: Values) -> float:
    """Return the largest difference of weights, each relative to its largest value.

    Their range would be the wrong measure: scales of a norm are all next to 1.
    """
    if list(found) != list(wanted):
        return float("inf")
    apart = [0.0]
    for weight, value in wanted.items():
        difference = float(np.abs(found[weight] - value).max(initial=0.0))
        apart.append(difference / (float(np.abs(value).max(initial=0.0)) or 1.0))
    return max(apart)


class _Warnings(logging.Handler):
    """What geutil warns of while it is open."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(" ".join(record.getMessage().split())[:300])

    def __enter__(self) -> _Warnings:
        logging.getLogger("geutil").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("geutil").removeHandler(self)


def bits(visit: Visit) -> Cell:
    """Take gradients under op determinism: the same bits as plain ones."""
    wanted = visit.made["repeated"]
    if isinstance(wanted, str):
        return none(f"tf.gradients fails: {wanted}"[:70])
    first, again = wanted
    if all(g is None for g in first):
        return none("nothing to train")
    takes = [partial(gradients, checkpoints=c) for c in ("memory", "speed")]
    found = repeated(visit.entry, visit.made["many"], *takes)
    differ = [
        place
        for place, (a, b) in enumerate(zip(first, again, strict=True))
        if _same(a, b) and not all(_same(a, one[place]) for one in found)
    ]
    varying = sum(not _same(a, b) for a, b in zip(first, again, strict=True))
    text = "ok" if not varying else f"ok but for {varying} that vary anyway"
    note = f"gradients {differ[:5]} have other bits" if differ else ""
    return judged(not differ, text if not differ else "other bits", note)


def _same(a: Array | None, b: Array | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.tobytes() == b.tobytes()


def peak(visit: Visit) -> Cell:
    """Measure the step with checkpoints "memory" and the plain one."""
    wanted = visit.made["gradients"]
    if isinstance(wanted, str) or all(g is None for g in wanted):
        return none("nothing to train")
    plain = _measured(visit, tf.gradients)
    if plain is None:
        return none("a graph of version 1")
    # The step returns its gradients.
    take = partial(gradients, checkpoints="memory", holds_gradients=True)
    saving = _measured(visit, take)
    report = last_report()
    missed = []
    if saving > plain + _SLACK:
        missed.append(f"{saving} bytes, plain {plain}")
    if report is not None and abs(saving - report.peak) > max(
        PREDICTED * saving, _SLACK
    ):
        missed.append(f"predicted {report.peak} bytes, measured {saving}")
    text = f"{saving / max(plain, 1):.2f} of plain"
    return judged(not missed, text, "; ".join(missed))


def _measured(visit: Visit, take: Any) -> Any:
    subject = visit.build()
    if not isinstance(subject, Function):
        return None
    sample = visit.made["many"]
    specs = {n: tf.TensorSpec(x.shape, x.dtype) for n, x in sample.items()}
    step = step_of(subject, take).get_concrete_function(**specs)
    values = {name: tf.constant(value) for name, value in sample.items()}
    return memory.measure(step, kwargs=values, steps=1, timeout=120).peak
