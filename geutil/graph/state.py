"""The notes that geutil keeps of graphs and variables; hooks that tell of each run.

The notes hang on the graph itself, so they die with it, and a table from graphs to
notes, which would keep every graph alive through its ops, is not needed.

A training step is complete only when its updates are there, and these are written after
its gradients. Nothing marks that moment; the next event is that the graph is run. A
FuncGraph becomes a function first, in `atomic_function.from_func_graph`; a graph of
version 1 is run by a Session, in `BaseSession._do_run`. Both are wrapped by
`watch_completion`.

Two facts (TensorFlow 2.16 to 2.21), each with a test that reproduces it:

1. A Session takes over the whole graph at its first run, whatever it runs. An input
   changed afterwards changes nothing for that Session: it goes on returning the old
   result.
2. A ConcreteFunction takes over the ops of its FuncGraph when tracing ends. A FuncGraph
   edited afterwards changes nothing for the function. So it is with `Defun`, the
   function of version 1.

To know about both, `watch_runs` wraps the places where TensorFlow takes the ops over:
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
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from geutil.errors import FinalizedGraphError, StaleGraphError
from geutil.graph import _tf, types
from geutil.graph._tf import AtomicFunction, BaseSession, Version1FuncGraph
from geutil.graph.adjacency import TopologicalOrder
from geutil.graph.types import Graph, IdentitySet, Operation, Tensor
from geutil.graph.walks import closure

T = TypeVar("T")
_ATTRIBUTE = "_geutil_state"


@dataclass(frozen=True)
class UndoStep:
    """How to take one change back."""

    undo: Callable[[], None]
    ops: tuple[Operation, ...] = ()


@dataclass(eq=False)
class GraphState:
    """geutil's notes on one graph."""

    # For each Session that has run the graph, the `_id` of the newest op it knew then.
    sessions: WeakKeyDictionary[Any, int] = field(default_factory=WeakKeyDictionary)
    # The name of the function that was built from the graph, if any.
    function: str | None = None
    stale_allowed: int = 0  # How many `allow_stale` blocks are open.
    # By thread, one list of undo steps for each open transaction. Replicas that share
    # the graph are traced in turn, each in a thread.
    journals: dict[int, list[list[UndoStep]]] = field(default_factory=dict)
    # A topological order of the ops, kept up to date over edits.
    order: TopologicalOrder | None = None
    # How often edges were changed; with the number of ops it tells whether anything is
    # new.
    edits: int = 0
    own: bool = False  # Whether geutil made the graph, for a model.
    # Callbacks to run before the graph is (`geutil.graph.state`).
    completions: list[Callable[[Any], None]] = field(default_factory=list)
    step_order: Any = None  # Notes on the training steps whose ops are ordered, if any.
    report: Any = None  # On the gradients that were built last in it, if any.
    # The notes of clients, by the class that makes them; see `slot`.
    notes: dict[Any, Any] = field(default_factory=dict)


def state_of(graph: Graph) -> GraphState:
    """Return the state of `graph`, made on the first call."""
    state: GraphState | None = getattr(graph, _ATTRIBUTE, None)
    if state is None:
        state = GraphState()
        setattr(graph, _ATTRIBUTE, state)
    return state


def slot(graph: Graph, key: Callable[[], T]) -> T:
    """Return the notes of a client on `graph`, which `key` makes on the first call."""
    notes: dict[Any, T] = state_of(graph).notes
    if key not in notes:
        notes[key] = key()
    return notes[key]


def is_own_graph(graph: Graph) -> bool:
    """Return whether geutil made a graph, for a model."""
    state: GraphState | None = getattr(graph, _ATTRIBUTE, None)
    return state is not None and state.own


def forget_order(graph: Graph) -> None:
    """Forget the order: edges of older ops were changed past `geutil.graph.edits`."""
    state = state_of(graph)
    state.order = None
    state.edits += 1


def fingerprint(graph: Graph) -> tuple[int, int]:
    """Return a value that changes when an op is added or geutil edits an edge."""
    return graph.version, state_of(graph).edits


def renew_order(graph: Graph) -> None:
    """Give each op its place by how far it is from where the data comes in."""
    # New ops come last in the order that edits keep up to date. Each edit that puts one
    # in the place of an early op then moves all between: before many such edits it is
    # quicker to begin with an order in which new and old stand side by side.
    state = state_of(graph)
    if state.order is None:
        state.order = TopologicalOrder()
    state.order.rebuild(graph)


def count_ops(graph: Graph) -> int:
    """Return the number of ops of `graph`, without listing them."""
    return int(graph.num_operations())


def ops_since(graph: Graph, count: int) -> list[Operation]:
    """Return the ops made since `graph` had `count` of them."""
    if count_ops(graph) == count:
        return []
    new_ops: list[Operation] = graph.get_operations()[count:]
    return new_ops


_WATCHED = "_geutil_watched"


def newest_op_id(graph: Graph) -> int:
    """Return the `_id` of the op made last, or -1 in an empty graph."""
    ops = graph.get_operations()
    return ops[-1]._id if ops else -1


def has_been_run(graph: Graph, ops: Iterable[Operation]) -> bool:
    """Return whether an open Session has run a graph with any of some ops in it."""
    newest = _newest_run(graph)
    return any(op._id <= newest for op in ops)


def _newest_run(graph: Graph) -> int:
    sessions = state_of(graph).sessions
    return max(
        (newest_id for s, newest_id in sessions.items() if not s._closed), default=-1
    )


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


def with_subclasses(kinds: Iterable[type]) -> dict[type, None]:
    """Return classes and all their subclasses."""
    return closure(kinds, type.__subclasses__)


def _scan() -> None:
    """Note the open Sessions and the functions that exist already."""
    sessions = with_subclasses([BaseSession])
    functions = with_subclasses([AtomicFunction])
    bodies = with_subclasses([Version1FuncGraph])
    being_traced = {id(graph) for graph in _tf.default_graph_stack.stack}
    kinds = {*sessions, *functions, *bodies}
    everything = gc.get_objects()
    # type() and not isinstance(): the latter asks proxies for their __class__, which
    # makes lazily loaded modules load. Of up to a million, Python sees the chosen only.
    chosen = map(kinds.__contains__, map(type, everything))
    for obj in itertools.compress(everything, chosen):
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
    """Refuse to edit `ops` where the edit is forbidden or would have no effect."""
    # A Session takes ops over that it has not seen yet when it runs next.
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
    """A request to a complete graph."""

    graph: Graph
    targets: Sequence[Operation]  # The ops that are to run.
    tensors: Sequence[Tensor]  # The tensors whose values are wanted.
    feeds: IdentitySet
    # True if the graph becomes a function, which then runs just that; a Session may be
    # asked for something else next time.
    is_function: bool = False


Completion = Callable[[Use], None]
"""Is called before a graph runs, each time something is asked of it."""


def on_completion(graph: Graph, act: Completion, *, ahead: bool = False) -> None:
    """Register a callback for each time before a graph runs or becomes a function."""
    # `act` may edit the graph, and must tolerate being called again; `ahead` of the
    # others if these need its edits.
    completions = state_of(graph).completions
    if act not in completions:
        completions.insert(0 if ahead else len(completions), act)


def complete(
    graph: Graph, fetches: Iterable[Any], feeds: Iterable[Tensor] = ()
) -> None:
    """Run now the callbacks that come before a graph computes some fetches."""
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
        fed_tensors = IdentitySet(map(types.dereference, feeds))
        _complete(Use(session.graph, targets, tensors, fed_tensors))


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


watch_runs()
watch_completion()
