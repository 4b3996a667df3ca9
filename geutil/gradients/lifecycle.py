"""The life of a training step: prepared, built, and ordered once it is complete.

Plain gradients are built from the caller's arguments, planned, and carried out. Updates
consume gradients, and are built after them. So a step is ordered when its graph is
complete: before a function is built from it, or, in a graph of version 1, before a
Session runs it or when `order_updates` is called.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import PlanError, SelectionError, StaleGraphError
from geutil.gradients import choices, construction
from geutil.gradients.barriers import Offload, with_returns
from geutil.gradients.choices import BFLOAT16, Candidate, Keeping, Options
from geutil.gradients.encodings import Encoder, halve
from geutil.gradients.plans import Budget
from geutil.gradients.report import (
    Report,
    holding_gradients,
    last_report,
    make_report,
    replace_last,
    with_halved,
)
from geutil.gradients.segments import plan_recomputation, program_of
from geutil.gradients.step import (
    Edits,
    PlainStep,
    Recomputation,
    build_step,
    edges_of,
    let_out_when_read,
    require_targets,
    set_back,
    tensors_of,
)
from geutil.gradients.tape.engine import engine_of
from geutil.graph import (
    adjacency,
    creation,
    function_calls,
    protos,
    runtime,
    state,
    types,
)
from geutil.graph.types import Graph, IdentitySet, Operation, Tensor
from geutil.memory import costs
from geutil.memory.read import device_of
from geutil.memory.schedule import OrderPlan
from geutil.select.selections import graph_of_all
from geutil.select.walks import get_backward_walk_ops

_logger = logging.getLogger("geutil")

_XLA_WIDENS = (
    "XLA compiles the step, and may leave out that tensors are rounded to bfloat16 and "
    "widened again: none is halved, only lossless encodings are made"
)
_ALL_KEPT = (
    "all that the backward pass reads after its start is kept, so there is nothing to "
    "recompute: these are plain gradients"
)
_COMPILED = (
    "XLA compiles '{name}' (calls of that kind: {count}): what it holds besides their "
    "results while it runs them is no part of the predicted peaks; for a convolution "
    "by groups that may be many times the rest"
)
_TURNED = (
    "with auto_mixed_precision Grappler turns images for a GPU: the copies are in "
    "geutil.memory.predict of the finished step, and not in this report"
)
_ONE_DEVICE = "XLA compiles a step for one device: nothing is offloaded"
_OVER_BUDGET = (
    "the whole step holds {peak:,} bytes at its peak, more than the budget of "
    "{limit:,} ({before:,} were planned): while '{op}' ({type}) runs, it holds {held}; "
    "pass a smaller budget"
)
_NAMED = 3
"""How many of the largest tensors at the peak a message names."""
_OVER_BY_GAPS = (
    "the allocator hands out {peak:,} bytes in chunks for the {buffers:,} that the "
    "step holds at its peak, more than the budget of {limit:,}, by the best of "
    "{attempts} plans: pass another budget"
)
_HOLDS = (
    "of the {peak:,} bytes that the step holds at its peak, {held:,} are gradients: "
    "they are held until the last one is there (to be clipped by their common norm, "
    "say); pass holds_gradients=True, so that the checkpoints are chosen for that"
)
_TOO_LATE = (
    "a Session has run the graph before its updates were known, so they are not "
    "ordered, and the step may hold more than {peak:,} bytes: call "
    "geutil.gradients.order_updates(train_op) before the first run of the graph"
)
_FINALIZED = (
    "the graph is finalized, so its updates are not ordered, and the step may hold "
    "more than {peak:,} bytes: call geutil.gradients.order_updates(train_op) before"
)
_FED = (
    "a tensor is fed that the graph computes, so its updates are not ordered, and "
    "the step may hold more than {peak:,} bytes: call "
    "geutil.gradients.order_updates(train_op) before the first run of the graph"
)
_FORCED = (
    "the run would also run '{op}' ({type}), which changes state and which it does not "
    "ask for: the updates of these gradients were ordered, so the backward pass waits "
    "for them. Run the updates along with it, or build the gradients that are looked "
    "at alone by another call, gradients(..., order=False)"
)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A step with plain gradients, and its plan."""

    candidate: Candidate
    options: Options
    offload: Offload | None
    encoder: Encoder
    # The step with plain gradients, as TensorFlow built it.
    plain: PlainStep
    # The beginning of warnings, if they are about a part of a step.
    where: str = ""

    def replanning(self) -> Replanning | None:
        """Return how the step can be built again, ahead of its first build, or None."""
        # None where its budget is none of chunks, and where an edit cannot be taken
        # back.
        budget, graph = self.options.checkpoints, self.plain.graph
        is_possible = (
            isinstance(budget, Budget)
            and budget.extra_time is None
            and types.is_func_graph(graph)
            and not runtime.is_compiled_by_xla(graph)
            and not any(self.candidate.levels)
            and device_of(runtime.planned_for(graph)).allocator is not None
        )
        return Replanning(self.plain, self.options) if is_possible else None

    @runtime.without_collector()
    def build(self) -> tuple[PlainStep, Report]:
        """Build the step as it is planned; return it and the report on it."""
        options = self.options
        report = self.report(is_ordered_later=options.order)
        step = construction.build_recomputation(self.candidate.plan, self.offload)
        runtime.keep_image_layouts(step.graph)
        if options.encode == BFLOAT16 and not runtime.is_compiled_by_xla(step.graph):
            # All that is kept then, to recompute from it as well.
            halved = halve(step, options.min_checkpoint_size, self.encoder)
            step = halved.step
            costs.settle_shapes(step.ops())
            report = with_halved(report, halved, ordered=options.order)
        return let_out_when_read(step), report

    def report(self, *, is_ordered_later: bool = False) -> Report:
        """Return the report on the plan; the order of the whole step may change it."""
        plan, keeping = self.candidate.plan, self.candidate.keeping
        warnings = list(keeping.warnings)
        recomputes = bool(plan.segments or any(self.candidate.levels))
        if keeping.recomputes and not (recomputes or warnings):
            warnings.append(_ALL_KEPT)
        compiled = runtime.is_compiled_by_xla(plan.step.graph)
        if compiled and self.options.encode == BFLOAT16:
            warnings.append(_XLA_WIDENS)
        warnings += _warnings_of_sizes(plan.step.ops(), compiled=compiled)
        if runtime.turns_images(plan.step.graph):
            warnings.append(_TURNED)
        sent = plan.offloaded
        if compiled and with_returns(plan, self.offload).offloaded:
            warnings.append(_ONE_DEVICE)
        # XLA has an order of its own, which is taken to hold as little.
        ordered = bool(plan.segments) if compiled else self.options.order
        is_later = is_ordered_later and not compiled
        report = make_report(self.candidate, sent, ordered=ordered, is_later=is_later)
        if compiled:
            report = replace(
                report, resident=None, plan=None, plain_plan=None, plain_plan_held=None
            )
        return replace(report, warnings=tuple(self.where + w for w in warnings))


