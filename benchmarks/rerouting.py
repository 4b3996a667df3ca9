"""Many small reroutes in a large graph, each one checked for cycles."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import tensorflow as tf

import geutil as ge
from benchmarks.graphs import LOCAL_REACH, Case, import_graph, random_graph_def
from benchmarks.rows import Row
from benchmarks.timing import Side, once

LIMIT_MS = 1000.0
REROUTES = 1000
REPEATS = 3
# The share of reroutes that ask for a tensor made later than its new reader.
BACKWARD = 0.3


@dataclass(frozen=True)
class Reroute:
    """Input `index` of op `reader` shall be output `output` of op `producer`."""

    reader: int
    index: int
    producer: int
    output: int


@dataclass
class Outcome:
    """What a run of reroutes came to."""

    accepted: int = 0
    against_creation: int = 0
    refused: int = 0
    first_ms: float = 0.0


def rows(case: Case) -> Iterator[Row]:
    if case.size is None:
        # The traced graph's function is built already: edits of it are refused.
        graph_def, name = case.graph_def, case.name
    else:
        graph_def = random_graph_def(case.size, reach=LOCAL_REACH)
        name = f"{case.size:,} local"
    reroutes = plan(import_graph(graph_def))
    outcomes: list[Outcome] = []
    side = Side(
        lambda graph: run(graph, reroutes),
        prepare=lambda: import_graph(graph_def),
        check=outcomes.append,
    )
    seconds = median(once(side) for _ in range(REPEATS))
    seen = outcomes[0]
    first_ms = median(outcome.first_ms for outcome in outcomes)
    yield Row(
        "reroute",
        f"{len(reroutes):,} reroutes one after another",
        name,
        seconds * 1e3,
        None,
        LIMIT_MS,
        note=(
            f"{seen.accepted} accepted, {seen.against_creation} of them against the "
            f"order of creation; {seen.refused} refused as cycles; the first took "
            f"{first_ms:.0f} ms"
        ),
        contrib="no cycle check",
    )


def plan(graph: tf.Graph, seed: int = 0) -> list[Reroute]:
    """Draw the reroutes: a nearby tensor of the same type for one input of an op."""
    rng = random.Random(seed)
    ops = graph.get_operations()
    readers = [i for i, op in enumerate(ops) if op.inputs]
    reroutes: list[Reroute] = []
    while len(reroutes) < REROUTES:
        reader = rng.choice(readers)
        index = rng.randrange(len(ops[reader].inputs))
        backward = rng.random() < BACKWARD
        near = (
            range(reader + 1, min(reader + LOCAL_REACH, len(ops)))
            if backward
            else range(max(reader - LOCAL_REACH, 0), reader)
        )
        old = ops[reader].inputs[index]
        candidates = [
            (producer, output)
            for producer in near
            for output, t in enumerate(ops[producer].outputs)
            if t is not old
            and t.dtype == old.dtype
            and t.shape.is_fully_defined()
            and t.shape.as_list() == _shape(old)
        ]
        if candidates:
            reroutes.append(Reroute(reader, index, *rng.choice(candidates)))
    return reroutes


def _shape(tensor: tf.Tensor) -> list[int] | None:
    return tensor.shape.as_list() if tensor.shape.is_fully_defined() else None


def run(graph: tf.Graph, reroutes: list[Reroute]) -> Outcome:
    """Carry the reroutes out, one call each."""
    ops = graph.get_operations()
    outcome = Outcome()
    for number, reroute in enumerate(reroutes):
        start = perf_counter()
        reader = ops[reroute.reader]
        new = ops[reroute.producer].outputs[reroute.output]
        try:
            ge.reroute_ts(new, reader.inputs[reroute.index], can_modify=[reader])
        except ge.CycleError:
            outcome.refused += 1
        else:
            outcome.accepted += 1
            outcome.against_creation += reroute.producer > reroute.reader
        if not number:
            outcome.first_ms = (perf_counter() - start) * 1e3
    return outcome
