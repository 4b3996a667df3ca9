"""The results of a FuncGraph as a list that can be changed, and changed back."""

from __future__ import annotations

from collections.abc import Iterable

from geutil.graph.edits import note_undo
from geutil.graph.kinds import Graph, Tensor, is_func_graph
from geutil.graph.state import UndoStep


def results_of(graph: Graph) -> list[Tensor]:
    """Return the results of a FuncGraph; of another graph none, since it tells none."""
    return list(graph.outputs) if is_func_graph(graph) else []


def set_results(graph: Graph, tensors: Iterable[Tensor]) -> None:
    """Set the results of a FuncGraph; a transaction that fails puts the old ones back.

    Of another graph there is nothing to set.
    """
    if not is_func_graph(graph):
        return
    before = graph.outputs

    def undo() -> None:
        graph.outputs = before

    note_undo(graph, UndoStep(undo))
    graph.outputs = list(tensors)
