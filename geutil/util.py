"""Names that `tf.contrib.graph_editor.util` had."""

from geutil.graph.names import scope_basename, scope_dirname, scope_finalize
from geutil.graph.placeholders import (
    make_placeholder_from_dtype_and_shape,
    make_placeholder_from_tensor,
    placeholder_name,
)
from geutil.select.controls import ControlOutputs
from geutil.select.lists import (
    check_graphs,
    get_consuming_ops,
    get_generating_ops,
    get_tensors,
    is_iterable,
    make_list_of_op,
    make_list_of_t,
)
from geutil.select.listview import ListView

__all__ = [
    "ControlOutputs",
    "ListView",
    "check_graphs",
    "get_consuming_ops",
    "get_generating_ops",
    "get_tensors",
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
