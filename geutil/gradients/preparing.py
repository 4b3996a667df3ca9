"""From the caller's arguments to a plan: what `gradients` and `explain` share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from geutil.errors import ArgumentTypeError, PlanError, SelectionError
from geutil.gradients import tensor_sizes
from geutil.gradients.encoding_ops import Encoder, halve
from geutil.gradients.encodings import EncodingPlan, plan_encodings
from geutil.gradients.offloading import HOST, Offload, offloaded
from geutil.gradients.planning import Budget, Plan
from geutil.gradients.policies import Policy
from geutil.gradients.prediction import StepProgram
from geutil.gradients.recomputing import build_recomputation
from geutil.gradients.report import Encoded, Report, make_report, with_halved
from geutil.gradients.segments import Recomputation, plan_recomputation
from geutil.gradients.selection import Keeping, checked, resolve
from geutil.gradients.step import PlainStep, build_step, require_targets
from geutil.gradients.tape.building import engine_of
from geutil.graph import adjacency, function_calls, runtime
from geutil.graph.types import (
    GivenShapes,
    Graph,
    IdentitySet,
    Operation,
    Tensor,
    type_name,
)
from geutil.memory import sizes
from geutil.select.walks import get_backward_walk_ops

MIN_CHECKPOINT_SIZE = 1024
"""The default of `min_checkpoint_size`, in elements."""
LOSSLESS, BFLOAT16 = "lossless", "bfloat16"
ENCODINGS = (LOSSLESS, BFLOAT16)
"""How kept tensors can be encoded."""

_XLA_WIDENS = (
    "XLA compiles the step, and may leave out that tensors are rounded to bfloat16 and "
    "widened again: none is halved, only lossless encodings are made"
)
_HELD_FOR_LESS = "the step would hold more at its peak if tensors were encoded"
_HELD_FOR_TIME = "within the budget the step takes less time without encodings"
_ALL_KEPT = (
    "all that the backward pass reads after its start is kept, so there is nothing to "
    "recompute: these are plain gradients"
)
_COMPILED = (
    "XLA compiles '{name}' (calls of that kind: {count}): what it holds besides their "
    "results while it runs them is no part of the predicted peaks; for a convolution "
    "by groups that may be many times the rest"
)
_ONE_DEVICE = "XLA compiles a step for one device: nothing is offloaded"


@dataclass(frozen=True)
class Options:
    """How to choose and hold checkpoints; see `geutil.gradients.gradients`."""

    checkpoints: Any
    min_checkpoint_size: int = MIN_CHECKPOINT_SIZE
    offload: bool | Policy = False
    offload_device: str = HOST
    prefetch: int = 1
    holds_gradients: bool = False
    engine: Any = "tensorflow"
    order: bool = True
    shapes: GivenShapes | None = None
    encode: str | None = None

    def __post_init__(self) -> None:
        """Refuse options that cannot be met, before anything is built."""
        for name in ("min_checkpoint_size", "prefetch"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ArgumentTypeError(f"{name} is a number from 0 up, got {value!r}")
        if not isinstance(self.order, bool):
            raise ArgumentTypeError(f"order is True or False, got {self.order!r}")
        if self.encode is not None and self.encode not in ENCODINGS:
            raise SelectionError(
                f"{self.encode!r} is no encoding; pass one of {', '.join(ENCODINGS)}, "
                "or None to keep tensors as they are"
            )
        if not isinstance(self.offload, bool) and not callable(self.offload):
            raise ArgumentTypeError(
                f"offload is True, False or a policy, got {type_name(self.offload)}"
            )

        planned = self._planned_offload() is not None
        if planned and self.offload is not False:
            raise SelectionError(
                "the plan says what is offloaded: pass offload=False with it"
            )
        if (planned or self.offload is not False) and self.encode == BFLOAT16:
            raise SelectionError(
                "offloaded tensors are not halved: pass offload=False, or "
                f"encode='{LOSSLESS}'"
            )

    def offloading(self) -> Offload | None:
        """Return what is offloaded, and how."""
        planned = self._planned_offload()
        if planned is not None:
            # The plan has its own places for what comes back.
            return Offload(lambda _: False, planned, prefetch=0)
        if self.offload is False:
            return None
        takes = self._is_large if self.offload is True else self.offload
        return Offload(takes, self.offload_device, self.prefetch)

    def _planned_offload(self) -> str | None:
        """Return the device where a plan, or one to be made, has results wait."""
        chosen = self.checkpoints
        if isinstance(chosen, Budget) and chosen.offload:
            return chosen.offload_device
        is_away = isinstance(chosen, Plan) and chosen.away
        return chosen.offload_device if is_away else None

    def _is_large(self, tensor: Tensor) -> bool:
        return sizes.tensor_elements(tensor) >= self.min_checkpoint_size


@dataclass(frozen=True, eq=False)
class Prepared:
    """A step with plain gradients, and what shall become of it.

    Attributes:
        plan: what is recomputed.
        keeping: what is kept, and why.
        offload: what is offloaded, and how.
        where: what warnings begin with, if they are about a part of a step.
        order: whether the step is held to its planned order.
        encode: how kept tensors are encoded, or None.
        encoded: what is encoded of the plain step.
        encoder: makes what is kept.
        smallest: tensors of fewer elements are not encoded.
    """

    plan: Recomputation
    keeping: Keeping
    offload: Offload | None
    where: str = ""
    order: bool = True
    encode: str | None = None
    encoded: Encoded | None = None
    encoder: Encoder = field(default_factory=Encoder)
    smallest: int = MIN_CHECKPOINT_SIZE

    def build(self) -> tuple[PlainStep, Report]:
        """Build the step as it is planned.

        Returns:
            The step with the gradients to return, and the report on it.

        Cost: linear in the ops of the step and their edges.
        """
        report = self.report()
        step = build_recomputation(self.plan, self.offload)
        if self.encode != BFLOAT16 or runtime.is_compiled_by_xla(step.graph):
            return step, report
        # Whatever is kept then, to recompute from it as well.
        halved = halve(step, self.smallest, self.encoder)
        tensor_sizes.settle_shapes(halved.step.ops())
        return halved.step, with_halved(report, halved, ordered=self.order)

    def report(self) -> Report:
        """Return the report on the plan."""
        warnings = list(self.keeping.warnings)
        if self.keeping.recomputes and not (self.plan.segments or warnings):
            warnings.append(_ALL_KEPT)
        compiled = runtime.is_compiled_by_xla(self.plan.step.graph)
        if compiled and self.encode == BFLOAT16:
            warnings.append(_XLA_WIDENS)
        warnings += _warnings_of_sizes(self.plan.step.ops(), compiled=compiled)
        sent = offloaded(self.plan, self.offload) if self.offload else []
        if sent and compiled:
            warnings.append(_ONE_DEVICE)
            sent = []
        # XLA has an order of its own, which is taken to hold as little.
        recomputed = bool(self.plan.segments)
        ordered = recomputed if compiled else self.order
        report = make_report(
            self.plan, self.keeping, sent, ordered=ordered, encoded=self.encoded
        )
        if compiled:
            report = replace(report, plan=None, plain_plan=None, plain_plan_held=None)
        return replace(report, warnings=tuple(self.where + w for w in warnings))


def _warnings_of_sizes(ops: Sequence[Operation], *, compiled: bool) -> list[str]:
    """Return what to tell of sizes that are not known, or not counted."""
    guessed = tensor_sizes.warning_of_sizes(ops)
    warnings = [guessed] if guessed else []
    calls = (
        [] if compiled else [op for op in ops if function_calls.is_compiled_call(op)]
    )
    if calls:
        first = min(calls, key=adjacency.creation_index)
        warnings.append(_COMPILED.format(count=len(calls), name=first.name))
    return warnings


def keep_all(tensor: Tensor) -> bool:
    """Keep every tensor: these are plain gradients."""
    return True


def prepare(
    ys: Any, xs: Any, grad_ys: Any, options: Options, arguments: Mapping[str, Any]
) -> Prepared:
    """Build plain gradients, and plan what is recomputed.

    Args:
        ys: as in `geutil.gradients.gradients`.
        xs: as there.
        grad_ys: as there.
        options: how to choose and hold checkpoints.
        arguments: further arguments of `tf.gradients`.
    """
    targets = require_targets(ys)
    _refuse_mesh(targets[0].graph)
    checkpoints = checked(targets[0].graph, options.checkpoints)
    holds = options.holds_gradients
    engine = None if options.engine == "tensorflow" else engine_of(options.engine)
    tensor_dims = tensor_sizes.given_shapes(targets[0].graph, options.shapes)
    # Before anything is built: what does not fit is refused.
    tensor_sizes.settle_shapes(
        get_backward_walk_ops(targets, control_inputs=True), tensor_dims
    )
    step = build_step(
        targets, xs, grad_ys, arguments, holds_gradients=holds, engine=engine
    )
    tensor_sizes.settle_shapes(step.ops())
    encoder = Encoder()

    def choose(step: PlainStep, kept: Any) -> Chosen:
        keeping = resolve(step, kept, options.min_checkpoint_size)
        plan = keeping.plan or plan_recomputation(
            step, keeping if len(keeping.chosen) else keep_all
        )
        if checkpoints == "speed":
            plan = _plain_if_less(plan, keeping)
        return keeping, plan

    keeping, plan, encoded = choose_and_encode(step, options, encoder, choose)
    return Prepared(
        plan,
        keeping,
        options.offloading(),
        order=options.order,
        encode=options.encode,
        encoded=encoded,
        encoder=encoder,
        smallest=options.min_checkpoint_size,
    )


def _refuse_mesh(graph: Graph) -> None:
    if runtime.is_on_mesh(graph):
        raise PlanError(
            "the function reads variables of a DTensor mesh, and DTensor has no layout "
            "for the barriers that hold recomputation back; use tf.gradients there, or "
            "shard the batch by tf.distribute"
        )


Chosen = tuple[Keeping, Recomputation]
"""What a step keeps, and what it recomputes."""
Choose = Callable[[PlainStep, Any], Chosen]
"""Chooses by a caller's checkpoints what a step keeps and recomputes."""


