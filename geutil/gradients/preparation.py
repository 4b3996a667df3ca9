"""From the caller's arguments to a plan, for `gradients` and its dry runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from geutil.gradients import tensor_sizes
from geutil.gradients.apply import build_recomputation
from geutil.gradients.barriers import Offload, offloaded, with_returns
from geutil.gradients.choices import (
    BFLOAT16,
    Candidate,
    Options,
    choose_all,
    refuse_mesh,
)
from geutil.gradients.encoding_ops import Encoder, halve
from geutil.gradients.prediction import program_of
from geutil.gradients.report import Report, make_report, with_halved
from geutil.gradients.second_plan import Replanning
from geutil.gradients.segments import Recomputation, plan_recomputation
from geutil.gradients.selection import PLAIN, Keeping, checked, resolve
from geutil.gradients.step import PlainStep, build_step, require_targets
from geutil.gradients.tape.engine import engine_of
from geutil.gradients.updates import let_out_when_read
from geutil.graph import (
    adjacency,
    function_calls,
    image_layouts,
    placement,
    runtime,
)
from geutil.graph.types import IdentitySet, Operation, Tensor
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
        """Return how the step can be built again; None if it cannot, or need not be."""

        def build(plain: PlainStep, options: Options) -> tuple[PlainStep, Report]:
            return prepare_step(plain, options).build()

        return Replanning.of(self.plain, self.options, self.candidate, build)

    @runtime.without_collector()
    def build(self) -> tuple[PlainStep, Report]:
        """Build the step as it is planned; return it and the report on it."""
        options = self.options
        report = self.report(is_ordered_later=options.order)
        step = build_recomputation(self.candidate.plan, self.offload)
        image_layouts.hold_when_complete(step.graph)
        if options.encode == BFLOAT16 and not runtime.is_compiled_by_xla(step.graph):
            # Whatever is kept then, to recompute from it as well.
            halved = halve(step, options.min_checkpoint_size, self.encoder)
            step = halved.step
            tensor_sizes.settle_shapes(step.ops())
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
        if image_layouts.are_turned(plan.step.graph):
            warnings.append(_TURNED)
        sent = offloaded(plan)
        if compiled and offloaded(with_returns(plan, self.offload)):
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
    guessed = tensor_sizes.warning_of_sizes(ops)
    warnings = [guessed] if guessed else []
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
    with placement.planning_for(targets[0].graph, options.device):
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
    tensor_dims = tensor_sizes.given_shapes(targets[0].graph, options.shapes)
    # Before anything is built: refuse arguments that do not fit.
    behind = get_backward_walk_ops(targets, control_inputs=True)
    tensor_sizes.settle_shapes(behind, tensor_dims)
    step = build_step(
        targets, xs, grad_ys, arguments, holds_gradients=holds, engine=engine
    )
    tensor_sizes.settle_shapes(step.ops())
    return prepare_step(step, replace(options, checkpoints=checkpoints))


def prepare_step(step: PlainStep, options: Options) -> Prepared:
    """Plan the recomputation of a step with plain gradients and checked checkpoints."""
    encoder, offload = Encoder(), options.offloading()
    is_compiled = runtime.is_compiled_by_xla(step.graph)
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
    """Return plain gradients unless less is predicted to be needed; say so then."""
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