def _warnings_of_sizes(ops: Sequence[Operation], *, compiled: bool) -> list[str]:
    """Return warnings of sizes that are unknown, or not counted."""
    guessed = costs.warning_of_sizes(ops)
    warnings = [guessed] if guessed else []
    # XLA compiles such calls together with a step that it compiles.
    calls = list(filter(function_calls.is_compiled_call, () if compiled else ops))
    if calls:
        first = min(calls, key=adjacency.creation_index)
        warnings.append(_COMPILED.format(count=len(calls), name=first.name))
    return warnings


def keep_all(tensor: Tensor) -> bool:
    """Keep every tensor: these are plain gradients."""
    return True


@runtime.without_collector()
def prepare(
    ys: Any, xs: Any, grad_ys: Any, options: Options, arguments: Mapping[str, Any]
) -> Prepared:
    """Build plain gradients by the arguments of `gradients`, and plan recomputation."""
    targets = require_targets(ys)
    choices.refuse_mesh(targets[0].graph)
    with runtime.planning_for(targets[0].graph, options.device):
        checkpoints = choices.checked(targets[0].graph, options.checkpoints)
        holds = options.holds_gradients
        engine = None if options.engine == "tensorflow" else engine_of(options.engine)
        tensor_dims = costs.given_shapes(targets[0].graph, options.shapes)
        # Before anything is built: refuse arguments that do not fit.
        behind = get_backward_walk_ops(targets, control_inputs=True)
        costs.settle_shapes(behind, tensor_dims)
        step = build_step(
            targets, xs, grad_ys, arguments, holds_gradients=holds, engine=engine
        )
        costs.settle_shapes(step.ops())
        return prepare_step(step, replace(options, checkpoints=checkpoints))


