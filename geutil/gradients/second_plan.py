"""Plans made again, for budgets that the chunks of a finished step exceed.

A budget is planned for before the updates of the step are known, and the order that the
step has in the end moves the gaps between chunks. Once the step is finished, its edges
are set back to those of plain gradients, and another plan is carried out. Ops of the
first one are left without readers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from geutil.errors import PlanError
from geutil.gradients.apply import make_edits
from geutil.gradients.choices import Candidate, Options
from geutil.gradients.planning import Budget
from geutil.gradients.report import Report
from geutil.gradients.step import Edits, PlainStep, tensors_of
from geutil.graph import adjacency, creation, runtime, state, types
from geutil.graph.placement import planned_for
from geutil.graph.types import Graph, IdentitySet, Operation
from geutil.memory.kernels import device_of

ATTEMPTS = 3
"""How many plans are made at the most. Chunks move by some percent from one plan to
the next, so that the second or third is within a limit that can be met."""

Build = Callable[[PlainStep, Options], tuple[PlainStep, Report]]
"""Plans and builds a step with plain gradients. Raises `PlanError`."""


def edges_of(ops: Iterable[Operation]) -> Edits:
    """Return the current edges of some ops as edits that restore them."""
    ops = list(ops)
    return Edits(
        {op: list(op.inputs) for op in ops},
        {op: list(adjacency.control_inputs(op)) for op in ops},
    )


def set_back(edges: Edits) -> None:
    """Give ops the edges that they had before."""
    inputs = {
        op: tensors
        for op, tensors in edges.inputs.items()
        if any(new is not old for new, old in zip(tensors, op.inputs, strict=True))
    }
    controls = {
        op: awaited
        for op, awaited in edges.controls.items()
        if {*awaited} != {*adjacency.control_inputs(op)}
    }
    make_edits(Edits(inputs, controls))


class Replanning:
    """The gradients of one step in a function, which can be built again."""

    def __init__(self, plain: PlainStep, options: Options, build: Build) -> None:
        self._graph: Graph = plain.graph
        self._plain = edges_of(self._graph.get_operations())
        self._options, self._build = options, build
        # A copy, by which nothing was looked up: that keeps a graph as long as its key.
        self._step = replace(plain)
        self.built: PlainStep | None = None
        self._count = 0

    @classmethod
    def of(
        cls, plain: PlainStep, options: Options, candidate: Candidate, build: Build
    ) -> Replanning | None:
        """Return the means to build a step again by `build`, ahead of its first one."""
        # None where its budget is none of chunks, and where an edit cannot be taken
        # back.
        budget, graph = options.checkpoints, plain.graph
        is_possible = (
            isinstance(budget, Budget)
            and budget.extra_time is None
            and types.is_func_graph(graph)
            and not runtime.is_compiled_by_xla(graph)
            and not any(candidate.levels)
            and device_of(planned_for(graph)).allocator is not None
        )
        return cls(plain, options, build) if is_possible else None

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
            step, report = self._build(replace(self._step), options)
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
