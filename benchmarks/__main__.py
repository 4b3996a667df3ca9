"""`python -m benchmarks [--quick] [--only NAME] [--network NAME] [--json PATH]`."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import tensorflow as tf

import geutil
from benchmarks import (
    batching,
    copying,
    folding,
    inspecting,
    memory,
    quantization,
    rerouting,
    rewriting,
    round_trip,
    selecting,
    table,
    viewing,
    walks,
    works,
)
from benchmarks.gradients import rows as gradients
from benchmarks.gradients import table as steps_table
from benchmarks.graphs import Case, groups
from benchmarks.rows import Row
from benchmarks.schedules import rows as schedules

WITH_BASELINE: dict[str, Callable[[Case], list[works.Work]]] = {
    "walks": walks.works,
    "select": selecting.works,
    "view": viewing.works,
    "copy": copying.works,
}
# Their limits are for a large graph: in a small one nothing is far from anything, and
# what does not grow with the graph is shared by few ops.
ON_THE_LARGEST: dict[str, Callable[[Case], Iterator[Row]]] = {
    "reroute": rerouting.rows,
    "rewrite": rewriting.rows,
    "memory": memory.rows,
}
# They write the models that they read.
ON_THEIR_OWN: dict[str, Callable[[bool], Iterator[Row]]] = {
    "batch": batching.rows,
    "fold": folding.rows,
    "inspect": inspecting.rows,
    "quantize": quantization.rows,
    "round_trip": round_trip.rows,
    "schedules": schedules.rows,
}
FAMILIES = (*WITH_BASELINE, *ON_THE_LARGEST, *ON_THEIR_OWN, gradients.FAMILY)
AnyRow = Row | gradients.StepRow


def main() -> None:
    options = _options()
    console = table.make_console()
    names = options.only or list(FAMILIES)
    rows = sorted(_measure(names, options), key=lambda row: names.index(row.family))
    if options.json is not None:
        options.json.write_text(json.dumps(_report(rows), indent=2) + "\n")
    plain = [row for row in rows if isinstance(row, Row)]
    steps = [row for row in rows if isinstance(row, gradients.StepRow)]
    if plain:
        table.show(console, plain)
    if steps:
        steps_table.show(console, steps)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks")
    parser.add_argument(
        "--quick", action="store_true", help="leave out what takes long"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=FAMILIES,
        metavar="NAME",
        help=f"run one family; may be repeated: {', '.join(FAMILIES)}",
    )
    parser.add_argument(
        "--network",
        action="append",
        default=[],
        choices=gradients.NETWORKS,
        metavar="NAME",
        help="of the family gradients, run one network; may be repeated: "
        + ", ".join(gradients.NETWORKS),
    )
    parser.add_argument("--json", type=Path, help="also write the numbers to a file")
    return parser.parse_args()


def _measure(names: list[str], options: argparse.Namespace) -> Iterator[AnyRow]:
    for name in names:
        if name in ON_THEIR_OWN:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            yield from ON_THEIR_OWN[name](options.quick)
        elif name == gradients.FAMILY:
            yield from gradients.rows(options.quick, options.network)
    names = [name for name in names if name in WITH_BASELINE | ON_THE_LARGEST]
    yield from _measure_graphs(names, options.quick)


def _measure_graphs(names: list[str], quick: bool) -> Iterator[Row]:
    pending = groups(quick) if names else []
    largest = max((case.size or 0 for cases in pending for case in cases), default=0)
    while pending:
        # Popped, so that large graphs are gone before the next ones are measured.
        cases = pending.pop(0)
        for case in cases:
            case.settle()
        for name in names:
            on = " and ".join(case.name for case in cases)
            print(f"measuring {name} on {on} ...", file=sys.stderr, flush=True)
            if name in WITH_BASELINE:
                yield from works.rows(name, WITH_BASELINE[name], cases)
            elif cases[-1].size in (None, largest):
                yield from ON_THE_LARGEST[name](cases[-1])
        gc.unfreeze()


def _report(rows: list[AnyRow]) -> dict[str, object]:
    return {
        "geutil": geutil.__version__,
        "tensorflow": tf.__version__,
        "python": platform.python_version(),
        "rows": [row.as_dict() for row in rows],
    }


if __name__ == "__main__":
    main()
