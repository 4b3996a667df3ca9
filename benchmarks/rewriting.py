"""Twenty rules over a whole graph, against one backward walk for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import tensorflow as tf

import geutil as ge
from benchmarks.graphs import Case, import_graph
from benchmarks.rows import Row
from benchmarks.timing import Side, compare
from geutil import rewrite as rw

LIMIT = 3.0
RULES = 20
# Types of the random graphs by which a pattern can begin, with what it reads.
_SHAPES: tuple[Callable[[], rw.Pattern], ...] = (
    lambda: rw.Op("AddV2", rw.Op("Mul"), rw.Any("x")),
    lambda: rw.Op("AddV2", rw.Const(), rw.Op("Exp"), commutative=True),
    lambda: rw.Op("Neg", rw.Op("Neg", rw.Op("Relu", only_consumer=True))),
    lambda: rw.Op("AddN", rw.Op("Neg", rw.Const()), rw.Op("Mul"), ...),
    lambda: rw.Op({"Relu", "Relu6"}, rw.Op("BiasAdd", rw.Op("Conv2D"), rw.Const())),
)


def rules_without_a_match() -> list[rw.Rule]:
    """Return twenty rules that look at the ops of a random graph and find nothing."""
    return [
        rw.Rule(_SHAPES[i % len(_SHAPES)](), lambda match: None, name=f"rule{i}")
        for i in range(RULES)
    ]


def rules_with_matches() -> list[rw.Rule]:
    """Return the same rules, but the first one applies here and there."""
    negations = rw.Op("Neg", rw.Op("Neg", rw.Op("Neg", rw.Op("Neg", rw.Any("x")))))
    first = rw.Rule(negations, lambda match: match["x"], name="four negations")
    return [first, *rules_without_a_match()[1:]]


def rows(case: Case) -> Iterator[Row]:
    graph_def, sinks = case.graph_def, case.sinks()
    reports: list[rw.RewriteReport] = []

    def walk(_: None) -> None:
        for _ in range(RULES):
            ge.get_backward_walk_ops(sinks)

    def apply(rules: list[rw.Rule], graph: tf.Graph) -> rw.RewriteReport:
        # The traced graph's function is built already.
        with ge.allow_stale(graph):
            return rw.rewrite(graph, rules)

    def settled() -> tf.Graph:
        fresh = Case("", lambda: import_graph(graph_def), "")
        fresh.settle()
        return fresh.graph

    nothing, something = rules_without_a_match(), rules_with_matches()
    sides = [
        Side(lambda _: apply(nothing, case.graph), check=finds_nothing),
        # Each round changes the graph, so it starts from a fresh one.
        Side(lambda graph: apply(something, graph), settled, reports.append),
        Side(walk),
    ]
    *times, baseline = (seconds * 1e3 for seconds in compare(sides))
    notes = "no rewrite", f"{len(reports[0].rewritten)} rewrites"
    for note, ours in zip(notes, times, strict=True):
        work = f"{RULES} rules over everything"
        yield Row("rewrite", work, case.name, ours, baseline, LIMIT, note=note)


def finds_nothing(report: rw.RewriteReport) -> None:
    assert not report.rewritten
