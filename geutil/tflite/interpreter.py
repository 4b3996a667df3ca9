"""The interpreter of TFLite files, and its arena: the place of each tensor in memory.

Files run by LiteRT where it is installed: `tf.lite.Interpreter` is deprecated in favour
of the package `ai_edge_litert` (the extra `litert`). Files are the same.

The interpreter reports the address of each tensor, but not the size of its arena. Its
tensors lie in one piece of memory, without gaps but for alignment; the arena is that
piece. Weights lie in the file, variables and values that are computed once elsewhere.
Scalars are read without an address: they count with their bytes, but not in the size.

Two buffers that are alive at once must not overlap. Interpreters place the largest one
first (Pisarchyk and Lee 2020, "greedy by size"), and so does this, byte by byte:

- "litert": LiteRT's interpreter with its own kernels and without delegates. Inputs are
  alive to the end. Some ops write their result into the buffer of an input, and
  convolutions need temporary buffers: both are read off the interpreter.
- "reference": the same with its reference kernels, which need few temporary buffers.
- "micro": TensorFlow Lite for Microcontrollers. Inputs are alive until they are read
  for the last time, and no op writes into the buffer of an input. Buffers that its
  kernels ask for are not known here.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import import_module, metadata
from typing import Any, Literal, NamedTuple

import numpy as np

from geutil.errors import PlanError
from geutil.tflite.effects import calls_others, dependencies, keeps_order
from geutil.tflite.file import LiteFile
from geutil.tflite.kinds import NO_NUMBERS
from geutil.tflite.parts import LiteGraph, LiteOp, LiteTensor


@cache
def _interpreter_module() -> Any:
    try:
        return import_module("ai_edge_litert.interpreter")
    except ImportError:
        return None


def runtime_name() -> str:
    """Return which runtime runs files: "LiteRT", or "TensorFlow Lite"."""
    return "TensorFlow Lite" if _interpreter_module() is None else "LiteRT"


def runtime_version() -> tuple[int, int]:
    """Return the major and the minor number of the runtime's version."""
    package = "tensorflow" if _interpreter_module() is None else "ai_edge_litert"
    major, minor = metadata.version(package).split(".")[:2]
    return int(major), int(minor)


def new_interpreter(
    blob: bytes,
    *,
    delegates: bool = False,
    keep_tensors: bool = False,
    reference: bool = False,
    threads: int = 1,
) -> Any:
    """Return an interpreter of a file, whose tensors are not allocated yet."""
    module = _interpreter_module()
    if module is None:
        import tensorflow as tf

        resolvers, make = tf.lite.experimental.OpResolverType, tf.lite.Interpreter
    else:
        resolvers, make = module.OpResolverType, module.Interpreter
    resolver = (
        resolvers.AUTO if delegates else resolvers.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    )
    with warnings.catch_warnings():
        # Without LiteRT there is no other interpreter to take.
        warnings.filterwarnings("ignore", ".*tf.lite.Interpreter is deprecated")
        return make(
            model_content=bytes(blob),
            num_threads=threads,
            experimental_preserve_all_tensors=keep_tensors,
            experimental_op_resolver_type=(
                resolvers.BUILTIN_REF if reference else resolver
            ),
        )


ALIGNMENT = 64
"""The interpreter starts tensors at multiples of so many bytes."""
_UNKNOWN = -1
"""The address of a scalar."""


@dataclass(frozen=True)
class MeasuredArena:
    """Where the interpreter put the tensors of a subgraph."""

    size: int
    offsets: Mapping[LiteTensor, int]
    sizes: Mapping[LiteTensor, int]
    unplaced: tuple[LiteTensor, ...]
    temporaries: tuple[int, ...]


def measure_arena(
    file: LiteFile, graph: LiteGraph | None = None, *, reference: bool = False
) -> MeasuredArena:
    """Return the arena that the interpreter plans for a file, without delegates."""
    graph = graph or file.graphs[0]
    first = copy.copy(file)
    # An op that calls a subgraph finds it wherever it is.
    first.graphs = [graph, *(one for one in file.graphs if one is not graph)]
    first.signatures = {}
    interpreter = new_interpreter(first.to_bytes(), reference=reference)
    interpreter.allocate_tensors()
    return _arena(graph, *_addresses(graph, interpreter))


