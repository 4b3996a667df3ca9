"""The memory of functions that ops run: calls, branches, loops that pile up lists.

Such an op is one node of a program, and the bytes of its function beyond the results
are its temporary memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from geutil.graph import function_calls, shape_inference
from geutil.graph.function_calls import LoopBody, Loops, source_of
from geutil.graph.types import Graph, Operation, Tensor, dims_of
from geutil.memory.executor import simulate
from geutil.memory.kernels.cpu import HELD, Pairs
from geutil.memory.program import Program
from geutil.memory.sizes import UNKNOWN
from geutil.memory.times import op_time

SizeOf = Callable[[Tensor], int]
"""The bytes of a tensor of the graph that is read."""


@dataclass(frozen=True)
class Piled:
    """The memory of the results of a loop, or of a function with loops in it."""

    # The bytes of those results that are lists of something new.
    sizes: dict[int, int] = field(default_factory=dict)
    # The bytes of the elements of lists, whoever else holds them.
    lists: dict[int, int] = field(default_factory=dict)
    # Pairs (result, argument) of places: the result is the argument's buffer.
    aliases: Pairs = ()


def _piled(loops: Loops, op: Operation, graph: Graph, size_of: SizeOf) -> Piled:
    """Return the memory of the results of a loop with a body."""
    body, times = LoopBody(graph), loops.times(op)
    owner: dict[int, tuple[int, int]] = {}
    aliases: dict[int, int] = {}
    lists: dict[int, int] = {}
    for i in range(len(body.results)):
        if body.stays(i):
            aliases[i] = i
            continue
        for element in body.added(i):
            origin = body.origin(element)
            argument = body.list_argument(origin)
            size = (times or 0) * size_of(element)
            lists[i] = lists.get(i, 0) + size
            if argument is not None:
                aliases[i] = argument
            elif origin.op.type not in HELD:
                # The last list is that of the gradient, which lives longest.
                owner[id(origin)] = i, size
    sizes: dict[int, int] = {}
    for i, size in owner.values():
        sizes[i] = sizes.get(i, 0) + size
    shared = [(i, j) for i, j in aliases.items() if not sizes.get(i)]
    return Piled(sizes, lists, shared)


def _returned_lists(graph: Graph, piled: Mapping[Operation, Piled]) -> Piled:
    """Return the memory of the lists that a function's loops make and it returns."""
    # Tf_keras has its recurrent layers in functions, whose gradient is another one that
    # takes the lists.
    returned = Piled()
    met: set[int] = set()
    for i, result in enumerate(graph.outputs):
        source = source_of(result)
        if source.op in piled and result.dtype.name == "variant":
            made, place = piled[source.op], source.value_index
            returned.lists[i] = made.lists.get(place, 0)
            if id(source) not in met:
                returned.sizes[i] = made.sizes.get(place, 0)
            met.add(id(source))
    return returned


class ListSizes:
    """The bytes of the lists of a graph, op by op in their order."""

    def __init__(self, size_of: SizeOf) -> None:
        self._size_of = size_of
        self._elements: dict[int, int] = {}

    def add(self, op: Operation, piled: Piled) -> Mapping[int, int]:
        """Return the bytes of lists among an op's results that nobody else holds."""
        owned = piled.sizes
        if op.type == "TensorListFromTensor":
            # Elements are copied even where a row of the tensor could be one.
            owned = {0: self._size_of(op.inputs[0])}
        elif op.type == "ZerosLike" and op.outputs[0].dtype.name == "variant":
            owned = {0: self._of(op.inputs[0])}
        same = {i: self._of(op.inputs[j]) for i, j in piled.aliases}
        for i, size in (same | owned | piled.lists).items():
            self._elements[id(op.outputs[i])] = size
        return owned

    def _of(self, tensor: Tensor) -> int:
        known = self._elements
        return known.get(id(tensor)) or known.get(id(source_of(tensor)), 0)


ReadBody = Callable[[Graph, "Mapping[Operation, Called]"], Program]
"""Reads the graph of a function, given the memory of its own calls."""


@dataclass(frozen=True)
class Called:
    """The memory of an op by the functions that it runs."""

    # The bytes beyond those of the op's results.
    temporary: int = 0
    # The bytes that it may hold besides, if more iterations run at once.
    surge: int = 0
    results: Piled = field(default_factory=Piled)
    # Pairs (result, argument) of places: returned as passed, in the same buffer.
    forwarded: Pairs = ()
    # The loops whose lists are left out: how often they run is not known.
    uncounted: tuple[str, ...] = ()
    # In the unit of `op_time`: all iterations of a loop, 32 if unknown; the longer
    # branch.
    time: float = 0.0
    # The body of a loop, with the shapes that follow from the call.
    body: Graph | None = None
    # How often the loop runs it, None if that is not known.
    times: int | None = None
    # The bytes that kernels of the functions take beside the allocator.
    packed: int = 0


NOTHING = Called()
ITERATIONS = 2
"""How many iterations of a loop count."""


