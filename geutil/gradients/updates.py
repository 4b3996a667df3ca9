"""Training steps whose use of memory is ordered once their updates are known.

Gradients are used up by updates, which are written after them. So a step is put in
order when its graph is complete: before a function is built of it, or, in a graph of
version 1, before a Session runs it or when `order_updates` is called.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from geutil.errors import SelectionError, StaleGraphError
from geutil.gradients.report import Report, holding_gradients, last_report, replace_last
from geutil.gradients.step import PlainStep, tensors_of
from geutil.gradients.step_order import OrderedStep, Phase, order_step
from geutil.graph import (
    adjacency,
    call_graph,
    creation,
    fetched_subgraph,
    runtime,
    state,
    types,
)
from geutil.graph.types import Graph, IdentitySet, Operation
from geutil.memory.dependencies import OrderPlan
from geutil.select.conversions import graph_of_all

_logger = logging.getLogger("geutil")

_MUCH = 0.1
_OVER = 1.02
_OVER_BUDGET = (
    "the step holds {peak:,} bytes at its peak together with its updates, which were "
    "not known when the budget of {limit:,} bytes was planned for ({before:,} bytes "
    "without them): pass a smaller budget, or, if the updates hold all gradients at "
    "once, holds_gradients=True"
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


def order_when_complete(step: PlainStep, report: Report | None = None) -> None:
    """Have a step put in order once its graph is complete; a first part is done now.

    In a graph of version 1, forward and backward pass are ordered at once, since it may
    be exported before anything runs it. Under XLA and op determinism nothing is done.

    Args:
        step: the step.
        report: what was told of it.

    Cost: that of `order_step`.
    """
    if runtime.is_compiled_by_xla(step.graph) or runtime.is_determinism_enabled():
        return
    orders = orders_of(step.graph)
    orders.add(step, report)
    if not types.is_func_graph(step.graph):
        orders.order_gradients(step)


def order_moved(graph: Graph, backward: Iterable[Operation]) -> None:
    """Have a step put in order whose backward pass was moved to a function.

    Args:
        graph: the graph of the function.
        backward: the backward ops there.
    """
    if not runtime.is_determinism_enabled():
        orders_of(graph).add_backward(backward)


def order_updates(*fetches: Any) -> Report | None:
    """Order the updates of a training step in a graph of version 1.

    What a step holds depends on when its updates use up the gradients, and TensorFlow
    puts that off. In `tf.function` and Keras' `fit` the updates are found when the
    function is built. A Session takes over the whole graph at its first run, often to
    initialize variables, before anything tells what a step runs: so call this before.

    From then on no run can have gradients of the step without its updates: one that
    asks for that is refused.

    Args:
        *fetches: what a step is asked for: the train op, or the updates, with whatever
            else each step runs.

    Returns:
        The report on the gradients of the graph that were built last, with the peak of
        the step as it runs now.

    Raises:
        SelectionError: `fetches` change nothing by gradients of `geutil.gradients`.
        StaleGraphError: a Session has run the graph, which would not see the order.

    Cost: linear in the ops behind `fetches`, but for a logarithm; some 0.15 ms each.

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
    targets = [_op_or_tensor(f) for f in types.flatten(list(fetches))]
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
    """The steps of one graph whose ops are put in order."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._backward: dict[Operation, None] = {}
        self._report: Report | None = None
        self._holds_gradients = True
        # No step is held: it is the key of notes that lead back to the graph.
        self._gradients: frozenset[str] = frozenset()
        # What is run for the ys alone, which must not come to take more.
        self._forward: dict[Operation, None] = {}
        self._phases: list[Phase] = []
        # The places of ops in the orders that gradients were planned with, by name.
        self._known: dict[str, int] = {}
        # The ops whose results are on another device.
        self._elsewhere: set[str] = set()
        self._warned = False
        # What was ordered last: no need to do so again.
        self._ordered: Any = None
        # The ops that wait for updates in a graph that a Session runs.
        self._waits: frozenset[Operation] | None = None
        self._allowed: set[Any] = set()

    def add(self, step: PlainStep, report: Report | None) -> None:
        """Note a step."""
        self.add_backward(step.backward)
        self._report = report
        self._holds_gradients = step.holds_gradients
        self._gradients = frozenset(t.op.name for t in tensors_of(step.gradients))
        self._phases.append((step.seeds, [y.op for y in step.ys]))
        self._elsewhere |= step.elsewhere
        first = len(self._known)
        if step.places:
            self._known |= {name: first + n for name, n in step.places.items()}

    def add_backward(self, ops: Iterable[Operation]) -> None:
        """Note ops of a backward pass."""
        self._backward.update(dict.fromkeys(ops))
        self._ordered = None

    def order_gradients(self, step: PlainStep) -> None:
        """Order the forward and backward pass of a step."""
        fetched_tensors = [*step.ys, *tensors_of(step.gradients)]
        held_tensors = fetched_tensors if step.holds_gradients else []
        ops = adjacency.topological_sort(
            fetched_subgraph.step_ops([t.op for t in fetched_tensors], IdentitySet())
        )
        forward = fetched_subgraph.step_ops([y.op for y in step.ys], IdentitySet())
        # The forward pass waits for what encodes a tensor, so that this is let go.
        self._forward.update(dict.fromkeys((*forward, *step.encoders)))
        self._phases.append((step.unawaited_helpers(ops), [y.op for y in step.ys]))
        self._tell(
            order_step(
                ops,
                held_tensors,
                self._may_await,
                self._phases,
                self._known,
                self._elsewhere,
            )
        )

    def order_now(self, fetches: Sequence[Any]) -> None:
        """Order the updates behind some fetches, or say why that cannot be done."""
        if self._waits is None and self._was_run():
            raise StaleGraphError(_TOO_LATE.format(peak=self._peak))
        state.complete(self._graph, fetches)
        if self._waits is None:
            names = ", ".join(f"'{f.name}'" for f in fetches[:3])
            raise SelectionError(
                f"{names}: no op behind them changes a variable by gradients of "
                "geutil.gradients; pass the train op"
            )

    def __call__(self, use: state.Use) -> None:
        """Put the steps in order as far as their graph is complete."""
        targets = [*use.targets, *(t.op for t in use.tensors)]
        if use.is_function:
            done = (state.fingerprint(self._graph), tuple(map(id, targets)))
            if self._ordered != done:
                self._order(targets, use)
                self._ordered = (
                    state.fingerprint(self._graph),
                    tuple(map(id, targets)),
                )
        elif self._waits is None:
            self._order_for_session(targets, use)
        else:
            self._check(targets, use)

    def _order(self, targets: Sequence[Operation], use: state.Use) -> None:
        ops = adjacency.topological_sort(fetched_subgraph.step_ops(targets, use.feeds))
        if self._backward.keys().isdisjoint(ops):
            return
        if _pass_by_joints(ops, self._backward):
            # What the joints held together is free of them now.
            ops = adjacency.topological_sort(
                fetched_subgraph.step_ops(targets, use.feeds)
            )
        self._tell(
            order_step(
                ops,
                use.tensors,
                phases=self._phases,
                known=self._known,
                elsewhere=self._elsewhere,
            ),
            whole=True,
        )

    def _order_for_session(self, targets: Sequence[Operation], use: state.Use) -> None:
        ops = adjacency.topological_sort(fetched_subgraph.step_ops(targets, use.feeds))
        after = _after(ops, self._backward)
        if not any(call_graph.changes_state(op) for op in after):
            return
        obstacle = self._obstacle(use)
        if obstacle is not None:
            self._warn(obstacle.format(peak=self._peak))
            return
        # What is fed counts as a part of the step, as it is.
        targets = [*targets, *(t.op for t in use.feeds)]
        ops = adjacency.topological_sort(
            fetched_subgraph.step_ops(targets, IdentitySet())
        )
        if _pass_by_joints(ops, self._backward):
            ops = adjacency.topological_sort(
                fetched_subgraph.step_ops(targets, IdentitySet())
            )
        changing = _with_readers(
            ops, (op for op in ops if call_graph.changes_state(op))
        )
        # A part of the step alone must not change anything, gradients apart.
        behind = frozenset((*self._backward, *after))

        def may_await(op: Operation, other: Operation) -> bool:
            harmless = op in behind or other not in changing
            return harmless and self._may_await(op, other)

        ordered = order_step(
            ops, use.tensors, may_await, self._phases, self._known, self._elsewhere
        )
        self._waits = frozenset(ordered.waits)
        self._tell(ordered, whole=True)

    def _check(self, targets: Sequence[Operation], use: state.Use) -> None:
        """Refuse a run that would change state only because others wait for that."""
        key = (tuple(map(id, targets)), tuple(sorted(id(t) for t in use.feeds)))
        if key in self._allowed:
            return
        needed_ops = frozenset(
            fetched_subgraph.step_ops(targets, use.feeds, without=self._waits or ())
        )
        for op in fetched_subgraph.step_ops(targets, use.feeds):
            if op not in needed_ops and call_graph.changes_state(op):
                raise StaleGraphError(_FORCED.format(op=op.name, type=op.type))
        self._allowed.add(key)

    def _obstacle(self, use: state.Use) -> str | None:
        """Return why updates cannot be ordered for a run, or None."""
        if self._graph.finalized:
            return _FINALIZED
        if self._was_run():
            return _TOO_LATE
        if any(t.op.inputs or t.op.control_inputs for t in use.feeds):
            return _FED
        return None

    def _was_run(self) -> bool:
        return state.has_been_run(self._graph, self._backward)

    def _may_await(self, op: Operation, other: Operation) -> bool:
        """Tell whether an op may wait for another in a graph that a Session runs.

        Not if a Session has the op already and would not see that it waits, nor if
        that would run a part of the backward pass whenever the forward pass is run.
        """
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
        old_report = self._report
        if old_report is None:
            return
        report = old_report
        warnings = list(report.warnings)
        if whole and not self._holds_gradients:
            if _are_held(ordered.plan, self._gradients):
                report = holding_gradients(report)
            held_bytes = _held_gradients(ordered.plan, self._gradients)
            if held_bytes > _MUCH * ordered.plan.peak:
                note = _HOLDS.format(held=held_bytes, peak=ordered.plan.peak)
                warnings.append(note)
                self._warn(note)
        limit = report.budget
        if whole and limit is not None and ordered.peak > _OVER * limit:
            note = _OVER_BUDGET.format(
                peak=ordered.peak, before=report.peak, limit=limit
            )
            warnings.append(note)
            self._warn(note)
        self._report = replace(
            report, peak=ordered.peak, plan=ordered.plan, warnings=tuple(warnings)
        )
        replace_last(old_report, self._report, self._graph)


def _held_gradients(plan: OrderPlan, names: Collection[str]) -> int:
    """Return what a plan holds at its peak of gradients if most of them are there.

    Args:
        plan: the order of the step.
        names: of the ops that make the gradients.
    """
    run = plan.simulation
    if not run.order:
        return 0
    peak = max(range(len(run.order)), key=run.held.__getitem__)
    return _held_at(plan, names, peak)


def _are_held(plan: OrderPlan, names: Collection[str]) -> bool:
    """Tell whether a plan holds most gradients until the last of them is there."""
    run = plan.simulation
    node_names = [run.program.nodes[i].name for i in run.order]
    places = [place for place, name in enumerate(node_names) if name in names]
    if not places:
        return False
    # The last may be the largest, and is there whatever becomes of it.
    others = {node_names[place] for place in places[:-1]}
    step = places[-1] if others else len(node_names) - 1
    return bool(_held_at(plan, others or names, step))


def _held_at(plan: OrderPlan, names: Collection[str], step: int) -> int:
    """Return what a plan holds of gradients at a step if most of them are there."""
    run = plan.simulation
    alive = frozenset(run.alive(step))
    gradients = [
        t for node in run.program.nodes if node.name in names for t in node.outputs
    ]
    total = sum(run.program.sizes[t] for t in gradients)
    held_bytes = sum(run.program.sizes[t] for t in gradients if t in alive)
    return held_bytes if 2 * held_bytes > total else 0


def orders_of(graph: Graph) -> _Orders:
    """Return the steps of a graph that are put in order."""
    graph_state = state.state_of(graph)
    if graph_state.step_order is None:
        graph_state.step_order = _Orders(graph)
        state.on_completion(graph, graph_state.step_order)
    orders: _Orders = graph_state.step_order
    return orders


def _op_or_tensor(fetch: Any) -> Any:
    """Return what is run for a fetch: an assignment returns a variable, with its op."""
    return fetch if types.is_op(fetch) or types.is_tensor(fetch) else fetch.op


def _after(
    ops: Sequence[Operation], starts: Iterable[Operation]
) -> dict[Operation, None]:
    """Return the ops that read what others yield, themselves apart, in their order."""
    starts = frozenset(starts)
    after: dict[Operation, None] = {}
    for op in ops:
        if op not in starts and any(t.op in starts or t.op in after for t in op.inputs):
            after[op] = None
    return after


def _with_readers(
    ops: Sequence[Operation], starts: Iterable[Operation]
) -> frozenset[Operation]:
    """Return some ops and all that read them or wait for them."""
    downstream = set(starts)
    for op in ops:
        if any(t.op in downstream for t in op.inputs) or not downstream.isdisjoint(
            op.control_inputs
        ):
            downstream.add(op)
    return frozenset(downstream)


def _pass_by_joints(ops: Sequence[Operation], backward: Iterable[Operation]) -> bool:
    """Let updates read gradients directly that one op forwards together.

    Keras' optimizers sum gradients over replicas first, by an IdentityN over all of
    them that is left where there is one replica: none could be used up before all are
    there.

    Returns:
        Whether there was such an op.
    """
    backward = frozenset(backward)
    after = _after(ops, backward)
    has_joint = False
    for op in after:
        joins = op.type == "IdentityN" and len(op.inputs) > 1
        if not joins or op.control_inputs:
            continue
        has_joint = True
        for read, handed_on in zip(list(op.inputs), op.outputs, strict=True):
            for reader in handed_on.consumers():
                for place, t in enumerate(reader.inputs):
                    if t is handed_on:
                        creation.set_new_input(reader, place, read)
    return has_joint
