"""L0, the graph as data: identity, adjacency, names, edits, verification.

The only package that calls TensorFlow's private API.
"""

from geutil.graph import run_hooks
from geutil.graph.edits import transaction
from geutil.graph.run_hooks import allow_stale
from geutil.graph.verify import Violation, find_violations, verify

__all__ = ["Violation", "allow_stale", "find_violations", "transaction", "verify"]

run_hooks.watch_runs()
run_hooks.watch_completion()
