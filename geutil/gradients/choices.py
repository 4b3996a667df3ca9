"""Candidates (tensors kept, encoded, recomputed in loops) and their search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from geutil.errors import ArgumentTypeError, PlanError, SelectionError
from geutil.gradients.barriers import HOST, Offload
from geutil.gradients.encoding_ops import Encoder
from geutil.gradients.encodings import Encoding, EncodingPlan, plan_encodings
from geutil.gradients.loops import Loop, Rebuilt, find_loops, rebuild
from geutil.gradients.planning import Budget, Plan
from geutil.gradients.policies import Policy
from geutil.gradients.prediction import StepProgram, program_of
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
from geutil.memory.read import device_of

MIN_CHECKPOINT_SIZE = 1024
"""The default of `min_checkpoint_size`, in elements."""
LOSSLESS, BFLOAT16 = "lossless", "bfloat16"
ENCODINGS = (LOSSLESS, BFLOAT16)
"""How kept tensors can be encoded."""

NO_LESS = "the step would hold no less at its peak, or take longer than it may"
_NO_FASTER = "the step is within the budget in less time without"
_OTHER_STEP = (
    "the plan was made for another step: that one had {planned} loops whose values can "
    "be computed again, this one has {found}; call geutil.gradients.plan again"
)
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
    device: str | None = None

    def __post_init__(self) -> None:
        """Refuse options that cannot be met, before anything is built."""
        for name in ("min_checkpoint_size", "prefetch"):
            value = getattr(self, name)
            # True is an int by isinstance, and no number here.
            if type(value) is not int or value < 0:
                raise ArgumentTypeError(f"{name} is a number from 0 up, got {value!r}")
        if not isinstance(self.order, bool):
            raise ArgumentTypeError(f"order is True or False, got {self.order!r}")
        if self.encode is not None and self.encode not in ENCODINGS:
            raise SelectionError(
                f"{self.encode!r} is no encoding; pass one of {', '.join(ENCODINGS)}, "
                "or None to keep tensors as they are"
            )
        # To resolve the device is to check it.
        device_of(self.device)
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

    def offloading(self, *, is_counted: bool = False) -> Offload | None:
        """Return the device and rules of offloading, or None; see `Offload`."""
        planned = self._planned_offload()
        if planned is not None:
            # The plan has its own places for returned tensors.
            return Offload(lambda _: False, planned, 0, is_counted=is_counted)
        if self.offload is False:
            return None
        takes = self._is_large if self.offload is True else self.offload
        return Offload(takes, self.offload_device, self.prefetch, is_counted=is_counted)

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
class Candidate:
    """A choice for a step, as data: nothing of it is built."""

    keeping: Keeping
    # Of the step that is encoded and whose loops compute values again, by edits that
    # are not made yet.
    plan: Recomputation
    # The step with plain gradients, as numbers, if it may be another one.
    plain: StepProgram | None = None
    # None if that was not open.
    encodings: EncodingPlan | None = None
    # The numbers of the encodings among all that were possible.
    encoded: tuple[int, ...] = ()
    # For each loop the values computed again: none (0), or those of one of its cuts.
    levels: tuple[int, ...] = ()
    # For a report.
    loops: tuple[LoopValues, ...] = ()
    # The time of the step's ops, as a part of that without values that loops compute
    # again.
    longer: float = 1.0
    # Less time is better if True, else less bytes at the peak.
    in_budget: bool = False

    @cached_property
    def cost(self) -> float:
        """The time of the step within a budget, its peak otherwise."""
        if self.in_budget:
            return (1 + self.plan.extra_share(self.keeping.time_of)) * self._longer
        return program_of(self.plan.step).peak(self.plan.segments, self.plan.places)

    @cached_property
    def extra_times(self) -> tuple[float, float]:
        """The extra time and its bound, as fractions of the time of plain gradients."""
        bound, longer = self.keeping.bound, self._longer
        if self.keeping.extra_time is not None:
            return self.keeping.extra_time, bound
        extra = self.plan.extra_share(self.keeping.time_of)
        if longer == 1.0:
            return extra, bound
        # Of a bound of 0 nothing is known.
        least = max((1 + bound) * longer - 1, 0.0) if bound else 0.0
        return max((1 + extra) * longer - 1, 0.0), least

    @cached_property
    def _longer(self) -> float:
        """The time of the step's ops, as a fraction of that with plain gradients."""
        if not (self.plain and self.encodings and self.encodings.encodings):
            return self.longer
        time_of = self.keeping.time_of
        plain = sum(map(time_of, self.plain.ops)) or 1.0
        return self.longer * sum(map(time_of, self.plan.step.ops())) / plain


@dataclass(frozen=True)
class LoopValues:
    """Values that the backward pass of a loop recomputes in each iteration.

    Attributes:
        name: the name of the loop of the forward pass.
        values: the names of the recomputed values in the body; empty if all are kept.
        ops: the number of ops of the body that run again.
        bytes: the bytes that all iterations together save.
        reason: why all values are kept; None if some are recomputed.
    """

    name: str
    values: tuple[str, ...] = ()
    ops: int = 0
    bytes: int = 0
    reason: str | None = None