def measure_op_temporaries(
    graph: LiteGraph, *, reference: bool = False
) -> list[tuple[int, ...]]:
    """Return for each op the bytes of its kernel's own buffers, each op measured alone.

    They are those of the arena and such that are kept from run to run: the interpreter
    does not tell them apart. Ops that call subgraphs, or share a state, have none.
    """
    return [
        () if keeps_order(op) or calls_others(op) else _temporaries(op, reference)
        for op in graph.ops
    ]


def _temporaries(op: LiteOp, reference: bool) -> tuple[int, ...]:
    copies = {t: t.copied() for t in (*op.reads, *op.outputs)}
    alone, graph = LiteFile(), LiteGraph()
    only = graph.add_op(op.copied(copies))
    for tensor in copies:
        if tensor.quantization is not None and tensor.quantization.block_scales:
            graph.add_tensor(tensor.quantization.block_scales)
    # Its constants are constants still.
    fed = dict.fromkeys(t for t in op.reads if not t.stored_bytes)
    graph.inputs = tuple(copies[t] for t in fed)
    graph.outputs = only.outputs
    alone.graphs.append(graph)
    try:
        interpreter = new_interpreter(alone.to_bytes(), reference=reference)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError):
        # It cannot run by itself: it needs a resource, say.
        return ()
    _, temporaries = _addresses(graph, interpreter)
    return tuple(size for _, size in temporaries)


Place = tuple[int, int]
"""The address of a tensor, and its size."""


def _addresses(
    graph: LiteGraph, interpreter: Any
) -> tuple[dict[LiteTensor, Place], list[Place]]:
    """Return where tensors that may be in the arena are, and kernels' own buffers."""
    tensors = graph.tensors
    found: dict[LiteTensor, Place] = {}
    temporaries: list[Place] = []
    # Those without a shape have no details, and end the process if they are read.
    for detail in interpreter.get_tensor_details():
        index = detail["index"]
        tensor = tensors[index] if index < len(tensors) else None
        if tensor is not None and _is_elsewhere(tensor):
            continue
        try:
            array = interpreter.tensor(index)()
        except ValueError:
            # It has no memory yet.
            continue
        if array.nbytes:
            is_known = isinstance(array, np.ndarray)
            place = array.ctypes.data if is_known else _UNKNOWN, array.nbytes
            if tensor is None:
                temporaries.append(place)
            else:
                found[tensor] = place
    return found, temporaries


def _is_elsewhere(tensor: LiteTensor) -> bool:
    is_outside = tensor.is_variable or tensor.dtype in NO_NUMBERS
    return is_outside or tensor.stored_bytes > 0


def _arena(
    graph: LiteGraph, found: Mapping[LiteTensor, Place], temporaries: list[Place]
) -> MeasuredArena:
    """Return the largest piece of memory without gaps, and its buffers."""
    made = {*graph.inputs, *(t for op in graph.ops for t in op.outputs)}
    pieces: list[list[Place]] = []
    end = -1
    for address, size in sorted((*found.values(), *temporaries)):
        if address == _UNKNOWN:
            continue
        # Padding leaves gaps up to the alignment; a larger one ends an allocation.
        if not pieces or address > end + ALIGNMENT:
            pieces.append([])
            end = address
        pieces[-1].append((address, size))
        end = max(end, address + size)
    piece = {*max(pieces, key=len, default=[])}
    start = min((address for address, _ in piece), default=0)
    offsets = {t: place[0] - start for t, place in found.items() if place in piece}
    return MeasuredArena(
        size=max(map(sum, piece), default=start) - start,
        offsets=offsets,
        # The address of a scalar is unknown, and it takes memory all the same.
        sizes={
            tensor: size
            for tensor, (address, size) in found.items()
            if tensor in offsets or (address == _UNKNOWN and tensor in made)
        },
        unplaced=tuple(
            t
            for t in graph.tensors
            if t in made and t not in found and not _is_elsewhere(t)
        ),
        temporaries=tuple(place[1] for place in temporaries if place in piece),
    )


Fit = Literal["tightest", "first"]
"""The gap that a buffer gets: the one that leaves least, or the first."""