def prepare_step(step: PlainStep, options: Options) -> Prepared:
    """Plan the recomputation of a step with plain gradients and checked checkpoints."""
    encoder, offload = Encoder(), options.offloading()
    is_compiled = runtime.is_compiled_by_xla(step.graph)
    # XLA compiles a step for one device.
    may_send = options.offload is not False and not is_compiled
    returns = partial(with_returns, offload=offload) if may_send else None

    def choose(step: PlainStep, kept: Any) -> tuple[Keeping, Recomputation]:
        keeping = choices.resolve(
            step, kept, options.min_checkpoint_size, returns=returns
        )
        plan = keeping.plan or plan_recomputation(
            step, keeping if len(keeping.chosen) else keep_all
        )
        if returns and keeping.sends:
            plan = returns(plan)
        if options.checkpoints == "speed":
            plan = _plain_if_less(plan, keeping)
        return keeping, plan

    chosen = choices.choose_all(step, options, encoder, choose)
    return Prepared(chosen, options, offload, encoder, step)


def _plain_if_less(plan: Recomputation, keeping: Keeping) -> Recomputation:
    """Return plain gradients, with a warning, unless the plan's peak is lower."""
    if not plan.segments:
        return plan
    program = program_of(plan.step)
    peak, plain_peak = program.peak(plan.segments), program.peak()
    if peak < plain_peak:
        return plan
    keeping.chosen = IdentitySet()
    keeping.warnings.append(
        f"{choices.PLAIN}: what '{keeping.mode}' recomputes is predicted to "
        f"need {peak:,} bytes at its peak, and plain gradients {plain_peak:,}"
    )
    return plan_recomputation(plan.step, keep_all)


_ATTEMPTS = 3
"""How many plans are made at the most. Chunks move by some percent from one plan to
the next, so that the second or third is within a limit that can be met."""


class Replanning:
    """The gradients of one step in a function, which can be built again."""

    # A budget is planned for before the updates of the step are known, and the order
    # that the step has in the end moves the gaps between chunks. Once it is finished,
    # its edges are set back to those of plain gradients, and another plan is carried
    # out. Ops of the first one are left without readers.

    def __init__(self, plain: PlainStep, options: Options) -> None:
        self._graph: Graph = plain.graph
        self._plain = edges_of(self._graph.get_operations())
        self._options = options
        # A copy, by which nothing was looked up: that keeps a graph as long as its key.
        self._step = replace(plain)
        self.built: PlainStep | None = None
        self._count = 0

    def note(self, built: PlainStep) -> None:
        """Note the step that was built; ops that are made from now on are its users."""
        self.built, self._count = built, state.count_ops(self._graph)

    @runtime.without_collector()
    def again(
        self, limit: int, finished: Edits, fetched: IdentitySet
    ) -> tuple[PlainStep, Report] | None:
        """Build the gradients by a plan for another limit; None if that cannot be."""
        # Nothing is changed then, nor where it raises PlanError for want of a choice.
        # `finished` are the edges of the complete graph before its ops were ordered; a
        # gradient that is `fetched` stays.
        before = edges_of(self._graph.get_operations())
        if self.built is None or limit <= 0:
            return None
        set_back(finished)
        users = state.ops_since(self._graph, self._count)
        users = [op for op in users if op in finished.inputs]
        set_back(self._plain)
        budget = replace(self._options.checkpoints, limit=limit)
        options = replace(self._options, checkpoints=budget)
        try:
            step, report = prepare_step(replace(self._step), options).build()
        except PlanError:
            set_back(before)
            raise
        pairs = zip(
            tensors_of(self.built.gradients), tensors_of(step.gradients), strict=True
        )
        moved = [(old, new) for old, new in pairs if old is not new]
        awaited = {op for user in users for op in adjacency.control_inputs(user)}
        if any(old in fetched or old.op in awaited for old, _ in moved):
            set_back(before)
            return None
        for old, new in moved:
            for user in users:
                for place in adjacency.input_indices(user, old):
                    creation.set_new_input(user, place, new)
        return step, report


