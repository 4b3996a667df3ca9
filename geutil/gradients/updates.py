"""Training steps whose use of memory is ordered once their updates are known.

Updates consume gradients, and are built after them. So a step is ordered when its graph
is complete: before a function is built from it, or, in a graph of version 1, before a
Session runs it or when `order_updates` is called.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import PlanError, SelectionError, StaleGraphError
from geutil.gradients.apply import edges_of, set_back
from geutil.gradients.preparation import ATTEMPTS, Replanning
from geutil.gradients.report import Report, holding_gradients, last_report, replace_last
from geutil.gradients.step import Edits, PlainStep, tensors_of
from geutil.gradients.step_order import OrderedStep, Phase, order_step
from geutil.graph import adjacency, creation, protos, runtime, state, types
from geutil.graph.types import Graph, IdentitySet, Operation
from geutil.memory.schedule import OrderPlan
from geutil.select.selections import graph_of_all

_logger = logging.getLogger("geutil")

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
        self._phases: list[Phase] = []
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
        self._tell(order_step(ops, held, self._may_await, *self._notes))

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
        ordered: OrderedStep,
        replanning: Replanning,
        finished: Edits,
        targets: Sequence[Operation],
        use: state.Use,
    ) -> OrderedStep:
        """Plan again while chunks exceed the budget, each time for less."""
        # By as many bytes less as were missed, or half of that where there is no such
        # plan. Returns the step that takes least, as the graph has it then.
        first, step = self._report, replanning.built
        if first is None or first.budget is None or step is None:
            return ordered
        limit, asked, attempts = first.budget, first.budget, 1
        missed = ordered.resident - limit
        tried = [(ordered, step, first, self._edges())]
        while attempts < ATTEMPTS and missed > 0:
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
    ) -> OrderedStep | None:
        """Order the ops that run for some targets; None if no gradient is one."""
        ops = _ops_of(targets, use.feeds)
        if self._backward.keys().isdisjoint(ops):
            return None
        ops = _without_joints(ops, self._backward, targets, use.feeds)
        return order_step(ops, use.tensors, lambda *_: True, *self._notes)

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

        ordered = order_step(ops, use.tensors, may_await, *self._notes)
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

    def _tell(self, ordered: OrderedStep, *, whole: bool = False) -> None:
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


def _over(ordered: OrderedStep, report: Report, limit: int) -> str:
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
