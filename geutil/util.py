"""Names that `tf.contrib.graph_editor.util` had."""

from __future__ import annotations

from geutil.graph.creation import (
    make_placeholder_from_dtype_and_shape,
    make_placeholder_from_tensor,
    placeholder_name,
)
from geutil.graph.types import scope_basename, scope_dirname, scope_finalize
from geutil.select.selections import (
    ListView,
    check_graphs,
    get_consuming_ops,
    get_generating_ops,
    get_tensors,
    get_unique_graph,
    is_iterable,
    make_list_of_op,
    make_list_of_t,
)
from geutil.select.walks import ControlOutputs

__all__ = [
    "ControlOutputs",
    "ListView",
    "check_graphs",
    "get_consuming_ops",
    "get_generating_ops",
    "get_tensors",
    "get_unique_graph",
    "is_iterable",
    "make_list_of_op",
    "make_list_of_t",
    "make_placeholder_from_dtype_and_shape",
    "make_placeholder_from_tensor",
    "placeholder_name",
    "scope_basename",
    "scope_dirname",
    "scope_finalize",
]
