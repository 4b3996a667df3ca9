"""The memory of functions that ops run: calls, branches, loops that pile up lists.

Such an op is one node of a program, and what its function holds beyond the results is
its temporary memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from geutil.graph import function_calls, op_types, shape_inference
from geutil.graph.types import Graph, Operation, Tensor, dims_of
from geutil.memory.executor import simulate
from geutil.memory.kernels.cpu import HELD, Pairs, passes_on
from geutil.memory.program import Program
from geutil.memory.sizes import UNKNOWN
from geutil.memory.times import op_time

SizeOf = Callable[[Tensor], int]
"""The bytes of a tensor of the graph that is read."""
_COMPARISONS = {"Less": 0, "LessEqual": 1}
"""How often more a counter is counted up once it has reached the bound."""


@dataclass(frozen=True)
class Piled:
    """The memory of the results of a loop, or of a function with loops in it."""

    # The bytes of those results that are lists of something new.
    sizes: dict[int, int] = field(default_factory=dict)
    # The bytes of the elements of lists, whoever else holds them.
    lists: dict[int, int] = field(default_factory=dict)
    # Pairs (result, argument) of places: the result is the argument's buffer.
    aliases: Pairs = ()


class Loops:
    """The loops of a graph that are functions, each with its condition and body."""

    def __init__(
        self, loops: Mapping[Operation, tuple[Graph, Graph]], size_of: SizeOf
    ) -> None:
        self._loops, self._size_of = loops, size_of
        self._times: dict[Operation, int | None] = {}

    def times(self, op: Operation) -> int | None:
        """Return how often a loop runs, None if constants do not tell."""
        if op not in self._times:
            # A counter that starts with the result of a loop before.
            self._times[op] = None
            # Keras has two bounds: the length of a sequence and the most times at all.
            bounds = [n for n in self._bounds(op) if n is not None]
            self._times[op] = min(bounds, default=None)
        return self._times[op]

    def exact_times(self, op: Operation) -> int | None:
        """Return how often a loop runs, None if anything else may end it."""
        bounds = list(self._bounds(op))
        return None if None in bounds else self.times(op)

    def piled(self, op: Operation) -> Piled:
        """Return what the results of a loop hold. Cost: linear in its body."""
        body = LoopBody(self._loops[op][1])
        times = self.times(op)
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
                size = (times or 0) * self._size_of(element)
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

    def _bounds(self, op: Operation) -> Iterator[int | None]:
        """Yield how often each test lets a loop run, None if that is not known."""
        condition, graph = self._loops[op]
        body = LoopBody(graph)
        places = {id(t): i for i, t in enumerate(condition.inputs)}
        waiting = [condition.outputs[0]]
        while waiting:
            test = source_of(waiting.pop()).op
            if test.type == "LogicalAnd":
                waiting += test.inputs
            else:
                yield self._count(op, test, places, body)

    def _count(
        self, op: Operation, test: Operation, places: Mapping[int, int], body: LoopBody
    ) -> int | None:
        """Return how often a comparison lets a loop run, None if that is not known."""
        if test.type not in _COMPARISONS:
            return None
        counter, bound = (source_of(t) for t in test.inputs)
        place, of = places.get(id(counter)), places.get(id(bound))
        if place is None or (of is not None and not body.stays(of)):
            return None
        limit = _static(bound) if of is None else self._argument(op, of)
        start, step = self._argument(op, place), body.step(place)
        if start is None or step is None or limit is None or step <= 0:
            return None
        more = _COMPARISONS[test.type]
        return max(0, -((int(start) - int(limit) - more) // int(step)))

    def _argument(self, op: Operation, place: int) -> Any:
        """Return what a loop begins with at a place, None if it is not known."""
        tensor = source_of(op.inputs[place])
        if tensor.op not in self._loops:
            return _static(tensor)
        # A counter after its loop.
        op, place = tensor.op, tensor.value_index
        step = LoopBody(self._loops[op][1]).step(place)
        times = self.times(op)
        start = None if times is None else self._argument(op, place)
        if times is None or step is None or start is None:
            return None
        return int(start) + times * int(step)


def _returned_lists(graph: Graph, piled: Mapping[Operation, Piled]) -> Piled:
    """Return the memory of the lists that a function returns and that its loops made.

    Tf_keras has its recurrent layers in functions, whose gradient is another one that
    takes the lists.
    """
    returned = Piled()
    met: set[int] = set()
    for i, result in enumerate(graph.outputs):
        source = source_of(result)
        if source.op in piled and result.dtype == tf.variant:
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
        elif op.type == "ZerosLike" and op.outputs[0].dtype == tf.variant:
            owned = {0: self._of(op.inputs[0])}
        same = {i: self._of(op.inputs[j]) for i, j in piled.aliases}
        for i, size in (same | owned | piled.lists).items():
            self._elements[id(op.outputs[i])] = size
        return owned

    def _of(self, tensor: Tensor) -> int:
        known = self._elements
        return known.get(id(tensor)) or known.get(id(source_of(tensor)), 0)


class LoopBody:
    """The body of a loop; `results` is what it returns, behind ops that hand it on."""

    def __init__(self, graph: Graph) -> None:
        self._arguments: Sequence[Tensor] = graph.inputs
        self._place = {id(t): i for i, t in enumerate(graph.inputs)}
        self.results = [source_of(t) for t in graph.outputs]

    def place(self, tensor: Tensor) -> int | None:
        """Return the number of the argument that a tensor is, None if it is none."""
        return self._place.get(id(tensor))

    def stays(self, place: int | None) -> bool:
        """Tell whether an argument is the same each time; None is none."""
        if place is None:
            return False
        return self.results[place] is self._arguments[place]

    def step(self, place: int) -> Any:
        """Return the number added to a value each time, None if that is not known."""
        op = self.results[place].op
        if op.type not in op_types.ADDITIONS:
            return None
        first, second = (source_of(t) for t in op.inputs)
        if second is self._arguments[place]:
            first, second = second, first
        if first is not self._arguments[place]:
            return None
        return tf.get_static_value(second)

    def added(self, place: int) -> Iterator[Tensor]:
        """Yield what is put into a list each time."""
        waiting = [self.results[place]]
        while waiting:
            op = source_of(waiting.pop()).op
            if op.type in op_types.LIST_ELEMENTS:
                yield op.inputs[op_types.LIST_ELEMENTS[op.type]]
                waiting.append(op.inputs[0])
            elif op.type == "AddN" and op.outputs[0].dtype == tf.variant:
                waiting += op.inputs

    def origin(self, tensor: Tensor) -> Tensor:
        """Return what made a value, be it the time before."""
        met: set[int] = set()
        tensor = source_of(tensor)
        while id(tensor) in self._place and id(tensor) not in met:
            met.add(id(tensor))
            tensor = self.results[self._place[id(tensor)]]
        return tensor

    def list_argument(self, tensor: Tensor) -> int | None:
        """Return the list, the same each time, of which a tensor is an element."""
        if tensor.op.type != "TensorListGetItem":
            return None
        place = self.place(source_of(tensor.op.inputs[0]))
        return place if self.stays(place) else None


def _static(tensor: Tensor) -> Any:
    """Return the value of a constant tensor, or of a dimension that is known."""
    op = tensor.op
    if op.type != "StridedSlice" or op.get_attr("shrink_axis_mask") != 1:
        return tf.get_static_value(tensor)
    of, place = op.inputs[0], tf.get_static_value(op.inputs[1])
    is_shape = of.op.type == "Shape"
    values = of.op.inputs[0].shape if is_shape else tf.get_static_value(of)
    unknown = values is None or (is_shape and values.rank is None) or place is None
    return None if unknown or len(place) > 1 else values[int(place[0])]


def source_of(tensor: Tensor) -> Tensor:
    """Return the tensor that a tensor is, behind ops that hand it on."""
    while passes_on(tensor.op.type) and tensor.op.inputs:
        tensor = tensor.op.inputs[0]
    return tensor


ReadBody = Callable[[Graph, "Mapping[Operation, Called]"], Program]
"""Reads the graph of a function, given what its own calls hold."""


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
_DEEPEST = 32
"""How many functions deep functions count."""
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
        """Return the memory of the functions that a graph's ops run.

        The larger branch of a conditional counts; of a loop two iterations, since one
        begins before the last one has ended, and the lists that it adds to each time,
        if constants tell how often it runs.
        """
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
        loops = Loops(loop_graphs, self._size_of)
        for op, (_, body) in loop_graphs.items():
            called_by_op[op] = _of_loop(op, loops, body, called_by_op[op])
        return called_by_op

    def _body(
        self, graph: Graph, name: str, arguments: Sequence[Tensor] | None
    ) -> tuple[Graph, Called] | None:
        passed = shape_inference.behind(arguments or ())
        key = (name, *(str(t.shape) for t in arguments or ()), *map(str, passed))
        if key not in self._known and self._depth < _DEEPEST:
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
        """Return what one run of a function holds, and the lists that it returns."""
        calls = self.called_in(body)
        program = self._read(body, calls)
        piled = {op: called.results for op, called in calls.items()}
        returned = _returned_lists(body, piled)
        forwarded = _forwarded(body)
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
    """Return which argument each result of a function is that is one.

    The tensors that the gradient of a compiled call reads are results of it. XLA gives
    those that were arguments back as they came.
    """
    place = {id(t): i for i, t in enumerate(body.inputs)}
    sources = ((i, t, source_of(t)) for i, t in enumerate(body.outputs))
    return {
        i: place[id(source)]
        for i, t, source in sources
        if id(source) in place and dims_of(source) == dims_of(t)
    }


def uncounted_loops(calls: Mapping[Operation, Called]) -> tuple[str, ...]:
    """Return the loops whose lists are left out of what some ops hold."""
    return tuple(name for called in calls.values() for name in called.uncounted)


def _of_loop(op: Operation, loops: Loops, body: Graph, once: Called) -> Called:
    """Return what a loop holds, given what one iteration does."""
    most = function_calls.parallel_iterations(op)
    times = loops.times(op)
    if times is not None:
        most = min(most, times)
    usual = min(most, ITERATIONS)
    piled = loops.piled(op)
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
    """Return what an op holds that runs one of several functions."""
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
