"""Rerouting the ends of subgraph views; detaching, connecting and bypassing views."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from geutil.errors import ArgumentTypeError, RerouteError
from geutil.graph.edits import note_undo
from geutil.graph.state import UndoStep
from geutil.graph.types import Operation, Tensor, index_by_identity, type_name
from geutil.graph.v1_control_flow import branch_name, reading_while_context
from geutil.reroute.tensors import (
    OpPredicate,
    PlannedPlaceholder,
    ReroutePlan,
    may_modify,
    redirection,
)
from geutil.select import queries, selections
from geutil.select.subgraph import SubGraphView
from geutil.select.walks import ControlOutputs, check_cios

Views = tuple[SubGraphView, SubGraphView]


def swap_inputs(sgv0: Any, sgv1: Any) -> Views:
    """Swap all inputs of two views.

    Args:
        sgv0: a view, or anything that `make_view` takes.
        sgv1: a view with as many inputs of the same dtypes and compatible shapes.

    Returns:
        `(sgv0, sgv1)`; both views are also updated in place.

    Raises:
        ArgumentTypeError: an argument cannot be converted to a view.
        RerouteError: counts, dtypes or shapes differ.
        SelectionError: the views belong to different graphs.
        CycleError: the swap would close a cycle.
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: linear in the ops of the views and the readers of their inputs, and see
    `geutil.graph.edits.apply_edits`.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     a, b = tf.constant(1.0, name="a"), tf.constant(2.0, name="b")
        ...     c, d = tf.negative(a), tf.negative(b)
        >>> _ = ge.swap_inputs(c.op, d.op)
        >>> c.op.inputs[0].name, d.op.inputs[0].name
        ('b:0', 'a:0')
    """
    return _reroute(sgv0, sgv1, _plan_inputs, both_ways=True)


def reroute_inputs(sgv0: Any, sgv1: Any) -> Views:
    """Make `sgv1` read the inputs of `sgv0`.

    The arguments, result, errors and cost are those of `swap_inputs`.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     a, b = tf.constant(1.0, name="a"), tf.constant(2.0, name="b")
        ...     c, d = tf.negative(a), tf.negative(b)
        >>> _ = ge.reroute_inputs(c.op, d.op)
        >>> c.op.inputs[0].name, d.op.inputs[0].name
        ('a:0', 'a:0')
    """
    return _reroute(sgv0, sgv1, _plan_inputs, both_ways=False)


def swap_outputs(sgv0: Any, sgv1: Any) -> Views:
    """Swap the readers of the outputs of two views; ops of the views stay as they are.

    The arguments, result, errors and cost are those of `swap_inputs`, for outputs.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     a, b = tf.constant(1.0, name="a"), tf.constant(2.0, name="b")
        ...     c, d = tf.negative(a), tf.negative(b)
        >>> _ = ge.swap_outputs(a.op, b.op)
        >>> c.op.inputs[0].name, d.op.inputs[0].name
        ('b:0', 'a:0')
    """
    return _reroute(sgv0, sgv1, _plan_outputs, both_ways=True)


def reroute_outputs(sgv0: Any, sgv1: Any) -> Views:
    """Make the readers of the outputs of `sgv1` read those of `sgv0`.

    The arguments, result, errors and cost are those of `swap_inputs`, for outputs.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     a, b = tf.constant(1.0, name="a"), tf.constant(2.0, name="b")
        ...     c, d = tf.negative(a), tf.negative(b)
        >>> _ = ge.reroute_outputs(a.op, b.op)
        >>> c.op.inputs[0].name, d.op.inputs[0].name
        ('a:0', 'a:0')
    """
    return _reroute(sgv0, sgv1, _plan_outputs, both_ways=False)


def swap_ios(sgv0: Any, sgv1: Any) -> Views:
    """Swap the inputs and the outputs of two views, as one edit.

    The arguments, result, errors and cost are those of `swap_inputs`.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     a, b = tf.constant(1.0, name="a"), tf.constant(2.0, name="b")
        ...     c, d = tf.negative(a, name="c"), tf.negative(b, name="d")
        ...     e, f = tf.exp(c), tf.exp(d)
        >>> _ = ge.swap_ios(c.op, d.op)
        >>> [t.name for op in (c.op, d.op, e.op, f.op) for t in op.inputs]
        ['b:0', 'a:0', 'd:0', 'c:0']
    """
    return _reroute(sgv0, sgv1, _plan_outputs, _plan_inputs, both_ways=True)


def reroute_ios(sgv0: Any, sgv1: Any) -> Views:
    """Reroute the outputs and the inputs of `sgv0` to `sgv1`, as one edit.

    The arguments, result, errors and cost are those of `swap_inputs`.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     a, b = tf.constant(1.0, name="a"), tf.constant(2.0, name="b")
        ...     c, d = tf.negative(a, name="c"), tf.negative(b, name="d")
        ...     e, f = tf.exp(c), tf.exp(d)
        >>> _ = ge.reroute_ios(c.op, d.op)
        >>> [t.name for op in (c.op, d.op, e.op, f.op) for t in op.inputs]
        ['a:0', 'a:0', 'c:0', 'c:0']
    """
    return _reroute(sgv0, sgv1, _plan_outputs, _plan_inputs, both_ways=False)


_Step = Callable[[ReroutePlan, SubGraphView, SubGraphView, bool], None]


def _reroute(sgv0: Any, sgv1: Any, *steps: _Step, both_ways: bool) -> Views:
    view0, view1 = queries.make_view(sgv0), queries.make_view(sgv1)
    selections.check_graphs(view0, view1)
    plan = ReroutePlan(view0.graph or view1.graph)
    for step in steps:
        step(plan, view0, view1, both_ways)
    plan.apply()
    if _plan_inputs in steps:
        inputs0, inputs1 = list(view0.inputs), list(view1.inputs)
        replace_inputs(view1, inputs0)
        if both_ways:
            replace_inputs(view0, inputs1)
    return view0, view1


def _plan_inputs(
    plan: ReroutePlan, view0: SubGraphView, view1: SubGraphView, both_ways: bool
) -> None:
    steps = [redirection(view1.inputs, view0.inputs, readers_within(view1))]
    if both_ways:
        steps.append(redirection(view0.inputs, view1.inputs, readers_within(view0)))
    plan.redirect(*steps)


def _plan_outputs(
    plan: ReroutePlan, view0: SubGraphView, view1: SubGraphView, both_ways: bool
) -> None:
    others = may_modify(cannot_modify=[*view0.ops, *view1.ops])
    steps = [redirection(view1.outputs, view0.outputs, others)]
    if both_ways:
        steps.append(redirection(view0.outputs, view1.outputs, others))
    plan.redirect(*steps)


def readers_within(view: SubGraphView) -> OpPredicate:
    """Tell which ops read the inputs of a view on its behalf.

    Its own ops do, and whoever reads one of its passthrough tensors.
    """
    return may_modify([*view.ops, *selections.get_consuming_ops(view.passthroughs)])


def replace_inputs(view: SubGraphView, inputs: list[Tensor]) -> None:
    """Give `view` other inputs in place, one for each it has.

    A passthrough tensor keeps being one: its successor replaces it among the
    passthrough tensors and the outputs.
    """
    before = view.copy()
    if view.graph is not None:
        note_undo(view.graph, UndoStep(lambda: view._assign_from(before)))
    position = index_by_identity(view.inputs)
    passing = index_by_identity(view.passthroughs)

    # A passthrough is an input and an output: it changes as both.
    def successor(t: Tensor) -> Tensor:
        return inputs[position[id(t)]] if id(t) in passing and id(t) in position else t

    view._output_ts = [successor(t) for t in view.outputs]
    view._passthrough_ts = [successor(t) for t in view.passthroughs]
    view._input_ts = list(inputs)


def detach_control_inputs(sgv: Any) -> None:
    """Remove the control inputs of a view from outside.

    Args:
        sgv: a view, or anything that `make_view` takes.

    Raises:
        ArgumentTypeError: `sgv` cannot be converted to a view.
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: linear in the ops of the view and their control inputs.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0)
        ...     with tf.control_dependencies([x]):
        ...         y = tf.constant(2.0)
        >>> ge.detach_control_inputs(y.op)
        >>> y.op.control_inputs
        []
    """
    view = queries.make_view(sgv)
    plan = ReroutePlan(view.graph)
    _plan_control_inputs(plan, view)
    plan.apply()


def detach_control_outputs(sgv: Any, control_outputs: ControlOutputs) -> None:
    """Remove the control edges that leave a view.

    Args:
        sgv: a view, or anything that `make_view` takes.
        control_outputs: a `ControlOutputs` of the graph.

    Raises:
        ArgumentTypeError: `sgv` is not a view, or `control_outputs` has another type.
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: linear in the ops of the view and their control outputs.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0)
        ...     with tf.control_dependencies([x]):
        ...         y = tf.constant(2.0)
        >>> ge.detach_control_outputs(x.op, ge.ControlOutputs(graph))
        >>> y.op.control_inputs
        []
    """
    if not isinstance(control_outputs, ControlOutputs):
        raise ArgumentTypeError(
            "control_outputs must be a geutil.ControlOutputs, got "
            f"{type_name(control_outputs)}; pass geutil.ControlOutputs(graph)"
        )
    view = queries.make_view(sgv)
    plan = ReroutePlan(view.graph)
    _plan_control_outputs(plan, view, control_outputs)
    plan.apply()


def detach_inputs(
    sgv: Any, control_inputs: bool = False
) -> tuple[SubGraphView, list[Tensor]]:
    """Replace the inputs of a view by placeholders.

    Args:
        sgv: a view, or anything that `make_view` takes; a view is updated in place.
        control_inputs: whether to remove control inputs from outside too.

    Returns:
        `(sgv, placeholders)`; the placeholders, named `geph__...`, are its new inputs.

    Raises:
        ArgumentTypeError: `sgv` cannot be converted to a view.
        RerouteError: an input is read inside a version 1 while loop.
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: linear in the ops of the view and their edges.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0, name="x")
        ...     y = tf.negative(x)
        >>> _, placeholders = ge.detach_inputs(y.op)
        >>> y.op.inputs[0].name
        'geph__x_0:0'
    """
    view = queries.make_view(sgv)
    plan = ReroutePlan(view.graph)
    planned = _plan_detached_inputs(plan, view)
    if control_inputs:
        _plan_control_inputs(plan, view)
    plan.apply(planned)
    placeholders = _made(planned)
    replace_inputs(view, placeholders)
    return view, placeholders


def detach_outputs(
    sgv: Any, control_outputs: ControlOutputs | None = None
) -> tuple[SubGraphView, list[Tensor]]:
    """Replace the outputs of a view by placeholders for their readers.

    Args:
        sgv: a view, or anything that `make_view` takes.
        control_outputs: if given, control edges that leave the view are removed too.

    Returns:
        `(sgv, placeholders)`: a view whose outputs are those that were read outside,
        and a placeholder, named `geph__...`, for each of them.

    Raises:
        ArgumentTypeError: `sgv` cannot be converted to a view.
        RerouteError: an output is read inside a version 1 while loop.
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: linear in the ops of the view and their edges.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0, name="x")
        ...     y = tf.negative(x)
        >>> _, placeholders = ge.detach_outputs(x.op)
        >>> y.op.inputs[0].name
        'geph__x_0:0'
    """
    _, control_outputs = check_cios(False, control_outputs)
    view = queries.make_view(sgv)
    plan = ReroutePlan(view.graph)
    detached, planned = _plan_detached_outputs(plan, view)
    if control_outputs is not None:
        _plan_control_outputs(plan, view, control_outputs)
    plan.apply(planned)
    return detached, _made(planned)


def detach(
    sgv: Any,
    control_inputs: bool = False,
    control_outputs: ControlOutputs | None = None,
    control_ios: ControlOutputs | None = None,
) -> tuple[SubGraphView, list[Tensor], list[Tensor]]:
    """Disconnect the inputs and the outputs of a view, as one edit.

    Args:
        sgv: a view, or anything that `make_view` takes; a view is updated in place.
        control_inputs: whether to remove control inputs from outside.
        control_outputs: if given, control edges that leave the view are removed.
        control_ios: if given, both are.

    Returns:
        `(sgv, input_placeholders, output_placeholders)`.

    Raises:
        ArgumentTypeError, SelectionError, RerouteError, StaleGraphError,
            FinalizedGraphError: as `detach_inputs` and `check_cios`.

    Cost: linear in the ops of the view and their edges.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0, name="x")
        ...     y = tf.negative(x, name="y")
        ...     z = tf.negative(y, name="z")
        >>> _ = ge.detach(y.op)
        >>> y.op.inputs[0].name, z.op.inputs[0].name
        ('geph__x_0:0', 'geph__y_0:0')
    """
    control_inputs, control_outputs = check_cios(
        control_inputs, control_outputs, control_ios
    )
    view = queries.make_view(sgv)
    # One plan for all ends: a refusal at an output leaves the inputs as they are.
    plan = ReroutePlan(view.graph)
    planned_inputs = _plan_detached_inputs(plan, view)
    _, planned_outputs = _plan_detached_outputs(plan, view)
    if control_inputs:
        _plan_control_inputs(plan, view)
    if control_outputs is not None:
        _plan_control_outputs(plan, view, control_outputs)
    plan.apply([*planned_inputs, *planned_outputs])
    placeholders = _made(planned_inputs)
    replace_inputs(view, placeholders)
    return view, placeholders, _made(planned_outputs)


def connect(
    sgv0: Any, sgv1: Any, disconnect_first: bool = False
) -> tuple[SubGraphView, SubGraphView]:
    """Make `sgv1` read the outputs of `sgv0`.

    Args:
        sgv0: a view, or anything that `make_view` takes.
        sgv1: a view with as many inputs as `sgv0` has outputs; updated in place.
        disconnect_first: whether to disconnect the current readers of these outputs
            first, as `detach_outputs` does.

    Returns:
        `(sgv0, sgv1)`.

    Raises:
        ArgumentTypeError, RerouteError, SelectionError, CycleError, StaleGraphError,
            FinalizedGraphError: as `swap_inputs`.

    Cost: linear in the ops of the views and their edges.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x, y = tf.constant(1.0, name="x"), tf.constant(2.0, name="y")
        ...     z = tf.negative(y)
        >>> _ = ge.connect(x.op, z.op)
        >>> z.op.inputs[0].name
        'x:0'
    """
    view0, view1 = queries.make_view(sgv0), queries.make_view(sgv1)
    selections.check_graphs(view0, view1)
    outputs = list(view0.outputs)
    step = redirection(view1.inputs, outputs, readers_within(view1))
    plan = ReroutePlan(view0.graph or view1.graph)
    planned = _plan_detached_outputs(plan, view0)[1] if disconnect_first else []
    plan.redirect(step)
    plan.apply(planned)
    replace_inputs(view1, outputs)
    return view0, view1


def bypass(sgv: Any) -> tuple[SubGraphView, list[Tensor]]:
    """Make the readers of a view's outputs read its inputs, and disconnect the view.

    Args:
        sgv: a view with as many inputs as outputs (remap it first), or anything that
            `make_view` takes; a view is updated in place.

    Returns:
        `(sgv, placeholders)`: the view, and the placeholders that are its inputs now.

    Raises:
        ArgumentTypeError, RerouteError, CycleError, StaleGraphError,
            FinalizedGraphError: as `swap_inputs`.

    Cost: linear in the ops of the view and their edges.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0, name="x")
        ...     y = tf.negative(x, name="y")
        ...     z = tf.negative(y, name="z")
        >>> _ = ge.bypass(y.op)
        >>> z.op.inputs[0].name, y.op.inputs[0].name
        ('x:0', 'geph__x_0:0')
    """
    view = queries.make_view(sgv)
    others = may_modify(cannot_modify=view.ops)
    plan = ReroutePlan(view.graph)
    plan.redirect(redirection(view.outputs, list(view.inputs), others))
    planned = _plan_detached_inputs(plan, view)
    plan.apply(planned)
    placeholders = _made(planned)
    replace_inputs(view, placeholders)
    return view, placeholders


def _plan_detached_inputs(
    plan: ReroutePlan, view: SubGraphView
) -> list[PlannedPlaceholder]:
    """Plan placeholders for the inputs of a view, one for each."""
    within = readers_within(view)
    read = [op for t in view.inputs for op, _ in plan.edges_reading(t) if within(op)]
    # Readers that an earlier step of the plan brought in stay with what they read.
    within = may_modify([op for op in read if within(op)])
    return _plan_placeholders(plan, view, view.inputs, within)


def _plan_detached_outputs(
    plan: ReroutePlan, view: SubGraphView
) -> tuple[SubGraphView, list[PlannedPlaceholder]]:
    """Plan placeholders for the outputs of a view that are read outside of it."""
    others = may_modify(cannot_modify=view.ops)
    read: dict[int, int] = {}
    for index, t in enumerate(view.outputs):
        if any(others(op) for op, _ in plan.edges_reading(t)):
            read.setdefault(id(t), index)
    detached = view.remap_outputs(read.values())
    return detached, _plan_placeholders(plan, view, detached.outputs, others)


def _plan_placeholders(
    plan: ReroutePlan, view: SubGraphView, tensors: Iterable[Tensor], may: OpPredicate
) -> list[PlannedPlaceholder]:
    if view.graph is None:
        raise RerouteError("the view is empty; select ops or tensors first")
    planned = [PlannedPlaceholder(t) for t in tensors]
    for placeholder in planned:
        for op, _ in plan.edges_reading(placeholder.like):
            if may(op):
                _check_detachable(op)
    plan.redirect(([(p.like, p) for p in planned], may))
    return planned


def _check_detachable(op: Operation) -> None:
    """Refuse where a placeholder cannot feed an op."""
    loop, branch = reading_while_context(op), branch_name(op)
    if loop is not None:
        raise RerouteError(
            f"'{op.name}' runs in while loop '{loop.name}', where no placeholder can "
            "feed it; detach the loop as a whole"
        )
    if branch is not None:
        raise RerouteError(
            f"'{op.name}' runs in a branch of conditional '{branch}', which a "
            "placeholder would feed even when it is not taken; detach the conditional "
            "as a whole"
        )


def _made(planned: Iterable[PlannedPlaceholder]) -> list[Tensor]:
    return [placeholder.tensor for placeholder in planned]


def _plan_control_inputs(plan: ReroutePlan, view: SubGraphView) -> None:
    own = frozenset(view.ops)
    for op in view.ops:
        plan.drop_control_inputs(
            op, [c for c in plan.control_inputs(op) if c not in own]
        )


def _plan_control_outputs(
    plan: ReroutePlan, view: SubGraphView, control_outputs: ControlOutputs
) -> None:
    own = frozenset(view.ops)
    for op in view.ops:
        for reader in control_outputs.get(op):
            if reader not in own:
                plan.drop_control_inputs(reader, [op])
