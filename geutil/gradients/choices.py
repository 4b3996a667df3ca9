"""The tensors that a step keeps, encodes, or computes again in loops.

The caller's checkpoints are checked and turned into a test of each tensor, `Keeping`.
Candidates add encodings and loops, as edits that are planned only; the search returns
the best one. Nothing is built here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError, PlanError, SelectionError
from geutil.gradients import segments
from geutil.gradients.barriers import HOST, Offload
from geutil.gradients.budget_search import BudgetSearch
from geutil.gradients.encodings import Encoder, Encoding, EncodingPlan, plan_encodings
from geutil.gradients.loops import Loop, Rebuilt, find_loops, rebuild
from geutil.gradients.plans import Budget, Plan, planned_recomputation
from geutil.gradients.policies import Policy, name_of_policy
from geutil.gradients.segments import StepProgram, program_of
from geutil.gradients.step import PlainStep, Recomputation, is_parameter, why_kept
from geutil.graph import adjacency, runtime, types
from geutil.graph.types import GivenShapes, Graph, IdentityMap, IdentitySet, Tensor
from geutil.memory import costs
from geutil.memory.costs import Times, is_heavy, op_time, tensor_bytes
from geutil.memory.read import device_of
from geutil.select import selections
from geutil.sizes import size_text

PLAIN = "these are plain gradients"
"""How a warning begins that nothing is recomputed."""
_NOTHING_HEAVY = (
    "there is no convolution, matmul, einsum or the like between xs and ys: these are "
    "plain gradients; checkpoints='memory' chooses by bytes"
)
_NOTHING_CHOSEN = (
    "the policy keeps no tensor between xs and ys, so there is nothing to recompute "
    "from: these are plain gradients"
)
_NOTHING_LEFT = (
    "no checkpoint is left, so there is nothing to recompute from: these are plain "
    "gradients"
)
_NO_USE = (
    "nothing is offloaded: with kept tensors in the memory of another device the step "
    "is predicted to need {peak:,} bytes at its peak, and without that {without:,}"
)
_NOTHING_TRAVELS = (
    "nothing is offloaded: to compute results again takes less time than to send them "
    "to another device and back"
)
MODES = ("collection", "memory", "speed")
COLLECTION = "checkpoints"
"""The graph collection that `checkpoints="collection"` reads."""


def checked(
    graph: Graph, checkpoints: Any
) -> str | Policy | Budget | Plan | tuple[Tensor, ...] | None:
    """Return the `checkpoints` of `gradients`, checked: a mode, policy or tensors."""
    # None stays None: nothing is to be recomputed. Nothing is built.
    if checkpoints is None or isinstance(checkpoints, Budget | Plan):
        return checkpoints
    if isinstance(checkpoints, str):
        if checkpoints not in MODES:
            raise SelectionError(
                f"'{checkpoints}' is no mode of checkpoints; pass one of "
                f"{', '.join(MODES)}, a list of tensors or names, or a policy"
            )
        if checkpoints == "collection":
            collected(graph)
        return checkpoints
    # A Keras layer can be called, and is none.
    is_function = callable(checkpoints) and not selections.is_keras(checkpoints)
    if is_function and not types.is_tensor(checkpoints):
        policy: Policy = checkpoints
        return policy
    single = isinstance(checkpoints, dict) or not isinstance(checkpoints, Iterable)
    single = single or selections.is_keras(checkpoints)
    if single or types.is_tensor(checkpoints):
        checkpoints = [checkpoints]
    return _tensors(graph, checkpoints)


def collected(graph: Graph) -> tuple[Tensor, ...]:
    """Return the collection, without tensors that only outer graphs can have."""
    members = list(runtime.collection(graph, COLLECTION))
    if not members:
        raise SelectionError(
            f"the collection '{COLLECTION}' of this graph is empty; add tensors by "
            f"tf.compat.v1.add_to_collection('{COLLECTION}', tensor), or pass "
            "checkpoints='memory' to have them chosen"
        )
    # A graph inherits the collections of the one that it is traced in.
    around = runtime.enclosing_graphs(graph)
    return _tensors(
        graph, (t for t in members if getattr(t, "graph", None) not in around)
    )


def _tensors(graph: Graph, checkpoints: Iterable[Any]) -> tuple[Tensor, ...]:
    """Return a list of checkpoints as tensors; refuse those that the graph lacks."""
    given = (types.dereference(t) for t in checkpoints)
    tensors = tuple(
        selections.tensor_of(graph, t, "the graph of ys")
        if selections.is_name(t)
        else t
        for t in given
    )
    for t in tensors:
        if not types.is_tensor(t):
            raise ArgumentTypeError(
                f"a checkpoint is a tensor of the graph, got {types.type_name(t)}; "
                f"pass a list of tensors, Keras layers or names, a policy, or one of "
                f"{', '.join(MODES)}"
            )
        if t.graph is not graph:
            raise SelectionError(
                f"the checkpoint '{t.name}' belongs to another graph than ys; inside "
                "tf.function, choose tensors that were made inside it"
            )
    return tensors


class AlwaysKept:
    """Forward tensors that are kept in any case, and the reason for each."""

    def __init__(self, step: PlainStep) -> None:
        self._step = step
        self._given = frozenset((*step.seeds, *(x.op for x in step.xs)))
        # By id: the graph holds its tensors, so their ids are theirs for good.
        self._known: dict[int, str | None] = {}
        read = IdentitySet(read.tensor for read in step.edges.reads)
        self._negligible = costs.negligible_bytes(
            tensor_bytes(t) for t in read if not is_parameter(t.op)
        )

    def __call__(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is kept."""
        return self.why(tensor) is not None

    def why(self, tensor: Tensor) -> str | None:
        """Return why `tensor` is kept, or None if that is open."""
        key = id(tensor)
        if key not in self._known:
            self._known[key] = self._find(tensor)
        return self._known[key]

    def _find(self, tensor: Tensor) -> str | None:
        if tensor.op in self._given or not self._step.covers(tensor.op):
            return "it is given"
        reason = why_kept(tensor.op)
        # How much a variant leads to is unknown: to a loop's stack, for one.
        unknown = costs.known_dims(tensor) is None or tensor.dtype == tf.variant
        if reason is not None or unknown:
            return reason
        small = tensor_bytes(tensor) <= self._negligible
        return "it is too small to matter" if small else None


