"""From the caller's arguments to a plan, for `gradients` and its dry runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import tensorflow as tf

from geutil.errors import PlanError
from geutil.gradients.apply import build_recomputation, edges_of, set_back
from geutil.gradients.barriers import Offload, with_returns
from geutil.gradients.choices import (
    BFLOAT16,
    PLAIN,
    Candidate,
    Keeping,
    Options,
    checked,
    choose_all,
    refuse_mesh,
    resolve,
)
from geutil.gradients.encodings import Encoder, halve
from geutil.gradients.planning import Budget
from geutil.gradients.prediction import program_of
from geutil.gradients.report import Report, make_report, with_halved
from geutil.gradients.segments import Recomputation, plan_recomputation
from geutil.gradients.step import (
    Edits,
    PlainStep,
    build_step,
    require_targets,
    tensors_of,
    with_replaced,
)
from geutil.gradients.tape.engine import engine_of
from geutil.graph import (
    adjacency,
    creation,
    function_calls,
    op_types,
    runtime,
    state,
    types,
    v1_control_flow,
)
from geutil.graph.types import Graph, IdentitySet, Operation, Tensor
from geutil.graph.walks import closure
from geutil.memory import costs
from geutil.memory.cpu import aliases
from geutil.memory.read import device_of
from geutil.select.walks import get_backward_walk_ops

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
        step = build_recomputation(self.candidate.plan, self.offload)
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
    refuse_mesh(targets[0].graph)
    with runtime.planning_for(targets[0].graph, options.device):
        return _prepared(targets, xs, grad_ys, options, arguments)


def _prepared(
    targets: Sequence[Tensor],
    xs: Any,
    grad_ys: Any,
    options: Options,
    arguments: Mapping[str, Any],
) -> Prepared:
    """Build and plan the gradients of tensors of one graph."""
    checkpoints = checked(targets[0].graph, options.checkpoints)
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
        keeping = resolve(step, kept, options.min_checkpoint_size, returns=returns)
        plan = keeping.plan or plan_recomputation(
            step, keeping if len(keeping.chosen) else keep_all
        )
        if returns and keeping.sends:
            plan = returns(plan)
        if options.checkpoints == "speed":
            plan = _plain_if_less(plan, keeping)
        return keeping, plan

    chosen = choose_all(step, options, encoder, choose)
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
        f"{PLAIN}: what '{keeping.mode}' recomputes is predicted to "
        f"need {peak:,} bytes at its peak, and plain gradients {plain_peak:,}"
    )
    return plan_recomputation(plan.step, keep_all)


ATTEMPTS = 3
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


# An update of a reference variable of version 1 is done in its buffer, which readers
# share: `Identity` copies nothing. TensorFlow runs an update as soon as its gradient is
# there, and later reads of the backward pass get the new value. So
# `Optimizer.compute_gradients` gates gradients; here each waits for the readers of its
# own variable in the step. So who fetches one such gradient runs these reads, too.
# Reads of another call of `gradients` are not waited for, nor an argument that a
# function returns as it is. Resource variables need none of this.

_CALLING = op_types.LOOPS | op_types.BRANCHINGS | op_types.CALLS


def let_out_when_read(step: PlainStep) -> PlainStep:
    """Make gradients of reference variables wait for all reads of these in a step."""
    pairs = zip(step.gradients, step.references, strict=True)
    updated = [(g, r) for g, r in pairs if not (g is None or r is None)]
    if not updated:
        return step
    ops = adjacency.topological_sort(step.ops())
    needed = frozenset(ops)
    awaitable = frozenset(v1_control_flow.unconditional(ops, exits=True))
    makers = types.unique(t.op for t in tensors_of(step.gradients))
    # Several variables may have one gradient.
    reads: types.MutableIdentityMap[dict[Operation, None]] = types.MutableIdentityMap()
    for gradient, reference in updated:
        value = tensors_of([gradient])[0]
        readers = list(_readers(reference, needed))
        found = _behind(readers, needed, awaitable)
        if not awaitable.issuperset(readers):
            # In a loop other values of a turn may still be computed when one leaves it.
            found += [op for op in makers if op in awaitable]
        reads[value] = reads.get(value, {}) | dict.fromkeys(found)

    @cache
    def ends(op: Operation) -> list[Operation]:
        """Return the ops to wait for in the place of one that may call a function."""
        # Once TensorFlow has inlined a function, an op that waits for the call waits
        # for its stateful ops alone; so all results are awaited.
        if op.type not in _CALLING:
            return [op]
        with creation.surroundings_of(op):
            return [tf.identity(t, "read").op for t in op.outputs]

    let_out: types.MutableIdentityMap[Tensor] = types.MutableIdentityMap()
    for value, ops_behind in reads.items():
        if value.op not in awaitable:
            continue
        awaited = [end for op in ops_behind if op is not value.op for end in ends(op)]
        with (
            creation.neutral(step.graph),
            step.graph.device(value.op.device),
            step.graph.control_dependencies(awaited),
        ):
            let_out[value] = tf.identity(value, f"{value.op.name}_read")
    return with_replaced(step, let_out)


def _readers(reference: Tensor, needed: Collection[Operation]) -> Iterator[Operation]:
    """Yield the ops that read the buffer of a variable, views of it apart."""
    views = IdentitySet([reference])
    waiting = [reference]
    for tensor in waiting:
        for op in filter(needed.__contains__, adjacency.consumers(tensor)):
            shown = _shown(op, tensor)
            waiting += [t for t in shown if t not in views]
            for t in shown:
                views.add(t)
            if not shown or op.type in _CALLING:
                yield op


def _shown(op: Operation, tensor: Tensor) -> list[Tensor]:
    """Return the results of an op that may be the buffer of an input."""
    # A function may return an argument, and a loop one that it does not change.
    if op.type in _CALLING or v1_control_flow.is_loop_structure(op):
        return list(op.outputs)
    return [op.outputs[there] for there, i in aliases(op) if op.inputs[i] is tensor]


def _behind(
    ops: Iterable[Operation],
    needed: Collection[Operation],
    awaitable: Collection[Operation],
) -> list[Operation]:
    """Return the first ops behind others that run once and can be awaited."""

    def onwards(op: Operation) -> Iterable[Operation]:
        is_end = op in awaitable
        return () if is_end else filter(needed.__contains__, adjacency.successors(op))

    return [op for op in closure(ops, onwards) if op in awaitable]