class CalledFunctions:
    """The memory of functions, each read once for the shapes of its calls."""

    def __init__(self, read: ReadBody, size_of: SizeOf) -> None:
        self._read = read
        self._size_of = size_of
        self._known: dict[tuple[str, ...], tuple[Graph, Called] | None] = {}
        self._depth = 0

    def called_in(
        self, graph: Graph, among: Collection[Operation] | None = None
    ) -> dict[Operation, Called]:
        """Return the memory of the functions that a graph's ops run."""
        # The larger branch of a conditional counts; of a loop two iterations, since one
        # begins before the last one has ended, and the lists that it adds to each time,
        # if constants tell how often it runs.
        called_by_op: dict[Operation, Called] = {}
        loop_graphs: dict[Operation, tuple[Graph, Graph]] = {}
        for caller in function_calls.callers_in(graph):
            if among is not None and caller.op not in among:
                continue
            found = (self._body(graph, n, caller.arguments) for n in caller.names)
            bodies = [body for body in found if body is not None]
            largest = _largest([called for _, called in bodies])
            if caller.is_call and bodies:
                forwarded = bodies[0][1].forwarded
                largest = replace(largest, forwarded=forwarded)
                if function_calls.is_compiled_call(caller.op):
                    # XLA makes room for all results, and lets go of it behind.
                    results = (caller.op.outputs[i] for i, _ in forwarded)
                    room = largest.temporary + sum(map(self._size_of, results))
                    largest = replace(largest, temporary=room)
            called_by_op[caller.op] = largest
            if caller.is_loop and len(bodies) > 1:
                loop_graphs[caller.op] = (bodies[0][0], bodies[1][0])
        loops = Loops(loop_graphs)
        for op, (_, body) in loop_graphs.items():
            piled = _piled(loops, op, body, self._size_of)
            called = called_by_op[op]
            called_by_op[op] = _of_loop(op, loops.times(op), piled, body, called)
        return called_by_op

    def _body(
        self, graph: Graph, name: str, arguments: Sequence[Tensor] | None
    ) -> tuple[Graph, Called] | None:
        passed = shape_inference.behind(arguments or ())
        key = (name, *(str(t.shape) for t in arguments or ()), *map(str, passed))
        # So deep do functions count.
        if key not in self._known and self._depth < 32:
            # Nothing, for a function that calls itself.
            self._known[key] = None
            body = function_calls.body_for_call(graph, name, arguments)
            self._depth += 1
            if body is not None:
                shape_inference.refine(body, passed)
                self._known[key] = body, self._of_body(body)
            self._depth -= 1
        return self._known.get(key)

    def _of_body(self, body: Graph) -> Called:
        """Return the memory of one run of a function, and the lists that it returns."""
        calls = self.called_in(body)
        program = self._read(body, calls)
        piled = {op: called.results for op, called in calls.items()}
        returned = _returned_lists(body, piled)
        forwarded = _forwarded(body)
        # The caller counts results, and one that is an argument has the buffer of that.
        results = sum(
            max(program.sizes[tensor], returned.sizes.get(i, 0))
            for i, tensor in enumerate(program.fetched)
            if i not in forwarded
        )
        run = simulate(program)
        time = sum(
            calls[op].time if op in calls else op_time(op)
            for op in body.get_operations()
        )
        return Called(
            run.peak - results,
            results=returned,
            forwarded=tuple(forwarded.items()),
            uncounted=uncounted_loops(calls),
            time=time,
            packed=run.resident - run.peak,
        )


def _forwarded(body: Graph) -> dict[int, int]:
    """Map the results of a function that are arguments to these."""
    # The tensors that the gradient of a compiled call reads are results of it. XLA
    # gives those that were arguments back as they came.
    place = {id(t): i for i, t in enumerate(body.inputs)}
    sources = ((i, t, source_of(t)) for i, t in enumerate(body.outputs))
    return {
        i: place[id(source)]
        for i, t, source in sources
        if id(source) in place and dims_of(source) == dims_of(t)
    }


def uncounted_loops(calls: Mapping[Operation, Called]) -> tuple[str, ...]:
    """Return the loops whose lists do not count in the memory of some ops."""
    return tuple(name for called in calls.values() for name in called.uncounted)


def _of_loop(
    op: Operation, times: int | None, piled: Piled, body: Graph, once: Called
) -> Called:
    """Return the memory of a loop, given that of one iteration."""
    most = function_calls.parallel_iterations(op)
    if times is not None:
        most = min(most, times)
    usual = min(most, ITERATIONS)
    # Lists of unknown length are left out, of which the report warns by this name.
    here = (op.name,) if times is None and piled.lists else ()
    return replace(
        once,
        temporary=usual * once.temporary,
        surge=(most - usual) * once.temporary,
        results=piled,
        uncounted=(*here, *once.uncounted),
        time=(UNKNOWN if times is None else times) * once.time,
        body=body,
        times=times,
    )


def _largest(bodies: Sequence[Called]) -> Called:
    """Return the memory of an op that runs one of several functions."""
    largest = Piled()
    for results in (body.results for body in bodies):
        pairs = ((largest.sizes, results.sizes), (largest.lists, results.lists))
        for most, one in pairs:
            most |= {i: max(size, most.get(i, 0)) for i, size in one.items()}
    return Called(
        max((body.temporary for body in bodies), default=0),
        results=largest,
        uncounted=tuple(name for body in bodies for name in body.uncounted),
        time=max((body.time for body in bodies), default=0.0),
        packed=max((body.packed for body in bodies), default=0),
    )
