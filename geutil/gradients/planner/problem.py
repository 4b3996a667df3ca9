"""Computations to be scheduled in limited memory, and schedules of them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

from geutil.errors import ArgumentTypeError, PlanError

_WORKSPACE = "workspace"


class Problem:
    """A computation whose nodes each make one output of their inputs.

    Every node runs at least once. While node v runs, memory holds its inputs, its
    output, its workspace and the outputs kept for later. An output may be freed after
    any use, and the node run again for the next one::

        runs     a     b     c     a     d
        a        ####################       of size 1: needed by b and d,
        a freed  ############     ######    or freed behind b and made again
        b              ##########           read by c
        c                    ############   read by d

    Attributes:
        times: the cost of each node, in any unit.
        sizes: the bytes of each node's output.
        edges: pairs of nodes; the second reads the output of the first.
        fixed_order: the order in which nodes run for the first time; None for any
            order.
        keep: nodes that run once, and whose outputs stay live until the end.
        no_recompute: nodes that run once, and whose outputs may be freed.
        outputs: nodes whose outputs are live at the end.
        workspaces: the further bytes that each node holds only while it runs.

    Raises:
        PlanError: a number is negative or not finite, an edge or a node does not
            exist, the edges form a cycle, or `fixed_order` is not an order of them.

    Cost: linear in nodes and edges.

    Example:
        A chain of three, and its backward pass:

        >>> edges = [(0, 1), (1, 2), (2, 3), (1, 3), (3, 4), (0, 4)]
        >>> problem = Problem([1, 1, 1, 2, 2], [8, 8, 8, 8, 8], edges, outputs=[4])
        >>> len(problem), problem.total_time, problem.least_budget
        (5, 7.0, 24)
    """

    def __init__(
        self,
        times: Sequence[float],
        sizes: Sequence[int],
        edges: Iterable[tuple[int, int]],
        *,
        fixed_order: Sequence[int] | None = None,
        keep: Iterable[int] = (),
        no_recompute: Iterable[int] = (),
        outputs: Iterable[int] = (),
        workspaces: Sequence[int] = (),
    ) -> None:
        self.times = tuple(float(time) for time in times)
        self.sizes = tuple(int(size) for size in sizes)
        self.workspaces = tuple(map(int, workspaces or [0] * len(self.sizes)))
        # Each once, in the order of their nodes.
        self.edges = tuple(sorted({(int(a), int(b)) for a, b in edges}))
        self.keep = tuple(sorted({int(v) for v in keep}))
        self.no_recompute = tuple(sorted({int(v) for v in no_recompute}))
        self.outputs = tuple(sorted({int(v) for v in outputs}))
        self.fixed_order = None if fixed_order is None else tuple(map(int, fixed_order))
        self._check_numbers()
        # Refuses a cycle.
        _ = self.topological_order
        if self.fixed_order is not None:
            self._check_order(self.fixed_order)

    def __len__(self) -> int:
        return len(self.times)

    def __repr__(self) -> str:
        return f"Problem({len(self)} nodes, {len(self.edges)} edges)"

    @cached_property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that each node reads, in ascending order."""
        return self._grouped((head, tail) for tail, head in self.edges)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that read each node, in ascending order."""
        return self._grouped(self.edges)

    def _grouped(self, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
        groups: list[list[int]] = [[] for _ in self.times]
        for node, other in pairs:
            groups[node].append(other)
        return tuple(map(tuple, groups))

    @cached_property
    def topological_order(self) -> tuple[int, ...]:
        """The nodes, each behind its inputs, lower numbers first."""
        waits = [len(inputs) for inputs in self.inputs]
        # Sorted, so it is a heap.
        ready = [v for v, count in enumerate(waits) if not count]
        order = []
        while ready:
            node = heappop(ready)
            order.append(node)
            for reader in self.readers[node]:
                waits[reader] -= 1
                if not waits[reader]:
                    heappush(ready, reader)
        if len(order) < len(self):
            # The first nodes of a cycle, the first one twice if it is short.
            try:
                TopologicalSorter(dict(enumerate(self.inputs))).prepare()
            except CycleError as error:
                cycle = " -> ".join(map(str, error.args[1][:6]))
                raise PlanError(f"nodes read each other in a cycle: {cycle}") from None
        return tuple(order)

    @property
    def first_order(self) -> tuple[int, ...]:
        """The fixed order, or the topological one if there is none."""
        return self.topological_order if self.fixed_order is None else self.fixed_order

    @cached_property
    def staying(self) -> frozenset[int]:
        """The nodes whose outputs are there at the end."""
        return frozenset((*self.outputs, *self.keep))

    @cached_property
    def once(self) -> frozenset[int]:
        """The nodes that run once."""
        return frozenset((*self.no_recompute, *self.keep))

    @property
    def total_time(self) -> float:
        """The time of a schedule that runs every node once."""
        return math.fsum(self.times)

    @cached_property
    def least_budget(self) -> int:
        """Bytes that no schedule does without: a node next to its inputs.

        The least peak that can be reached may be larger.
        """
        together = [self.bytes_to_run(v) for v in range(len(self))]
        at_end = sum(self.sizes[v] for v in self.staying)
        return max([at_end, *together], default=0)

    def bytes_to_run(self, node: int) -> int:
        """Return the bytes of a node's output, inputs and workspace."""
        inputs = sum(self.sizes[u] for u in self.inputs[node])
        return self.sizes[node] + inputs + self.workspaces[node]

    def last_uses(self, runs: Sequence[int]) -> list[int]:
        """Return the index of the last use of each run; after all runs if it stays.

        Args:
            runs: every node once or more, each after a run of its inputs.
        """
        latest: dict[int, int] = {}
        last_use = list(range(len(runs)))
        for i, node in enumerate(runs):
            for u in self.inputs[node]:
                if u in latest:
                    last_use[latest[u]] = i
            latest[node] = i
        for node in self.staying & latest.keys():
            last_use[latest[node]] = len(runs)
        return last_use

    def held(self, runs: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes that are held during each run. Args: see `last_uses`."""
        changes = [0] * (len(runs) + 2)
        for i, (node, last) in enumerate(zip(runs, self.last_uses(runs), strict=True)):
            changes[i] += self.sizes[node]
            changes[last + 1] -= self.sizes[node]
        levels = zip(runs, accumulate(changes), strict=False)
        return tuple(level + self.workspaces[node] for node, level in levels)

    def peak(self, runs: Sequence[int]) -> int:
        """Return the most bytes that are held at once. Args: see `last_uses`."""
        return max(self.held(runs), default=0)

    @classmethod
    def from_networkx(
        cls, graph: Any, time: str = "time", size: str = "size", **options: Any
    ) -> Problem:
        """Return the problem of a networkx graph.

        Args:
            graph: a `networkx.DiGraph`. Its nodes are numbered in its own order.
            time: the attribute of nodes that holds their cost.
            size: the attribute that holds the bytes of their outputs. An attribute
                "workspace", if there is one, is read, too.
            options: `fixed_order`, `keep`, `no_recompute` and `outputs`, as numbers.

        Raises:
            ArgumentTypeError: the graph is not directed.
            PlanError: a node lacks an attribute.

        Example:
            >>> import networkx
            >>> graph = networkx.DiGraph([("a", "b")])
            >>> networkx.set_node_attributes(graph, 1, "time")
            >>> networkx.set_node_attributes(graph, 64, "size")
            >>> Problem.from_networkx(graph).sizes
            (64, 64)
        """
        if not hasattr(graph, "is_directed") or not graph.is_directed():
            raise ArgumentTypeError(
                f"from_networkx takes a networkx.DiGraph, not {type(graph).__name__}"
            )
        number = {node: i for i, node in enumerate(graph)}
        for node, data in graph.nodes(data=True):
            for name in (time, size):
                if name not in data:
                    raise PlanError(f"node {node!r} has no attribute '{name}'")
        return cls(
            [graph.nodes[node][time] for node in graph],
            [graph.nodes[node][size] for node in graph],
            [(number[a], number[b]) for a, b in graph.edges()],
            workspaces=[graph.nodes[node].get(_WORKSPACE, 0) for node in graph],
            **options,
        )

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the problem as JSON in node-link form, and write it to a file.

        Args:
            path: the file; None writes none.
        """
        options = {
            name: list(getattr(self, name))
            for name in ("fixed_order", "keep", "no_recompute", "outputs")
            if getattr(self, name)
        }
        document = {
            "directed": True,
            "multigraph": False,
            "graph": options,
            "nodes": [
                {"id": v, "time": self.times[v], "size": self.sizes[v]}
                | ({_WORKSPACE: self.workspaces[v]} if self.workspaces[v] else {})
                for v in range(len(self))
            ],
            "edges": [{"source": a, "target": b} for a, b in self.edges],
        }
        text = json.dumps(document, separators=(",", ":"))
        if path is not None:
            Path(path).write_text(f"{text}\n", encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> Problem:
        """Return the problem that `to_json` wrote.

        Args:
            source: a file, or the text itself.

        Raises:
            PlanError: it is not a document of `to_json`.

        Example:
            >>> Problem.from_json(Problem([1, 2], [3, 4], [(0, 1)]).to_json()).times
            (1.0, 2.0)
        """
        # No path begins with a brace, and JSON of an object does.
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        text = str(source) if is_text else Path(source).read_text(encoding="utf-8")
        try:
            document = json.loads(text)
            nodes = sorted(document["nodes"], key=lambda node: node["id"])
            # Older versions of networkx write "links".
            edges = document["edges"] if "edges" in document else document["links"]
            times = [node["time"] for node in nodes]
            sizes = [node["size"] for node in nodes]
            workspaces = [node.get(_WORKSPACE, 0) for node in nodes]
            number = {node["id"]: i for i, node in enumerate(nodes)}
            pairs = [(number[e["source"]], number[e["target"]]) for e in edges]
            options = document.get("graph", {})
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                "this is no problem in node-link form, with nodes of id, time and "
                f"size and edges of source and target: {error!r}"
            ) from error
        return cls(times, sizes, pairs, workspaces=workspaces, **options)

    def _check_numbers(self) -> None:
        """Refuse numbers that no computation can have."""
        count = len(self.times)
        numbers = {"time": self.times, "size": self.sizes, _WORKSPACE: self.workspaces}
        for name, values in numbers.items():
            if len(values) != count:
                raise PlanError(f"{count} times, but {len(values)} {name}s")
            for node, value in enumerate(values):
                if not (math.isfinite(value) and value >= 0):
                    raise PlanError(
                        f"the {name} of node {node} is {value}; it has to be finite "
                        "and not negative"
                    )
        ends = tuple(v for edge in self.edges for v in edge)
        for name in ("edges", "keep", "no_recompute", "outputs"):
            for node in ends if name == "edges" else getattr(self, name):
                if not 0 <= node < count:
                    raise PlanError(
                        f"{name} names node {node}, of nodes 0 to {count - 1}"
                    )

    def _check_order(self, order: Sequence[int]) -> None:
        """Refuse an order that lacks a node, or has one before its input."""
        if sorted(order) != list(range(len(self))):
            raise PlanError("fixed_order has to name every node once")
        place = {node: i for i, node in enumerate(order)}
        for tail, head in self.edges:
            if place[tail] > place[head]:
                raise PlanError(
                    f"fixed_order has node {head} before its input, node {tail}"
                )


Status = Literal["optimal", "feasible", "infeasible"]


class ScheduleStep(NamedTuple):
    """One step of a schedule: a node that is computed, or whose output is freed."""

    kind: Literal["compute", "free"]
    node: int


class Improvement(NamedTuple):
    """A schedule that was the best when it was found.

    Attributes:
        seconds: the time since solving began.
        overhead: its extra time.
        peak: its peak, in bytes.
    """

    seconds: float
    overhead: float
    peak: int


@dataclass(frozen=True)
class Schedule:
    """Runs of nodes, some of them several times, with their figures.

    Attributes:
        problem: the computation.
        runs: the nodes in the order in which they run.
        budget: the given bytes, or the given extra time if the peak is minimized.
        lower_bound: a lower bound of the extra time of any schedule within the budget;
            infinity if no schedule is.
        status: "optimal": no schedule does better; "feasible": this one is within the
            budget; "infeasible": it is not, and has the least peak that was found.
        history: the improvements, in order.

    Example:
        >>> edges = [(0, 1), (1, 2), (2, 3), (1, 3), (3, 4), (0, 4)]
        >>> problem = Problem([1] * 5, [8] * 5, edges, outputs=[4])
        >>> schedule = Schedule(problem, (0, 1, 2, 3, 0, 4))
        >>> schedule.verify()
        >>> schedule.peak, schedule.time, schedule.overhead
        (24, 6.0, 1.0)
        >>> schedule.steps[:3]
        (ScheduleStep(kind='compute', node=0), ScheduleStep(kind='compute', node=1),
         ScheduleStep(kind='free', node=0))
    """

    problem: Problem
    runs: tuple[int, ...]
    budget: float = math.inf
    lower_bound: float = 0.0
    status: Status = "feasible"
    history: tuple[Improvement, ...] = ()

    def __str__(self) -> str:
        share = 100 * self.overhead / (self.problem.total_time or 1)
        said = (
            f"{self.status}: peak {self.peak} bytes, {len(self.runs)} runs of "
            f"{len(self.problem)} nodes, {share:.2f} % more time"
        )
        if self.status == "infeasible":
            known = "exists" if self.lower_bound == math.inf else "was found"
            least = self.problem.least_budget
            return (
                f"{said}; no schedule within {self.budget:g} bytes {known}; the least "
                f"peak found is {self.peak}, and none is below {least}"
            )
        return f"{said}, at most {100 * self.gap:.2f} % from the best"

    @cached_property
    def steps(self) -> tuple[ScheduleStep, ...]:
        """The runs and frees in turn: each result is freed behind its last use."""
        freed: list[list[int]] = [[] for _ in (*self.runs, None)]
        last_uses = self.problem.last_uses(self.runs)
        for node, last in zip(self.runs, last_uses, strict=True):
            freed[last].append(node)
        steps: list[ScheduleStep] = []
        for node, behind in zip(self.runs, freed, strict=False):
            steps.append(ScheduleStep("compute", node))
            steps += [ScheduleStep("free", v) for v in sorted(behind)]
        return tuple(steps)

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The bytes that are held during each run."""
        return self.problem.held(self.runs)

    @property
    def peak(self) -> int:
        """The most bytes that are held at once."""
        return max(self.held, default=0)

    @property
    def time(self) -> float:
        """The time of all runs."""
        return math.fsum(self.problem.times[node] for node in self.runs)

    @property
    def overhead(self) -> float:
        """The time above that of running every node once."""
        return max(self.time - self.problem.total_time, 0.0)

    @property
    def gap(self) -> float:
        """The most time that may still be saved, as a share of `Problem.total_time`."""
        missing = max(self.overhead - self.lower_bound, 0.0)
        return missing / self.problem.total_time if missing else 0.0

    def verify(self) -> None:
        """Replay the steps one by one, and check them.

        Raises:
            PlanError: a node runs without an input, or again although it may not, an
                output is missing at the end, a node never runs, the order or the budget
                is violated, or a figure differs from the replay.

        Cost: linear in the steps and their inputs.
        """
        problem = self.problem
        there: set[int] = set()
        ran: dict[int, int] = {}
        held = peak = 0
        for number, (kind, node) in enumerate(self.steps):
            where = f"step {number} ({kind} {node})"
            if kind == "free":
                if node not in there:
                    raise PlanError(f"{where}: it is not there")
                if node in problem.keep:
                    raise PlanError(f"{where}: it has to be kept")
                there.remove(node)
                held -= problem.sizes[node]
                continue
            if node in ran and node in problem.once:
                raise PlanError(f"{where}: it may run only once")
            if node in there:
                raise PlanError(f"{where}: its output is there already")
            if missing := [u for u in problem.inputs[node] if u not in there]:
                raise PlanError(f"{where}: its inputs {missing} are not there")
            there.add(node)
            ran[node] = ran.get(node, 0) + 1
            held += problem.sizes[node]
            peak = max(peak, held + problem.workspaces[node])
        self._check_end(there, ran, peak)

    def _check_end(self, there: set[int], ran: dict[int, int], peak: int) -> None:
        """Compare the outcome of the steps with the figures of the schedule."""
        problem = self.problem
        if never := [v for v in range(len(problem)) if v not in ran]:
            raise PlanError(f"nodes {never[:5]} never run")
        if lost := sorted(problem.staying - there):
            raise PlanError(f"the outputs of nodes {lost[:5]} are not there at the end")
        if problem.fixed_order not in (None, tuple(ran)):
            raise PlanError("nodes first run in another order than fixed_order")
        time = math.fsum(problem.times[v] * count for v, count in ran.items())
        if peak != self.peak or not math.isclose(time, self.time, abs_tol=1e-9):
            raise PlanError(
                f"peak and time are {peak} and {time}, not {self.peak} and {self.time}"
            )

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Plot the bytes held during each run, and the budget.

        Args:
            path: a file, with suffix .png, .svg or .pdf.

        Raises:
            MissingExtraError: matplotlib is not installed.
            PlotError: the suffix names no format.
        """
        # Its package imports TensorFlow.
        from geutil.memory.timeline import drawn_axes

        count = len(self.runs)
        first = dict(zip(self.runs[::-1], range(count)[::-1], strict=True))
        again = [i for i, node in enumerate(self.runs) if first[node] != i]
        with drawn_axes(path, "runs in order", "held, bytes") as axes:
            places = range(len(self.held) + 1)
            levels = [*self.held, *(self.held[-1:] or [0])]
            axes.step(places, levels, where="post", linewidth=1.2)
            dots = [self.held[i] for i in again]
            axes.plot(again, dots, "|", label="computed again")
            if self.status != "infeasible" and math.isfinite(self.budget):
                axes.axhline(self.budget, linestyle="--", label="budget")
            axes.legend(frameon=False)
        return Path(path)
