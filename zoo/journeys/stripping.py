"""Strips the training function of a model."""

from __future__ import annotations

from geutil import model
from zoo.journeys.opening import random_ops
from zoo.journeys.visit import Visit
from zoo.results import Cell, judged, none
from zoo.values import apart

LIMIT = 1e-5


def strip(visit: Visit) -> Cell:
    """Strip; the result is to be the inference, with nothing random left."""
    subject = visit.build()
    if getattr(subject, "train", None) is None:
        return none("no training function")
    training = model.open(subject.concrete(training=True))
    stripped = training.strip_training()
    sample = {name: visit.sample[name] for name in stripped.inputs}
    found, wanted = stripped.run(**sample), visit.made["outputs"]
    notes = [f"left: {op}" for op in random_ops(stripped)[:3]]
    if apart(found, wanted) > LIMIT:
        differing = [n for n in wanted if apart({n: found[n]}, {n: wanted[n]}) > LIMIT]
        notes.append(f"another value: {', '.join(differing)}")
    return judged(not notes, "ok" if not notes else "missed", "; ".join(notes))
