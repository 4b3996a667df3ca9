"""Filters: the ops or tensors of a set for which something holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.graph import types
from geutil.graph.types import Operation, Tensor
from geutil.select.conversions import get_tensors, make_list_of_op, make_regex

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
        SelectionError: `regex` is none.

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
        SelectionError: `regex` is none.

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

    An op belongs to "foo/bar" when its name is that or begins with "foo/bar/"; the
    scope is a plain name, no regular expression. The empty scope is the whole graph.

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
    if "kind" in parts:
        parts["kind"] = parts["kind"].upper()
    return parts
