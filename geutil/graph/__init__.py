"""L0, the graph as data: identity, adjacency, names, edits, verification.

The only package that calls TensorFlow's private API. The names are imported when they
are first used: what reads TFLite files needs no TensorFlow.
"""

import typing

from geutil import lazy

__all__ = ["Violation", "allow_stale", "find_violations", "transaction", "verify"]

if typing.TYPE_CHECKING:
    from geutil.graph.edits import transaction
    from geutil.graph.invariants import Violation, find_violations, verify
    from geutil.graph.state import allow_stale
else:
    __getattr__, __dir__ = lazy.names_of(
        __name__,
        {
            "edits": ("transaction",),
            "invariants": ("Violation", "find_violations", "verify"),
            "state": ("allow_stale",),
        },
    )