def choose_and_encode(
    step: PlainStep, options: Options, encoder: Encoder, choose: Choose
) -> tuple[Keeping, Recomputation, Encoded | None]:
    """Choose what a step keeps, and let backward ops read no more of it than needed.

    What is recomputed is chosen without encodings and with them: what runs again from
    a mask's tensor may be cheaper to hold than the mask. There are none where the step
    would hold more at its peak with them; within a budget, where it would take longer.

    Args:
        step: the step with plain gradients; its graph is changed.
        options: the checkpoints, whether to encode, and how small a tensor may be.
        encoder: makes what is kept.
        choose: makes the choice.

    Cost: twice that of `choose`, and linear in the ops of the step.
    """
    _refuse_mesh(step.graph)
    checkpoints = options.checkpoints
    if options.encode is None:
        return *choose(step, checkpoints), None
    plain = StepProgram(step)
    if isinstance(checkpoints, Plan):
        return _encode_as_planned(step, options, encoder, choose)
    found = plan_encodings(step, options.min_checkpoint_size)
    if not found.encodings:
        return *choose(step, checkpoints), Encoded(found, plain, step)
    is_limit = isinstance(checkpoints, Budget) and checkpoints.extra_time is None
    if is_limit:
        checkpoints = replace(checkpoints, limit=checkpoints.bytes(plain.plain_peak()))
    measure = _time_of if is_limit else _peak_of
    # Before the step is changed. A budget may be one that only encodings are within, or
    # only no encodings.
    whole = _tried(step, checkpoints, choose)
    most = math.inf if isinstance(whole, PlanError) else measure(whole)
    encoded = encoder.encode(step, found)
    tensor_sizes.settle_shapes(encoded.ops())
    less = _tried(encoded, checkpoints, choose)
    if not isinstance(less, PlanError) and measure(less) <= most:
        return *less, Encoded(found, plain, encoded)
    encoder.undo()
    if isinstance(whole, PlanError):
        raise whole
    reason = _HELD_FOR_TIME if is_limit else _HELD_FOR_LESS
    stay = ((encoding.tensor, reason) for encoding in found.encodings)
    return *whole, Encoded(EncodingPlan((), (*found.left, *stay)), plain, step)