def order_when_complete(
    step: PlainStep,
    report: Report | None = None,
    replanning: Replanning | None = None,
) -> None:
    """Order a step once its graph is complete; a first part is done now."""
    # In a graph of version 1, forward and backward pass are ordered at once, since it
    # may be exported before anything runs it. Under XLA and op determinism nothing is
    # done.
    if runtime.is_compiled_by_xla(step.graph) or runtime.is_determinism_enabled():
        return
    orders = _orders_of(step.graph)
    orders.add(step, report, replanning)
    if not types.is_func_graph(step.graph):
        orders.order_gradients(step)


def order_moved(graph: Graph, backward: Iterable[Operation]) -> None:
    """Order a step whose backward ops were moved to the graph of a function."""
    if not runtime.is_determinism_enabled():
        _orders_of(graph).add_backward(backward)


def order_updates(*fetches: Any) -> Report | None:
    """Order the updates of a training step in a graph of version 1.

    The peak of a step depends on when its updates consume the gradients, and TensorFlow
    delays that. In `tf.function` and Keras' `fit` the updates are found when the
    function is built. A Session fixes the whole graph at its first run, often to
    initialize variables, before the ops of a step are known: so call this before.

    From then on, no run can fetch gradients of the step without its updates: such a run
    is refused.

    Args:
        *fetches: the fetches of a step: the train op, or the updates, with all else
            that each step runs.

    Returns:
        The report on the gradients of the graph that were built last, with the peak of
        the step as it runs now.

    Raises:
        SelectionError: `fetches` update nothing by gradients of `geutil.gradients`.
        StaleGraphError: a Session has run the graph, and would not see the order.

    Cost: linear in the ops behind `fetches`, up to a logarithm; about 0.15 ms each.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import gradients, order_updates
        >>> with tf.Graph().as_default():
        ...     w = tf.compat.v1.get_variable("w", [64, 64])
        ...     x = y = tf.ones([512, 64])
        ...     for _ in range(8):
        ...         y = tf.tanh(y @ w)
        ...     (slope,) = gradients(tf.reduce_mean(y), [w], checkpoints="memory")
        ...     train = w.assign_sub(0.1 * slope)
        ...     report = order_updates(train)
        >>> report.peak < report.plain_peak
        True
    """
    default = tf.compat.v1.get_default_graph()
    if types.is_func_graph(default):
        return last_report(default)
    # An assignment returns a variable, which has its op.
    targets = [
        f if types.is_op(f) or types.is_tensor(f) else f.op
        for f in types.flatten(list(fetches))
    ]
    graph = graph_of_all(targets)
    orders: _Orders | None = state.state_of(graph).step_order
    if orders is None:
        raise SelectionError(
            "the graph has no gradients whose ops are ordered; build them by "
            "geutil.gradients.gradients(..., order=True)"
        )
    orders.order_now(targets)
    return last_report(graph)


