"""What is done to a graph once it is complete: just before it runs the first time.

A training step is complete only when its updates are there, and these are written after
its gradients. Nothing says so; what comes next is that the graph is run. A FuncGraph
becomes a function first, in `atomic_function.from_func_graph`; a graph of version 1 is
run by a Session, in `BaseSession._do_run`. Both are wrapped by `watch`.

A Session takes over the whole graph at its first run, whatever it runs: a later edit
has no effect on it (see `geutil.graph.staleness`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from geutil.graph._tf import BaseSession, atomic_function
from geutil.graph.identity import IdentitySet, dereference
from geutil.graph.kinds import Graph, Operation, Tensor, is_op
from geutil.graph.state import state_of

_WATCHED = "_geutil_completed"


@dataclass(frozen=True, eq=False)
class Use:
    """What a complete graph is asked for.

    Attributes:
        graph: the graph.
        targets: the ops that are to run.
        tensors: the tensors whose values are wanted.
        feeds: the tensors that are given.
        is_function: whether the graph becomes a function, which then runs just that;
            a Session may be asked for something else next time.
    """

    graph: Graph
    targets: Sequence[Operation]
    tensors: Sequence[Tensor]
    feeds: IdentitySet
    is_function: bool = False


Completion = Callable[[Use], None]
"""Is called before a graph runs, each time something is asked of it."""


def on_completion(graph: Graph, act: Completion) -> None:
    """Have something done each time before a graph is run or made a function of.

    Args:
        graph: the graph.
        act: what is done. It may edit the graph, and has to bear being called again.
    """
    completions = state_of(graph).completions
    if act not in completions:
        completions.append(act)


def complete(
    graph: Graph, fetches: Iterable[Any], feeds: Iterable[Tensor] = ()
) -> None:
    """Do now what is to be done before a graph is asked for some fetches.

    Args:
        graph: the graph.
        fetches: ops and tensors of it.
        feeds: the tensors that are given.

    Cost: that of what is to be done; none if there is nothing.
    """
    fetches = list(fetches)
    ops = [f for f in fetches if is_op(f)]
    tensors = [f for f in fetches if not is_op(f)]
    _complete(Use(graph, ops, tensors, IdentitySet(feeds)))


def _complete(use: Use) -> None:
    for act in tuple(state_of(use.graph).completions):
        act(use)


def _before_function(name: Any, graph: Any, *args: Any, **kwargs: Any) -> None:
    del name, args, kwargs
    if state_of(graph).completions:
        use = Use(graph, graph.control_outputs, graph.outputs, IdentitySet(), True)
        _complete(use)


def _before_run(
    session: Any, handle: Any, targets: Any, tensors: Any, feeds: Any, *args: Any
) -> None:
    del handle, args
    if state_of(session.graph).completions:
        given = IdentitySet(map(dereference, feeds))
        _complete(Use(session.graph, targets, tensors, given))


def watch() -> None:
    """Begin to notice when graphs are complete. Idempotent."""
    _wrap(atomic_function, "from_func_graph", _before_function)
    _wrap(BaseSession, "_do_run", _before_run)


def _wrap(owner: Any, name: str, before: Callable[..., None]) -> None:
    original = getattr(owner, name)
    if hasattr(original, _WATCHED):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(wrapper, _WATCHED, True)
    setattr(owner, name, wrapper)