def _tried(step: PlainStep, checkpoints: Any, choose: Choose) -> Chosen | PlanError:
    """Return what is chosen of a step, or why nothing is."""
    try:
        return choose(step, checkpoints)
    except PlanError as error:
        return error


def _peak_of(chosen: Chosen) -> float:
    _, plan = chosen
    return StepProgram(plan.step).peak(plan.segments, plan.places)


def _time_of(chosen: Chosen) -> float:
    keeping, plan = chosen
    ops = (*plan.step.ops(), *plan.run_again)
    return sum(map(keeping.time_of, ops)) + plan.transfer_time


def _encode_as_planned(
    step: PlainStep, options: Options, encoder: Encoder, choose: Choose
) -> tuple[Keeping, Recomputation, Encoded | None]:
    """Encode a step if the one that a plan was made for was encoded."""
    plain = StepProgram(step)
    found = plan_encodings(step, options.min_checkpoint_size)
    encoded = encoder.encode(step, found)
    tensor_sizes.settle_shapes(encoded.ops())
    if options.checkpoints.fits(encoded):
        return *choose(encoded, options.checkpoints), Encoded(found, plain, encoded)
    encoder.undo()
    return *choose(step, options.checkpoints), Encoded(
        EncodingPlan((), ()), plain, step
    )


def _plain_if_less(plan: Recomputation, keeping: Keeping) -> Recomputation:
    """Return plain gradients unless less is predicted to be needed; say so then."""
    if not plan.segments:
        return plan
    program = StepProgram(plan.step)
    peak, plain_peak = program.peak(plan.segments), program.peak()
    if peak < plain_peak:
        return plan
    keeping.chosen = IdentitySet()
    keeping.warnings.append(
        f"these are plain gradients: what '{keeping.mode}' recomputes is predicted to "
        f"need {peak:,} bytes at its peak, and plain gradients {plain_peak:,}"
    )
    return plan_recomputation(plan.step, keep_all)
