"""Graphs read as a `Program`, with the sizes of their tensors and of what ops call.

An op that calls a function, or runs a loop or a branch, is one node of a program. The
bytes of its function beyond the results are its temporary memory; loops pile up lists.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.graph import (
    adjacency,
    creation,
    function_calls,
    op_types,
    shape_inference,
    types,
)
from geutil.graph.function_calls import LoopBody, Loops, source_of
from geutil.graph.runtime import has_kernels, kind_of, planned_for, uses_onednn
from geutil.graph.types import Graph, Operation, Tensor
from geutil.memory.costs import UNKNOWN, Shapes, op_time
from geutil.memory.executor import simulate
from geutil.memory.kernels import cpu, gpu
from geutil.memory.kernels.cpu import CHEAP, HELD, DimsOf, Pairs
from geutil.memory.program import Allocator, Device, Node, Program

_SizeOf = Callable[[Tensor], int]
"""The bytes of a tensor of the graph that is read."""


@dataclass(frozen=True)
class _Piled:
    """The memory of the results of a loop, or of a function with loops in it."""

    # The bytes of those results that are lists of something new.
    sizes: dict[int, int] = field(default_factory=dict)
    # The bytes of the elements of lists, whoever else holds them.
    lists: dict[int, int] = field(default_factory=dict)
    # Pairs (result, argument) of places: the result is the argument's buffer.
    aliases: Pairs = ()


def _piled(loops: Loops, op: Operation, graph: Graph, size_of: _SizeOf) -> _Piled:
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
    return _Piled(sizes, lists, shared)


def _returned_lists(graph: Graph, piled: Mapping[Operation, _Piled]) -> _Piled:
    """Return the memory of the lists that a function's loops make and it returns."""
    # Tf_keras has its recurrent layers in functions, whose gradient is another one that
    # takes the lists.
    returned = _Piled()
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


class _ListSizes:
    """The bytes of the lists of a graph, op by op in their order."""

    def __init__(self, size_of: _SizeOf) -> None:
        self._size_of = size_of
        self._elements: dict[int, int] = {}

    def add(self, op: Operation, piled: _Piled) -> Mapping[int, int]:
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


@dataclass(frozen=True)
class Called:
    """The memory of an op by the functions that it runs."""

    # The bytes beyond those of the op's results.
    temporary: int = 0
    # The bytes that it may hold besides, if more iterations run at once.
    surge: int = 0
    results: _Piled = field(default_factory=_Piled)
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


_NOTHING = Called()
ITERATIONS = 2
"""How many iterations of a loop count."""


class _CalledFunctions:
    """The memory of functions, each read once for the shapes of its calls."""

    def __init__(self, size_of: _SizeOf, device: Device | None) -> None:
        self._size_of = size_of
        self._device = device
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
        ops = body.get_operations()
        program = read_ops(
            ops, body.outputs, self._size_of, calls, self._device
        ).program
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
        time = sum(calls[op].time if op in calls else op_time(op) for op in ops)
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
        if id(source) in place and types.dims_of(source) == types.dims_of(t)
    }


def uncounted_loops(calls: Mapping[Operation, Called]) -> tuple[str, ...]:
    """Return the loops whose lists do not count in the memory of some ops."""
    return tuple(name for called in calls.values() for name in called.uncounted)


