"""Queries, by regexes, ops, tensors, nested lists and views; filters and matchers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.graph import adjacency, types
from geutil.graph.types import Element, Graph, Operation, Tensor
from geutil.select import selections, walks
from geutil.select.selections import get_tensors, make_list_of_op, make_regex
from geutil.select.subgraph import SubGraphView

OpFilter = Callable[[Operation], Any]
TensorFilter = Callable[[Tensor], Any]


def filter_ts(ops: Any, positive_filter: bool | TensorFilter) -> list[Tensor]:
    """Return the inputs and outputs of `ops` that pass a filter, each once.

    Args:
        ops: anything that `make_list_of_op` takes.
        positive_filter: a predicate on tensors, or True for all.

    Returns:
        Op by op, inputs before outputs: graph order when `ops` is in graph order.

    Raises:
        ArgumentTypeError: `ops` is not made of ops.

    Cost: linear in the ops and their inputs and outputs.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0, name="x")
        ...     y = tf.negative(x, name="y")
        >>> [t.name for t in ge.filter_ts(y.op, True)]
        ['x:0', 'y:0']
    """
    if types.is_graph(ops):
        tensors = get_tensors(ops)
    else:
        listed = make_list_of_op(ops)
        tensors = types.unique(
            t for op in listed for ts in (op.inputs, op.outputs) for t in ts
        )
    if positive_filter is True:
        return tensors
    return [t for t in tensors if positive_filter(t)]  # type: ignore[operator]


def filter_ts_from_regex(ops: Any, regex: str | re.Pattern[str]) -> list[Tensor]:
    r"""Return the inputs and outputs of `ops` whose name a regex finds.

    Args:
        ops: anything that `make_list_of_op` takes.
        regex: used by `re.search`; `r"^foo(/.*)?:\d+$"` finds the scope "foo".

    Raises:
        ArgumentTypeError: `ops` is not made of ops.
        SelectionError: `regex` is not a regular expression.

    Cost: linear in the ops and their inputs and outputs.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="foo/x") + 2.0
        >>> [t.name for t in ge.filter_ts_from_regex(graph, "^foo/")]
        ['foo/x:0']
    """
    search = make_regex(regex).search
    return filter_ts(ops, lambda t: search(t.name))


def filter_ops(ops: Any, positive_filter: bool | OpFilter) -> list[Operation]:
    """Return the ops that pass a filter, in the order given.

    Args:
        ops: anything that `make_list_of_op` takes.
        positive_filter: a predicate on ops, or True for all.

    Raises:
        ArgumentTypeError: `ops` is not made of ops.

    Cost: linear in the ops.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     y = tf.negative(tf.constant(1.0), name="y")
        >>> [op.name for op in ge.filter_ops(graph, ge.op_type("Neg"))]
        ['y']
    """
    listed = make_list_of_op(ops)
    if positive_filter is True:
        return listed
    return [op for op in listed if positive_filter(op)]  # type: ignore[operator]


def filter_ops_from_regex(ops: Any, regex: str | re.Pattern[str]) -> list[Operation]:
    """Return the ops whose name a regex finds, in the order given.

    Args:
        ops: anything that `make_list_of_op` takes.
        regex: used by `re.search`; "^foo(/.*)?$" finds the scope "foo".

    Raises:
        ArgumentTypeError: `ops` is not made of ops.
        SelectionError: `regex` is not a regular expression.

    Cost: linear in the ops.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="foo/x")
        >>> [op.name for op in ge.filter_ops_from_regex(graph, "^foo/")]
        ['foo/x']
    """
    search = make_regex(regex).search
    return [op for op in make_list_of_op(ops) if search(op.name)]


def get_name_scope_ops(ops: Any, scope: str) -> list[Operation]:
    """Return the ops of a name scope, in the order given.

    An op belongs to "foo/bar" if its name is "foo/bar" or begins with "foo/bar/"; the
    scope is a plain name, not a regular expression. The empty scope is the whole graph.

    Args:
        ops: anything that `make_list_of_op` takes.
        scope: the scope, with or without a slash at its end.

    Raises:
        ArgumentTypeError: `ops` is not made of ops.

    Cost: linear in the ops.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     _ = tf.constant(1.0, name="foo/bar"), tf.constant(1.0, name="foo/barn")
        >>> [op.name for op in ge.get_name_scope_ops(graph, "foo/bar/")]
        ['foo/bar']
    """
    inside = types.scope_finalize(scope)
    itself = inside[:-1]
    listed = make_list_of_op(ops)
    if not inside:
        return listed
    names = ((op, op.name) for op in listed)
    return [op for op, name in names if name.startswith(inside) or name == itself]


_PARTS = re.compile(
    r"(?:/job:(?P<job>[^/]+))?(?:/replica:(?P<replica>[^/]+))?"
    r"(?:/task:(?P<task>[^/]+))?"
    r"(?:/(?:device:)?(?P<kind>[A-Za-z*]+):(?P<index>[^/]+))?"
)


def by_device(device: str) -> OpFilter:
    """Return a filter that passes the ops of devices.

    Args:
        device: a device, or a part of one: "/job:worker", "/task:0",
            "/job:worker/task:*", "/device:GPU:*". A part that is left out may be
            anything, and "*" matches anything that is there. "" is the ops without a
            device.

    Raises:
        ArgumentTypeError: `device` is no text.
        SelectionError: it is no device.

    Cost: constant; the filter takes some microseconds for each op.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> from geutil.select import by_device
        >>> with tf.Graph().as_default() as graph:
        ...     for task in range(2):
        ...         with tf.device(f"/job:worker/task:{task}/device:CPU:0"):
        ...             x = tf.constant(1.0, name=f"x{task}")
        >>> [op.name for op in ge.filter_ops(graph, by_device("/job:worker/task:1"))]
        ['x1']
        >>> [op.name for op in ge.filter_ops(graph, by_device("/job:*/device:CPU:*"))]
        ['x0', 'x1']
    """
    if not isinstance(device, str):
        raise ArgumentTypeError(
            f"a device is a text, such as '/job:worker/task:*', not {device!r}"
        )
    wanted = _device_parts(device)
    if wanted is None:
        raise SelectionError(
            f"'{device}' is no device; write one like "
            "'/job:worker/replica:0/task:1/device:CPU:0', or a part of that"
        )
    # No part to compare would pass every op, and "" asks for ops without a device.
    if not wanted:
        return lambda op: not op.device

    def passes(op: Operation) -> bool:
        own = _device_parts(op.device) or {}
        return all(
            part in own and value in ("*", own[part]) for part, value in wanted.items()
        )

    return passes


def _device_parts(device: str) -> dict[str, str] | None:
    """Return the parts that a device names; None if it is none."""
    match = _PARTS.fullmatch(device)
    if match is None:
        return None
    parts = {name: value for name, value in match.groupdict().items() if value}
    # TensorFlow takes the type of a device in either case.
    if "kind" in parts:
        parts["kind"] = parts["kind"].upper()
    return parts


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
        ArgumentTypeError: an argument is none of these, or `graph` is not a graph.
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
        filter_ops_from_regex,
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
        ArgumentTypeError: an argument is none of these, or `graph` is not a graph.
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
        filter_ts_from_regex,
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
        if selections.can_be_regex(leaf):
            regex = selections.make_regex(leaf)
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
                else selections.get_tensors(leaf)
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
    selections.graph_of_all(first)
    if options.positive_filter is not None:
        elements = [element for element in elements if options.positive_filter(element)]
    return types.unique(elements) if len(leaves) > 1 else elements


def make_view(*args: Any, **kwargs: Any) -> SubGraphView:
    """Return a view of the ops and tensors that the arguments select.

    `geutil.sgv` is the same function.

    Args:
        *args: one view, returned as it is; or arguments of `select_ops_and_ts`. Tensors
            become passthrough tensors unless an op of the view reads or computes them.
        **kwargs: `graph`, which must contain the elements and in which regexes are
            searched; `positive_filter`.

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
            args[0] if ops else None, ops, *walks.ends_of(ops)
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
    return SubGraphView(get_name_scope_ops(graph, scope))


