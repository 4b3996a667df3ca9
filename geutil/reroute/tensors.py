"""Rerouting tensors: which ops read what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from geutil.errors import RerouteError
from geutil.graph.adjacency import input_indices, takes_reference
from geutil.graph.kinds import Tensor, is_reference
from geutil.reroute.plan import Plan, may_modify
from geutil.select.lists import get_unique_graph, make_list_of_op, make_list_of_t


def swap_ts(
    ts0: Any, ts1: Any, can_modify: Any = None, cannot_modify: Any = None
) -> int:
    r"""Swap the readers of the tensors of each pair.

    ::

        B0  B1        B0  B1
        |   |    =>     \/
        |   |           /\
        A0  A1        A0  A1

    Args:
        ts0: a tensor, or tensors.
        ts1: as many tensors, with the same dtypes and compatible shapes.
        can_modify: the ops that may be rewired; None is all.
        cannot_modify: ops that may not be rewired.

    Returns:
        The number of inputs that changed.

    Raises:
        ArgumentTypeError: an argument is not made of tensors, or of ops.
        RerouteError: counts, dtypes or shapes differ.
        SelectionError: the elements belong to different graphs.
        CycleError: the swap would close a cycle.
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: linear in the inputs of the ops that read the tensors, and see
    `geutil.graph.edits.apply_edits`.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     a, b = tf.constant(1.0, name="a"), tf.constant(2.0, name="b")
        ...     c = tf.subtract(a, b)
        >>> ge.swap_ts(a, b), [t.name for t in c.op.inputs]
        (2, ['b:0', 'a:0'])
    """
    pairs = _pairs(ts0, ts1, both_ways=True)
    return _apply(
        [p for t0, t1 in pairs for p in ((t1, t0), (t0, t1))], can_modify, cannot_modify
    )


def reroute_ts(
    ts0: Any, ts1: Any, can_modify: Any = None, cannot_modify: Any = None
) -> int:
    """Make the readers of each tensor of `ts1` read its partner in `ts0`.

    ::

        B0  B1        B0  B1
        |   |    =>   |  /
        |   |         | /
        A0  A1        A0  A1

    Afterwards nobody reads the tensors of `ts1`, except ops that may not be modified.

    Args:
        ts0: a tensor, or tensors: what shall be read.
        ts1: as many tensors, with the same dtypes and compatible shapes.
        can_modify: the ops that may be rewired; None is all.
        cannot_modify: ops that may not be rewired.

    Returns:
        The number of inputs that changed.

    Raises:
        ArgumentTypeError, RerouteError, SelectionError, CycleError, StaleGraphError,
            FinalizedGraphError: as `swap_ts`.

    Cost: as `swap_ts`.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     a, b = tf.constant(1.0, name="a"), tf.constant(2.0, name="b")
        ...     c = tf.subtract(b, b)
        >>> ge.reroute_ts(a, b), [t.name for t in c.op.inputs]
        (2, ['a:0', 'a:0'])
    """
    pairs = _pairs(ts0, ts1)
    return _apply([(t1, t0) for t0, t1 in pairs], can_modify, cannot_modify)


def _apply(
    pairs: Sequence[tuple[Tensor, Tensor]], can_modify: Any, cannot_modify: Any
) -> int:
    allowed = None if can_modify is None else make_list_of_op(can_modify)
    forbidden = None if cannot_modify is None else make_list_of_op(cannot_modify)
    graph = get_unique_graph(
        [t for pair in pairs for t in pair]
        + (allowed or [])[:1]
        + (forbidden or [])[:1]
    )
    if not pairs:
        return 0
    plan = Plan(graph)
    count = plan.redirect(pairs, may_modify(allowed, forbidden))
    plan.apply()
    return count


def _pairs(ts0: Any, ts1: Any, both_ways: bool = False) -> list[tuple[Tensor, Tensor]]:
    listed0, listed1 = make_list_of_t(ts0), make_list_of_t(ts1)
    check_compatible(listed0, listed1)
    if both_ways:
        check_compatible(listed1, listed0)
    return list(zip(listed0, listed1, strict=True))


def check_compatible(new: Sequence[Tensor], old: Sequence[Tensor]) -> None:
    """Refuse unless each new tensor can stand in for its old partner.

    Raises:
        RerouteError: counts, dtypes or shapes differ.
    """
    if len(new) != len(old):
        raise RerouteError(
            f"{len(new)} tensor(s) cannot stand in for {len(old)}; "
            f"got {_names(new)} for {_names(old)}"
        )
    for t0, t1 in zip(new, old, strict=True):
        if t0.dtype.base_dtype != t1.dtype.base_dtype:
            raise RerouteError(
                f"{_describe(t0)} cannot stand in for {_describe(t1)}: dtypes differ; "
                "cast first with tf.cast"
            )
        if not t0.shape.is_compatible_with(t1.shape):
            raise RerouteError(
                f"{_describe(t0)} cannot stand in for {_describe(t1)}: shapes differ; "
                "reshape first, or copy with geutil.graph_replace, which infers shapes "
                "anew"
            )
        # An op that assigns takes a reference: a plain value has no memory behind it.
        if is_reference(t1) and not is_reference(t0):
            _check_no_reference_needed(t0, t1)


def _check_no_reference_needed(new: Tensor, old: Tensor) -> None:
    for op in old.consumers():
        for index in input_indices(op, old):
            if takes_reference(op, index):
                raise RerouteError(
                    f"{_describe(new)} cannot stand in for {_describe(old)}: "
                    f"'{op.name}' assigns to it, and only a reference can be assigned "
                    "to; leave that op out with cannot_modify="
                )


def _describe(t: Tensor) -> str:
    return f"'{t.name}' ({t.dtype.name} {t.shape})"


def _names(tensors: Sequence[Tensor]) -> str:
    return f"[{', '.join(t.name for t in tensors)}]"
