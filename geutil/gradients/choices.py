"""Choices of a step, the open ones and those made: what to keep, encode, rebuild."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from geutil.errors import ArgumentTypeError, PlanError, SelectionError
from geutil.gradients import tensor_sizes
from geutil.gradients.encoding_ops import Encoder
from geutil.gradients.encodings import Encoding, plan_encodings
from geutil.gradients.loops.choosing import (
    Levels,
    LoopChoices,
    Looped,
    Tried,
    best_of,
)
from geutil.gradients.offloading import HOST, Offload
from geutil.gradients.planning import Budget, Plan
from geutil.gradients.policies import Policy
from geutil.gradients.prediction import StepProgram
from geutil.gradients.report import Encoded, extra_times
from geutil.gradients.segments import Recomputation
from geutil.gradients.selection import PLAIN, Keeping
from geutil.gradients.step import PlainStep
from geutil.graph import runtime
from geutil.graph.types import (
    GivenShapes,
    Graph,
    IdentityMap,
    IdentitySet,
    Tensor,
    type_name,
)
from geutil.memory import sizes

MIN_CHECKPOINT_SIZE = 1024
"""The default of `min_checkpoint_size`, in elements."""
LOSSLESS, BFLOAT16 = "lossless", "bfloat16"
ENCODINGS = (LOSSLESS, BFLOAT16)
"""How kept tensors can be encoded."""

_HELD_FOR_LESS = "the step would hold more at its peak if tensors were encoded"
_HELD_FOR_TIME = "within the budget the step takes less time without encodings"
_RUNS_AGAIN = "it runs again, encoded or not"
_UNPLANNED = "the plan has it as it is"


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


def refuse_mesh(graph: Graph) -> None:
    """Raise `PlanError` if a graph is one of a DTensor mesh."""
    if runtime.is_on_mesh(graph):
        raise PlanError(
            "the function reads variables of a DTensor mesh, and DTensor has no layout "
            "for the barriers that hold recomputation back; use tf.gradients there, or "
            "shard the batch by tf.distribute"
        )


@dataclass(frozen=True, eq=False)
class ChosenAll:
    """All that is chosen of a step, which is as it was chosen.

    Attributes:
        keeping: what is kept.
        recomputation: what is recomputed.
        encoded: what is encoded, if anything is to be.
        looped: what loops compute again, if that was open.
    """

    keeping: Keeping
    recomputation: Recomputation
    encoded: Encoded | None
    looped: Looped | None = None


Chosen = tuple[Keeping, Recomputation]
"""What a step keeps, and what it recomputes."""
Choose = Callable[[PlainStep, Any], Chosen]
"""Chooses by a caller's checkpoints what a step keeps and recomputes."""


def choose_all(
    step: PlainStep, options: Options, encoder: Encoder, choose: Choose
) -> ChosenAll:
    """Choose what a step keeps, what it encodes, and what its loops compute again.

    Loops are rebuilt where the choice is free: for "memory", if the step holds less at
    its peak then, and within a budget, if it can be met in less time.

    Args:
        step: as in `choose_and_encode`.
        options: see there.
        encoder: see there.
        choose: see there.

    Raises:
        PlanError: nothing was chosen, or a plan was made for another step.

    Cost: that of `choose_and_encode`; with loops that can compute values again, so
        many times: four, and the binary logarithm of how many there are.
    """
    checkpoints = options.checkpoints
    is_open = checkpoints == "memory" or isinstance(checkpoints, Budget | Plan)
    loops = LoopChoices(step) if is_open else None
    if loops is None or not loops.loops:
        return ChosenAll(*choose_and_encode(step, options, encoder, choose))
    if not loops:
        chosen = ChosenAll(*choose_and_encode(step, options, encoder, choose))
        return replace(chosen, looped=loops.looped(loops.none, in_budget=False))
    if isinstance(checkpoints, Plan):
        levels = loops.planned(checkpoints.loops)
        loops.apply(levels)
        step = replace(step)
        tensor_sizes.settle_shapes(step.ops())
        chosen = ChosenAll(*choose_and_encode(step, options, encoder, choose))
        return replace(chosen, looped=loops.looped(levels, in_budget=True))
    budget = checkpoints if isinstance(checkpoints, Budget) else None
    if budget is not None and budget.extra_time is None:
        checkpoints = replace(budget, limit=budget.bytes(loops.plain.plain_peak()))

    def attempt(levels: Levels) -> Tried[ChosenAll] | PlanError:
        try:
            with loops.applied(levels) as longer:
                # What is known of the step is that of before.
                rebuilt = replace(step)
                tensor_sizes.settle_shapes(rebuilt.ops())
                kept = _with_less_time(checkpoints, longer)
                tried = choose_and_encode(
                    rebuilt, replace(options, checkpoints=kept), encoder, choose
                )
                keeping, plan, encoded = tried
                if budget is None or budget.extra_time is not None:
                    cost = float(_peak_of(plan))
                else:
                    cost = (1 + extra_times(plan, keeping, encoded)[0]) * longer
        except PlanError as error:
            return error
        if budget is not None:
            # As it was asked for.
            keeping.mode = str(budget)
        return Tried(levels, ChosenAll(*tried), cost)

    best = best_of(loops.in_order(), attempt)
    loops.apply(best.levels)
    chosen = best.result
    if any(best.levels):
        warnings = chosen.keeping.warnings
        warnings[:] = [w for w in warnings if not w.startswith(PLAIN)]
    is_limit = budget is not None and budget.extra_time is None
    looped = loops.looped(best.levels, in_budget=is_limit)
    return replace(chosen, looped=looped)