def _check_graph(view: SubGraphView, graph: Graph | None) -> SubGraphView:
    if graph is not None:
        types.require_graph(graph)
        if view.graph is not None and view.graph is not graph:
            raise SelectionError(f"{view!r} belongs to another graph than graph=")
    return view


def op_type(op_types: str | Iterable[str], op: Operation | None = None) -> Any:
    """Return whether an op has one of several types.

    Args:
        op_types: one or more types, compared for equality.
        op: the op; if None, a predicate on ops is returned.

    Raises:
        ArgumentTypeError: `op` is neither None nor an op.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.add(1.0, 2.0)
        >>> ge.op_type("AddV2", x.op), ge.op_type("Add", x.op)
        (True, False)
    """
    type_names = frozenset((op_types,) if isinstance(op_types, str) else op_types)

    def matches(candidate: Operation) -> bool:
        types.require_op(candidate)
        return candidate.type in type_names

    return matches if op is None else matches(op)


class OpMatcher:
    """A predicate on an op, its producers, its consumers and its control inputs.

    Args:
        positive_filter: the condition on the op: a string is a regex that must match
            its whole name, or the part after the last slash ("Add" matches neither
            "AddN" nor "Add_1"); a compiled regex is searched in its name; an op matches
            itself; a predicate on ops is called; True matches any op.

    Raises:
        SelectionError: `positive_filter` is none of these.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x, y = tf.constant(1.0, name="x"), tf.constant(2.0, name="y")
        ...     z = tf.add(x, y, name="z")
        >>> ge.OpMatcher("z").input_ops("x", True)(z.op)
        True
        >>> ge.OpMatcher("z").input_ops("y", "x")(z.op)
        False
    """

    def __init__(self, positive_filter: Any) -> None:
        self.positive_filters: list[OpFilter] = [_predicate(positive_filter)]
        self.input_op_matches: list[OpMatcher | None] | None = None
        self.control_input_op_matches: list[OpMatcher | None] | None = None
        self.output_op_matches: list[list[OpMatcher | None] | None] | None = None

    def __call__(self, op: Operation) -> bool:
        """Return whether `op` and its neighbours match.

        Raises:
            ArgumentTypeError: `op` is no op.
        """
        types.require_op(op)
        return (
            all(passes(op) for passes in self.positive_filters)
            and _match_all([t.op for t in op.inputs], self.input_op_matches)
            and _match_all(adjacency.control_inputs(op), self.control_input_op_matches)
            and self._match_outputs(op)
        )

    def input_ops(self, *args: Any) -> OpMatcher:
        """Require these producers, one for each input; None means any.

        Raises:
            SelectionError: the producers are already set.
        """
        _check_unset(self.input_op_matches, "input_ops")
        self.input_op_matches = _matchers(args)
        return self

    def control_input_ops(self, *args: Any) -> OpMatcher:
        """Require these control inputs, in graph order; None means any.

        Raises:
            SelectionError: the control inputs are already set.
        """
        _check_unset(self.control_input_op_matches, "control_input_ops")
        self.control_input_op_matches = _matchers(args)
        return self

    def output_ops(self, *args: Any) -> OpMatcher:
        """Require these consumers: for each output one matcher, a list, or None.

        A list matches the consumers of the output in graph order; None means any number
        of any consumers.

        Raises:
            SelectionError: the consumers are already set.
        """
        _check_unset(self.output_op_matches, "output_ops")
        self.output_op_matches = [
            None if arg is None else _matchers(arg if isinstance(arg, list) else [arg])
            for arg in args
        ]
        return self

    def _match_outputs(self, op: Operation) -> bool:
        if self.output_op_matches is None:
            return True
        if len(op.outputs) != len(self.output_op_matches):
            return False
        return all(
            matchers is None or _match_all(adjacency.consumers(t), matchers)
            for t, matchers in zip(op.outputs, self.output_op_matches, strict=True)
        )


