"""Reports of memory-saving gradients, and those built last."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.gradients.choices import Candidate, Keeping, LoopValues
from geutil.gradients.encodings import EncodedTensor, EncodingPlan, Halved
from geutil.gradients.plans import at_least
from geutil.gradients.segments import StepProgram, program_of
from geutil.gradients.step import is_parameter
from geutil.graph.runtime import enclosing_graphs
from geutil.graph.state import state_of
from geutil.graph.types import Graph, Tensor, is_func_graph, is_graph, type_name
from geutil.lazy import Shown
from geutil.memory.bounds import has_solver, worst_of
from geutil.memory.costs import Dims, multiply_adds, open_shapes_of, tensor_bytes
from geutil.memory.schedule import OrderPlan
from geutil.select.selections import LayerNames, with_layer
from geutil.select.walks import get_backward_walk_ops
from geutil.sizes import size_text

_logger = logging.getLogger("geutil")
# So many kept tensors, and tensors of assumed shapes, are printed.
_SHOWN = 20
# Dimensions that a line names; the rest is counted.
_NAMED = 4


@dataclass(frozen=True)
class KeptTensor:
    """A forward tensor that is held until the backward pass has read it.

    Attributes:
        name: its name.
        op_type: the type of the op that yields it.
        bytes: its size; where dimensions are unknown, by the given or assumed shape.
        reason: why it is kept.
        keras_layer: the path of the Keras layer that contains its op; "" if none does.
    """

    name: str
    op_type: str
    bytes: int
    reason: str
    keras_layer: str = ""


@dataclass(frozen=True)
class RecomputedOp:
    """A forward op that runs again in the backward pass.

    Attributes:
        name: its name.
        op_type: its type.
        segment: the number of the segment in which it runs again, in the order of the
            backward pass.
        times: how often it runs again, in all segments.
    """

    name: str
    op_type: str
    segment: int
    times: int = 1


@dataclass(frozen=True)
class Report(Shown):
    """The effect of memory-saving gradients on one step.

    Attributes:
        mode: how the kept tensors were chosen.
        kept: the tensors held between forward and backward pass, without variables and
            constants, in graph order.
        recomputed: the ops that run again, segment by segment.
        segments: the number of segments in which ops run again.
        plain_peak: the predicted peak of plain gradients in bytes, without variables
            and constants: the prediction of `geutil.memory.predict(...,
            grappler=False)`. If the whole step turns out to hold all gradients until it
            ends, so do plain gradients. Their order is not enforced: where gradients of
            weights are most of the peak, Grappler may produce a step that holds up to
            two fifths less.
        peak: the predicted peak with recomputation. When the updates of the step are
            known (the function is built, or `order_updates` is called), `last_report`
            returns a report with the peak of the whole step: the larger of those in the
            planned order and in the executor's.
        resident: the peak including the bytes that kernels pack outside TensorFlow's
            allocator, which `peak` leaves out. Checkpoints are compared by it, and a
            budget limits it. Overheads of the heap are not counted. None under XLA.
        forward_cost: the multiply-adds of the forward pass.
        extra_cost: the multiply-adds of the ops that run again.
        extra_time: the estimated time of the ops that run again and of the lossless
            encodings, as a fraction of the time with plain gradients. Unless times were
            measured, moving an element counts as some multiply-adds of a convolution.
        extra_time_bound: a lower bound of it, by the same estimate, for any schedule of
            the step's ops, encoded as they are, within the budget; 0 if unknown.
        loops: the values that the backward pass of each loop recomputes, or why none:
            for "memory", a budget or a plan.
        budget: the limit of the step, in bytes; None without one.
        attempts: the number of plans made for the budget: more than one where an
            allocator hands out chunks, and those of the finished step exceed the
            budget.
        offloaded: the names of tensors that wait in another device's memory.
        offloaded_bytes: their bytes there, which no peak includes.
        warnings: the facts that the caller should know.
        assumed: the tensors of unknown shape, each with the shape assumed in all sizes.
        encoded: the encoded tensors, in the order of the backward pass.
        not_encoded: the other tensors that the backward pass reads, each with the
            reason; empty without `encode`.
        plan: the order in which the step runs, with its control dependencies.
        plain_plan: the same for plain gradients, whose order is not enforced.
        plain_plan_held: the same for a step that holds all gradients until it ends. It
            replaces `plain_plan` when the whole step turns out to do so.
    """

    mode: str
    kept: tuple[KeptTensor, ...]
    recomputed: tuple[RecomputedOp, ...]
    segments: int
    plain_peak: int
    peak: int
    forward_cost: int
    extra_cost: int
    offloaded: tuple[str, ...]
    warnings: tuple[str, ...]
    assumed: tuple[tuple[str, Dims], ...] = ()
    encoded: tuple[EncodedTensor, ...] = ()
    not_encoded: tuple[KeptTensor, ...] = ()
    extra_time: float = 0.0
    extra_time_bound: float = 0.0
    loops: tuple[LoopValues, ...] = ()
    budget: int | None = None
    resident: int | None = None
    attempts: int = 1
    offloaded_bytes: int = 0
    plan: OrderPlan | None = field(default=None, repr=False, compare=False)
    plain_plan: OrderPlan | None = field(default=None, repr=False, compare=False)
    plain_plan_held: OrderPlan | None = field(default=None, repr=False, compare=False)

    @cached_property
    def plain_resident(self) -> int | None:
        """The `resident` bytes of plain gradients. None under XLA."""
        return self.plain_plan.simulation.resident if self.plain_plan else None

    @cached_property
    def worst(self) -> int | None:
        """The most bytes that the step can hold under any schedule, 8 ops at once.

        A bound, as in `geutil.memory.worst_case`, for the step as geutil built it: the
        step after Grappler may differ by a few percent. On a GPU it bounds its
        allocator's chunks, as in `resident`. None under XLA, which has its own order.

        Raises:
            MissingExtraError: OR-Tools is not installed.
        """
        if self.plan is None:
            return None
        program = self.plan.program
        peak = worst_of(program).peak
        # Another order of the step may leave larger gaps than those looked at.
        return max(peak, self.resident or 0) if program.device.allocator else peak

    @cached_property
    def plain_worst(self) -> int | None:
        """The same for plain gradients, without their updates.

        Raises:
            MissingExtraError: OR-Tools is not installed.
        """
        return worst_of(self.plain_plan.program).peak if self.plain_plan else None

    @property
    def kept_bytes(self) -> int:
        """The total bytes of all kept tensors."""
        return sum(tensor.bytes for tensor in self.kept)

    def __str__(self) -> str:
        plain = self.plain_peak
        ratio = f" (ratio {self.peak / plain:.2f})" if plain else ""
        most = max((op.times for op in self.recomputed), default=1)
        often = "each once" if most == 1 else f"up to {most} times each"
        again = f"{len(self.recomputed)} ops in {self.segments} segments, {often}"
        share = f"{self.extra_cost / (self.forward_cost or 1):.0%} of the forward pass"
        longer = f"{self.extra_time:.0%} more time{at_least(self.extra_time_bound)}"
        lines = [
            f"checkpoints: {self.mode}",
            f"predicted peak: {size_text(self.peak)}, plain {size_text(plain)}{ratio}",
            f"under any schedule: {self.worst_cases()}",
            f"kept: {len(self.kept)} tensors, {size_text(self.kept_bytes)}",
            f"recomputed: {again}, {share}; about {longer}",
        ]
        if self.attempts > 1:
            lines.append(f"planned {self.attempts} times, for the gaps between chunks")
        if self.encoded:
            before = size_text(sum(tensor.bytes for tensor in self.encoded))
            after = size_text(sum(tensor.kept_bytes for tensor in self.encoded))
            lines.append(f"encoded: {len(self.encoded)} tensors, {before} as {after}")
        lines += map(_of_loop, self.loops)
        if self.offloaded:
            there = size_text(self.offloaded_bytes)
            lines.append(f"offloaded: {len(self.offloaded)} tensors, {there} elsewhere")
        if self.assumed:
            # All bytes above hold for these shapes only.
            lines.append(f"sizes are those with: {_shapes(self.assumed)}")
        lines += [f"warning: {warning}" for warning in self.warnings]
        if self.kept:
            lines += ["", *_table(self.kept)]
        return "\n".join(lines)

    def worst_cases(self) -> str:
        """Return a text with the bounds of the step's memory under any schedule."""
        if self.plan is None:
            return "not known, since XLA has an order of its own"
        if not has_solver():
            return "not known; pip install 'geutil[plan]' to have it computed"
        worst, plain = (size_text(size or 0) for size in (self.worst, self.plain_worst))
        return f"at most {worst}, plain {plain}"


