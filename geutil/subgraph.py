"""Names that `tf.contrib.graph_editor.subgraph` had."""

from __future__ import annotations

from geutil.select.queries import make_view, make_view_from_scope
from geutil.select.subgraph import SubGraphView

__all__ = ["SubGraphView", "make_view", "make_view_from_scope"]
