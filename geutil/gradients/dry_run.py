"""Plans of memory-saving gradients, without building these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from geutil.bodies.function_bodies import trace_bodies
from geutil.errors import ArgumentTypeError, PlanError
from geutil.gradients import choices, step
from geutil.gradients.barriers import HOST
from geutil.gradients.choices import BFLOAT16, MIN_CHECKPOINT_SIZE, Options
from geutil.gradients.loops import find_loops
from geutil.gradients.planning import Budget, BudgetSearch, Plan, PlanCurve, make_plan
from geutil.gradients.policies import NamedPolicy, Policy, name_of_policy
from geutil.gradients.prediction import program_of
from geutil.gradients.preparation import Prepared, keep_all, prepare
from geutil.gradients.report import Report
from geutil.gradients.segments import plan_recomputation
from geutil.gradients.tape.engine import TapeEngine
from geutil.graph import creation, runtime
from geutil.graph.types import GivenShapes, IdentityMap, Tensor
from geutil.memory import sizes
from geutil.select import queries, walks
from geutil.transform.transformer import Transformer, assign_renamed_collections_handler

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
    device: str | None = None,
    **kwargs: Any,
) -> Report:
    """Return the report that `gradients` would make, without building anything.

    The forward pass is copied to a temporary graph, and everything is tried there. The
    arguments are those of `gradients`.

    Returns:
        The tensors to keep, the ops to recompute, the predicted peaks with and without
        recomputation, and the extra compute. `str` of it is a table.

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
    kept = (checkpoints, min_checkpoint_size, offload, offload_device, prefetch)
    options = Options(*kept, holds_gradients, engine, order, shapes, encode, device)
    return explained(ys, xs, grad_ys, options, kwargs)


def explained(
    ys: Any, xs: Any, grad_ys: Any, options: Options, kwargs: dict[str, Any]
) -> Report:
    """Return the report that `gradients` would make, given its options."""
    prepared = _prepared_on_copy(ys, xs, grad_ys, options, kwargs)
    if options.encode == BFLOAT16:
        # The waits are known only when all is built.
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
    device: str | None = None,
    **kwargs: Any,
) -> Plan:
    """Return a plan of the ops that `gradients` with a `Budget` would run again.

    Planning takes longer than building the gradients, and is needed only once: a plan
    can be saved, and `gradients(ys, xs, checkpoints=plan)` accepts it for the same
    step, in the same graph or traced again. Nothing is built here.

    The budget is a `Budget`, or the limit of one: bytes, a text such as "1.5GB" or
    "50%", or a fraction of the peak of plain gradients. With a limit, `measured`,
    `offload`, `bandwidth` and `offload_device` are those of the `Budget`. The budget of
    a plan for `extra_time` is its own peak. The other arguments are those of
    `gradients`, which needs the same `encode` with the plan; the plan is for these
    `xs`, in this order.

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
    how = (holds_gradients, engine, True, shapes, encode, device)
    options = Options(budget, MIN_CHECKPOINT_SIZE, False, HOST, 1, *how)
    return _plan_of(_prepared_on_copy(ys, xs, grad_ys, options, kwargs), budget)


def _plan_of(prepared: Prepared, budget: Budget) -> Plan:
    """Return the prepared step as a plan for a budget."""
    report, chosen = prepared.report(), prepared.candidate
    is_limit = budget.extra_time is None
    limit = budget.bytes(report.plain_peak) if is_limit else report.peak
    peaks = (report.peak, report.plain_peak)
    times = (report.extra_time, report.extra_time_bound)
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
    device: str | None = None,
    **kwargs: Any,
) -> PlanCurve:
    """Return plans of one step for several budgets: the trade-off of memory and time.

    The budgets are those of `plan`; by default, fractions of the peak of plain
    gradients. If the first is a `Budget`, all of it but the limit applies to all. The
    other arguments are those of `gradients`.

    Returns:
        The plans, each for `gradients(..., checkpoints=plan)`, and the budgets for
        which there is none.

    Raises:
        The same as `gradients`.
        ArgumentTypeError: a budget limits time, not memory.

    Cost: that of `plan`, for each budget; where no loop can recompute values, the
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
    how = (holds_gradients, engine, True, shapes, None, device)
    options = Options(None, MIN_CHECKPOINT_SIZE, False, HOST, 1, *how)
    plain = _prepared_on_copy(ys, xs, grad_ys, options, kwargs).candidate.plan.step
    first = given[0] if given else Budget(1.0)
    search = BudgetSearch(plain, choices.AlwaysKept(plain), budget=first)
    program = program_of(plain)

    def planned(limit: int) -> Plan:
        trial = search.within(limit)
        found = trial.plan or plan_recomputation(plain, keep_all)
        peaks = program.plan(found.segments, found.places).peak, search.plain_peak
        times = found.extra_share(search.time_of), trial.bound
        return make_plan(found, limit, peaks, times, first.offload_device)

    def planned_with_loops(limit: int) -> Plan:
        budget = replace(first, limit=limit)
        asked = replace(options, checkpoints=budget)
        return _plan_of(_prepared_on_copy(ys, xs, grad_ys, asked, kwargs), budget)

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
def plans_within_time(
    ys: Any, xs: Any, shares: Iterable[float], device: str | None = None
) -> list[Plan]:
    """Return plans of least peak within parts of a step's time, for any batch size."""
    plain = _prepared_on_copy(
        ys, xs, None, Options(None, device=device), {}
    ).candidate.plan.step
    # Rebuilt loops make another step, so that each share needs its own search.
    if _has_loops(plain):
        budgets = (Budget(extra_time=share) for share in shares)
        plans = [plan(ys, xs, budget) for budget in budgets]
    else:
        always = choices.AlwaysKept(plain)
        search = BudgetSearch(plain, always, updates="none")
        plans = []
        for trial in map(search.least, shares):
            found = trial.plan or plan_recomputation(plain, keep_all)
            peaks = trial.peak, search.plain_peak
            times = found.extra_share(search.time_of), 0.0
            plans.append(make_plan(found, trial.peak, peaks, times))
    # A plan without a fingerprint fits the step of another batch size.
    return [replace(made, fingerprint="") for made in plans]