def make_report(
    candidate: Candidate,
    offloaded: Iterable[Tensor] = (),
    *,
    ordered: bool = True,
    is_later: bool = False,
) -> Report:
    """Return the report on a choice, without warnings."""
    # `is_later`: the order is planned later, for the whole step. The peak is then that
    # of the one order in which candidates are compared.
    plan, keeping, encoded = candidate.plan, candidate.keeping, candidate.encodings
    step = plan.step
    forward = get_backward_walk_ops(
        list(step.ys), within_ops_fn=step.covers, control_inputs=True
    )
    program = program_of(step)
    planned = program.plan(plan.segments, plan.places, ordered=ordered)
    run = program.quick(plan.segments, plan.places) if is_later else planned.simulation
    run = replace(run, program=program.on_device(run.program))
    plain_program = candidate.plain or program
    plain = plain_program.plain(holds_gradients=step.holds_gradients)
    extra_time, bound = candidate.extra_times
    times = Counter(op for segment in plan.segments for op in segment.ops)
    recomputed = [
        RecomputedOp(op.name, op.type, number, times[op])
        for number, segment in enumerate(plan.segments)
        for op in segment.ops
        if op not in segment.fetched
    ]
    kept = (_kept(t, _reason(t, keeping)) for t in plan.kept if not is_parameter(t.op))
    sent = [*offloaded, *(t for op in plan.fetched for t in op.outputs)]
    assumed = open_shapes_of(step.graph).assumed.items()
    return Report(
        mode=keeping.mode,
        kept=tuple(LayerNames(step.graph).noted(kept, "name")),
        recomputed=tuple(recomputed),
        segments=len(plan.segments),
        plain_peak=plain.peak,
        peak=run.peak,
        resident=run.resident,
        forward_cost=sum(map(multiply_adds, forward)),
        extra_cost=sum(map(multiply_adds, plan.run_again)),
        offloaded=tuple(t.name for t in sent),
        offloaded_bytes=sum(map(tensor_bytes, sent)),
        warnings=(),
        assumed=tuple((t.name, dims) for t, dims in assumed),
        budget=keeping.limit,
        extra_time=extra_time,
        extra_time_bound=bound,
        loops=candidate.loops,
        plan=planned,
        plain_plan=plain,
        plain_plan_held=plain_program.plain(holds_gradients=True),
        **(encodings_of(encoded) if encoded else {}),
    )


