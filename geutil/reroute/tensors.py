"""Rerouting tensors and control edges: planned, checked and applied as one edit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from geutil.errors import RerouteError
from geutil.graph import adjacency, creation
from geutil.graph.adjacency import control_inputs
from geutil.graph.edits import ControlEdit, InputEdit, apply_edits, check_edits
from geutil.graph.types import Graph, Operation, Tensor, is_reference, require_op
from geutil.select.selections import graph_of_all, make_list_of_op, make_list_of_t

OpPredicate: TypeAlias = Callable[[Operation], bool]
Edge: TypeAlias = tuple[Operation, int]


class PlannedPlaceholder:
    """A placeholder that a plan will make, once nothing stands against it."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The placeholder; it is there once the plan has been applied."""
        return self._tensor

    def make(self) -> None:
        """Make the placeholder in the default graph."""
        self._tensor = creation.make_placeholder_from_tensor(self.like)


Source: TypeAlias = Tensor | PlannedPlaceholder
Redirection: TypeAlias = tuple[Sequence[tuple[Tensor, Source]], OpPredicate]
"""Pairs (old, new), and which readers of the old tensors may be rewired."""


class ReroutePlan:
    """Edits of one graph that are noted down but not yet applied.

    Each step sees the graph as the steps before it will leave it.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._inputs: dict[Edge, Source] = {}
        self._readers: dict[int, dict[Edge, None]] = {}
        self._controls: dict[Operation, tuple[Operation, ...]] = {}

    def edges_reading(self, tensor: Tensor) -> list[Edge]:
        """Return the (op, index) pairs that read `tensor`, planned steps included."""
        edges = [
            (op, index)
            for op in adjacency.consumers(tensor)
            for index, t in enumerate(op.inputs)
            if t is tensor and (op, index) not in self._inputs
        ]
        return edges + list(self._readers.get(id(tensor), ()))

    def set_input(self, edge: Edge, source: Source) -> None:
        """Plan that `edge` reads `source`."""
        before = self._inputs.get(edge)
        if before is not None:
            del self._readers[id(before)][edge]
        self._inputs[edge] = source
        self._readers.setdefault(id(source), {})[edge] = None

    def redirect(self, *redirections: Redirection) -> int:
        """Plan that whoever reads an old tensor reads its new one, all at once.

        Args:
            *redirections: where an old tensor is repeated, its first pair counts; a
                pair of one tensor with itself does nothing.
        """
        changes: dict[Edge, Source] = {}
        for pairs, may_modify in redirections:
            for old, new in pairs:
                if old is new:
                    continue
                for edge in self.edges_reading(old):
                    if may_modify(edge[0]):
                        changes.setdefault(edge, new)
        # All at once: an edge that was redirected is not to be redirected again.
        for edge, source in changes.items():
            self.set_input(edge, source)
        return len(changes)

    def control_inputs(self, op: Operation) -> tuple[Operation, ...]:
        """Return the control inputs that `op` will have."""
        planned = self._controls.get(op)
        return tuple(control_inputs(op)) if planned is None else planned

    def set_control_inputs(self, op: Operation, ops: Iterable[Operation]) -> None:
        """Plan that `op` has these control inputs."""
        self._controls[op] = tuple(ops)

    def drop_control_inputs(self, op: Operation, ops: Iterable[Operation]) -> None:
        """Plan that `op` does not wait for `ops`."""
        dropped = frozenset(ops)
        before = self.control_inputs(op)
        after = tuple(c for c in before if c not in dropped)
        if len(after) != len(before):
            self._controls[op] = after

    def apply(self, placeholders: Sequence[PlannedPlaceholder] = ()) -> None:
        """Check the whole plan and apply it; a refusal leaves the graph untouched."""
        if placeholders:
            check_edits(self._graph, self._input_edits(), self._control_edits())
            with creation.neutral(self._graph):
                for placeholder in placeholders:
                    placeholder.make()
        apply_edits(self._graph, self._input_edits(), self._control_edits())

    def _input_edits(self) -> list[InputEdit]:
        return [
            InputEdit(
                *edge,
                source.tensor if isinstance(source, PlannedPlaceholder) else source,
            )
            for edge, source in self._inputs.items()
        ]

    def _control_edits(self) -> list[ControlEdit]:
        return [ControlEdit(op, ops) for op, ops in self._controls.items()]


def may_modify(can_modify: Any = None, cannot_modify: Any = None) -> OpPredicate:
    """Return a predicate on ops from sets of ops; None for `can_modify` is all."""
    allowed = None if can_modify is None else frozenset(can_modify)
    forbidden = frozenset(cannot_modify or ())
    return lambda op: (allowed is None or op in allowed) and op not in forbidden


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
    return _reroute(ts0, ts1, can_modify, cannot_modify, both_ways=True)


def reroute_ts(
    ts0: Any, ts1: Any, can_modify: Any = None, cannot_modify: Any = None
) -> int:
    """Make the readers of each tensor of `ts1` read its partner in `ts0`.

    ::

        B0  B1        B0  B1
        |   |    =>   |  /
        |   |         | /
        A0  A1        A0  A1

    Afterwards no op reads the tensors of `ts1`, except ops that may not be modified.

    Args:
        ts0: a tensor, or tensors: the tensors to be read.
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
    return _reroute(ts0, ts1, can_modify, cannot_modify, both_ways=False)