@dataclass(eq=False)
class Keeping:
    """The forward tensors of a step that are kept, and the figures of the choice."""

    # The choice that the caller asked for, in words.
    mode: str
    chosen: IdentitySet
    always: AlwaysKept
    warnings: list[str] = field(default_factory=list)
    recomputes: bool = True
    # Where it does not follow from kept tensors.
    plan: Recomputation | None = None
    # In bytes.
    limit: int | None = None
    # No schedule within the limit takes less extra time, as a part of the step's.
    bound: float = 0.0
    time_of: Times = op_time
    # Where a plan says it.
    extra_time: float | None = None
    # Set where kept tensors may wait on another device.
    sends: bool = True

    def __call__(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is kept."""
        return tensor in self.chosen or self.always(tensor)


def resolve(
    step: PlainStep,
    checkpoints: Any,
    min_checkpoint_size: int,
    *,
    among_others: bool = False,
    returns: Callable[[Recomputation], Recomputation] | None = None,
) -> Keeping:
    """Return the tensors to keep of a step by the `checkpoints` of `gradients`."""
    resolver = _Resolver(step, min_checkpoint_size, among_others, returns)
    keeping = resolver.resolve(checked(step.graph, checkpoints))
    if keeping.time_of is op_time:
        # Loops, branches and calls take the time of their functions.
        keeping.time_of = step.op_times()
    return keeping


class _Resolver:
    """Resolves each kind of checkpoints for a step."""

    def __init__(
        self,
        step: PlainStep,
        smallest: int,
        among_others: bool,
        returns: Callable[[Recomputation], Recomputation] | None,
    ) -> None:
        self._step, self._smallest, self._among_others = step, smallest, among_others
        self._returns = returns
        self._always = AlwaysKept(step)

    def resolve(self, choice: Any) -> Keeping:
        """Return the tensors to keep by checkpoints that were checked."""
        if choice is None:
            return Keeping("none", IdentitySet(), self._always, recomputes=False)
        if isinstance(choice, Budget):
            return self._within_budget(choice)
        if isinstance(choice, Plan):
            return self._by_plan(choice)
        if isinstance(choice, tuple):
            return self._by_list(choice, "list")
        if choice == "collection":
            return self._by_list(collected(self._step.graph), choice)
        if choice == "memory":
            return self._least_peak()
        is_speed = choice == "speed"
        chosen = self._chosen_by(is_heavy if is_speed else choice, self._smallest)
        name = choice if is_speed else name_of_policy(choice)
        keeping = Keeping(name, chosen, self._always)
        if not len(chosen):
            keeping.warnings.append(_NOTHING_HEAVY if is_speed else _NOTHING_CHOSEN)
        return keeping

    def _least_peak(self) -> Keeping:
        """Return the choice for "memory", with a warning if that is plain gradients."""
        # The choice of "speed" is simulated as well, since no cutting may lead there.
        heavy = tuple(self._chosen_by(is_heavy, self._smallest))
        search = BudgetSearch(self._step, self._always, [heavy], updates="none")
        among_others = self._among_others
        choice = search.least_once_again(self._smallest, among_others=among_others)
        sends = False
        if self._returns:
            # There the fewest bytes are sent that it takes.
            sending = search.least_once_again(
                self._smallest,
                among_others=among_others,
                returns=self._returns,
                enough=int(0.7 * choice.peak),
            )
            # It may take time.
            sends = sending.peak <= 0.95 * choice.peak
            wanted = _NO_USE.format(peak=sending.peak, without=choice.peak)
            choice = sending if sends else choice
        keeping = Keeping(
            "memory",
            IdentitySet(choice.kept),
            self._always,
            plan=None if choice.spares_last else choice.plan,
            time_of=search.time_of,
            sends=sends or self._returns is None,
        )
        if not keeping.sends:
            keeping.warnings.append(wanted)
        if choice.reason is not None:
            keeping.warnings.append(f"{PLAIN}: {choice.reason}")
        return keeping

    def _within_budget(self, budget: Budget) -> Keeping:
        """Return the choice of least compute in a budget, of least peak in a time."""
        heavy = tuple(self._chosen_by(is_heavy, 0))
        warnings = []
        if budget.offload and runtime.is_compiled_by_xla(self._step.graph):
            warnings.append("XLA compiles a step for one device: nothing is offloaded")
            budget = replace(budget, offload=False)
        share = budget.extra_share
        search = BudgetSearch(
            self._step,
            self._always,
            [heavy],
            budget,
            # As for "memory": there is no limit that updates could exceed.
            updates="apart" if share is None else "none",
        )
        limit = budget.bytes(search.plain_peak) if share is None else None
        trial = search.least(share or 0.0) if limit is None else search.within(limit)
        if budget.offload and not (trial.plan and trial.plan.fetched):
            warnings.append(_NOTHING_TRAVELS)
        return Keeping(
            str(budget),
            IdentitySet(trial.kept),
            self._always,
            warnings,
            recomputes=trial.plan is not None,
            plan=trial.plan,
            limit=limit,
            bound=trial.bound,
            time_of=search.time_of,
        )

    def _by_plan(self, plan: Plan) -> Keeping:
        """Return the choice of a plan for the step that it was made for."""
        recomputation = planned_recomputation(self._step, plan)
        recomputes = bool(recomputation.segments)
        kept = recomputation.kept if recomputes else ()
        return Keeping(
            f"plan for {size_text(plan.budget)}",
            IdentitySet(t for t in kept if not self._always(t)),
            self._always,
            recomputes=recomputes,
            plan=recomputation,
            limit=plan.budget,
            extra_time=plan.extra_time,
            bound=plan.bound,
        )

    def _by_list(self, listed: Sequence[Tensor], mode: str) -> Keeping:
        """Return the choice of listed tensors, with warnings about the useless ones."""
        between = frozenset(segments.recomputable(self._step, self._always))
        useful = IdentitySet(t for t in listed if t.op in between)
        warnings = [
            f"the checkpoint '{t.name}' is not between xs and ys: keeping it saves "
            "nothing"
            for t in listed
            if t not in useful and not self._always(t)
        ]
        if not len(useful):
            warnings.append(_NOTHING_LEFT)
        return Keeping(mode, useful, self._always, warnings)

    def _chosen_by(
        self, policy: Callable[[Tensor], bool], smallest: int
    ) -> IdentitySet:
        """Return the tensors that a policy keeps of those that could be recomputed."""
        return IdentitySet(
            # To cast again costs nothing.
            adjacency.source_behind(t, ("Cast",))
            for op in segments.recomputable(self._step, self._always)
            for t in op.outputs
            if not self._always(t)
            # A variant is one element, which may stand for any number of tensors.
            and (t.dtype == tf.variant or costs.tensor_elements(t) >= smallest)
            and policy(t)
        )


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
                "offload is True, False or a policy, got "
                f"{types.type_name(self.offload)}"
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
        return costs.tensor_elements(tensor) >= self.min_checkpoint_size


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
            costs.settle_shapes(step.ops())
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
        # recomputation is chosen again without these encodings.
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