def _of_loop(
    op: Operation, times: int | None, piled: _Piled, body: Graph, once: Called
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
    largest = _Piled()
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


_GROWS = "TF_FORCE_GPU_ALLOW_GROWTH"
_GPU_ALLOCATOR = "TF_GPU_ALLOCATOR"
_CPU_TAKES_CHUNKS = "TF_CPU_ALLOCATOR_USE_BFC"


def device_of(name: str | None = None, onednn: bool | None = None) -> Device:
    """Return a device such as "GPU:0", which need not exist."""
    kind = kind_of(name)
    if kind not in ("CPU", "GPU") or not has_kernels(kind):
        raise ArgumentTypeError(
            f"'{name}' is no device that this TensorFlow has kernels for; pass "
            f"'CPU:0'{' or ' + repr('GPU:0') if has_kernels('GPU') else ''}"
        )
    if kind == "CPU":
        onednn = uses_onednn() if onednn is None else onednn
        takes_chunks = os.environ.get(_CPU_TAKES_CHUNKS, "").lower() in ("1", "true")
        return Device(kind, onednn, Allocator(grows=True) if takes_chunks else None)
    return Device(kind, False, _allocator_of_gpu())


def _allocator_of_gpu() -> Allocator | None:
    # It takes each request from the driver.
    if os.environ.get(_GPU_ALLOCATOR) == "cuda_malloc_async":
        return None
    said = os.environ.get(_GROWS)
    # TensorFlow takes no other spelling.
    if said in ("true", "false"):
        return Allocator(grows=said == "true")
    gpus = tf.config.get_visible_devices("GPU")
    return Allocator(
        grows=any(tf.config.experimental.get_memory_growth(gpu) for gpu in gpus)
    )


def calls_in(
    graph: Graph,
    size_of: _SizeOf,
    among: Collection[Operation] | None = None,
    device: Device | None = None,
) -> dict[Operation, Called]:
    """Return the memory of the functions of a graph's ops, or those `among` them."""
    return _CalledFunctions(size_of, device).called_in(graph, among)


def calls_of(
    ops: Collection[Operation], edits: Iterable[Any] = ()
) -> dict[Operation, Called]:
    """Return the memory of the functions that some ops of a graph run, edits made."""
    # Tensors of unknown shape in a body count nothing.
    if not ops:
        return {}
    device = device_of(planned_for(next(iter(ops)).graph))
    if not any(op.type in op_types.LOOPS for op in ops):
        for op in ops:
            size_of = Shapes(op.graph, None).bytes_of
            return calls_in(op.graph, size_of, frozenset(ops), device)
        return {}
    by_name = {op.name: op for op in ops}
    members = adjacency.topological_sort(ops)
    graph = members[0].graph
    read = types.IdentitySet(
        t for op in members for t in op.inputs if t.op.name not in by_name
    )
    # Placeholders are ops of the step themselves; other tensors get stand-ins.
    fed = types.unique(t.op for t in read if t.op.type in op_types.PLACEHOLDERS)
    graph_def = creation.step_graph_def(graph, [*fed, *members], read)
    for edit in edits:
        edit.write(graph_def)
    scratch = shape_inference.inferred_graph(graph_def)
    calls = calls_in(scratch, Shapes(graph, None).bytes_of, device=device)
    return {by_name[op.name]: c for op, c in calls.items() if op.name in by_name}


class Edges(Protocol):
    """The edges of ops: those of their graph, or as they are to be."""

    def inputs(self, op: Operation) -> Sequence[Tensor]:
        """Return the tensors that an op reads."""
        return op.inputs

    def control_inputs(self, op: Operation) -> Sequence[Operation]:
        """Return the ops that an op waits for."""
        return adjacency.control_inputs(op)


class _GraphEdges(Edges):
    """The edges of ops in their graph."""


@dataclass(frozen=True, eq=False)
class Reading:
    """Ops of a graph as a program: nodes for outer inputs, then for the ops."""

    program: Program
    # The node of each op.
    places: Mapping[Operation, int]
    # The number of each tensor, by its `id`.
    tensors: Mapping[int, int]
    # For each output of a pool of maxima, the tensor of their places, which its
    # gradient reads besides.
    maxima: Mapping[int, int]


def read_ops(
    ops: Sequence[Operation],
    fetched: Iterable[Tensor],
    size_of: _SizeOf,
    calls: Mapping[Operation, Called] | None = None,
    device: Device | None = None,
    dims: DimsOf = types.dims_of,
    edges: Edges | None = None,
) -> Reading:
    """Read ops, in topological order, as a program; other inputs are given."""
    edges = edges or _GraphEdges()
    members = frozenset(ops)
    read = (t.op for op in ops for t in edges.inputs(op))
    given = dict.fromkeys(op for op in read if op not in members)
    device = device or (device_of(planned_for(ops[0].graph)) if ops else device_of())
    reader = _OpReader((*given, *ops), given, calls or {}, edges, size_of, device, dims)
    variables = [size for op in ops if (size := variable_bytes(op))]
    program = Program(
        nodes=reader.nodes,
        sizes=reader.sizes,
        fetched=[reader.tensors[id(t)] for t in fetched],
        variable_bytes=sum(variables),
        constant_bytes=constant_bytes(ops, size_of),
        device=device,
        variables=variables,
    )
    return Reading(program, reader.places, reader.tensors, reader.maxima)


class _OpReader:
    """Makes the nodes of some ops; those `given` are held by others."""

    def __init__(
        self,
        ops: Sequence[Operation],
        given: Collection[Operation],
        calls: Mapping[Operation, Called],
        edges: Edges,
        size_of: _SizeOf,
        device: Device,
        dims: DimsOf,
    ) -> None:
        self._calls, self._edges, self._device, self._dims = calls, edges, device, dims
        self._is_gpu = device.kind == "GPU"
        self.places = {op: i for i, op in enumerate(ops)}
        self.tensors: dict[int, int] = {}
        self.sizes: list[int] = []
        lists = _ListSizes(size_of)
        for op in ops:
            # A variable, a constant or the caller holds it anyway.
            is_held = cpu.is_held(op) or op in given
            piled = calls.get(op, _NOTHING).results
            listed = {} if is_held else lists.add(op, piled)
            for i, tensor in enumerate(op.outputs):
                self.tensors[id(tensor)] = len(self.sizes)
                size = 0 if is_held else listed.get(i) or size_of(tensor)
                if size and self._is_gpu and gpu.is_in_host_memory(tensor):
                    size = 0
                self.sizes.append(size)
        self.nodes = [self._node(op, op in given) for op in ops]
        self._add_updates()
        self.maxima = self._add_places_of_maxima()

    def _node(self, op: Operation, is_given: bool) -> Node:
        """Return the node of an op, its edges given by number."""
        outputs = [self.tensors[id(t)] for t in op.outputs]
        # TensorFlow makes a constant of a Fill that is held: it reads nothing.
        is_folded = op.type == "Fill" and cpu.is_held(op)
        if is_given or is_folded:
            kind = "Const" if is_folded else "_Arg"
            return Node(op.name, kind, outputs=outputs, cheap=True)
        inputs = self._edges.inputs(op)
        # Programs have no cycles: a loop is simulated without its back edge.
        if op.type in op_types.MERGES:
            inputs = [t for t in inputs if not adjacency.is_back_edge(t.op, op)]
        controls = self._edges.control_inputs(op)
        called = self._calls.get(op, _NOTHING)
        temporary, packed = self._scratch(op)
        taken_over = called.results.aliases or called.forwarded
        aliases = (taken_over or cpu.aliases(op)) if inputs else ()
        if self._is_gpu:
            aliases = gpu.without_copies(op, aliases)
        return Node(
            name=op.name,
            type=op.type,
            inputs=[self.tensors[id(t)] for t in inputs],
            outputs=outputs,
            controls=[self.places[c] for c in controls if c in self.places],
            aliases=aliases,
            reuses=cpu.reuses(op),
            temporary=called.temporary + temporary,
            surge=called.surge,
            # The executor runs kernels of a GPU at once: they only enqueue work.
            cheap=self._is_gpu or op.type in CHEAP,
            packed=called.packed + packed,
        )

    def _scratch(self, op: Operation) -> tuple[int, int]:
        """Return the bytes that an op's kernel allocates, and takes besides."""
        if self._is_gpu:
            return gpu.temporary_bytes(op, self._dims), 0
        of_kernel = op, self._device.onednn, self._dims
        return cpu.temporary_bytes(*of_kernel), cpu.packed_bytes(*of_kernel)

    def _add_updates(self) -> None:
        """Let ops that change a variable make a buffer for it, if its own is in use."""
        reads: dict[int, list[int]] = {}
        for op in self.places:
            if op.type == "ReadVariableOp" and op.inputs:
                read = self.tensors[id(op.outputs[0])]
                reads.setdefault(id(op.inputs[0]), []).append(read)
        for op, i in self.places.items():
            if cpu.updates_variable(op.type) and id(op.inputs[0]) in reads:
                node = self.nodes[i]
                outputs, updates = [len(self.sizes)], reads[id(op.inputs[0])]
                self.nodes[i] = node.changed(outputs=outputs, updates=updates)
                # The added tensor is as large, should the handle come from elsewhere.
                added = max(self.sizes[tensor] for tensor in node.inputs)
                self.sizes.append(variable_bytes(op.inputs[0].op) or added)

    def _add_places_of_maxima(self) -> dict[int, int]:
        """Let pools of maxima hold the places that their gradients read."""
        # oneDNN's kernel writes a byte for each. A gradient whose input is no pool, or
        # without oneDNN, looks for them anew.
        found: dict[int, int] = {}
        nodes, sizes = self.nodes, self.sizes
        for op, i in self.places.items():
            onednn = self._device.onednn
            if op.type != "MaxPoolGrad" or not cpu.runs_in_onednn(op, onednn):
                continue
            maxima = self._edges.inputs(op)[1]
            number, pool = self.tensors[id(maxima)], self.places[maxima.op]
            if nodes[pool].type != "MaxPool":
                size = cpu.temporary_bytes(op, False)
                nodes[i] = nodes[i].changed(temporary=size)
                continue
            if number not in found:
                found[number] = len(sizes)
                sizes.append(sizes[number] // (maxima.dtype.size or 1))
                outputs = [*nodes[pool].outputs, found[number]]
                nodes[pool] = nodes[pool].changed(outputs=outputs)
            nodes[i] = nodes[i].changed(inputs=[*nodes[i].inputs, found[number]])
        return found


def equal_constants(
    ops: Iterable[Operation], fetched: Iterable[Tensor] = ()
) -> dict[Operation, Operation]:
    """Map constants to the first ones of their values, but for `fetched` ones."""
    # The executor's common subexpression elimination makes one node of them. Of nodes
    # that wait for nothing, those made first run first: with a constant of its own, the
    # update of each weight would come after all the rest.
    stays = {t.op for t in fetched}
    first: dict[tuple[str, bytes], Operation] = {}
    instead: dict[Operation, Operation] = {}
    for op in ops:
        if op.type == "Const" and not op.control_inputs and op not in stays:
            value = op.node_def.attr["value"].SerializeToString(deterministic=True)
            same = first.setdefault((op.device, value), op)
            if same is not op:
                instead[op] = same
    return instead


def constant_bytes(ops: Iterable[Operation], size_of: _SizeOf) -> int:
    """Return the bytes of the constants among some ops."""
    return sum(size_of(op.outputs[0]) for op in ops if op.type == "Const")


def variable_bytes(op: Operation) -> int:
    """Return the bytes of the variable that an op makes the handle of; 0 of others."""
    if op.type not in op_types.VARIABLES:
        return 0
    shape = tf.TensorShape(op.get_attr("shape"))
    dims = None if shape.rank is None else shape.as_list()
    return types.bytes_of_shape(op.get_attr("dtype"), dims) or 0
