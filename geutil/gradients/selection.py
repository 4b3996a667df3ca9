"""The choice of kept tensors: the caller's checkpoints as a test of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.gradients import segments
from geutil.gradients.planning import (
    Budget,
    BudgetSearch,
    Plan,
    planned_recomputation,
)
from geutil.gradients.policies import Policy, name_of_policy
from geutil.gradients.segments import Recomputation
from geutil.gradients.step import PlainStep
from geutil.graph import adjacency, runtime, types
from geutil.graph.types import Graph, IdentitySet, Tensor
from geutil.memory import sizes
from geutil.memory.sizes import tensor_bytes
from geutil.memory.times import Times, is_heavy, op_time
from geutil.select import names
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
    is_function = callable(checkpoints) and not names.is_keras(checkpoints)
    if is_function and not types.is_tensor(checkpoints):
        policy: Policy = checkpoints
        return policy
    single = isinstance(checkpoints, dict) or not isinstance(checkpoints, Iterable)
    single = single or names.is_keras(checkpoints)
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
        names.tensor_of(graph, t, "the graph of ys") if names.is_name(t) else t
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
    """Tells which forward tensors are kept whatever the caller chose."""

    def __init__(self, step: PlainStep) -> None:
        self._step = step
        self._given = frozenset((*step.seeds, *(x.op for x in step.xs)))
        # By id: the graph holds its tensors, so their ids are theirs for good.
        self._known: dict[int, str | None] = {}
        read = IdentitySet(read.tensor for read in step.edges.reads)
        self._negligible = sizes.negligible_bytes(
            tensor_bytes(t) for t in read if not segments.is_parameter(t.op)
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
        reason = segments.why_kept(tensor.op)
        # How much a variant leads to is unknown: to a loop's stack, for one.
        unknown = sizes.known_dims(tensor) is None or tensor.dtype == tf.variant
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
            and (t.dtype == tf.variant or sizes.tensor_elements(t) >= smallest)
            and policy(t)
        )