class ArenaBuffer(NamedTuple):
    """A buffer and the time in which it is alive.

    Attributes:
        first: the first step in which it is alive.
        last: the last one.
        size: in bytes.
        is_first: whether it is placed before all that are not, whatever its size; not
            looked at where the first gap is taken.
    """

    first: int
    last: int
    size: int
    is_first: bool = False


def greedy_offsets(
    buffers: Sequence[ArenaBuffer], *, alignment: int = 64, fit: Fit = "tightest"
) -> list[int]:
    """Return the offset of each buffer: the largest is placed first.

    Of buffers of one size, the one that is alive first comes first, where gaps are
    chosen by how little they leave; where the first gap is taken, the one that is given
    last. TensorFlow Lite does the former, with an alignment of 64 bytes, and
    TensorFlow Lite for Microcontrollers the latter, with 16.

    Example:
        >>> ends = [(0, 1, 100), (1, 2, 300), (2, 3, 50)]
        >>> a, b, c = [ArenaBuffer(*end) for end in ends]
        >>> greedy_offsets([a, b, c])
        [320, 0, 320]
    """
    first = np.array([b.first for b in buffers], np.int64)
    last = np.array([b.last for b in buffers], np.int64)
    sizes = [b.size for b in buffers]
    # TensorFlow Lite for Microcontrollers aligns sizes before it sorts by them.
    if fit == "first":
        sizes = [_aligned(size, alignment) for size in sizes]
    turns = _turns(buffers, sizes, fit)
    offsets, ends = np.zeros_like(first), np.zeros_like(first)
    is_placed = np.zeros(len(buffers), bool)
    for i in turns:
        if not sizes[i]:
            continue
        alive = np.flatnonzero(is_placed & (first <= last[i]) & (last >= first[i]))
        alive = alive[np.argsort(offsets[alive], kind="stable")]
        pairs = zip(offsets[alive].tolist(), ends[alive].tolist(), strict=True)
        offsets[i] = _gap(list(pairs), sizes[i], alignment, fit)
        ends[i] = offsets[i] + sizes[i]
        is_placed[i] = True
    return [int(offset) for offset in offsets]


def arena_bytes(
    buffers: Sequence[ArenaBuffer], *, alignment: int = 64, fit: Fit = "tightest"
) -> int:
    """Return the bytes of the arena in which `greedy_offsets` places buffers.

    Example:
        >>> ends = [(0, 1, 100), (1, 2, 300), (2, 3, 50)]
        >>> arena_bytes([ArenaBuffer(*end) for end in ends])
        420
    """
    offsets = greedy_offsets(buffers, alignment=alignment, fit=fit)
    ends = (o + b.size for o, b in zip(offsets, buffers, strict=True))
    end = max(ends, default=0)
    return _aligned(end, alignment) if fit == "first" else end


def alive_bytes(buffers: Sequence[ArenaBuffer], steps: int) -> list[int]:
    """Return how many bytes are alive in each step: no arena is smaller than the most.

    Example:
        >>> alive_bytes([ArenaBuffer(0, 1, 100), ArenaBuffer(1, 2, 300)], 3)
        [100, 400, 300]
    """
    changes = [0] * (steps + 1)
    for buffer in buffers:
        changes[max(buffer.first, 0)] += buffer.size
        changes[min(buffer.last, steps - 1) + 1] -= buffer.size
    alive, total = [], 0
    for change in changes[:steps]:
        total += change
        alive.append(total)
    return alive


class Value(NamedTuple):
    """A value: operations make it, read it, and share one buffer for it.

    Attributes:
        size: in bytes.
        maker: the first operation that writes it; -1 if it is there from the start,
            which takes no memory if nothing uses or keeps it.
        users: the others that read it or write into it.
        is_kept: whether it is alive to the end.
    """

    size: int
    maker: int
    users: tuple[int, ...] = ()
    is_kept: bool = False


