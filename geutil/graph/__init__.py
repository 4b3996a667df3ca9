"""L0, the graph as data: identity, adjacency, names, edits, verification.

The only package that calls TensorFlow's private API.
"""

from geutil.graph import state
from geutil.graph.edits import transaction
from geutil.graph.state import allow_stale
from geutil.graph.verify import Violation, find_violations, verify

__all__ = ["Violation", "allow_stale", "find_violations", "transaction", "verify"]

state.watch_runs()
state.watch_completion()