def _reroute(
    ts0: Any, ts1: Any, can_modify: Any, cannot_modify: Any, *, both_ways: bool
) -> int:
    listed0, listed1 = make_list_of_t(ts0), make_list_of_t(ts1)
    allowed = None if can_modify is None else make_list_of_op(can_modify)
    forbidden = [] if cannot_modify is None else make_list_of_op(cannot_modify)
    graph = graph_of_all([*listed0, *listed1, *(allowed or [])[:1], *forbidden[:1]])
    may = may_modify(allowed, forbidden)
    groups = [redirection(listed1, listed0, may)]
    if both_ways:
        groups.append(redirection(listed0, listed1, may))
    plan = ReroutePlan(graph)
    count = plan.redirect(*groups)
    plan.apply()
    return count


def redirection(
    old: Sequence[Tensor], new: Sequence[Tensor], may_modify: OpPredicate
) -> Redirection:
    """Return the step that makes readers of `old` read `new`, checked to fit."""
    check_compatible(new, old, may_modify)
    return list(zip(old, new, strict=True)), may_modify


def check_compatible(
    new: Sequence[Tensor], old: Sequence[Tensor], may_modify: OpPredicate
) -> None:
    """Refuse unless each new tensor can stand in for its old partner."""
    if len(new) != len(old):
        raise RerouteError(
            f"{len(new)} tensor(s) cannot stand in for {len(old)}; "
            f"got {_names(new)} for {_names(old)}; pass as many of either, and remap "
            "the inputs or outputs of a view first"
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
            _check_no_reference_needed(t0, t1, may_modify)


def _check_no_reference_needed(
    new: Tensor, old: Tensor, may_modify: OpPredicate
) -> None:
    for op in filter(may_modify, adjacency.consumers(old)):
        for index in adjacency.input_indices(op, old):
            if adjacency.takes_reference(op, index):
                raise RerouteError(
                    f"{_describe(new)} cannot stand in for {_describe(old)}: "
                    f"'{op.name}' assigns to it, and only a reference can be assigned "
                    "to; leave that op out with cannot_modify="
                )


def _describe(t: Tensor) -> str:
    return f"'{t.name}' ({t.dtype.name} {t.shape})"


def _names(tensors: Sequence[Tensor]) -> str:
    return f"[{', '.join(t.name for t in tensors)}]"


def remove_control_inputs(op: Operation, cops: Any) -> None:
    """Remove control inputs of `op`.

    Args:
        op: the op that waits.
        cops: an op, or ops, that are control inputs of it.

    Raises:
        ArgumentTypeError: an argument is not made of ops.
        RerouteError: one of `cops` is not a control input of `op`.
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: quadratic in the control inputs that stay: TensorFlow can only remove all, and
        these are added again.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0)
        ...     with tf.control_dependencies([x]):
        ...         y = tf.constant(2.0)
        >>> ge.remove_control_inputs(y.op, x.op)
        >>> y.op.control_inputs
        []
    """
    removed = _control_ops(op, cops)
    present = frozenset(op.control_inputs)
    for cop in removed:
        if cop not in present:
            raise RerouteError(
                f"'{cop.name}' is no control input of '{op.name}'; its control inputs "
                f"are {[c.name for c in op.control_inputs]}"
            )
    plan = ReroutePlan(op.graph)
    plan.drop_control_inputs(op, removed)
    plan.apply()


def add_control_inputs(op: Operation, cops: Any) -> None:
    """Add control inputs to `op`.

    Args:
        op: the op that waits.
        cops: an op, or ops, of the same graph.

    Raises:
        ArgumentTypeError: an argument is not made of ops.
        RerouteError: one of `cops` is a control input of `op` already.
        SelectionError: the ops belong to different graphs.
        CycleError: the control edges would close a cycle.
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: linear in the control inputs of `op`, and see
    `geutil.graph.edits.apply_edits`.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x, y = tf.constant(1.0, name="x"), tf.constant(2.0, name="y")
        >>> ge.add_control_inputs(y.op, x.op)
        >>> [op.name for op in y.op.control_inputs]
        ['x']
    """
    added = _control_ops(op, cops)
    present = frozenset(op.control_inputs)
    for cop in added:
        if cop in present:
            raise RerouteError(
                f"'{cop.name}' is a control input of '{op.name}' already; leave it out"
            )
    if added:
        plan = ReroutePlan(op.graph)
        plan.set_control_inputs(op, [*op.control_inputs, *added])
        plan.apply()


def _control_ops(op: Operation, cops: Any) -> list[Operation]:
    require_op(op)
    listed = list(dict.fromkeys(make_list_of_op(cops, allow_graph=False)))
    graph_of_all([op, *listed])
    return listed
