"""Making subgraph views from whatever selects ops and tensors."""

from __future__ import annotations

from typing import Any

from geutil.errors import SelectionError
from geutil.graph.kinds import Graph, is_graph, require_graph
from geutil.select.boundary import ends_of
from geutil.select.filters import get_name_scope_ops
from geutil.select.queries import check_keywords, select_ops, select_ops_and_ts
from geutil.select.subgraph import SubGraphView


def make_view(*args: Any, **kwargs: Any) -> SubGraphView:
    """Return a view of the ops and tensors that the arguments select.

    `geutil.sgv` is the same function.

    Args:
        *args: one view, returned as it is; or what `select_ops_and_ts` takes. Tensors
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
    if len(args) == 1 and is_graph(args[0]):
        # None of a whole graph's tensors goes past its ops.
        check_keywords(kwargs)
        ops = select_ops(*args, **kwargs)
        view = SubGraphView.from_parts(args[0] if ops else None, ops, *ends_of(ops))
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
    require_graph(graph)
    return SubGraphView(get_name_scope_ops(graph, scope))


def _check_graph(view: SubGraphView, graph: Graph | None) -> SubGraphView:
    if graph is not None:
        require_graph(graph)
        if view.graph is not None and view.graph is not graph:
            raise SelectionError(f"{view!r} belongs to another graph than graph=")
    return view
