"""The heaviest closure of a graph: which nodes to take so that all they need is taken.

A closure is a set of nodes with all that its nodes require. The heaviest one is one
side of a minimum cut (Picard, "Maximal closure of a graph and applications to
combinatorial problems", Management Science 22, 1976), which OR-Tools computes.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from geutil.errors import MissingExtraError

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def heaviest_closure(requires: tuple[Ints, Ints], weights: Ints) -> tuple[int, Flags]:
    """Return the weight of the heaviest closure, and which nodes are in it.

    Args:
        requires: pairs of nodes, as two arrays: the first cannot be taken without the
            second.
        weights: of the nodes; some may be negative.

    Raises:
        MissingExtraError: OR-Tools is not installed.

    Cost: that of a maximum flow.

    Example:
        The second node is worth taking for the sake of the first:

        >>> import numpy as np
        >>> requires = (np.array([0, 2]), np.array([1, 1]))
        >>> heaviest_closure(requires, np.array([5, -3, 1]))
        (3, array([ True,  True,  True]))
    """
    flow = _flows().SimpleMaxFlow()
    count = len(weights)
    source, sink = count, count + 1
    gains, losses = np.nonzero(weights > 0)[0], np.nonzero(weights < 0)[0]
    most = int(weights[gains].sum())
    tails = [np.full(len(gains), source), losses, requires[0]]
    heads = [gains, np.full(len(losses), sink), requires[1]]
    capacities = [weights[gains], -weights[losses], np.full(len(requires[0]), most + 1)]
    flow.add_arcs_with_capacity(
        np.concatenate(tails).astype(np.int32),
        np.concatenate(heads).astype(np.int32),
        np.concatenate(capacities).astype(np.int64),
    )
    # Nodes without an arc do not exist.
    flow.add_arc_with_capacity(source, sink, 0)
    flow.solve(source, sink)
    taken = np.zeros(count + 2, np.bool_)
    taken[flow.get_source_side_min_cut()] = True
    return most - int(flow.optimal_flow()), taken[:count]


def has_solver() -> bool:
    """Tell whether OR-Tools is installed."""
    return find_spec("ortools") is not None


def _flows() -> Any:
    try:
        from ortools.graph.python import max_flow
    except ImportError as error:
        raise MissingExtraError(
            "the worst case of a step is computed by OR-Tools, which is not installed; "
            "run: pip install 'geutil[plan]'"
        ) from error
    return max_flow
