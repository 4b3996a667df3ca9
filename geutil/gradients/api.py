"""Memory-saving gradients, their plans, and the differences that encodings make.

`explain`, `plan` and `plan_curve` are dry runs: they build nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tensorflow as tf

from geutil.bodies.function_bodies import trace_bodies
from geutil.errors import ArgumentTypeError, PlanError
from geutil.gradients import choices, step
from geutil.gradients.barriers import HOST
from geutil.gradients.budget_search import BudgetSearch
from geutil.gradients.choices import BFLOAT16, MIN_CHECKPOINT_SIZE, Options
from geutil.gradients.lifecycle import Prepared, keep_all, order_when_complete, prepare
from geutil.gradients.loops import find_loops
from geutil.gradients.plans import Budget, Plan, PlanCurve, make_plan
from geutil.gradients.policies import NamedPolicy, Policy, name_of_policy
from geutil.gradients.report import Report, publish
from geutil.gradients.segments import plan_recomputation, program_of
from geutil.gradients.step import require_targets
from geutil.gradients.tape.engine import TapeEngine
from geutil.graph import creation, runtime
from geutil.graph.types import GivenShapes, IdentityMap, Tensor, is_func_graph
from geutil.memory import costs
from geutil.select import queries, walks
from geutil.transform.transformer import Transformer, assign_renamed_collections_handler


@tf.autograph.experimental.do_not_convert
def gradients(
    ys: Any,
    xs: Any,
    grad_ys: Any = None,
    checkpoints: Any = "collection",
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
) -> list[Any]:
    """Return the gradients of `ys` with respect to `xs`, recomputing forward tensors.

    Gradient checkpointing: only some tensors of the forward pass, the checkpoints, are
    held for the backward pass. The others are recomputed, segment by segment, when the
    backward pass needs them. The results are those of `tf.gradients`: the backward
    graph is TensorFlow's own, unless another engine is asked for, and only reads other
    copies of the same tensors. Works in a version 1 graph and inside `tf.function`.

    With `tf.config.experimental.enable_op_determinism` the results are those of
    `tf.gradients` to the last bit, unless Grappler joins constants in another order
    (see `geutil.gradients.construction`), and as far as `tf.gradients` is reproducible:
    TensorFlow may add three or more tensors in an order that depends on chance (see
    there, too). Otherwise the step also runs in a low-memory order, and adds gradients
    as they arrive: rounded like TensorFlow's with Grappler or, where forward ops have
    to wait and Grappler joins less, without it; and to 1e-6 under XLA, unless the
    differentiated function amplifies a rounding beyond that.

    Nothing stateful runs twice: variable reads, assignments, random numbers, queues and
    prints keep their results. Loops, branches and calls are recomputed as a whole.
    Values that a functional loop keeps from each iteration for its backward pass, such
    as the gates of an LSTM, are recomputed iteration by iteration where "memory" or a
    budget gains by it; its products may then run again, but nothing stateful.

    Args:
        ys: a tensor, or a list or tuple of tensors.
        xs: a tensor, a `tf.Variable` or a Keras variable, or a list or tuple of them.
        grad_ys: the gradients of `ys`, each of its shape; None means ones.
        checkpoints: the tensors to hold. A list of tensors, of Keras layers, or of
            names of either, of ops or scopes; "collection", the tensors in the graph
            collection `checkpoints`; "speed", the results of convolutions, matrix
            products and the like; "memory", the tensors of the least predicted peak; a
            `Budget`, those of the least time whose predicted peak is within it, or of
            the least peak within its extra time; a `Plan`, those found earlier for such
            a budget; or a policy, a predicate on tensors such as `by_type("Conv2D")`.
            None: all that the backward pass reads, as with `tf.gradients`, if only
            `engine` or the report is wanted.
        min_checkpoint_size: modes and policies choose no tensor of fewer elements.
            "memory" also keeps a smaller one that is live across many layers, such as a
            mask that each of them reads.
        offload: whether kept tensors wait in the memory of another device from their
            last use in the forward pass to their first in the backward pass; or a
            policy that selects them. "memory" takes this into account: it offloads as
            few bytes as bring the peak to 0.7 of that without, or to the least peak;
            and none, with a warning, where the peak would fall by less than a
            twentieth. In a function the forward pass waits until all but the last two
            have arrived, so that no more than two are in transit.
        offload_device: that device.
        prefetch: how many segments before its use a tensor starts to come back.
        holds_gradients: whether all gradients are held until the step ends, as when
            they are returned, or clipped by their common norm; otherwise each is
            consumed as it arrives, as by an optimizer. The choice of "memory" and the
            predicted peaks depend on it.
        engine: the builder of the backward graph: "tensorflow", `tf.gradients` itself;
            or "tape", which sums the gradients of a tensor with many readers before all
            of them have arrived (see `geutil.gradients.tape`). A `TapeEngine` sets
            when.
        order: whether the step, its updates included, runs in a planned low-memory
            order, with any number of threads and any load. It costs no time, and saves
            memory without checkpoints, too. In a graph of version 1, updates that a
            Session runs are ordered by `order_updates`. Nothing is ordered under XLA or
            op determinism.
        shapes: shapes for tensors whose static shapes leave dimensions open, such as
            those of feeds: a mapping, or pairs. A key is a tensor, its `ref()` or its
            name. All other sizes are inferred. Without them, an open dimension that
            nothing determines is assumed to be 32, and the report lists these. They
            hold for the graph from then on.
        encode: the form to keep of tensors whose values the backward pass does not
            need. "lossless": the mask of an activation, the positions of the maxima of
            a pool, a shape, a sign, the input of a cast to more bytes. Nothing is
            recomputed for it, and with `checkpoints=None` the gradients are the same to
            the last bit, except under XLA. "bfloat16": these, and all other kept
            tensors of type float32 wait in half the bytes, which changes the gradients;
            `encoding_errors` measures how much. None: nothing is encoded. Encodings are
            also left out where the step would hold more, or, within a budget, take
            longer.
        device: the device of ops that name none, such as "GPU:0", which need not exist:
            checkpoints, order, budget and report are then for its memory
            (`geutil.memory.predict`). It holds for the graph from then on. None: the
            device on which this process runs them.
        **kwargs: further arguments of `tf.gradients` (`name`, `gate_gradients`,
            `aggregation_method`, `stop_gradients`, `unconnected_gradients`) and of
            `tf.compat.v1.gradients` (`colocate_gradients_with_ops`). The tape refuses
            `gate_gradients` and `aggregation_method`.

    Returns:
        A list with a tensor or `tf.IndexedSlices` for each x, or None where no y
        depends on it. `last_report` returns the report on kept and recomputed tensors.
        Its warnings are logged as well, so plain gradients are never returned without a
        warning, unless `checkpoints` is None.

    Raises:
        ArgumentTypeError: an argument is of a wrong type.
        SelectionError: an unknown mode, a checkpoint from another graph, or an empty
            collection; or `shapes` that do not fit the graph.
        PlanError: the function belongs to a DTensor mesh; no choice was found within a
            budget (the message has the least peak that was found); or a plan was made
            for another step. A function that is being traced then keeps the ops of
            plain gradients, which planning needs; nothing reads or runs them.
        TapeError: with the tape, an op has no gradient, or is in a loop or conditional
            of version 1.
        The errors of `tf.gradients`.

    Cost: at most four times that of `tf.gradients`, linear in ops and edges; with a
        budget, also that of the planner, about 10 s for 2,000 ops, and this twice in a
        graph that is not a function's.

    Source: Chen et al., "Training deep nets with sublinear memory cost", 2016,
        arXiv 1604.06174.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import gradients
        >>> @tf.function
        ... def slope(x):
        ...     y = x * x
        ...     z = tf.square(y * y)
        ...     return gradients(z, x, checkpoints=[y])[0]
        >>> slope(tf.constant([1.0, 2.0])).numpy().tolist()
        [8.0, 1024.0]
    """
    kept = (checkpoints, min_checkpoint_size, offload, offload_device, prefetch)
    options = Options(*kept, holds_gradients, engine, order, shapes, encode, device)
    if isinstance(checkpoints, Budget | Plan) and not is_func_graph(
        require_targets(ys)[0].graph
    ):
        # In a graph that stays, impossible requests are refused on a copy.
        explained(ys, xs, grad_ys, options, kwargs)
    prepared = prepare(ys, xs, grad_ys, options, kwargs)
    replanning = prepared.replanning() if order else None
    step, report = prepared.build()
    if replanning:
        replanning.note(step)
    publish(report, step.graph)
    if order:
        order_when_complete(step, report, replanning)
    return list(step.gradients)


def gradients_speed(
    ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs: Any
) -> list[Any]:
    """Return `gradients(..., checkpoints="speed")`; can replace `tf.gradients`.

    Convolutions, matrix products and the like run once; the ops between them run again.
    Arguments, errors and cost are those of `gradients`; `args` are the further
    positional arguments of `tf.gradients`.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import gradients_speed
        >>> original, tf.gradients = tf.gradients, gradients_speed
        >>> with tf.Graph().as_default():
        ...     x = tf.ones([32, 32])
        ...     y = tf.matmul(tf.tanh(tf.matmul(x, x)), x)
        ...     len(tf.gradients(y, x))
        1
        >>> tf.gradients = original
    """
    return gradients(ys, xs, grad_ys, "speed", **_named(args), **kwargs)


def gradients_memory(
    ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs: Any
) -> list[Any]:
    """Return `gradients(..., checkpoints="memory")`; can replace `tf.gradients`.

    Minimizes the predicted peak with at most one extra forward pass. Arguments, errors
    and cost are those of `gradients`; `args` are the further positional arguments of
    `tf.gradients`.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import gradients_memory, last_report
        >>> with tf.Graph().as_default():
        ...     x = y = tf.ones([1024])
        ...     for _ in range(30):
        ...         y = tf.tanh(y)
        ...     _ = gradients_memory(y, x)
        >>> report = last_report()
        >>> report.peak < 0.6 * report.plain_peak
        True
    """
    return gradients(ys, xs, grad_ys, "memory", **_named(args), **kwargs)


def gradients_collection(
    ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs: Any
) -> list[Any]:
    """Return `gradients(..., checkpoints="collection")`; can replace `tf.gradients`.

    Keeps the tensors of the graph collection `checkpoints`. Arguments, errors and cost
    are those of `gradients`; `args` are the further positional arguments of
    `tf.gradients`.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import gradients_collection, last_report
        >>> with tf.Graph().as_default():
        ...     x = tf.ones([1024])
        ...     y = tf.sin(tf.sin(x))
        ...     tf.compat.v1.add_to_collection("checkpoints", y)
        ...     _ = gradients_collection(tf.sin(tf.sin(y)), x)
        >>> last_report().mode
        'collection'
    """
    return gradients(ys, xs, grad_ys, "collection", **_named(args), **kwargs)


_POSITIONAL = (
    *("name", "gate_gradients", "aggregation_method", "stop_gradients"),
    "unconnected_gradients",
)


def _named(args: tuple[Any, ...]) -> dict[str, Any]:
    """Name the positional arguments of `tf.gradients` after `grad_ys`."""
    if len(args) > len(_POSITIONAL):
        raise ArgumentTypeError(
            f"expected at most {len(_POSITIONAL) + 3} arguments by position, as "
            "tf.gradients takes them; pass the others by name"
        )
    return dict(zip(_POSITIONAL, args, strict=False))


@dataclass(frozen=True)
class GradientError:
    """The difference between a gradient and that of `tf.gradients`.

    Attributes:
        name: the name of the x that it is the gradient with respect to.
        relative: the Euclidean norm of the difference, divided by the gradient's.
        largest: the largest difference of an element, divided by the largest element.
    """

    name: str
    relative: float
    largest: float


def encoding_errors(
    loss: Callable[..., Any], xs: Sequence[Any], *batch: Any, **options: Any
) -> tuple[GradientError, ...]:
    """Return the error of each gradient with `encode="bfloat16"`, on one batch.

    Both kinds of gradients share one forward pass, which runs once with its side
    effects: moving averages move, and dropout draws.

    Args:
        loss: computes the differentiated tensor from a batch.
        xs: variables, the same in each call.
        *batch: tensors or arrays.
        **options: those of `gradients`; `encode` is "bfloat16" unless given, and
            `checkpoints` is None.

    Returns:
        An error for each x that the loss depends on.

    Raises:
        The errors of `gradients`.

    Cost: two backward passes.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import encoding_errors
        >>> w = tf.Variable(tf.random.stateless_normal([64, 64], (1, 2)) / 8, name="w")
        >>> def loss(x):
        ...     return tf.reduce_mean(tf.square(tf.tanh(tf.tanh(x @ w) @ w)))
        >>> (error,) = encoding_errors(loss, [w], tf.ones([32, 64]))
        >>> error.name, 0 < error.relative < 0.01
        ('w:0', True)
    """
    # An order changes no value, and takes its time to find.
    options = {"encode": BFLOAT16, "checkpoints": None, **options, "order": False}
    sources = list(xs)

    @tf.function(autograph=False)
    def compare(*args: Any) -> list[Any]:
        value = loss(*args)
        plain = tf.gradients(value, sources)
        encoded = gradients(value, sources, **options)
        return [
            None if p is None else _differences(tf.convert_to_tensor(p), e)
            for p, e in zip(plain, encoded, strict=True)
        ]

    compared = compare(*map(tf.convert_to_tensor, batch))
    return tuple(
        GradientError(x.name, *(float(number) for number in numbers))
        for x, numbers in zip(sources, compared, strict=True)
        if numbers is not None
    )


def _differences(plain: Tensor, encoded: Any) -> tuple[Tensor, Tensor]:
    """Return the relative norm and the relative largest element of a difference."""
    difference = tf.convert_to_tensor(encoded) - plain
    relative = tf.math.divide_no_nan(tf.norm(difference), tf.norm(plain))
    largest = (tf.reduce_max(tf.abs(t)) for t in (difference, plain))
    return relative, tf.math.divide_no_nan(*largest)


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
        dims = costs.given_shapes(self._source, options.shapes)
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
