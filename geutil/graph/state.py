"""The state that geutil keeps of a graph, its topological order among it.

The state hangs on the graph itself, so it dies with the graph and a table from graphs
to states, which would keep every graph alive through its ops, is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from geutil.graph.adjacency import TopologicalOrder
from geutil.graph.types import Graph, Operation

_ATTRIBUTE = "_geutil_state"
_FLAG = "_geutil_trainable"


@dataclass(frozen=True)
class UndoStep:
    """How to take one change back.

    Attributes:
        undo: takes it back.
        ops: the ops whose edges change.
    """

    undo: Callable[[], None]
    ops: tuple[Operation, ...] = ()


@dataclass(eq=False)
class GraphState:
    """geutil's notes on one graph.

    Attributes:
        sessions: for each Session that has run the graph, the `_id` of the newest op
            it knew then.
        function: the name of the function that was built from the graph, if any.
        stale_allowed: how many `allow_stale` blocks are open.
        journals: one list of undo steps for each open transaction.
        gradient_copies: for each gradient registered for ops copied into this graph,
            the copies of the tensors that its closure reads.
        gradient_reads: for each such gradient, and each closure of this graph, the
            tensors of this graph that it reads, once that was asked for.
        rewired_ops: for each gradient that follows the inputs of an op, the op and what
            it read before.
        order: a topological order of the ops, kept up to date over edits.
        edits: how often edges were changed; with the number of ops it tells whether
            anything is new.
        retired: ops that a rewrite rule left without readers, in order of retirement.
        call_functions: the functions as which calls were differentiated.
        own: whether geutil made the graph, for a model.
        checkpointed_calls: notes on the calls of checkpointed functions, if any.
        step_counter: what counts its training steps, if anything.
        completions: what is done before the graph is run (`geutil.graph.run_hooks`).
        step_order: notes on the training steps whose ops are ordered, if any.
        open_shapes: what the shapes that it leaves open are taken to be, if known.
        report: on the gradients that were built last in it, if any.
        variables: variables outside that geutil made it read, by `id`, kept alive so.
    """

    sessions: WeakKeyDictionary[Any, int] = field(default_factory=WeakKeyDictionary)
    function: str | None = None
    stale_allowed: int = 0
    journals: list[list[UndoStep]] = field(default_factory=list)
    gradient_copies: dict[str, Any] = field(default_factory=dict)
    gradient_reads: dict[str, Any] = field(default_factory=dict)
    rewired_ops: dict[str, Any] = field(default_factory=dict)
    order: TopologicalOrder | None = None
    edits: int = 0
    retired: dict[Operation, None] = field(default_factory=dict)
    call_functions: dict[Any, Any] = field(default_factory=dict)
    own: bool = False
    checkpointed_calls: Any = None
    step_counter: Any = None
    completions: list[Callable[[Any], None]] = field(default_factory=list)
    step_order: Any = None
    open_shapes: Any = None
    report: Any = None
    variables: dict[int, Any] = field(default_factory=dict)


def state_of(graph: Graph) -> GraphState:
    """Return the state of `graph`, made on the first call."""
    state: GraphState | None = getattr(graph, _ATTRIBUTE, None)
    if state is None:
        state = GraphState()
        setattr(graph, _ATTRIBUTE, state)
    return state


def is_own_graph(graph: Graph) -> bool:
    """Tell whether geutil made a graph, for a model."""
    state: GraphState | None = getattr(graph, _ATTRIBUTE, None)
    return state is not None and state.own


def forget_order(graph: Graph) -> None:
    """Note that edges between older ops were changed past `geutil.graph.edits`."""
    state = state_of(graph)
    state.order = None
    state.edits += 1


def fingerprint(graph: Graph) -> tuple[int, int]:
    """Return what differs after any op was added or any edge edited by geutil."""
    return graph.version, state_of(graph).edits


def renew_order(graph: Graph) -> None:
    """Give each op its place by how far it is from where the data comes in.

    New ops come last in the order that edits keep up to date. Each edit that puts one
    in the place of an early op then moves all that lies between. Before many such
    edits it is quicker to begin with an order in which new and old stand side by side.

    Cost: linear in ops and edges.
    """
    state = state_of(graph)
    if state.order is None:
        state.order = TopologicalOrder()
    state.order.rebuild(graph)


def count_ops(graph: Graph) -> int:
    """Return the number of ops of `graph`, without listing them."""
    return int(graph.num_operations())


def ops_since(graph: Graph, count: int) -> list[Operation]:
    """Return the ops made since `graph` had `count` of them.

    Cost: none when there are none, else one listing of the ops (some 5 ns each).
    """
    if count_ops(graph) == count:
        return []
    made: list[Operation] = graph.get_operations()[count:]
    return made


def set_trainable(variable: tf.Variable, trainable: bool) -> None:
    """Note whether the owner of a variable trains it; the variable stays as it is.

    Keras freezes a layer by a flag of its own; the `tf.Variable` behind it stays
    trainable. That cannot be changed for good without breaking the layer when it is
    thawed again.
    """
    setattr(variable, _FLAG, trainable)


def is_trainable(variable: tf.Variable) -> bool:
    """Tell whether a variable is trained."""
    return bool(variable.trainable and getattr(variable, _FLAG, True))


@contextmanager
def flags_as_noted(variables: Iterable[tf.Variable]) -> Iterator[None]:
    """Make the variables themselves say what is noted while the block runs."""
    frozen = [v for v in variables if v.trainable and not is_trainable(v)]
    for variable in frozen:
        variable._trainable = False
    try:
        yield
    finally:
        for variable in frozen:
            variable._trainable = True