def encodings_of(plan: EncodingPlan) -> dict[str, Any]:
    """Return the attributes of a report on encodings."""
    return {
        "encoded": tuple(encoding.described() for encoding in plan.encodings),
        "not_encoded": tuple(_kept(t, reason) for t, reason in plan.left),
    }


def _kept(tensor: Tensor, reason: str) -> KeptTensor:
    return KeptTensor(tensor.name, tensor.op.type, tensor_bytes(tensor), reason)


def with_halved(report: Report, halved: Halved, *, ordered: bool) -> Report:
    """Return the report on a halved step, given the report before."""
    planned = StepProgram(halved.step).plan(ordered=ordered)
    left = {t.name: reason for t, reason in halved.left}
    sized = [(t, tensor_bytes(t)) for t in halved.tensors]
    waiting = [
        EncodedTensor(t.name, t.op.type, "bfloat16", size, size // 2)
        for t, size in sized
    ]
    whole = [t for t in report.not_encoded if t.name in left]
    return replace(
        report,
        encoded=(*report.encoded, *waiting),
        not_encoded=tuple(replace(t, reason=left[t.name]) for t in whole),
        peak=planned.peak,
        resident=planned.simulation.resident,
        plan=planned,
    )


def holding_gradients(report: Report) -> Report:
    """Return a report in which plain gradients, too, hold all gradients to the end."""
    plan = report.plain_plan_held
    if plan is None:
        return report
    return replace(report, plain_peak=plan.peak, plain_plan=plan)


def _shapes(assumed: Iterable[tuple[str, Dims]]) -> str:
    listed = [f"'{name}' {list(dims)}" for name, dims in assumed]
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return f"{', '.join(listed[:_NAMED])}{more}; pass shapes= for others"


def _reason(tensor: Tensor, keeping: Keeping) -> str:
    if tensor in keeping.chosen:
        return f"chosen: {keeping.mode}"
    if not keeping.recomputes:
        return "nothing is recomputed"
    return keeping.always.why(tensor) or "the backward pass starts with it"


def _of_loop(loop: LoopValues) -> str:
    if loop.reason is not None:
        return f"loop '{loop.name}': all values are kept, {loop.reason}"
    return (
        f"loop '{loop.name}': {len(loop.values)} values are computed again each time "
        f"it turns, {size_text(loop.bytes)} less"
    )


def _table(kept_tensors: Iterable[KeptTensor]) -> list[str]:
    """Return the largest kept tensors as lines of a table."""
    largest = sorted(kept_tensors, key=lambda tensor: -tensor.bytes)
    shown = largest[:_SHOWN]
    named = {t.name: with_layer(t.keras_layer, t.name) for t in shown}
    width = max(map(len, named.values()))
    lines = [f"{'kept tensor':{width}}  {'bytes':>13}  {'type':20}  why"]
    lines += [
        f"{named[t.name]:{width}}  {t.bytes:13,}  {t.op_type:20}  {t.reason}"
        for t in shown
    ]
    if len(largest) > len(shown):
        rest = sum(tensor.bytes for tensor in largest[_SHOWN:])
        lines.append(f"... and {len(largest) - len(shown)} smaller, {size_text(rest)}")
    return lines


class _Last:
    """The last report of each thread; those of ended threads are for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The oldest report first.
        self._of: dict[threading.Thread, Report] = {}

    def publish(self, report: Report) -> None:
        thread = threading.current_thread()
        with self._lock:
            # Only the newest report of ended threads can be asked for.
            for ended in [t for t in self._of if not t.is_alive()][:-1]:
                del self._of[ended]
            self._of.pop(thread, None)
            self._of[thread] = report

    def replace(self, old: Report, new: Report) -> None:
        with self._lock:
            for thread, report in self._of.items():
                if report is old:
                    self._of[thread] = new

    def report(self) -> Report | None:
        own = threading.current_thread()
        with self._lock:
            seen = [r for t, r in self._of.items() if t is own or not t.is_alive()]
        return seen[-1] if seen else None


_last = _Last()


def publish(report: Report, graph: Graph) -> None:
    """Make a report the last one of its graph and of this thread; log its warnings."""
    # Graphs around the differentiated one know it as well, and the one that is being
    # made, where gradients may go.
    for inner in (graph, tf.compat.v1.get_default_graph()):
        for around in _and_around(inner):
            state_of(around).report = report
    _last.publish(report)
    for warning in report.warnings:
        _logger.warning("%s", warning)


def replace_last(old: Report, new: Report, graph: Graph) -> None:
    """Replace a report by another one; log nothing."""
    for around in _and_around(graph):
        if state_of(around).report is old:
            state_of(around).report = new
    _last.replace(old, new)


def _and_around(graph: Graph) -> list[Graph]:
    """Return a graph and, of a function, those that it was traced in."""
    return [graph, *filter(is_func_graph, enclosing_graphs(graph))]


def last_report(of: Any = None) -> Report | None:
    """Return the report on the most recently built gradients, or None.

    Those of a `checkpointed` function count as well. Each of its calls has gradients
    and a report of its own. The backward pass builds them from the last call to the
    first, so that after a step with several calls this is the report on the first.

    Args:
        of: a graph, or a part of one: a gradient, any other tensor or op, a
            ConcreteFunction. The report is on the gradients built last in that graph,
            or in functions traced in it. None: on those built last by this thread, or
            by one that has ended, such as those in which a `tf.distribute` strategy
            traces.

    Raises:
        ArgumentTypeError: `of` has no graph.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import gradients, last_report
        >>> with tf.Graph().as_default():
        ...     x = tf.ones([4])
        ...     y = tf.sin(x)
        ...     (slope,) = gradients(tf.exp(tf.cos(y)), x, checkpoints=[y])
        >>> last_report().kept[0].reason
        'chosen: list'
        >>> last_report(slope) is last_report()
        True
    """
    if of is None:
        return _last.report()
    graph = of if is_graph(of) else getattr(of, "graph", None)
    if not is_graph(graph):
        raise ArgumentTypeError(
            "expected a graph, a tensor or op of one, or a ConcreteFunction, got "
            f"{type_name(of)}; of a tf.function pass what get_concrete_function returns"
        )
    report: Report | None = state_of(graph).report
    return report
