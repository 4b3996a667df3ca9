"""Changes the batch size of a model: to a number, to any, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from geutil import model
from geutil.errors import GeutilError
from zoo.journeys.visit import Visit
from zoo.results import Cell, judged, none, ok, raised
from zoo.subject import FEWER, ROWS
from zoo.values import Values, apart

# Kernels may add up otherwise for another number of rows.
LIMIT = 1e-4


def set_batch_size(visit: Visit) -> Cell:
    """Fix the size at three, free it, and fix it at five."""
    if not visit.made["has_batch"]:
        return none("no batch axis")
    sample, outputs = visit.sample, visit.made["outputs"]
    fewer = {name: value[:FEWER] for name, value in sample.items()}
    opened = model.open(visit.saved_model)
    try:
        sizes = [FEWER, None, ROWS]
        three, anyone, back = _resized(opened, sizes)
    except GeutilError as error:
        if _rows_depend(visit):
            return ok("refused: rows depend on each other")
        refused = raised(error, is_own=True)
        works = _works(opened, sizes, samples=sample)
        return replace(refused, text="refused; ok by samples") if works else refused
    differences = {
        "3": apart(three.run(**fewer), visit.made["fewer"]),
        "any, 3 rows": apart(anyone.run(**fewer), visit.made["fewer"]),
        "any, 5 rows": apart(anyone.run(**sample), outputs),
        "5": apart(back.run(**sample), outputs),
    }
    missed = [f"{n}: {d:.1e}" for n, d in differences.items() if d > LIMIT]
    return judged(not missed, "differs" if missed else "ok", "; ".join(missed))


def _resized(opened: Any, sizes: Sequence[int | None], **options: Any) -> list[Any]:
    """Return the model in several batch sizes, each made of the one before."""
    found = []
    for size in sizes:
        opened = opened.set_batch_size(size, **options)
        found.append(opened)
    return found


def _works(opened: Any, sizes: Sequence[int | None], **options: Any) -> bool:
    try:
        _resized(opened, sizes, **options)
    except GeutilError:
        return False
    return True


def _rows_depend(visit: Visit) -> bool:
    """Tell whether three rows alone come to something else than among five."""
    fewer: Values = visit.made["fewer"]
    among = {name: value[:FEWER] for name, value in visit.made["outputs"].items()}
    return apart(among, fewer) > LIMIT