def _with_less_time(checkpoints: Any, longer: float) -> Any:
    """Return checkpoints for a step that takes a part of their extra time already.

    Args:
        checkpoints: as in `Options`.
        longer: how long it takes, as a part of plain gradients.

    Raises:
        PlanError: it takes all of it.
    """
    share = checkpoints.extra_share if isinstance(checkpoints, Budget) else None
    if share is None:
        return checkpoints
    left = (1 + share) / longer - 1
    if left <= 0:
        raise PlanError("what is rebuilt takes more than the extra time by itself")
    return replace(checkpoints, extra_time=left)


def choose_and_encode(
    step: PlainStep, options: Options, encoder: Encoder, choose: Choose
) -> tuple[Keeping, Recomputation, Encoded | None]:
    """Choose what a step keeps, and let backward ops read no more of it than needed.

    What is recomputed is chosen without encodings and with them: what runs again from
    a mask's tensor may be cheaper to hold than the mask. As long as tensors run again
    though they are encoded, it is chosen anew with these as they are. The choice that
    holds the least at its peak is taken; within a budget, the one of the least time.

    Args:
        step: the step with plain gradients; its graph is changed.
        options: the checkpoints, whether to encode, and how small a tensor may be.
        encoder: makes what is kept.
        choose: makes the choice.

    Cost: that of `choose`, two to four times, and linear in the ops of the step.
    """
    refuse_mesh(step.graph)
    if options.encode is None:
        return *choose(step, options.checkpoints), None
    tries = _Tries(step, options, encoder, choose)
    every = tries.found.encodings
    if isinstance(options.checkpoints, Plan):
        planned = options.checkpoints.encoded
        whole = [e for i, e in enumerate(every) if i not in planned]
        return tries.taken(tries.without(whole, _UNPLANNED))
    reason = _HELD_FOR_LESS if tries.limit is None else _HELD_FOR_TIME
    found = [tries.without(every, reason)]
    left: list[Encoding] = []
    while len(left) < len(every):
        less = tries.without(left, _RUNS_AGAIN)
        found.append(less)
        if isinstance(less, PlanError):
            break
        run_again = frozenset(less.recomputation.run_again)
        both = [e for e in every if e not in left and e.tensor.op in run_again]
        if not both:
            break
        left += both
    # Of equals the last one.
    met = [t for t in reversed(found) if not isinstance(t, PlanError)]
    return tries.taken(min(met, key=lambda t: t.cost) if met else found[0])


@dataclass(frozen=True, eq=False)
class _Try:
    """What is chosen of a step that is encoded in some way.

    Attributes:
        keeping: what is kept.
        recomputation: what is recomputed.
        encoded: what is encoded.
        cost: the time of the step within a budget, its peak otherwise.
    """

    keeping: Keeping
    recomputation: Recomputation
    encoded: Encoded
    cost: float


class _Tries:
    """Encodes a step in several ways, one after the other.

    Attributes:
        found: all that can be encoded.
        limit: the budget in bytes, None if there is none.
    """

    def __init__(
        self, step: PlainStep, options: Options, encoder: Encoder, choose: Choose
    ) -> None:
        self._step, self._encoder, self._choose = step, encoder, choose
        self._smallest = options.min_checkpoint_size
        self._plain = StepProgram(step)
        # Of the step as it is now: encoding changes it.
        self._time = _time_of_ops(step)
        self.found = plan_encodings(step, self._smallest)
        self.limit: int | None = None
        self._checkpoints = options.checkpoints
        self._budget = (
            self._checkpoints if isinstance(self._checkpoints, Budget) else None
        )
        if self._budget and self._budget.extra_time is None:
            self.limit = self._budget.bytes(self._plain.plain_peak())
            self._checkpoints = replace(self._budget, limit=self.limit)

    def without(self, left: Sequence[Encoding], reason: str) -> _Try | PlanError:
        """Return what is chosen, or why nothing is.

        Args:
            left: what is not encoded of what can be.
            reason: why.
        """
        part = self.found
        if left:
            staying = IdentityMap((e.tensor, reason) for e in left)
            part = plan_encodings(self._step, self._smallest, staying)
        tensors = IdentitySet(e.tensor for e in part.encodings)
        every = enumerate(self.found.encodings)
        numbers = tuple(i for i, e in every if e.tensor in tensors)
        step = self._encoder.encode(self._step, part)
        tensor_sizes.settle_shapes(step.ops())
        try:
            checkpoints = self._checkpoints
            if part.encodings:
                longer = _time_of_ops(step) / (self._time or 1.0)
                checkpoints = _with_less_time(checkpoints, longer)
            keeping, recomputation = self._choose(step, checkpoints)
            cost = (
                _peak_of(recomputation)
                if self.limit is None
                else _time_of(recomputation, keeping)
            )
        except PlanError as error:
            return error
        if self._budget:
            # As it was asked for.
            keeping.mode = str(self._budget)
        encoded = Encoded(part, self._plain, step, numbers)
        return _Try(keeping, recomputation, encoded, cost)

    def taken(self, tried: _Try | PlanError) -> tuple[Keeping, Recomputation, Encoded]:
        """Return what was tried; raise `PlanError` if nothing was chosen."""
        if isinstance(tried, PlanError):
            raise tried
        return tried.keeping, tried.recomputation, tried.encoded


def _peak_of(plan: Recomputation) -> float:
    return StepProgram(plan.step).peak(plan.segments, plan.places)


def _time_of_ops(step: PlainStep) -> float:
    return sum(map(step.op_times(), step.ops()))


def _time_of(plan: Recomputation, keeping: Keeping) -> float:
    ops = (*plan.step.ops(), *plan.run_again)
    return sum(map(keeping.time_of, ops)) + plan.transfer_time
