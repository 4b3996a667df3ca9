"""Graphs read as a `Program`, with the sizes of their tensors."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.graph import adjacency, creation, op_types, shape_inference, types
from geutil.graph.placement import has_kernels, kind_of, planned_for
from geutil.graph.runtime import uses_onednn
from geutil.graph.types import Graph, IdentitySet, Operation, Tensor
from geutil.memory.allocator import Allocator
from geutil.memory.function_memory import (
    NOTHING,
    Called,
    CalledFunctions,
    ListSizes,
    SizeOf,
)
from geutil.memory.kernels import cpu, gpu, packing
from geutil.memory.kernels.cpu import CHEAP, DimsOf
from geutil.memory.program import Device, Node, Program
from geutil.memory.sizes import Shapes, bytes_of_shape

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
    size_of: SizeOf,
    among: Collection[Operation] | None = None,
    device: Device | None = None,
) -> dict[Operation, Called]:
    """Return the memory of the functions of a graph's ops, or those `among` them."""

    def read_body(body: Graph, calls: Mapping[Operation, Called]) -> Program:
        ops = body.get_operations()
        return read_ops(ops, body.outputs, size_of, calls, device).program

    return CalledFunctions(read_body, size_of).called_in(graph, among)


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
    read = IdentitySet(
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
    size_of: SizeOf,
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
        size_of: SizeOf,
        device: Device,
        dims: DimsOf,
    ) -> None:
        self._calls, self._edges, self._device, self._dims = calls, edges, device, dims
        self._is_gpu = device.kind == "GPU"
        self.places = {op: i for i, op in enumerate(ops)}
        self.tensors: dict[int, int] = {}
        self.sizes: list[int] = []
        lists = ListSizes(size_of)
        for op in ops:
            # A variable, a constant or the caller holds it anyway.
            is_held = cpu.is_held(op) or op in given
            piled = calls.get(op, NOTHING).results
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
        called = self._calls.get(op, NOTHING)
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
        return cpu.temporary_bytes(*of_kernel), packing.packed_bytes(*of_kernel)

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


def constant_bytes(ops: Iterable[Operation], size_of: SizeOf) -> int:
    """Return the bytes of the constants among some ops."""
    return sum(size_of(op.outputs[0]) for op in ops if op.type == "Const")


def variable_bytes(op: Operation) -> int:
    """Return the bytes of the variable that an op makes the handle of; 0 of others."""
    if op.type not in op_types.VARIABLES:
        return 0
    shape = tf.TensorShape(op.get_attr("shape"))
    dims = None if shape.rank is None else shape.as_list()
    return bytes_of_shape(op.get_attr("dtype"), dims) or 0
