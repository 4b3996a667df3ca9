"""Names that `tf.contrib.graph_editor.subgraph` had."""

from geutil.select.subgraph import SubGraphView
from geutil.select.views import make_view, make_view_from_scope

__all__ = ["SubGraphView", "make_view", "make_view_from_scope"]
