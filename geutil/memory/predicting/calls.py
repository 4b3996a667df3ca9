"""Ops that run functions: conditionals, loops and calls.

Such an op is one node of a program, and what its function holds beyond the results is
its temporary memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from geutil.graph.body_shapes import body_for_call
from geutil.graph.function_calls import Caller, callers_in, parallel_iterations
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.memory.predicting.loops import Loops, Piled, returned_lists
from geutil.memory.program import Program
from geutil.memory.simulation import simulate

SizeOf = Callable[[Tensor], int]
"""The bytes of a tensor of the graph that is read."""
ReadBody = Callable[[Graph, "Mapping[Operation, Called]"], Program]
"""Reads the graph of a function, given what its own calls hold."""


@dataclass(frozen=True)
class Called:
    """What an op holds by the functions that it runs.

    Attributes:
        temporary: the bytes beyond those of the op's results.
        surge: the bytes that it may hold besides, if more iterations run at once.
        results: what the lists hold that are results.
    """

    temporary: int = 0
    surge: int = 0
    results: Piled = field(default_factory=Piled)


NOTHING = Called()
_DEEPEST = 32
"""How many functions deep functions count."""
ITERATIONS = 2
"""How many iterations of a loop count."""


def called_functions(
    graph: Graph,
    read: ReadBody,
    size_of: SizeOf,
    among: Collection[Operation] | None = None,
) -> dict[Operation, Called]:
    """Return what the functions hold that a graph's ops run.

    Of a conditional the larger branch counts. Of a loop two iterations do, since one
    begins before the last one has ended, and the lists that it adds to each time, if
    constants tell how often it runs.

    Args:
        graph: the graph of the calls.
        read: how to read a body.
        size_of: the bytes of a tensor in a body.
        among: the ops that count; all if None.

    Cost: linear in the ops of the bodies, each once for the shapes of its calls.
    """
    return _Functions(read, size_of).called_in(graph, among)


class _Functions:
    """What functions hold, each read once for the shapes that it is called with.

    Args:
        read: how to read a body.
        size_of: the bytes of a tensor in a body.
    """

    def __init__(self, read: ReadBody, size_of: SizeOf) -> None:
        self._read = read
        self._size_of = size_of
        self._known: dict[tuple[str, ...], tuple[Graph, Called] | None] = {}
        self._depth = 0

    def called_in(
        self, graph: Graph, among: Collection[Operation] | None = None
    ) -> dict[Operation, Called]:
        """Return what the functions hold that a graph's ops run."""
        found: dict[Operation, Called] = {}
        loops: dict[Operation, tuple[Graph, Graph]] = {}
        for caller in callers_in(graph):
            if among is not None and caller.op not in among:
                continue
            bodies = self._bodies(graph, caller)
            found[caller.op] = _largest([called for _, called in bodies])
            if caller.is_loop and len(bodies) > 1:
                loops[caller.op] = (bodies[0][0], bodies[1][0])
        known = Loops(loops, self._size_of)
        for op in loops:
            found[op] = _of_loop(op, known, found[op].temporary)
        return found

    def _bodies(self, graph: Graph, caller: Caller) -> list[tuple[Graph, Called]]:
        bodies = (self._body(graph, name, caller.arguments) for name in caller.names)
        return [body for body in bodies if body is not None]

    def _body(
        self, graph: Graph, name: str, arguments: Sequence[Tensor] | None
    ) -> tuple[Graph, Called] | None:
        key = (name, *(str(t.shape) for t in arguments or ()))
        if key not in self._known and self._depth < _DEEPEST:
            # Nothing, for a function that calls itself.
            self._known[key] = None
            body = body_for_call(graph, name, arguments)
            self._depth += 1
            if body is not None:
                self._known[key] = body, self._of_body(body)
            self._depth -= 1
        return self._known.get(key)

    def _of_body(self, body: Graph) -> Called:
        """Return what one run of a function holds, and the lists that it returns."""
        calls = self.called_in(body)
        program = self._read(body, calls)
        piled = {op: called.results for op, called in calls.items()}
        returned = returned_lists(body, piled)
        results = sum(
            max(program.sizes[tensor], returned.sizes.get(i, 0))
            for i, tensor in enumerate(program.fetched)
        )
        return Called(simulate(program).peak - results, results=returned)


def _of_loop(op: Operation, loops: Loops, once: int) -> Called:
    """Return what a loop holds of which one iteration holds so much."""
    most = parallel_iterations(op)
    times = loops.times(op)
    if times is not None:
        most = min(most, times)
    usual = min(most, ITERATIONS)
    return Called(usual * once, (most - usual) * once, loops.piled(op))


def _largest(bodies: Sequence[Called]) -> Called:
    """Return what an op holds that runs one of several functions."""
    sizes: dict[int, int] = {}
    lists: dict[int, int] = {}
    for body in bodies:
        for most, one in ((sizes, body.results.sizes), (lists, body.results.lists)):
            most |= {i: max(size, most.get(i, 0)) for i, size in one.items()}
    once = max((body.temporary for body in bodies), default=0)
    return Called(once, results=Piled(sizes, lists))
