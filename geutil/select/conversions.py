"""Lists of ops and tensors from whatever the caller has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.graph import adjacency, types
from geutil.graph.types import Element, Graph, Operation, Tensor, type_name


class ListView(Sequence[Any]):
    """A read-only view of a list whose elements are compared by identity."""

    # `x in view` and `view.index(x)` are safe for tensors of a FuncGraph, for which
    # `==` would add an op to the graph.

    def __init__(self, elements: list[Any]) -> None:
        self._elements = elements

    def __getitem__(self, index: Any) -> Any:
        return self._elements[index]

    def __len__(self) -> int:
        return len(self._elements)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._elements)

    def __contains__(self, element: object) -> bool:
        return any(e is element for e in self._elements)

    def index(self, element: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the first position of `element` between `start` and `stop`."""
        for position in range(*slice(start, stop).indices(len(self._elements))):
            if self._elements[position] is element:
                return position
        raise ValueError(f"'{getattr(element, 'name', element)}' is not in the list")

    def count(self, element: Any) -> int:
        """Return how many times `element` is there."""
        return sum(e is element for e in self._elements)

    def __add__(self, other: Iterable[Any]) -> list[Any]:
        return [*self._elements, *other]

    def __radd__(self, other: Iterable[Any]) -> list[Any]:
        return [*other, *self._elements]

    def __repr__(self) -> str:
        return repr(self._elements)


def graph_of_all(elements: Iterable[Element]) -> Graph | None:
    """Return the graph that all `elements` belong to, or None when there are none."""
    graph: Graph | None = None
    first: Element = None
    for element in elements:
        if graph is None:
            graph, first = element.graph, element
        elif element.graph is not graph:
            raise SelectionError(
                f"'{element.name}' and '{first.name}' belong to different graphs; copy "
                "one over with geutil.copy(..., dst_graph=...) first"
            )
    return graph


