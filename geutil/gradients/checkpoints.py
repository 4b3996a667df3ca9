"""What the caller says of checkpoints, checked before anything is built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.gradients.policies import Policy
from geutil.graph.identity import dereference
from geutil.graph.kinds import Graph, Tensor, is_tensor, type_name
from geutil.graph.plain_gradients import collection, enclosing_graphs

MODES = ("collection", "memory", "speed")
COLLECTION = "checkpoints"
"""The graph collection that `checkpoints="collection"` reads."""


def checked(graph: Graph, checkpoints: Any) -> str | Policy | tuple[Tensor, ...] | None:
    """Return what the caller says of checkpoints as a mode, a policy or tensors.

    None stays None: nothing is to be recomputed.

    Builds nothing, so that it can be refused before anything is built.

    Args:
        graph: the graph of the ys.
        checkpoints: as in `gradients`.

    Raises:
        ArgumentTypeError: `checkpoints` is none of what it may be.
        SelectionError: it is no mode, it names tensors of another graph, or the
            collection is empty.

    Cost: linear in the checkpoints.
    """
    if checkpoints is None:
        return None
    if isinstance(checkpoints, str):
        if checkpoints not in MODES:
            raise SelectionError(
                f"'{checkpoints}' is no mode of checkpoints; pass one of "
                f"{', '.join(MODES)}, a list of tensors, or a policy"
            )
        if checkpoints == "collection":
            collected(graph)
        return checkpoints
    if callable(checkpoints) and not is_tensor(checkpoints):
        policy: Policy = checkpoints
        return policy
    single = isinstance(checkpoints, dict) or not isinstance(checkpoints, Iterable)
    if single or is_tensor(checkpoints):
        checkpoints = [checkpoints]
    return _tensors(graph, checkpoints)


def collected(graph: Graph) -> tuple[Tensor, ...]:
    """Return the collection, without what only graphs around this one can have."""
    members = list(collection(graph, COLLECTION))
    if not members:
        raise SelectionError(
            f"the collection '{COLLECTION}' of this graph is empty; add tensors by "
            f"tf.compat.v1.add_to_collection('{COLLECTION}', tensor), or pass "
            "checkpoints='memory' to have them chosen"
        )
    # A graph inherits the collections of the one that it is traced in.
    around = enclosing_graphs(graph)
    return _tensors(
        graph, (t for t in members if getattr(t, "graph", None) not in around)
    )


def _tensors(graph: Graph, given: Iterable[Any]) -> tuple[Tensor, ...]:
    tensors = tuple(dereference(t) for t in given)
    for t in tensors:
        if not is_tensor(t):
            raise ArgumentTypeError(
                f"a checkpoint is a tensor of the graph, got {type_name(t)}; pass a "
                f"list of tensors, a policy, or one of {', '.join(MODES)}"
            )
        if t.graph is not graph:
            raise SelectionError(
                f"the checkpoint '{t.name}' belongs to another graph than ys; inside "
                "tf.function, choose tensors that were made inside it"
            )
    return tensors
