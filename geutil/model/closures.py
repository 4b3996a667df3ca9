"""Gradients that exist in Python only, carried from a source's graph."""

from __future__ import annotations

from typing import Any

from geutil.graph.kinds import Graph


def carry_closures(graph: Graph, origin: Graph, origins: Any) -> None:
    """Give ops of `graph` the gradients that `tf.custom_gradient` made for `origin`."""
