"""Placeholders that stand in for a cut edge."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from geutil.graph import _tf
from geutil.graph.kinds import Tensor, require_tensor
from geutil.graph.names import scope_basename, scope_dirname, scope_finalize

_PREFIX = "geph"


def placeholder_name(
    t: Tensor | None = None, scope: str | None = None, prefix: str = _PREFIX
) -> str:
    """Return a name for a placeholder that stands in for `t`.

    "geph" is short for "graph editor placeholder": the prefix tells such ops apart.

    Args:
        t: the tensor; None gives the bare prefix.
        scope: absolute scope of the name; None keeps the scope of `t`, "" is the root.
        prefix: the prefix.

    Raises:
        ArgumentTypeError: `t` is neither None nor a tensor of a graph.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     t = tf.constant(1.0, name="foo/x")
        >>> ge.placeholder_name(t), ge.placeholder_name(t, scope="bar")
        ('foo/geph__x_0', 'bar/geph__x_0')
    """
    if t is None:
        return scope_finalize(scope or "") + prefix
    require_tensor(t)
    if scope is None:
        scope = scope_dirname(t.op.name)
    base = scope_basename(t.op.name)
    if not base.startswith(f"{prefix}__"):
        base = f"{prefix}__{base}_{t.value_index}"
    return scope_finalize(scope) + base


def make_placeholder_from_tensor(
    t: Tensor, scope: str | None = None, prefix: str = _PREFIX
) -> Tensor:
    """Make a placeholder with the dtype and shape of `t` in the default graph.

    Args:
        t: the tensor it stands in for.
        scope: absolute scope of its name; None keeps that of `t`, "" is the root.
        prefix: prefix of its name.

    Returns:
        A new tensor, named as `placeholder_name` says.

    Raises:
        ArgumentTypeError: `t` is no tensor of a graph.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     t = tf.zeros([2, 3], name="x")
        ...     ge.make_placeholder_from_tensor(t)
        <tf.Tensor 'geph__x_0:0' shape=(2, 3) dtype=float32>
    """
    require_tensor(t)
    result = _placeholder(t.dtype, t.shape, placeholder_name(t, scope, prefix))
    copy_handle_data(t, result)
    return result


def make_placeholder_from_dtype_and_shape(
    dtype: Any, shape: Any = None, scope: str | None = None, prefix: str = _PREFIX
) -> Tensor:
    """Make a placeholder in the default graph; `geutil.ph` is the same function.

    Args:
        dtype: its type.
        shape: its shape; None leaves it unknown.
        scope: absolute scope of its name.
        prefix: its name inside the scope.

    Returns:
        A new tensor.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     ge.ph(tf.float32, [None, 3], scope="foo")
        <tf.Tensor 'foo/geph:0' shape=(None, 3) dtype=float32>
    """
    return _placeholder(dtype, shape, placeholder_name(scope=scope, prefix=prefix))


def _placeholder(dtype: Any, shape: Any, name: str) -> Tensor:
    # A placeholder feeds from outside: nothing around the caller may order it or put
    # it into a loop. The name is absolute, so the current scope is left. A device that
    # the caller asks for is meant.
    graph = tf.compat.v1.get_default_graph()
    with graph.control_dependencies(None), graph.name_scope(None):
        return tf.compat.v1.placeholder(tf.as_dtype(dtype).base_dtype, shape, name)


def copy_handle_data(source: Tensor, target: Tensor) -> None:
    """Give a resource or variant placeholder the shape and dtype behind the handle."""
    if source.dtype in (tf.resource, tf.variant):
        _tf.copy_handle_data(source, target)