def _has_loops(plain: step.PlainStep) -> bool:
    """Return whether a loop of a step can recompute values."""
    return any(loop.cuts for loop in find_loops(plain))


def _prepared_on_copy(
    ys: Any, xs: Any, grad_ys: Any, options: Options, kwargs: dict[str, Any]
) -> Prepared:
    """Prepare gradients in a temporary graph."""
    targets = step.require_targets(ys)
    graph = targets[0].graph
    checkpoints = choices.checked(graph, options.checkpoints)
    options = replace(options, checkpoints=checkpoints)
    output_gradients = [None] if grad_ys is None else step.as_list(grad_ys)
    named = checkpoints if isinstance(checkpoints, tuple) else ()
    # The copy has to hold the tensors of the collection, too.
    if checkpoints == "collection":
        named = choices.collected(graph)
    scratch = _Scratch([*targets, *step.tensors_of(output_gradients), *named], named)
    if kwargs.get("stop_gradients") is not None:
        stopped = scratch.sources(kwargs["stop_gradients"])
        kwargs = {**kwargs, "stop_gradients": stopped}
    with scratch.graph.as_default():
        return prepare(
            scratch.of(targets),
            scratch.sources(xs),
            None if grad_ys is None else scratch.of(output_gradients),
            scratch.options(options),
            kwargs,
        )


class _Scratch:
    """A copy of all that some tensors depend on, some of them its checkpoints."""

    def __init__(self, ends: list[Tensor], checkpoints: Iterable[Tensor]) -> None:
        self.graph = creation.new_graph()
        self._source = ends[0].graph
        ops = walks.get_backward_walk_ops(ends, control_inputs=True)
        copier = Transformer()
        # A partial is not the default, which would make objects of variables.
        copier.assign_collections_handler = partial(assign_renamed_collections_handler)
        _, info = copier(queries.make_view(ops), self.graph, "")
        trace_bodies(self.graph, self.graph.get_operations())
        pairs = [(t, info.transformed(t)) for op in ops for t in op.outputs]
        self._copy: IdentityMap[Tensor] = IdentityMap(pairs)
        self._original = IdentityMap((copy, t) for t, copy in pairs)
        self._checkpoints = self.of(checkpoints)
        self.graph.clear_collection(choices.COLLECTION)
        for t in self._checkpoints:
            self.graph.add_to_collection(choices.COLLECTION, t)

    def of(self, values: Iterable[Any]) -> list[Any]:
        """Return the copies of tensors and slices, and other values as they are."""

        def copied(t: Any) -> Any:
            return self._copy.get(t, t)

        return tf.nest.map_structure(copied, list(values), expand_composites=True)

    def sources(self, xs: Any) -> list[Tensor]:
        """Return the copies of tensors and variables; no y depends on those without."""
        tensors = (
            runtime.variable_tensor(self._source, x)
            if isinstance(x, tf.Variable)
            else x
            for x in map(step.source_of, step.as_list(xs))
        )
        return [self._copy[t] for t in tensors if t in self._copy]

    def options(self, options: Options) -> Options:
        """Return `options` with tensors and gradients of the copied graph."""
        kept, offload = options.checkpoints, options.offload
        dims = sizes.given_shapes(self._source, options.shapes)
        if isinstance(kept, tuple):
            kept = self._checkpoints
        elif callable(kept):
            kept = self._policy(kept)
        return replace(
            options,
            checkpoints=kept,
            offload=self._policy(offload) if callable(offload) else offload,
            # A tensor without a copy is not behind the targets.
            shapes=[(self._copy[t], given) for t, given in dims if t in self._copy],
        )

    def _policy(self, policy: Policy) -> Policy:
        name = name_of_policy(policy)
        return NamedPolicy(name, lambda t: policy(self._original.get(t, t)))
