"""Copies of everything, against `tf.import_graph_def` of the same nodes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import geutil as ge
from benchmarks.graphs import Case, import_graph
from benchmarks.timing import Side
from benchmarks.works import Work

LIMIT = 1.5
CONTRIB = "350 us/op, 6 to 11x"


def works(case: Case) -> list[Work]:
    graph, graph_def, count = case.graph, case.graph_def, len(case.ops)

    def is_whole(result: tuple[ge.SubGraphView, Any]) -> None:
        assert len(result[0].ops) == count

    def import_beside(graph: tf.Graph) -> None:
        with graph.as_default():
            tf.import_graph_def(graph_def, name="copy")

    return [
        Work(
            "copy of everything to a new graph",
            Side(lambda new: ge.copy(graph, new), tf.Graph, is_whole),
            Side(lambda _: import_graph(graph_def)),
            LIMIT,
            contrib=CONTRIB,
        ),
        # This one leaves twice as many ops behind, so it starts from a fresh graph.
        Work(
            "copy of everything in the same graph",
            Side(
                lambda fresh: ge.copy(fresh, dst_scope="copy"),
                lambda: import_graph(graph_def),
                is_whole,
            ),
            # A graph that holds ops already takes longer to import into.
            Side(import_beside, lambda: import_graph(graph_def)),
            LIMIT,
            contrib=CONTRIB,
        ),
    ]