def get_unique_graph(
    tops: Any, check_types: Any = None, none_if_empty: bool = False
) -> Graph | None:
    """Return the graph that some ops and tensors belong to.

    Args:
        tops: an iterable of ops and tensors, or a graph, which is returned.
        check_types: the type of the elements, or several; None for ops and tensors.
        none_if_empty: return None where there are no elements.

    Raises:
        ArgumentTypeError: `tops` is no iterable, or an element is of another type.
        SelectionError: two elements belong to different graphs, or there are none and
            `none_if_empty` is False.

    Cost: linear in the elements.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0)
        >>> ge.util.get_unique_graph([x, x.op]) is graph
        True
    """
    if types.is_graph(tops):
        return tops
    if not is_iterable(tops):
        raise ArgumentTypeError(
            f"expected an iterable of ops and tensors, got {type_name(tops)}"
        )
    if check_types is None:
        check_types = (tf.Operation, tf.Tensor)
    kinds = tuple(check_types) if is_iterable(check_types) else (check_types,)
    listed = list(tops)
    for element in listed:
        if not isinstance(element, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise ArgumentTypeError(f"expected {names}, got {type_name(element)}")
        # An eager tensor is a tf.Tensor too, but it has no graph.
        if isinstance(element, tf.Tensor):
            types.require_tensor(element)
    graph = graph_of_all(listed)
    if graph is None and not none_if_empty:
        raise SelectionError(
            "there are no ops and tensors, so that no graph is theirs; pass some, or "
            "none_if_empty=True"
        )
    return graph


def make_list_of_op(
    ops: Any,
    check_graph: bool = True,
    allow_graph: bool = True,
    ignore_ts: bool = False,
) -> list[Operation]:
    """Return a new list of the ops in `ops`.

    Args:
        ops: an op, an iterable of ops, or a graph (all of its ops).
        check_graph: whether to refuse ops of different graphs.
        allow_graph: whether to accept a graph.
        ignore_ts: whether to skip tensors instead of refusing them.

    Raises:
        ArgumentTypeError: `ops` holds something else.
        SelectionError: the ops belong to different graphs.

    Cost: linear in the ops.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="x")
        >>> [op.name for op in ge.make_list_of_op(graph)]
        ['x']
    """
    return _make_list(
        ops,
        types.is_op,
        types.is_tensor if ignore_ts else None,
        check_graph,
        allow_graph,
    )


def make_list_of_t(
    ts: Any,
    check_graph: bool = True,
    allow_graph: bool = True,
    ignore_ops: bool = False,
) -> list[Tensor]:
    """Return a new list of the tensors in `ts`.

    Args:
        ts: a tensor, an iterable of tensors, or a graph (all of its tensors).
        check_graph: whether to refuse tensors of different graphs.
        allow_graph: whether to accept a graph.
        ignore_ops: whether to skip ops instead of refusing them.

    Raises:
        ArgumentTypeError: `ts` holds something else.
        SelectionError: the tensors belong to different graphs.

    Cost: linear in the tensors.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="x")
        >>> ge.make_list_of_t(x)
        [<tf.Tensor 'x:0' shape=() dtype=float32>]
    """
    return _make_list(
        ts,
        types.is_tensor,
        types.is_op if ignore_ops else None,
        check_graph,
        allow_graph,
    )


def _make_list(
    elements: Any, is_wanted: Any, ignored: Any, check_graph: bool, allow_graph: bool
) -> list[Element]:
    """Return the wanted elements, without ignored ones; refuse all others."""
    what = "tf.Operation" if is_wanted is types.is_op else "tf.Tensor"
    if types.is_graph(elements):
        if not allow_graph:
            raise ArgumentTypeError(
                f"expected {what}s, got a tf.Graph; pass graph.get_operations()"
            )
        return (
            elements.get_operations()
            if is_wanted is types.is_op
            else get_tensors(elements)
        )
    listed = types.as_list(elements)
    for element in listed:
        if not is_wanted(element) and not (ignored and ignored(element)):
            raise ArgumentTypeError(
                f"expected a {what}, got {types.type_name(element)}"
                f"{types.eager_hint(element)}"
            )
    # Ignored elements have to be of the same graph, too.
    if check_graph:
        graph_of_all(listed)
    return [element for element in listed if is_wanted(element)] if ignored else listed


def get_tensors(graph: Graph) -> list[Tensor]:
    """Return every tensor of `graph`, in graph order.

    Raises:
        ArgumentTypeError: `graph` is not a `tf.Graph`.

    Cost: linear in ops and tensors.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="x")
        >>> ge.get_tensors(graph)
        [<tf.Tensor 'x:0' shape=() dtype=float32>]
    """
    types.require_graph(graph)
    return [t for op in graph.get_operations() for t in op.outputs]


def get_generating_ops(ts: Any) -> list[Operation]:
    """Return the op that computes each tensor of `ts`, with repetitions.

    Raises:
        ArgumentTypeError: `ts` is not made of tensors.

    Cost: linear in the tensors.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0, name="x")
        >>> [op.name for op in ge.get_generating_ops([x, x])]
        ['x', 'x']
    """
    return [t.op for t in make_list_of_t(ts, allow_graph=False)]


def get_consuming_ops(ts: Any) -> list[Operation]:
    """Return the ops that read a tensor of `ts`, each once.

    They come tensor by tensor, in graph order for each.

    Raises:
        ArgumentTypeError: `ts` is not made of tensors.

    Cost: linear in the edges that leave the tensors.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0, name="x")
        ...     _ = tf.add(x, x, name="y"), tf.negative(x, name="z")
        >>> [op.name for op in ge.get_consuming_ops(x)]
        ['y', 'z']
    """
    consumers: dict[Operation, None] = {}
    for t in make_list_of_t(ts, allow_graph=False):
        consumers.update(dict.fromkeys(adjacency.consumers(t)))
    return list(consumers)


def is_iterable(obj: object) -> bool:
    """Tell whether `obj` can be iterated over. A tensor is one thing, and cannot.

    Cost: constant.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.util import is_iterable
        >>> with tf.Graph().as_default():
        ...     x = tf.zeros([2])
        >>> is_iterable([x]), is_iterable(x), is_iterable(x.op)
        (True, False, False)
    """
    if isinstance(obj, tf.Tensor):
        return False
    try:
        iter(obj)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def check_graphs(*views: Any) -> None:
    """Refuse objects with a `graph` of their own that is not the same for all.

    Objects whose graph is None (empty views) agree with any.

    Raises:
        SelectionError: two graphs differ.

    Cost: linear in the objects.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.zeros([2])
        >>> ge.util.check_graphs(ge.sgv(), ge.sgv(x.op), x)
    """
    graphs = [view.graph for view in views if view.graph is not None]
    for position, graph in enumerate(graphs):
        if graph is not graphs[0]:
            raise SelectionError(
                f"argument {position} belongs to another graph than argument 0; copy "
                "one over with geutil.copy(..., dst_graph=...) first"
            )


def can_be_regex(obj: object) -> bool:
    """Return whether `obj` is a string or a compiled regular expression.

    Example:
        >>> import geutil as ge
        >>> ge.can_be_regex("^foo/"), ge.can_be_regex(1)
        (True, False)
    """
    return isinstance(obj, str | re.Pattern)


def make_regex(obj: str | re.Pattern[str]) -> re.Pattern[str]:
    """Return `obj` as a compiled regular expression.

    Raises:
        SelectionError: `obj` is neither a string nor a regular expression, or the
            string is not a valid one.

    Example:
        >>> import geutil as ge
        >>> ge.make_regex("^foo/").pattern
        '^foo/'
    """
    if isinstance(obj, re.Pattern):
        return obj
    if not isinstance(obj, str):
        raise SelectionError(f"expected a string or a regex, got {type_name(obj)}")
    try:
        return re.compile(obj)
    except re.error as error:
        raise SelectionError(
            f"'{obj}' is no regular expression ({error}); put a plain name "
            "through re.escape"
        ) from error
