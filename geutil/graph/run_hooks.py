"""Hooks on TensorFlow.

A graph that is complete, and edits that it would silently ignore.

A training step is complete only when its updates are there, and these are written after
its gradients. Nothing says so; what comes next is that the graph is run. A FuncGraph
becomes a function first, in `atomic_function.from_func_graph`; a graph of version 1 is
run by a Session, in `BaseSession._do_run`. Both are wrapped by `watch`.

A Session takes over the whole graph at its first run, whatever it runs: a later edit
has no effect on it (see `geutil.graph.run_hooks`).

Two facts (TensorFlow 2.16 to 2.21), each with a test that reproduces it:

1. A Session takes over the ops of its graph when it runs. An input changed afterwards
   changes nothing for that Session: it goes on returning the old result.
2. A ConcreteFunction takes over the ops of its FuncGraph when tracing ends. A FuncGraph
   edited afterwards changes nothing for the function. So it is with `Defun`, the
   function of version 1.

To know about both, `watch` wraps the places where TensorFlow takes the ops over:
`BaseSession._extend_graph`, `AtomicFunction.__init__` and, for version 1,
`func_graph_from_py_func`. Sessions and functions that are older than that are found by
one scan of the garbage collector's objects; such a Session is taken to have run,
because TensorFlow keeps no record that tells.

Watching begins with `import geutil` if TensorFlow is imported by then. If it is
imported after geutil, watching begins with the first use of a name that needs
TensorFlow: until then, nothing of geutil can have edited a graph.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from geutil.errors import FinalizedGraphError, StaleGraphError
from geutil.graph import _tf, types
from geutil.graph._tf import AtomicFunction, BaseSession, Version1FuncGraph
from geutil.graph.state import state_of
from geutil.graph.types import Graph, IdentitySet, Operation, Tensor

_WATCHED = "_geutil_watched"


def newest_op_id(graph: Graph) -> int:
    """Return the `_id` of the op made last, or -1 in an empty graph."""
    ops = graph.get_operations()
    return ops[-1]._id if ops else -1


def has_been_run(graph: Graph, ops: Iterable[Operation]) -> bool:
    """Tell whether an open Session has run a graph with any of some ops in it."""
    newest = _newest_run(graph)
    return any(op._id <= newest for op in ops)


def _newest_run(graph: Graph) -> int:
    sessions = state_of(graph).sessions
    return max((seen for s, seen in sessions.items() if not s._closed), default=-1)


def _note_session(session: Any) -> None:
    graph = session._graph
    sessions = state_of(graph).sessions
    version = graph.version
    if getattr(session, "_geutil_version", None) == version and session in sessions:
        return
    sessions[session] = newest_op_id(graph)
    session._geutil_version = version


def _note_function(function: Any) -> None:
    graph = function._cached_graph
    if graph is not None:
        state_of(graph).function = function.name.decode()


def _note_traced(graph: Any) -> None:
    """Note that a function of version 1 is being built from a graph."""
    state_of(graph).function = graph.name


def _wrap(owner: type, name: str, note: Callable[[Any], None]) -> None:
    """Make `owner.name` call `note(self)` after it has done its work."""
    original = getattr(owner, name)
    if hasattr(original, _WATCHED):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        note(self)
        return result

    setattr(wrapper, _WATCHED, True)
    setattr(owner, name, wrapper)


def _wrap_tracing() -> None:
    """Note each graph that a function of version 1 was traced into, once it is."""
    original = _tf.version_1_functions.func_graph_from_py_func

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        graph = original(*args, **kwargs)
        _note_traced(graph)
        return graph

    _tf.version_1_functions.func_graph_from_py_func = wrapper


def _with_subclasses(cls: type) -> set[type]:
    found = {cls}
    waiting = [cls]
    while waiting:
        new: set[type] = set(waiting.pop().__subclasses__()) - found
        found |= new
        waiting.extend(new)
    return found


def _scan() -> None:
    """Note the open Sessions and the functions that exist already."""
    sessions = _with_subclasses(BaseSession)
    functions = _with_subclasses(AtomicFunction)
    bodies = _with_subclasses(Version1FuncGraph)
    being_traced = {id(graph) for graph in _tf.default_graph_stack.stack}
    # type() and not isinstance(): the latter asks proxies for their __class__, which
    # makes lazily loaded modules load.
    for obj in gc.get_objects():
        kind = type(obj)
        if kind in sessions and hasattr(obj, "_graph"):
            _note_session(obj)
        elif kind in functions and hasattr(obj, "_cached_graph"):
            _note_function(obj)
        elif kind in bodies and id(obj) not in being_traced:
            _note_traced(obj)


def watch_runs() -> None:
    """Begin to notice Sessions that run and functions that are built. Idempotent."""
    if hasattr(BaseSession._extend_graph, _WATCHED):
        return
    _wrap(BaseSession, "_extend_graph", _note_session)
    _wrap(AtomicFunction, "__init__", _note_function)
    _wrap_tracing()
    _scan()


@contextmanager
def allow_stale(graph: Graph) -> Iterator[None]:
    """Permit edits of `graph` that a Session or a built function will not see.

    Args:
        graph: a `tf.Graph`.

    Raises:
        ArgumentTypeError: `graph` is not a `tf.Graph`.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> graph = tf.Graph()
        >>> with graph.as_default():
        ...     x, y = tf.constant(1.0), tf.constant(2.0)
        ...     z = tf.identity(x)
        >>> session = tf.compat.v1.Session(graph=graph)
        >>> float(session.run(z))
        1.0
        >>> with ge.allow_stale(graph):
        ...     ge.reroute_ts(y, x)
        1
        >>> float(session.run(z)), float(tf.compat.v1.Session(graph=graph).run(z))
        (1.0, 2.0)
    """
    types.require_graph(graph)
    state = state_of(graph)
    state.stale_allowed += 1
    try:
        yield
    finally:
        state.stale_allowed -= 1


def check_editable(graph: Graph, ops: Iterable[Operation]) -> None:
    """Refuse to edit `ops` where the edit is forbidden or would have no effect.

    Ops that a Session has not seen yet may be edited: it takes them over when it runs
    next.

    Raises:
        FinalizedGraphError: the graph is finalized.
        StaleGraphError: a live Session has run one of `ops`, or the function of the
            graph is built.
    """
    if graph.finalized:
        raise FinalizedGraphError(
            "the graph is finalized and cannot be edited; copy it into a new tf.Graph "
            "with geutil.copy(graph, tf.Graph()) and edit the copy"
        )
    state = state_of(graph)
    if state.stale_allowed:
        return
    if state.function is not None:
        raise StaleGraphError(
            f"function '{state.function}' is built already: it would not see an edit "
            "of its FuncGraph. Edit while tf.function traces (or Defun, in version 1), "
            "or copy the graph with geutil.copy(graph, tf.Graph()) and build a "
            "function from the copy; to edit all the same, use `with "
            "geutil.allow_stale(graph):`"
        )
    newest = _newest_run(graph)
    for op in ops:
        if op._id <= newest:
            raise StaleGraphError(
                f"a live Session has run this graph with op '{op.name}' in it: that "
                "Session would not see the edit and go on returning the old result. "
                "Close it and make a new tf.compat.v1.Session after the edit; to edit "
                "all the same, use `with geutil.allow_stale(graph):`"
            )


_COMPLETED = "_geutil_completed"


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
    ops = [f for f in fetches if types.is_op(f)]
    tensors = [f for f in fetches if not types.is_op(f)]
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
        given = IdentitySet(map(types.dereference, feeds))
        _complete(Use(session.graph, targets, tensors, given))


def watch_completion() -> None:
    """Begin to notice when graphs are complete. Idempotent."""
    _wrap_before(_tf.atomic_function, "from_func_graph", _before_function)
    _wrap_before(BaseSession, "_do_run", _before_run)


def _wrap_before(owner: Any, name: str, before: Callable[..., None]) -> None:
    original = getattr(owner, name)
    if hasattr(original, _COMPLETED):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(wrapper, _COMPLETED, True)
    setattr(owner, name, wrapper)
