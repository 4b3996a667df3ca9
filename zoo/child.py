"""`python -m zoo.child NAME FOLDER JOURNEY ...`: the side of geutil.

It writes a line of JSON when a journey begins, and one when it ends, to `cells.jsonl`:
so a process that dies loses no more than the journey it was on.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from geutil.errors import GeutilError
from zoo.journeys import JOURNEYS
from zoo.journeys.visit import Visit
from zoo.models import MODELS
from zoo.results import Cell, raised
from zoo.values import without_grappler


def main() -> None:
    """Take a model on its journeys, one after the other."""
    name, folder, *journeys = sys.argv[1:]
    without_grappler()
    visit = Visit(MODELS[name], Path(folder))
    for journey in journeys:
        _write(visit, {"begins": journey})
        found = _taken(JOURNEYS[journey], visit)
        _write(visit, {"ends": journey, "cell": found.as_dict()})


def _taken(journey: Callable[[Visit], Cell], visit: Visit) -> Cell:
    try:
        return journey(visit)
    except GeutilError as error:
        return raised(error, is_own=True)
    except Exception as error:  # The cell shows it.
        traceback.print_exc()
        return raised(error, is_own=False)


def _write(visit: Visit, line: dict[str, object]) -> None:
    with (visit.folder / "cells.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
