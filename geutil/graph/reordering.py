"""The topological order of a graph, computed anew."""

from __future__ import annotations

from geutil.graph.kinds import Graph
from geutil.graph.order import TopologicalOrder
from geutil.graph.state import state_of


def renew_order(graph: Graph) -> None:
    """Give each op its place by how far it is from where the data comes in.

    New ops come last in the order that edits keep up to date. Each edit that puts one
    in the place of an early op then moves all that lies between. Before many such
    edits it is quicker to begin with an order in which new and old stand side by side.

    Cost: linear in ops and edges.
    """
    state = state_of(graph)
    if state.order is None:
        state.order = TopologicalOrder()
    state.order.rebuild(graph)