# For each loop the values computed again: none (0), or those of one of its cuts.
Levels = tuple[int, ...]


class LoopChoices:
    """The loops of a step, if there is a choice, and the values they recompute."""

    def __init__(self, step: PlainStep, loops: Sequence[Loop]) -> None:
        self.loops = loops
        self._step = step
        self._rebuilt: dict[tuple[int, int], Rebuilt] = {}
        self._refused: dict[int, str] = {}
        self._time = sum(map(step.op_times(), step.ops())) if loops else 0.0

    def planned(self, levels: Sequence[int]) -> Levels:
        """Return a choice made before, or raise `PlanError` if for another step."""
        found = len(self.loops)
        levels = tuple(levels) or (0,) * found
        pairs = zip(self.loops, levels, strict=False)
        if len(levels) != found or any(n and n not in loop.cuts for loop, n in pairs):
            raise PlanError(_OTHER_STEP.format(planned=len(levels), found=found))
        return levels

    def in_order(self) -> list[Levels]:
        """Return choices of decreasing memory and increasing time."""
        # Each loop goes on by the values that save the most bytes for their time.
        choices: list[Levels] = [(0,) * len(self.loops)]
        while True:
            levels = choices[-1]
            more = [
                (_saved_for_time(loop, level, now), -i, level)
                for i, (loop, now) in enumerate(zip(self.loops, levels, strict=True))
                for level in loop.cuts
                if level > now
            ]
            if not more:
                return choices
            _, place, level = max(more)
            i = -place
            choices.append((*levels[:i], level, *levels[i + 1 :]))

    def rebuilt(self, levels: Levels) -> PlainStep:
        """Return the step with new loops, by edits to make, or raise `PlanError`."""
        chosen = [(i, level) for i, level in enumerate(levels) if level]
        if not chosen:
            return self._step
        for i, level in chosen:
            if (i, level) not in self._rebuilt:
                try:
                    self._rebuilt[i, level] = rebuild(self.loops[i], level)
                except PlanError as error:
                    # The report on the loops gives this reason.
                    self._refused[i] = str(error)
                    raise
        loops = tuple(map(self._rebuilt.__getitem__, chosen))
        return replace(self._step, edits=replace(self._step.edits, loops=loops))

    def longer(self, levels: Levels) -> float:
        """Return the step's time, as a fraction of that with all values kept."""
        pairs = zip(self.loops, levels, strict=True)
        more = sum(loop.cuts[level].time for loop, level in pairs if level)
        return 1 + more / (self._time or 1.0)

    def values(self, levels: Levels, *, in_budget: bool) -> tuple[LoopValues, ...]:
        """Return the rows of a report on the loops by a choice."""
        values = []
        for i, (loop, level) in enumerate(zip(self.loops, levels, strict=True)):
            name, cut = loop.forward.name, loop.cuts.get(level)
            if cut is not None:
                names = tuple(pile.value for pile in cut.dropped)
                values.append(LoopValues(name, names, len(cut.ops), cut.saved))
            else:
                other = _NO_FASTER if in_budget else NO_LESS
                reason = self._refused.get(i) or loop.reason or other
                values.append(LoopValues(name, reason=reason))
        return tuple(values)


def _saved_for_time(loop: Loop, level: int, now: int) -> float:
    """Return the bytes that a cut saves beyond another one, per extra time."""
    cut, before = loop.cuts[level], loop.cuts.get(now)
    saved = cut.saved - (before.saved if before else 0)
    return saved / max(cut.time - (before.time if before else 0.0), 1.0)


Choose = Callable[[PlainStep, Any], tuple[Keeping, Recomputation]]
"""Chooses the kept and recomputed tensors of a step by a caller's checkpoints."""


def choose_all(
    step: PlainStep, options: Options, encoder: Encoder, choose: Choose
) -> Candidate:
    """Choose the tensors that a step keeps, its encodings, and levels of its loops."""
    # Loops are rebuilt where the choice is free: for "memory", if that lowers the peak,
    # and within a budget, if it takes less time. `encoder` adds ops without readers.
    # Cost: that of `choose`; two to four times with encodings; with loops that can
    # compute values again, four and the binary logarithm of their number times that.
    refuse_mesh(step.graph)
    search = _CandidateSearch(step, options, encoder, choose)
    loops, plan = search.loops, options.checkpoints
    if isinstance(plan, Plan):
        whole = [e for i, e in enumerate(search.every) if i not in plan.encoded]
        best = search.candidate(loops.planned(plan.loops), whole, _UNPLANNED)
    else:
        best = best_of(loops.in_order(), search.best)
    in_budget = best.in_budget or isinstance(plan, Plan)
    return replace(best, loops=loops.values(best.levels, in_budget=in_budget))


