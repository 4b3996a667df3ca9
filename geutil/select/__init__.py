"""L1, selection: filters, walks, boundaries, subgraph views and matchers.

Nothing here changes a graph. Every function is linear in the ops and edges it visits
and returns them in a deterministic order.
"""

from geutil.select.queries import (
    by_device,
    filter_ops,
    filter_ops_from_regex,
    filter_ts,
    filter_ts_from_regex,
    get_name_scope_ops,
    select_ops,
    select_ops_and_ts,
    select_ts,
)
from geutil.select.selections import can_be_regex, make_regex
from geutil.select.walks import (
    ControlOutputs,
    check_cios,
    compute_boundary_ts,
    get_backward_walk_ops,
    get_forward_walk_ops,
    get_ops_ios,
    get_walks_intersection_ops,
    get_walks_union_ops,
    get_within_boundary_ops,
    inputs_of,
    outputs_of,
)

# Code that was written for the old module reads these.
_get_input_ts = inputs_of
_get_output_ts = outputs_of

__all__ = [
    "ControlOutputs",
    "by_device",
    "can_be_regex",
    "check_cios",
    "compute_boundary_ts",
    "filter_ops",
    "filter_ops_from_regex",
    "filter_ts",
    "filter_ts_from_regex",
    "get_backward_walk_ops",
    "get_forward_walk_ops",
    "get_name_scope_ops",
    "get_ops_ios",
    "get_walks_intersection_ops",
    "get_walks_union_ops",
    "get_within_boundary_ops",
    "make_regex",
    "select_ops",
    "select_ops_and_ts",
    "select_ts",
]