@dataclass(frozen=True)
class ArenaProgram:
    """Operations, numbered in an order in which they can run, and their values.

    Attributes:
        count: how many operations there are.
        values: what they make and read.
        temporaries: for each operation, the bytes of buffers that are alive only while
            it runs.
        after: pairs (earlier, later) of operations that must keep this order besides:
            the later one reads what the earlier one wrote into a shared buffer, say.
    """

    count: int
    values: Sequence[Value]
    temporaries: Sequence[Sequence[int]] = ()
    after: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        for before, behind in self.edges:
            if before >= behind:
                raise PlanError(
                    f"operation {behind} runs before {before}, whose result it needs; "
                    "number them in an order in which they can run"
                )

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """The pairs (earlier, later) of operations: by values, and given ones."""
        pairs = dict.fromkeys(self.after)
        for value in self.values:
            if value.maker >= 0:
                pairs.update(dict.fromkeys((value.maker, u) for u in value.users))
        return list(pairs)

    @cached_property
    def before(self) -> list[list[int]]:
        """For each operation, those that must run before it."""
        return self._ends([(later, earlier) for earlier, later in self.edges])

    @cached_property
    def behind(self) -> list[list[int]]:
        """For each operation, those that must run behind it."""
        return self._ends(self.edges)

    def _ends(self, pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
        ends: list[list[int]] = [[] for _ in range(self.count)]
        for one, other in pairs:
            ends[one].append(other)
        return ends

    def buffers(self, order: Sequence[int]) -> list[ArenaBuffer]:
        """Return the buffers of an order: of the values, then the temporary ones."""
        place = [0] * self.count
        for step, i in enumerate(order):
            place[i] = step
        end = self.count - 1
        buffers = []
        for value in self.values:
            first = place[value.maker] if value.maker >= 0 else 0
            last = max((place[u] for u in value.users), default=first)
            last = end if value.is_kept else last
            # TFLite places the tensors that live from the first step to the end first.
            stays = value.is_kept and not first
            is_needed = value.maker >= 0 or value.is_kept or bool(value.users)
            buffers.append(ArenaBuffer(first, last, is_needed * value.size, stays))
        for i, sizes in enumerate(self.temporaries):
            buffers += [ArenaBuffer(place[i], place[i], size) for size in sizes]
        return buffers

    def alive(self, order: Sequence[int]) -> list[int]:
        """Return how many bytes are alive in each step of an order."""
        return alive_bytes(self.buffers(order), self.count)

    def peak(self, order: Sequence[int]) -> int:
        """Return the most bytes that are alive at once in an order."""
        return max(self.alive(order), default=0)


def _turns(buffers: Sequence[ArenaBuffer], sizes: Sequence[int], fit: Fit) -> list[int]:
    """Return the buffers in the order in which they are placed."""
    numbers = range(len(buffers))
    if fit == "first":
        return sorted(numbers, key=lambda i: (-sizes[i], -i))
    return sorted(
        numbers,
        key=lambda i: (
            (0, 0, i) if buffers[i].is_first else (1, -sizes[i], buffers[i].first, i)
        ),
    )


def _gap(placed: Sequence[tuple[int, int]], size: int, alignment: int, fit: Fit) -> int:
    """Return the offset of a gap between placed buffers: (offset, end), in order."""
    best, left_by_best, current = None, 0, 0
    for offset, end in placed:
        start = _aligned(current, alignment)
        if start + size <= offset and (best is None or offset - start < left_by_best):
            if fit == "first":
                return start
            # TFLite compares what lies behind alignment with what lay before it.
            best, left_by_best = start, offset - current
        current = max(current, end)
        if best is not None and not left_by_best:
            break
    return _aligned(current, alignment) if best is None else best


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


Runtime = Literal["litert", "reference", "micro"]
RUNTIMES: tuple[Runtime, ...] = ("litert", "reference", "micro")
_RULES: Mapping[Runtime, tuple[int, Fit]] = {
    "litert": (64, "tightest"),
    "reference": (64, "tightest"),
    "micro": (16, "first"),
}


@dataclass(frozen=True)
class RuntimeArena:
    """The arena of a subgraph under a runtime."""

    runtime: Runtime
    program: ArenaProgram
    tensors: tuple[LiteTensor, ...]
    size: int
    unplaced: tuple[LiteTensor, ...] = ()

    @property
    def alignment(self) -> int:
        """The multiple of bytes at which tensors start."""
        return _RULES[self.runtime][0]

    def bytes_of(self, order: Sequence[int]) -> int:
        """Return the bytes of the arena in an order, as the runtime will plan it."""
        return _planned(self.program, self.runtime, order)

    def aligned(self) -> ArenaProgram:
        """Return the program with sizes rounded up to the alignment."""
        step, own = self.alignment, self.program
        return replace(
            own,
            values=[
                Value(_aligned(v.size, step), v.maker, v.users, v.is_kept)
                for v in own.values
            ],
            temporaries=[[_aligned(n, step) for n in s] for s in own.temporaries],
        )


def runtime_arenas(file: LiteFile, graph: LiteGraph) -> dict[Runtime, RuntimeArena]:
    """Return the arena of a subgraph under each runtime."""
    edges = dependencies(graph)
    arenas: dict[Runtime, RuntimeArena] = {}
    for runtime in ("litert", "reference"):
        is_reference = runtime == "reference"
        measured = measure_arena(file, graph, reference=is_reference)
        temporaries: Sequence[Sequence[int]] = ()
        # The whole arena does not tell which op owns a buffer: each op runs alone.
        if measured.temporaries:
            alone = measure_op_temporaries(graph, reference=is_reference)
            temporaries = _in_arena(alone, measured.temporaries)
        values, tensors = _values(graph, measured.sizes, _roots(graph, measured))
        program = ArenaProgram(len(graph.ops), values, temporaries, edges)
        arenas[runtime] = RuntimeArena(
            runtime, program, tensors, measured.size, measured.unplaced
        )
    # No interpreter of Micro runs here, so its kernels' buffers are unknown.
    values, tensors = _values(graph, measured.sizes, {}, stay=False)
    program = ArenaProgram(len(graph.ops), values, (), edges)
    planned = _planned(program, "micro", range(program.count))
    return {**arenas, "micro": RuntimeArena("micro", program, tensors, planned)}


def _planned(program: ArenaProgram, runtime: Runtime, order: Sequence[int]) -> int:
    alignment, fit = _RULES[runtime]
    return arena_bytes(program.buffers(order), alignment=alignment, fit=fit)


def _roots(graph: LiteGraph, measured: MeasuredArena) -> dict[LiteTensor, LiteTensor]:
    """Return for tensors that share a buffer the first of those that do.

    An op's inputs and outputs are alive at once: if they start at the same place, they
    share it.
    """
    roots: dict[LiteTensor, LiteTensor] = {}
    for op in graph.ops:
        at = {measured.offsets[t]: t for t in op.reads if t in measured.offsets}
        for tensor in op.outputs:
            shared = at.get(measured.offsets.get(tensor, -1))
            if shared is not None:
                roots[tensor] = roots.get(shared, shared)
    return roots


def _values(
    graph: LiteGraph,
    sizes: Mapping[LiteTensor, int],
    roots: Mapping[LiteTensor, LiteTensor],
    *,
    stay: bool = True,
) -> tuple[list[Value], tuple[LiteTensor, ...]]:
    """Return the buffers of ops, and the tensors that these are."""
    makers = {t: -1 for t in graph.inputs if t in sizes}
    users: dict[LiteTensor, dict[int, None]] = {t: {} for t in makers}
    for i, op in enumerate(graph.ops):
        for tensor in (*op.reads, *op.outputs):
            root = roots.get(tensor, tensor)
            if tensor in op.outputs and tensor in sizes and root not in makers:
                makers[root], users[root] = i, {}
            elif root in users:
                users[root][i] = None
    kept = {roots.get(t, t) for t in graph.outputs}
    # An input that nothing reads is written all the same.
    kept.update(t for t in graph.inputs if stay or not users.get(t))
    tensors = tuple(t for t in graph.tensors if t in makers)
    values = [
        Value(
            sizes[t], makers[t], tuple(u for u in users[t] if u != makers[t]), t in kept
        )
        for t in tensors
    ]
    return values, tensors


def _in_arena(
    alone: Sequence[Sequence[int]], in_arena: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return the temporary buffers of ops that are in the arena."""
    left = Counter(in_arena)
    found: list[tuple[int, ...]] = []
    for sizes in alone:
        own = []
        for size in sizes:
            if left[size] > 0:
                left[size] -= 1
                own.append(size)
        found.append(tuple(own))
    return found