def _match_all(ops: list[Operation], matchers: list[OpMatcher | None] | None) -> bool:
    if matchers is None:
        return True
    return len(ops) == len(matchers) and all(
        matcher is None or matcher(op)
        for op, matcher in zip(ops, matchers, strict=True)
    )


def _matchers(args: Iterable[Any]) -> list[OpMatcher | None]:
    return [
        arg if arg is None or isinstance(arg, OpMatcher) else OpMatcher(arg)
        for arg in args
    ]


def _check_unset(matches: object, name: str) -> None:
    if matches is not None:
        raise SelectionError(
            f"{name} was called on this matcher already; make a new one"
        )


def _predicate(positive_filter: Any) -> OpFilter:
    """Return the predicate that a regex, an op, a predicate or True corresponds to."""
    if isinstance(positive_filter, str):
        match = make_regex(positive_filter).fullmatch
        return lambda op: match(op.name) or match(types.scope_basename(op.name))
    if isinstance(positive_filter, re.Pattern):
        return lambda op: positive_filter.search(op.name)
    if types.is_op(positive_filter):
        return lambda op: op is positive_filter
    if positive_filter is True:
        return lambda op: True
    if callable(positive_filter):
        return positive_filter
    raise SelectionError(
        "expected a regex, a tf.Operation, a predicate or True, got "
        + types.type_name(positive_filter)
    )
