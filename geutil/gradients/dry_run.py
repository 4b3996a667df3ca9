"""Says what memory-saving gradients would do, and builds nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError, PlanError
from geutil.gradients import selection, step, tensor_sizes
from geutil.gradients.candidate import extra_share
from geutil.gradients.choices import BFLOAT16, MIN_CHECKPOINT_SIZE, Options
from geutil.gradients.loops.finding import find_loops
from geutil.gradients.offloading import HOST
from geutil.gradients.planning import (
    Budget,
    BudgetSearch,
    Plan,
    PlanCurve,
    make_plan,
)
from geutil.gradients.policies import Policy, name_of_policy, named_policy
from geutil.gradients.prediction import program_of
from geutil.gradients.preparing import Prepared, keep_all, prepare
from geutil.gradients.report import Report
from geutil.gradients.segments import plan_recomputation
from geutil.gradients.tape.building import TapeEngine
from geutil.graph import creation, runtime
from geutil.graph.types import GivenShapes, Graph, MutableIdentityMap, Tensor, is_tensor
from geutil.select import queries, walks
from geutil.transform.function_bodies import trace_bodies
from geutil.transform.handlers import assign_renamed_collections_handler
from geutil.transform.transformer import Transformer

BUDGETS = ("80%", "60%", "50%", "40%", "30%", "20%")
"""The default budgets of `plan_curve`."""


@tf.autograph.experimental.do_not_convert
def explain(
    ys: Any,
    xs: Any,
    grad_ys: Any = None,
    checkpoints: Any = "memory",
    *,
    min_checkpoint_size: int = MIN_CHECKPOINT_SIZE,
    offload: bool | Policy = False,
    offload_device: str = HOST,
    prefetch: int = 1,
    holds_gradients: bool = False,
    engine: str | TapeEngine = "tensorflow",
    order: bool = True,
    shapes: GivenShapes | None = None,
    encode: str | None = None,
    **kwargs: Any,
) -> Report:
    """Return the report that `gradients` would leave, without building anything.

    The forward pass is copied to a graph that is thrown away, and everything is tried
    out there.

    Args:
        ys: as in `gradients`, with all that follow.
        xs: see there.
        grad_ys: see there.
        checkpoints: see there.
        min_checkpoint_size: see there.
        offload: see there.
        offload_device: see there.
        prefetch: see there.
        holds_gradients: see there.
        engine: see there.
        order: see there.
        shapes: see there.
        encode: see there.
        **kwargs: see there.

    Returns:
        What would be kept and recomputed, the predicted peaks with it and without, and
        the extra compute. `str` of it is a table.

    Raises:
        The same as `gradients`.

    Cost: that of `tf.gradients` and of a copy of the forward pass.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import by_name, explain
        >>> with tf.Graph().as_default():
        ...     x = tf.ones([1024])
        ...     y = tf.sin(tf.sin(x), name="y")
        ...     z = tf.sin(tf.sin(y))
        >>> report = explain(z, x, checkpoints=by_name("^y$"))
        >>> [(t.name, t.bytes, t.reason) for t in report.kept][1:2]
        [('y:0', 4096, "chosen: by_name('^y$')")]
    """
    options = Options(
        checkpoints,
        min_checkpoint_size,
        offload,
        offload_device,
        prefetch,
        holds_gradients,
        engine,
        order,
        shapes,
        encode,
    )
    prepared = _prepared_on_copy(ys, xs, grad_ys, options, kwargs)
    if encode == BFLOAT16:
        # What waits is known only when all is built.
        with prepared.candidate.plan.step.graph.as_default():
            return prepared.build()[1]
    return prepared.report()


@tf.autograph.experimental.do_not_convert
def plan(
    ys: Any,
    xs: Any,
    budget: Budget | int | float | str,
    grad_ys: Any = None,
    *,
    measured: bool = False,
    offload: bool = False,
    bandwidth: float | None = None,
    offload_device: str = HOST,
    holds_gradients: bool = False,
    engine: str | TapeEngine = "tensorflow",
    shapes: GivenShapes | None = None,
    encode: str | None = None,
    **kwargs: Any,
) -> Plan:
    """Return what `gradients` with a `Budget` would run again, to be used later.

    Planning takes longer than building the gradients, and need not be done again: a
    plan can be saved, and `gradients(ys, xs, checkpoints=plan)` takes it for the same
    step, in the same graph or traced anew. Nothing is built here.

    Args:
        ys: as in `gradients`.
        xs: as in `gradients`; the plan is for these, in this order.
        budget: a `Budget`, or the limit of one: bytes, a text such as "1.5GB" or "50%",
            or a part of what plain gradients hold. That of a plan for `extra_time` is
            what it holds.
        grad_ys: as in `gradients`.
        measured: as in `Budget`, where a limit stands for one; so are the next three.
        offload: see there.
        bandwidth: see there.
        offload_device: see there.
        holds_gradients: as in `gradients`.
        engine: as in `gradients`.
        shapes: as in `gradients`.
        encode: as in `gradients`, which has to be told the same with the plan.
        **kwargs: as in `gradients`.

    Raises:
        The same as `gradients`.

    Cost: that of `gradients` with a budget.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import gradients, last_report, plan
        >>> with tf.Graph().as_default():
        ...     x = y = tf.ones([1000])
        ...     for _ in range(30):
        ...         y = tf.tanh(y)
        ...     found = plan(y, x, 0.4)
        ...     _ = gradients(y, x, checkpoints=found)
        >>> last_report().peak == found.peak
        True
    """
    if not isinstance(budget, Budget):
        budget = Budget(
            budget,
            measured=measured,
            offload=offload,
            bandwidth=bandwidth,
            offload_device=offload_device,
        )
    options = Options(
        budget,
        holds_gradients=holds_gradients,
        engine=engine,
        shapes=shapes,
        encode=encode,
    )
    return _plan_of(_prepared_on_copy(ys, xs, grad_ys, options, kwargs), budget)


def _plan_of(prepared: Prepared, budget: Budget) -> Plan:
    """Return what was prepared for a budget as a plan."""
    report = prepared.report()
    is_limit = budget.extra_time is None
    limit = budget.bytes(report.plain_peak) if is_limit else report.peak
    peaks = (report.peak, report.plain_peak)
    times = (report.extra_time, report.extra_time_bound)
    chosen = prepared.candidate
    found = make_plan(chosen.plan, limit, peaks, times, budget.offload_device)
    return replace(found, encoded=chosen.encoded, loops=chosen.levels)


@tf.autograph.experimental.do_not_convert
def plan_curve(
    ys: Any,
    xs: Any,
    budgets: Iterable[Budget | int | float | str] = BUDGETS,
    grad_ys: Any = None,
    *,
    holds_gradients: bool = False,
    engine: str | TapeEngine = "tensorflow",
    shapes: GivenShapes | None = None,
    **kwargs: Any,
) -> PlanCurve:
    """Return plans of one step for several budgets: what less memory costs in time.

    Args:
        ys: as in `gradients`.
        xs: as in `gradients`.
        budgets: as that of `plan`; by default, parts of what plain gradients hold. Of
            a `Budget` that comes first, all but the limit holds for all.
        grad_ys: as in `gradients`.
        holds_gradients: as in `gradients`.
        engine: as in `gradients`.
        shapes: as in `gradients`.
        **kwargs: as in `gradients`.

    Returns:
        The plans, each of which `gradients(..., checkpoints=plan)` takes, and the
        budgets for which there is none.

    Raises:
        The same as `gradients`.
        ArgumentTypeError: a budget is one of time.

    Cost: that of `plan`, for each budget; where no loop can compute values again, the
        gradients are built once for all.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import plan_curve
        >>> with tf.Graph().as_default():
        ...     x = y = tf.ones([1000])
        ...     for _ in range(30):
        ...         y = tf.tanh(y)
        ...     curve = plan_curve(y, x, [0.7, 0.5])
        >>> all(plan.peak <= plan.budget for plan in curve.plans)
        True
    """
    given = [b if isinstance(b, Budget) else Budget(b) for b in budgets]
    if any(budget.extra_time is not None for budget in given):
        raise ArgumentTypeError(
            "a curve is drawn through limits, such as '50%'; plan(..., "
            "Budget(extra_time=0.2)) gives the point of some extra time"
        )
    options = Options(
        None, holds_gradients=holds_gradients, engine=engine, shapes=shapes
    )
    plain = _prepared_on_copy(ys, xs, grad_ys, options, kwargs).candidate.plan.step
    first = given[0] if given else Budget(1.0)
    search = BudgetSearch(
        plain,
        selection.AlwaysKept(plain),
        seed=first.seed,
        measured=first.measured,
        offload=first if first.offload else None,
    )
    program = program_of(plain)

    def planned(limit: int) -> Plan:
        trial, bound = search.within(limit)
        found = trial.plan or plan_recomputation(plain, keep_all)
        peak = program.plan(found.segments, found.places).peak
        times = (extra_share(found, search.time_of), bound)
        peaks = (peak, search.plain_peak)
        return make_plan(found, limit, peaks, times, first.offload_device)

    def planned_with_loops(limit: int) -> Plan:
        budget = replace(first, limit=limit)
        asked = replace(options, checkpoints=budget)
        prepared = _prepared_on_copy(ys, xs, grad_ys, asked, kwargs)
        return _plan_of(prepared, budget)

    # A step whose loops are rebuilt is another one, with a search of its own.
    make = planned_with_loops if _has_loops(plain) else planned
    plans, unmet = [], []
    limits = (budget.bytes(search.plain_peak) for budget in given)
    for limit in sorted(set(limits), reverse=True):
        try:
            plans.append(make(limit))
        except PlanError:
            unmet.append(limit)
    return PlanCurve(search.plain_peak, search.alone.peak, tuple(plans), tuple(unmet))


@tf.autograph.experimental.do_not_convert
def plans_within_time(ys: Any, xs: Any, shares: Iterable[float]) -> list[Plan]:
    """Return plans of least peak within several extra times, for any batch size.

    Args:
        ys: as in `gradients`.
        xs: as in `gradients`.
        shares: extra times as parts of the step's.

    Cost: that of `plan`, for each share; what the shares have in common is done once
        where no loop can compute values again.
    """
    plain = _prepared_on_copy(ys, xs, None, Options(None), {}).candidate.plan.step
    if _has_loops(plain):
        budgets = (Budget(extra_time=share) for share in shares)
        plans = [plan(ys, xs, budget) for budget in budgets]
    else:
        always = selection.AlwaysKept(plain)
        search = BudgetSearch(plain, always, updates="none")
        trials = (search.least(share).trial for share in shares)
        plans = [
            make_plan(
                trial.plan or plan_recomputation(plain, keep_all),
                trial.peak,
                (trial.peak, search.plain_peak),
                (extra_share(trial.plan, search.time_of) if trial.plan else 0.0, 0.0),
            )
            for trial in trials
        ]
    return [replace(found, fingerprint="") for found in plans]


def _has_loops(plain: step.PlainStep) -> bool:
    """Tell whether a loop of a step can compute values again."""
    return any(loop.cuts for loop in find_loops(plain))


def _prepared_on_copy(
    ys: Any, xs: Any, grad_ys: Any, options: Options, kwargs: dict[str, Any]
) -> Prepared:
    """Prepare gradients in a graph that is thrown away."""
    targets = step.require_targets(ys)
    checkpoints = selection.checked(targets[0].graph, options.checkpoints)
    options = replace(options, checkpoints=checkpoints)
    output_gradients = [None] if grad_ys is None else step.as_list(grad_ys)
    named = checkpoints if isinstance(checkpoints, tuple) else ()
    if checkpoints == "collection":
        named = selection.collected(targets[0].graph)
    scratch = _Scratch([*targets, *step.tensors_of(output_gradients), *named])
    stopped = kwargs.get("stop_gradients")
    if stopped is not None:
        kwargs = {**kwargs, "stop_gradients": scratch.sources(stopped)}
    with scratch.graph.as_default():
        return prepare(
            [scratch.of(y) for y in targets],
            scratch.sources(xs),
            None
            if grad_ys is None
            else [scratch.gradient(g) for g in output_gradients],
            scratch.options(options),
            kwargs,
        )


def _assign_collections(info: Any, element: Any, element_: Any) -> None:
    """Put a copy into collections; no objects of variables are needed there."""
    assign_renamed_collections_handler(info, element, element_)


class _Scratch:
    """A copy of all that some tensors depend on."""

    def __init__(self, ends: list[Tensor]) -> None:
        self.graph = creation.new_graph()
        self._source = ends[0].graph
        ops = walks.get_backward_walk_ops(ends, control_inputs=True)
        copier = Transformer()
        copier.assign_collections_handler = _assign_collections
        _, info = copier(queries.make_view(ops), self.graph, "")
        trace_bodies(self.graph, self.graph.get_operations())
        self._copy: MutableIdentityMap[Tensor] = MutableIdentityMap()
        self._original: MutableIdentityMap[Tensor] = MutableIdentityMap()
        for op in ops:
            for t in op.outputs:
                self._copy[t] = info.transformed(t)
                self._original[self._copy[t]] = t

    def of(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor."""
        return self._copy[tensor]

    def sources(self, xs: Any) -> list[Tensor]:
        """Return the copies of tensors and variables, of those that have one.

        No y depends on the others.
        """
        tensors = []
        for x in map(step.source_of, step.as_list(xs)):
            is_variable = isinstance(x, tf.Variable)
            t = runtime.variable_tensor(self._source, x) if is_variable else x
            if t in self._copy:
                tensors.append(self._copy[t])
        return tensors

    def gradient(self, gradient: Any) -> Any:
        """Return the copy of the gradient of a y."""
        if isinstance(gradient, tf.IndexedSlices):
            shape = gradient.dense_shape
            return tf.IndexedSlices(
                self.of(gradient.values),
                self.of(gradient.indices),
                None if shape is None else self.of(shape),
            )
        return self.of(gradient) if is_tensor(gradient) else gradient

    def options(self, options: Options) -> Options:
        """Return options that mean in the copy what `options` mean in the original."""
        offload = options.offload
        return Options(
            self._checkpoints(options.checkpoints),
            options.min_checkpoint_size,
            offload if isinstance(offload, bool) else self._policy(offload),
            options.offload_device,
            options.prefetch,
            options.holds_gradients,
            options.engine,
            options.order,
            self._shapes(options.shapes),
            options.encode,
        )

    def _shapes(self, shapes: GivenShapes | None) -> GivenShapes:
        """Return what is told of the tensors that have a copy."""
        tensor_dims = tensor_sizes.given_shapes(self._source, shapes)
        return [(self._copy[t], dims) for t, dims in tensor_dims if t in self._copy]

    def _checkpoints(self, checkpoints: Any) -> Any:
        if checkpoints is None or isinstance(checkpoints, Budget | Plan):
            return checkpoints
        if isinstance(checkpoints, tuple):
            return [self._copy[t] for t in checkpoints]
        if isinstance(checkpoints, str):
            self._carry_collection(checkpoints)
            return checkpoints
        return self._policy(checkpoints)

    def _carry_collection(self, mode: str) -> None:
        named = selection.collected(self._source) if mode == "collection" else ()
        members = [self._copy[t] for t in named]
        _replace_collection(self.graph, selection.COLLECTION, members)

    def _policy(self, policy: Policy) -> Policy:
        return named_policy(
            name_of_policy(policy), lambda t: policy(self._original.get(t, t))
        )


def _replace_collection(graph: Graph, name: str, members: Iterable[Any]) -> None:
    graph.clear_collection(name)
    for member in members:
        graph.add_to_collection(name, member)
