"""Names that `tf.contrib.graph_editor.match` had."""

from __future__ import annotations

from geutil.select.queries import OpMatcher, op_type

__all__ = ["OpMatcher", "op_type"]
