"""Queries.

One call that takes regexes, ops, tensors and nested lists, and views of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.graph import types
from geutil.graph.types import Element, Graph, Operation, Tensor
from geutil.select import boundary, conversions, filters
from geutil.select.subgraph import SubGraphView

_OPS_TAG = "(?#ops)"
_TS_TAG = "(?#ts)"
_KEYWORDS = ("graph", "positive_filter", "restrict_ops_regex", "restrict_ts_regex")


def select_ops(*args: Any, **kwargs: Any) -> list[Operation]:
    """Return the ops that the arguments select, each once.

    Args:
        *args: regexes (strings or compiled, found in the op's name by `re.search`),
            ops, graphs, and nested lists of these. Tensors, and regexes that begin
            with "(?#ts)", are left out.
        **kwargs: `graph`, the `tf.Graph` that regexes are looked up in;
            `positive_filter`, a predicate on ops; `restrict_ops_regex`, True to leave
            out regexes that do not begin with "(?#ops)".

    Returns:
        Argument by argument; the ops that a regex finds are in graph order.

    Raises:
        ArgumentTypeError: an argument is none of these, or `graph` is no graph.
        SelectionError: an unknown keyword, a regex without `graph`, or ops of
            different graphs.

    Cost: linear in the ops, for each regex.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="foo/x")
        ...     y = tf.negative(x, name="bar/y")
        >>> [op.name for op in ge.select_ops("^foo/", [y.op], graph=graph)]
        ['foo/x', 'bar/y']
    """
    options = _options(kwargs)
    return _select(
        args,
        options,
        _OPS_TAG,
        _TS_TAG,
        types.is_op,
        types.is_tensor,
        filters.filter_ops_from_regex,
    )


def select_ts(*args: Any, **kwargs: Any) -> list[Tensor]:
    """Return the tensors that the arguments select, each once.

    Args:
        *args: regexes (strings or compiled, found in the tensor's name by
            `re.search`), tensors, graphs, and nested lists of these. Ops, and regexes
            that begin with "(?#ops)", are left out.
        **kwargs: `graph`, the `tf.Graph` that regexes are looked up in;
            `positive_filter`, a predicate on tensors; `restrict_ts_regex`, True to
            leave out regexes that do not begin with "(?#ts)".

    Returns:
        Argument by argument; the tensors that a regex finds are in graph order.

    Raises:
        ArgumentTypeError: an argument is none of these, or `graph` is no graph.
        SelectionError: an unknown keyword, a regex without `graph`, or tensors of
            different graphs.

    Cost: linear in the tensors, for each regex.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="foo/x")
        >>> [t.name for t in ge.select_ts("^foo/.*:0$", graph=graph)]
        ['foo/x:0']
    """
    options = _options(kwargs)
    return _select(
        args,
        options,
        _TS_TAG,
        _OPS_TAG,
        types.is_tensor,
        types.is_op,
        filters.filter_ts_from_regex,
    )


def select_ops_and_ts(
    *args: Any, **kwargs: Any
) -> tuple[list[Operation], list[Tensor]]:
    """Return the ops and the tensors that the arguments select.

    Args:
        *args: the arguments of `select_ops` and `select_ts`. A regex selects ops unless
            it begins with "(?#ts)".
        **kwargs: `graph` and `positive_filter`.

    Returns:
        `(ops, tensors)`.

    Raises:
        ArgumentTypeError, SelectionError: as `select_ops`.

    Cost: linear in the ops and tensors, for each regex.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="foo/x")
        >>> ge.select_ops_and_ts("^foo/", "(?#ts)^foo/", graph=graph)
        ([<tf.Operation 'foo/x' type=Const>],
         [<tf.Tensor 'foo/x:0' shape=() dtype=float32>])
    """
    check_keywords(kwargs)
    ops = select_ops(*args, restrict_ops_regex=False, **kwargs)
    ts = select_ts(*args, restrict_ts_regex=True, **kwargs)
    return ops, ts


class _QueryOptions:
    """The keywords of a query, checked."""

    def __init__(
        self,
        graph: Graph | None = None,
        positive_filter: Callable[[Element], Any] | None = None,
        restrict_ops_regex: bool = False,
        restrict_ts_regex: bool = False,
    ) -> None:
        if graph is not None:
            types.require_graph(graph)
        self.graph = graph
        self.positive_filter = positive_filter
        self.restricted = {_OPS_TAG: restrict_ops_regex, _TS_TAG: restrict_ts_regex}


def check_keywords(
    kwargs: Collection[str], known_keywords: tuple[str, ...] = _KEYWORDS[:2]
) -> None:
    """Refuse keywords that a query does not know."""
    for name in kwargs:
        if name not in known_keywords:
            raise SelectionError(
                f"unknown keyword '{name}'; known are {', '.join(known_keywords)}"
            )


def _options(kwargs: dict[str, Any]) -> _QueryOptions:
    check_keywords(kwargs, _KEYWORDS)
    return _QueryOptions(**kwargs)


def _select(
    args: tuple[Any, ...],
    options: _QueryOptions,
    own_tag: str,
    other_tag: str,
    is_wanted: Callable[[object], bool],
    ignored: Callable[[object], bool],
    find: Callable[[Graph, re.Pattern[str]], list[Element]],
) -> list[Element]:
    elements: list[Element] = []
    first: list[Element] = []
    leaves = types.flatten(args)
    for leaf in leaves:
        if conversions.can_be_regex(leaf):
            regex = conversions.make_regex(leaf)
            if options.graph is None:
                raise SelectionError(
                    f"pass graph= to look up the regex '{regex.pattern}'"
                )
            tagged = regex.pattern.startswith(own_tag)
            if regex.pattern.startswith(other_tag) or (
                options.restricted[own_tag] and not tagged
            ):
                continue
            selected = find(options.graph, regex)
        elif types.is_graph(leaf):
            selected = (
                leaf.get_operations()
                if is_wanted is types.is_op
                else conversions.get_tensors(leaf)
            )
        elif is_wanted(leaf):
            selected = [leaf]
        elif ignored(leaf):
            continue
        else:
            raise ArgumentTypeError(
                "expected a regex, a tf.Operation, a tf.Tensor or a list of these, got "
                f"{types.type_name(leaf)}"
            )
        elements += selected
        first += selected[:1]
    # All elements that one leaf selects are of one graph.
    conversions.graph_of_all(first)
    if options.positive_filter is not None:
        elements = [element for element in elements if options.positive_filter(element)]
    return types.unique(elements) if len(leaves) > 1 else elements


def make_view(*args: Any, **kwargs: Any) -> SubGraphView:
    """Return a view of the ops and tensors that the arguments select.

    `geutil.sgv` is the same function.

    Args:
        *args: one view, returned as it is; or arguments of `select_ops_and_ts`. Tensors
            become passthrough tensors unless an op of the view reads or makes them.
        **kwargs: `graph`, which the elements must belong to and which regexes are
            looked up in; `positive_filter`.

    Raises:
        ArgumentTypeError: an argument selects neither ops nor tensors.
        SelectionError: an unknown keyword, or elements of another graph.

    Cost: linear in the ops and their edges.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="foo/x")
        >>> ge.sgv("^foo/", graph=graph)
        <SubGraphView: 1 ops, 0 inputs, 1 outputs>
    """
    graph = kwargs.get("graph")
    if len(args) == 1 and isinstance(args[0], SubGraphView):
        check_keywords(kwargs)
        return _check_graph(args[0], graph)
    if len(args) == 1 and types.is_graph(args[0]):
        # None of a whole graph's tensors goes past its ops.
        check_keywords(kwargs)
        ops = select_ops(*args, **kwargs)
        view = SubGraphView.from_parts(
            args[0] if ops else None, ops, *boundary.ends_of(ops)
        )
    else:
        view = SubGraphView(*select_ops_and_ts(*args, **kwargs))
    return _check_graph(view, graph)


def make_view_from_scope(scope: str, graph: Graph) -> SubGraphView:
    """Return a view of a name scope; `geutil.sgv_scope` is the same function.

    Args:
        scope: the scope, a plain name.
        graph: the `tf.Graph`.

    Raises:
        ArgumentTypeError: `graph` is not a `tf.Graph`.

    Cost: linear in the ops of the graph.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="foo/x")
        >>> ge.sgv_scope("foo", graph)
        <SubGraphView: 1 ops, 0 inputs, 1 outputs>
    """
    types.require_graph(graph)
    return SubGraphView(filters.get_name_scope_ops(graph, scope))


def _check_graph(view: SubGraphView, graph: Graph | None) -> SubGraphView:
    if graph is not None:
        types.require_graph(graph)
        if view.graph is not None and view.graph is not graph:
            raise SelectionError(f"{view!r} belongs to another graph than graph=")
    return view