class _Orders:
    """The ordered steps of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._backward: dict[Operation, None] = {}
        self._report: Report | None = None
        self._holds_gradients = True
        # No step is held: it is the key of notes that lead back to the graph.
        self._gradients: frozenset[str] = frozenset()
        # The ops that run for the ys alone, which must not come to take more.
        self._forward: dict[Operation, None] = {}
        self._phases: list[construction.Phase] = []
        # The places of ops in the orders that gradients were planned with, by name; and
        # the ops whose results are on another device.
        self._known: dict[str, int] = {}
        self._elsewhere: set[str] = set()
        self._notes = (self._phases, self._known, self._elsewhere)
        self._warned = False
        # The graph and targets that were ordered last: no need to do so again.
        self._ordered: Any = None
        # The ops that wait for updates in a graph that a Session runs.
        self._waits: frozenset[Operation] | None = None
        self._replanning: Replanning | None = None
        self._allowed: set[Any] = set()

    def add(
        self,
        step: PlainStep,
        report: Report | None,
        replanning: Replanning | None = None,
    ) -> None:
        """Note a step."""
        # Of several steps none is planned again: one would take room from the others.
        self._replanning = None if self._backward else replanning
        self.add_backward(step.backward)
        self._report = report
        self._holds_gradients = step.holds_gradients
        self._gradients = frozenset(t.op.name for t in tensors_of(step.gradients))
        self._phases.append((step.seeds, [y.op for y in step.ys]))
        self._elsewhere.update(step.elsewhere)
        first = len(self._known)
        self._known.update((name, first + n) for name, n in step.places.items())

    def add_backward(self, ops: Iterable[Operation]) -> None:
        """Note ops of a backward pass."""
        self._backward.update(dict.fromkeys(ops))
        self._ordered = None

    def order_gradients(self, step: PlainStep) -> None:
        """Order the forward and backward pass of a step."""
        fetched = [*step.ys, *tensors_of(step.gradients)]
        ys = [y.op for y in step.ys]
        ops = _ops_of([t.op for t in fetched])
        forward = adjacency.step_ops(ys, IdentitySet())
        # The forward pass waits for encoding ops, so that the tensor is let go.
        self._forward.update(dict.fromkeys((*forward, *step.encoders)))
        self._phases.append((step.unawaited_helpers(ops), ys))
        held = fetched if step.holds_gradients else []
        self._tell(construction.order_step(ops, held, self._may_await, *self._notes))

    def order_now(self, fetches: Sequence[Any]) -> None:
        """Order the updates behind some fetches, or say why that cannot be done."""
        was_run = state.has_been_run(self._graph, self._backward)
        if self._waits is None and was_run:
            raise StaleGraphError(_TOO_LATE.format(peak=self._peak))
        state.complete(self._graph, fetches)
        if self._waits is None:
            names = ", ".join(f"'{f.name}'" for f in fetches[:3])
            raise SelectionError(
                f"{names}: no op behind them changes a variable by gradients of "
                "geutil.gradients; pass the train op"
            )

    def __call__(self, use: state.Use) -> None:
        """Order the steps as far as their graph is complete."""
        targets = [*use.targets, *(t.op for t in use.tensors)]
        if use.is_function:
            self._order(targets, use)
        elif self._waits is None:
            self._order_for_session(targets, use)
        else:
            self._check(targets, use)

    def _order(self, targets: Sequence[Operation], use: state.Use) -> None:
        key = state.fingerprint(self._graph), tuple(map(id, targets))
        if self._ordered == key:
            return
        replanning, self._replanning = self._replanning, None
        finished = self._edges() if replanning else None
        ordered = self._ordered_step(targets, use)
        if ordered is not None:
            if replanning and finished:
                ordered = self._planned_again(
                    ordered, replanning, finished, targets, use
                )
            self._tell(ordered, whole=True)
        # To order the step changes the graph, and its fingerprint with that.
        self._ordered = state.fingerprint(self._graph), key[1]

    def _planned_again(
        self,
        ordered: construction.OrderedStep,
        replanning: Replanning,
        finished: Edits,
        targets: Sequence[Operation],
        use: state.Use,
    ) -> construction.OrderedStep:
        """Plan again while chunks exceed the budget, each time for less."""
        # By as many bytes less as were missed, or half of that where there is no such
        # plan. Returns the step that takes least, as the graph has it then.
        first, step = self._report, replanning.built
        if first is None or first.budget is None or step is None:
            return ordered
        limit, asked, attempts = first.budget, first.budget, 1
        missed = ordered.resident - limit
        tried = [(ordered, step, first, self._edges())]
        while attempts < _ATTEMPTS and missed > 0:
            attempts += 1
            try:
                found = replanning.again(
                    asked - missed, finished, IdentitySet(use.tensors)
                )
            except PlanError:
                missed //= 2
                continue
            if found is None:
                break
            asked -= missed
            step, report = found
            runtime.mark_image_layouts(use)
            self._forget()
            self.add(step, report)
            ordered = self._ordered_step(targets, use) or ordered
            missed = ordered.resident - limit
            tried.append((ordered, step, report, self._edges()))
        best = min(tried, key=lambda one: one[0].resident)
        if best is not tried[-1]:
            set_back(best[3])
            self._forget()
            self.add(best[1], best[2])
        self._report = replace(
            best[2], mode=first.mode, budget=limit, attempts=attempts
        )
        replace_last(first, self._report, self._graph)
        return best[0]

    def _edges(self) -> Edits:
        return edges_of(self._graph.get_operations())

    def _forget(self) -> None:
        """Forget the step that was noted."""
        for notes in (self._backward, self._phases, self._known, self._elsewhere):
            notes.clear()

    def _ordered_step(
        self, targets: Sequence[Operation], use: state.Use
    ) -> construction.OrderedStep | None:
        """Order the ops that run for some targets; None if no gradient is one."""
        ops = _ops_of(targets, use.feeds)
        if self._backward.keys().isdisjoint(ops):
            return None
        ops = _without_joints(ops, self._backward, targets, use.feeds)
        return construction.order_step(ops, use.tensors, lambda *_: True, *self._notes)

    def _order_for_session(self, targets: Sequence[Operation], use: state.Use) -> None:
        after = _after(_ops_of(targets, use.feeds), self._backward)
        if not any(map(protos.changes_state, after)):
            return
        if obstacle := self._obstacle(use):
            self._warn(obstacle.format(peak=self._peak))
            return
        # Fed tensors count as a part of the step, as they are.
        targets = [*targets, *(t.op for t in use.feeds)]
        ops = _without_joints(_ops_of(targets), self._backward, targets)
        starts = frozenset(filter(protos.changes_state, ops))
        changing = starts.union(_after(ops, starts, awaiting=True))
        # A part of the step alone must not change anything, gradients apart.
        behind = frozenset((*self._backward, *after))

        def may_await(op: Operation, other: Operation) -> bool:
            harmless = op in behind or other not in changing
            return harmless and self._may_await(op, other)

        ordered = construction.order_step(ops, use.tensors, may_await, *self._notes)
        self._waits = frozenset(ordered.waits)
        self._tell(ordered, whole=True)

    def _check(self, targets: Sequence[Operation], use: state.Use) -> None:
        """Refuse a run that would change state only because others wait for that."""
        key = (tuple(map(id, targets)), tuple(sorted(id(t) for t in use.feeds)))
        if key in self._allowed:
            return
        step_ops = partial(adjacency.step_ops, targets, use.feeds)
        needed_ops = frozenset(step_ops(without=self._waits or ()))
        for op in step_ops():
            if op not in needed_ops and protos.changes_state(op):
                raise StaleGraphError(_FORCED.format(op=op.name, type=op.type))
        self._allowed.add(key)

    def _obstacle(self, use: state.Use) -> str | None:
        """Return why updates cannot be ordered for a run, or None."""
        if self._graph.finalized:
            return _FINALIZED
        if state.has_been_run(self._graph, self._backward):
            return _TOO_LATE
        is_computed = any(t.op.inputs or t.op.control_inputs for t in use.feeds)
        return _FED if is_computed else None

    def _may_await(self, op: Operation, other: Operation) -> bool:
        """Return whether an op may wait for another in a graph that a Session runs."""
        # Not if a Session has the op already and would not see that it waits, nor if
        # that would run a part of the backward pass whenever the forward pass is run.
        adds = op in self._forward and other not in self._forward
        return not adds and not state.has_been_run(self._graph, (op,))

    @property
    def _peak(self) -> int:
        return self._report.peak if self._report else 0

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            _logger.warning("%s", message)

    def _tell(self, ordered: construction.OrderedStep, *, whole: bool = False) -> None:
        """Bring the report up to date; the updates are known if the step is whole."""
        before = self._report
        if before is None:
            return
        report, plan = before, ordered.plan
        notes = []
        if whole and not self._holds_gradients:
            if _are_held(plan, self._gradients):
                report = holding_gradients(report)
            held = _held_gradients(plan, self._gradients)
            if held > 0.1 * plan.peak:
                notes.append(_HOLDS.format(held=held, peak=plan.peak))
        limit = report.budget
        if whole and limit is not None and ordered.resident > limit:
            notes.append(_over(ordered, report, limit))
        for note in notes:
            self._warn(note)
        self._report = replace(
            report,
            peak=ordered.peak,
            resident=ordered.resident,
            plan=plan,
            warnings=(*report.warnings, *notes),
        )
        replace_last(before, self._report, self._graph)


def _over(ordered: construction.OrderedStep, report: Report, limit: int) -> str:
    """Return a warning that a step exceeds a budget, and by what."""
    peak = ordered.resident
    # Buffers may fit where the chunks that hold them, with gaps, do not.
    has_chunks = ordered.fullest.program.device.allocator is not None
    if has_chunks and ordered.peak <= limit:
        return _OVER_BY_GAPS.format(
            peak=peak, limit=limit, buffers=ordered.peak, attempts=report.attempts
        )
    node, held = ordered.fullest.fullest()
    listed = ", ".join(f"'{part.name}' ({part.bytes:,})" for part in held[:_NAMED])
    more = f" and {len(held) - _NAMED} more" if len(held) > _NAMED else ""
    return _OVER_BUDGET.format(
        peak=peak,
        limit=limit,
        before=report.resident,
        op=node.name,
        type=node.type,
        held=listed + more,
    )


def _held_gradients(plan: OrderPlan, names: Collection[str]) -> int:
    """Return the bytes of named gradients at the peak, if most are held there."""
    held = plan.simulation.held
    return _held_at(plan, names, int(np.argmax(held))) if held else 0


def _are_held(plan: OrderPlan, names: Collection[str]) -> bool:
    """Return whether a plan holds most gradients until the last one is made."""
    run = plan.simulation
    node_names = [run.program.nodes[i].name for i in run.order]
    places = [place for place, name in enumerate(node_names) if name in names]
    if not places:
        return False
    # The last may be the largest, and is there whatever becomes of it.
    others = {node_names[place] for place in places[:-1]}
    step = places[-1] if others else len(node_names) - 1
    return _held_at(plan, others or names, step) > 0


def _held_at(plan: OrderPlan, names: Collection[str], step: int) -> int:
    """Return the bytes of gradients at a step of a plan, if most are held there."""
    program = plan.simulation.program
    alive = frozenset(plan.simulation.alive(step))
    gradients = [t for n in program.nodes if n.name in names for t in n.outputs]
    held = sum(program.sizes[t] for t in gradients if t in alive)
    return held if 2 * held > sum(map(program.sizes.__getitem__, gradients)) else 0


def _orders_of(graph: Graph) -> _Orders:
    """Return the ordered steps of a graph."""
    graph_state = state.state_of(graph)
    if graph_state.step_order is None:
        graph_state.step_order = _Orders(graph)
        state.on_completion(graph, graph_state.step_order)
    orders: _Orders = graph_state.step_order
    return orders


def _ops_of(
    targets: Sequence[Operation], feeds: IdentitySet | None = None
) -> list[Operation]:
    """Return the ops that run for some targets, in topological order."""
    ops = adjacency.step_ops(targets, feeds or IdentitySet())
    return adjacency.topological_sort(ops)


def _after(
    ops: Sequence[Operation], starts: Iterable[Operation], *, awaiting: bool = False
) -> dict[Operation, None]:
    """Return the ops that depend on `starts`, with `awaiting` also by control edges."""
    starts = frozenset(starts)
    after: dict[Operation, None] = {}
    for op in ops:
        before = [*(t.op for t in op.inputs), *(op.control_inputs if awaiting else ())]
        if op not in starts and any(p in starts or p in after for p in before):
            after[op] = None
    return after


def _without_joints(
    ops: list[Operation],
    backward: Iterable[Operation],
    targets: Sequence[Operation],
    feeds: IdentitySet | None = None,
) -> list[Operation]:
    """Let updates read gradients that one op forwards; return the ops to run."""
    # Keras' optimizers sum gradients over replicas first, by an IdentityN over all of
    # them that is left where there is one replica: none could be used up before all are
    # there.
    joints = [
        op
        for op in _after(ops, backward)
        if op.type == "IdentityN" and len(op.inputs) > 1 and not op.control_inputs
    ]
    for op in joints:
        for read, joined in zip(list(op.inputs), op.outputs, strict=True):
            for reader in adjacency.consumers(joined):
                for place in adjacency.input_indices(reader, joined):
                    creation.set_new_input(reader, place, read)
    # The ops that the joints held together are free of them now.
    return _ops_of(targets, feeds) if joints else ops
