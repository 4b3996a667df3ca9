"""Folds the batch norms of a model, and saves it."""

from __future__ import annotations

from geutil import model
from geutil.batchnorm import fold_batch_norms
from zoo.journeys.visit import Visit
from zoo.results import Cell, judged
from zoo.values import apart

LIMIT = 1e-5


def fold(visit: Visit) -> Cell:
    """Fold; what plain TensorFlow says of the saved model is looked at later."""
    folded = model.open(visit.saved_model)
    report = fold_batch_norms(folded)
    difference = apart(folded.run(**visit.sample), visit.made["outputs"])
    folded.save(visit.place("fold"), overwrite=True)
    known = visit.made["norms"]
    listed = len(report.folded) + len(report.refused)
    text = f"{len(report.folded)} of {listed}" if listed else "no norm"
    notes = [f"'{r.norm}': '{r.op}' {r.reason}" for r in report.refused[:3]]
    if known is not None and listed != known:
        notes.insert(0, f"{listed} norms listed, {known} there")
    if difference > LIMIT:
        notes.insert(0, f"differs by {difference:.1e} of the range")
    is_ok = difference <= LIMIT and (known is None or listed == known)
    return judged(is_ok, text, "; ".join(notes))