class _CandidateSearch:
    """Candidates of a step: its encodings, and the levels of its loops."""

    def __init__(
        self, step: PlainStep, options: Options, encoder: Encoder, choose: Choose
    ) -> None:
        self._step, self._encoder, self._choose = step, encoder, choose
        self._smallest = options.min_checkpoint_size
        self._encodes = options.encode is not None
        self._checkpoints = checkpoints = options.checkpoints
        is_open = checkpoints == "memory" or isinstance(checkpoints, Budget | Plan)
        self.loops = LoopChoices(step, find_loops(step) if is_open else [])
        self._all = (
            plan_encodings(step, self._smallest) if self._encodes else EncodingPlan()
        )
        # All that can be encoded.
        self.every = self._all.encodings
        may_change = self._encodes or self.loops.loops
        self._plain = program_of(step) if may_change else None
        self._budget = checkpoints if isinstance(checkpoints, Budget) else None
        self._in_budget = self._budget is not None and self._budget.extra_time is None
        if self._plain and self._budget and self._in_budget:
            limit = self._budget.bytes(self._plain.plain_peak())
            self._checkpoints = replace(self._budget, limit=limit)

    def candidate(
        self, levels: Levels, left: Sequence[Encoding] = (), reason: str = ""
    ) -> Candidate:
        """Return the candidate for some levels, without the encodings `left`."""
        step, longer = self.loops.rebuilt(levels), self.loops.longer(levels)
        checkpoints = _with_less_time(self._checkpoints, longer)
        part = self._all
        if left:
            staying = IdentityMap((e.tensor, reason) for e in left)
            part = plan_encodings(self._step, self._smallest, staying)
        if part.encodings:
            plain_time = step.total_time or 1.0
            step = self._encoder.encode(step, part)
            sizes.settle_shapes(step.ops())
            checkpoints = _with_less_time(checkpoints, step.total_time / plain_time)
        keeping, plan = self._choose(step, checkpoints)
        if self._budget:
            # As it was asked for.
            keeping.mode = str(self._budget)
        if any(levels):
            warnings = keeping.warnings
            warnings[:] = [w for w in warnings if not w.startswith(PLAIN)]
        tensors = IdentitySet(e.tensor for e in part.encodings)
        return Candidate(
            keeping,
            plan,
            self._plain,
            part if self._encodes else None,
            tuple(i for i, e in enumerate(self.every) if e.tensor in tensors),
            levels,
            longer=longer,
            in_budget=self._in_budget,
        )

    def _attempt(
        self, levels: Levels, left: Sequence[Encoding] = (), reason: str = ""
    ) -> Candidate | PlanError:
        """Return a candidate, or why there is none."""
        try:
            return self.candidate(levels, left, reason)
        except PlanError as error:
            return error

    def best(self, levels: Levels) -> Candidate | PlanError:
        """Return the best candidate with some loops, or the error why none is."""
        # With encodings and without: to run ops again from a tensor may hold less than
        # its mask does. As long as tensors run again though they are encoded, the
        # recomputation is chosen anew without these encodings.
        reason = _HELD_FOR_TIME if self._in_budget else _HELD_FOR_LESS
        found = [self._attempt(levels, self.every, reason)]
        left: list[Encoding] = []
        while len(left) < len(self.every):
            less = self._attempt(levels, left, _RUNS_AGAIN)
            found.append(less)
            if isinstance(less, PlanError):
                break
            run_again = frozenset(less.plan.run_again)
            both = [e for e in self.every if e not in left and e.tensor.op in run_again]
            if not both:
                break
            left += both
        # Of equals the last one.
        return _least(found[::-1]) or found[0]


def best_of(
    choices: Sequence[Levels], attempt: Callable[[Levels], Candidate | PlanError]
) -> Candidate:
    """Return the best candidate over choices of loops, or raise PlanError."""
    # If one of the `choices`, in the order of `LoopChoices.in_order`, can be met, so
    # can those behind it, or all before it.
    tried = [attempt(levels) for levels in dict.fromkeys((choices[0], choices[-1]))]
    first, last = tried[0], tried[-1]
    low, high = 0, len(choices) - 1
    # Where one end cannot be met, the nearest to it that can is wanted; else the middle
    # is one more to choose from.
    while high - low > 1:
        middle = (low + high) // 2
        found = attempt(choices[middle])
        tried.append(found)
        if isinstance(first, PlanError) == isinstance(last, PlanError):
            break
        if isinstance(found, PlanError) == isinstance(first, PlanError):
            low = middle
        else:
            high = middle
    best = _least(tried)
    if best is None:
        raise last if isinstance(last, PlanError) else PlanError(NO_LESS)
    return best


def _least(tried: Iterable[Candidate | PlanError]) -> Candidate | None:
    """Return the best candidate, of equals the one whose loops recompute least."""
    met = [t for t in tried if not isinstance(t, PlanError)]
    if len(met) < 2:
        return met[0] if met else None
    return min(met, key=lambda t: (t.cost, sum(t.levels)))


def _with_less_time(checkpoints: Any, longer: float) -> Any:
    """Return checkpoints for a step that takes `longer` times the plain one already."""
    share = checkpoints.extra_share if isinstance(checkpoints, Budget) else None
    if share is None or longer == 1.0:
        return checkpoints
    left = (1 + share) / longer - 1
    if left <= 0:
        raise PlanError("what is rebuilt takes more than the extra time by itself")
    return replace(checkpoints, extra_time=left)
