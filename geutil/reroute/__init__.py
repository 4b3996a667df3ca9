"""L2, rewiring: tensors, control edges, the ends of views, detach, connect, bypass.

Every function plans its edit, checks it as a whole and only then applies it; a refusal
leaves the graph as it was.
"""

from geutil.reroute.tensors import (
    add_control_inputs,
    remove_control_inputs,
    reroute_ts,
    swap_ts,
)
from geutil.reroute.views import (
    reroute_inputs,
    reroute_ios,
    reroute_outputs,
    swap_inputs,
    swap_ios,
    swap_outputs,
)

__all__ = [
    "add_control_inputs",
    "remove_control_inputs",
    "reroute_inputs",
    "reroute_ios",
    "reroute_outputs",
    "reroute_ts",
    "swap_inputs",
    "swap_ios",
    "swap_outputs",
    "swap_ts",
]
