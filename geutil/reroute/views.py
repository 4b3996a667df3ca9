"""Rerouting the ends of subgraph views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from geutil.graph.edits import note_undo
from geutil.graph.state import UndoStep
from geutil.graph.types import Tensor, index_by_identity
from geutil.reroute.tensors import OpPredicate, ReroutePlan, may_modify, redirection
from geutil.select import conversions, queries
from geutil.select.subgraph import SubGraphView

Views = tuple[SubGraphView, SubGraphView]


def swap_inputs(sgv0: Any, sgv1: Any) -> Views:
    """Swap all inputs of two views.

    Args:
        sgv0: a view, or anything that `make_view` takes.
        sgv1: a view with as many inputs of the same dtypes and compatible shapes.

    Returns:
        `(sgv0, sgv1)`; both views are also updated in place.

    Raises:
        ArgumentTypeError: an argument makes no view.
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

    The arguments, result, errors and cost are those of `swap_inputs`, said of outputs.

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

    The arguments, result, errors and cost are those of `swap_inputs`, said of outputs.

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
    conversions.check_graphs(view0, view1)
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
    return may_modify([*view.ops, *conversions.get_consuming_ops(view.passthroughs)])


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

    def successor(t: Tensor) -> Tensor:
        return inputs[position[id(t)]] if id(t) in passing and id(t) in position else t

    view._output_ts = [successor(t) for t in view.outputs]
    view._passthrough_ts = [successor(t) for t in view.passthroughs]
    view._input_ts = list(inputs)
