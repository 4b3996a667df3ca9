"""TFLite files whose ops run in the order that needs the smallest arena.

Interpreters run ops in the order of the file, and plan an arena in which a tensor has a
place while it is alive. On a microcontroller the arena decides whether a network runs.
Where a network branches, ops may run in many orders; none changes a result. (Liberis
and Lane, "Neural networks on microcontrollers: saving memory at inference via operator
reordering", 2019.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from geutil import tflite
from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.graph.types import type_name
from geutil.quantize.tflite.runner import interpreter_of
from geutil.tflite import LiteFile, LiteGraph
from geutil.tflite.arena_orders import least_arena, least_peak
from geutil.tflite.effects import fixed_order_reason
from geutil.tflite.interpreter import (
    RUNTIMES,
    ArenaProgram,
    Runtime,
    RuntimeArena,
    measure_arena,
    runtime_arenas,
)

_STATES_A_TRY = 25
"""One order is tried by the size of its arena for so many states of the search."""
_USUAL: Runtime = "litert"


@dataclass(frozen=True)
class PeakTensor:
    """A tensor that is alive at the memory peak.

    Attributes:
        name: its name in the file; for a temporary buffer, that of the op's result.
        size: its size in bytes.
        op: the type of the op that computes it; "input"; or e.g. "buffer of CONV_2D".
    """

    name: str
    size: int
    op: str


@dataclass(frozen=True)
class ReorderedSubgraph:
    """The arena of a subgraph of a file before and after its ops were reordered.

    Attributes:
        index: its index in the file; the first one is the network, others are bodies of
            conditionals and loops, each with its own arena.
        ops: the number of its ops.
        order: their indices in the original file, in the new execution order.
        arenas_before: the bytes of the arena for each runtime, in the original order.
        arenas_after: the same in the new order.
        lower_bound: the lower bound of the arena of any order under the requested
            runtime, to within less than the alignment of one tensor: 63 bytes, or 15
            for "micro".
        proven: whether the arena reaches this bound.
        peak_before: the largest number of bytes alive at once.
        peak_after: the same afterwards.
        peak_tensors_before: the tensors alive at that peak, largest first.
        peak_tensors_after: the same afterwards.
        reason: why the ops keep their order; None if they were reordered.
    """

    index: int
    ops: int
    order: tuple[int, ...]
    arenas_before: Mapping[Runtime, int]
    arenas_after: Mapping[Runtime, int]
    lower_bound: int
    proven: bool
    peak_before: int
    peak_after: int
    peak_tensors_before: tuple[PeakTensor, ...]
    peak_tensors_after: tuple[PeakTensor, ...]
    reason: str | None


@dataclass(frozen=True)
class ReorderedFile:
    """A TFLite file whose ops run in another order, and its arena before and after.

    Attributes:
        blob: the file.
        runtime: the runtime whose arena was minimized.
        subgraphs: the outcome of each subgraph, in the order of the file.
    """

    blob: bytes = field(repr=False)
    runtime: Runtime
    subgraphs: tuple[ReorderedSubgraph, ...]

    @property
    def arena_before(self) -> int:
        """The bytes of the arena, of all subgraphs together, in the old order."""
        return sum(g.arenas_before[self.runtime] for g in self.subgraphs)

    @property
    def arena_after(self) -> int:
        """The same in the new order."""
        return sum(g.arenas_after[self.runtime] for g in self.subgraphs)

    @property
    def lower_bound(self) -> int:
        """The lower bound of the arena of any order, to within one alignment."""
        return sum(g.lower_bound for g in self.subgraphs)

    @property
    def proven(self) -> bool:
        """True if no order has a smaller arena, except by less than an alignment."""
        return all(g.proven for g in self.subgraphs)

    @property
    def peak_tensors_before(self) -> tuple[PeakTensor, ...]:
        """The tensors alive at the peak of the network, in the old order."""
        return self.subgraphs[0].peak_tensors_before

    @property
    def peak_tensors_after(self) -> tuple[PeakTensor, ...]:
        """The same in the new order."""
        return self.subgraphs[0].peak_tensors_after

    def __str__(self) -> str:
        """Return the report as lines: the arena that counts first, then the others."""
        lines = [
            f"arena {_change(self.arena_before, self.arena_after)} ({self.runtime}); "
            + (
                "no order has a smaller one"
                if self.proven
                else f"no order has less than {self.lower_bound:,}"
            )
        ]
        for runtime in RUNTIMES:
            if runtime != self.runtime:
                before = sum(g.arenas_before[runtime] for g in self.subgraphs)
                after = sum(g.arenas_after[runtime] for g in self.subgraphs)
                lines.append(f"  under {runtime:<10} {_change(before, after)}")
        for graph in self.subgraphs:
            lines += _lines_of(graph, self.runtime, alone=len(self.subgraphs) == 1)
        return "\n".join(lines)


def least_memory_order(
    blob: bytes, *, runtime: Runtime | None = None, iterations: int = 20_000
) -> ReorderedFile:
    """Return a file with its ops in the order that needs the smallest arena.

    Only the order of the ops changes, and every result is the same to the last bit. Ops
    that read or change state (variables, random numbers, custom ops) keep their
    relative order. The search first minimizes the bytes alive at once, with a proof of
    optimality if it finishes, and then the arena that the runtime plans, including
    gaps. The file is returned unchanged if no order is better.

    Args:
        blob: a TFLite file, int8 or float, from any converter.
        runtime: the runtime whose arena to minimize. "litert" is the interpreter
            without delegates, "reference" the same with reference kernels, which need
            few temporary buffers, and "micro" TensorFlow Lite for Microcontrollers. The
            default is "litert", without a larger arena under the others than in the
            original order. Among orders with equal arenas, one with smaller arenas
            under the others is chosen. The first two are measured with the interpreter,
            from the addresses of the tensors.
        iterations: the number of states that the search visits for each subgraph.

    Returns:
        The file, its arena before and after, and the tensors that are alive at the
        peak.

    Raises:
        ArgumentTypeError: `blob` is not bytes.
        QuantizeError: it is not a TFLite file, or cannot be run, or there is no such
            runtime.

    Cost: about 1 ms for each op to measure in the interpreter, and at most about 1 ms
        for each iteration; chains, and networks with the same largest step in any
        order, need no iteration.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.quantize import least_memory_order
        >>> @tf.function(input_signature=[tf.TensorSpec([1, 64], tf.float32)])
        ... def net(x):
        ...     kept = tf.tile(x, [1, 8])
        ...     wide = tf.nn.relu(tf.tile(x, [1, 32]))
        ...     return tf.reduce_max(kept, 1) + tf.reduce_max(wide, 1)
        >>> convert = tf.lite.TFLiteConverter.from_concrete_functions
        >>> blob = convert([net.get_concrete_function()], net).convert()
        >>> found = least_memory_order(blob)
        >>> found.arena_after <= found.arena_before, found.proven
        (True, True)
    """
    file = _checked(blob, runtime, iterations)
    fixed = fixed_order_reason(file)
    drafts = [_draft(file, graph, runtime, iterations, fixed) for graph in file.graphs]
    runtime = runtime or _USUAL
    changed = _reordered(blob, drafts)
    found = [_measured(draft, changed, runtime) for draft in drafts]
    # Not seen so far: what was computed is what the interpreter plans.
    for index, one in enumerate(found):
        if one.arenas_after[runtime] > one.arenas_before[runtime]:
            why = "its arena would be larger, as measured"
            drafts[index] = drafts[index].unmoved(why)
            changed = _reordered(blob, drafts)
            found[index] = _measured(drafts[index], changed, runtime)
    is_moved = any(draft.is_moved for draft in drafts)
    new = changed.to_bytes() if is_moved else bytes(blob)
    return ReorderedFile(new, runtime, tuple(found))


def _reordered(blob: bytes, drafts: Sequence[_Draft]) -> LiteFile:
    file = tflite.open(bytes(blob))
    for draft in drafts:
        if draft.is_moved:
            graph = file.graphs[draft.index]
            graph.set_ops([graph.ops[at] for at in draft.order])
    return file


def arena_bytes(blob: bytes, *, reference: bool = False) -> int:
    """Return the bytes of the arena that the interpreter plans for a TFLite file.

    The arena is the contiguous memory of the interpreter's tensors; its size follows
    from their addresses. It does not include weights, variables and the interpreter's
    own structs. Delegates, which plan their own memory, are off.

    Args:
        blob: the file. Dynamic sizes count as 1.
        reference: whether to run TFLite's reference kernels, which need few temporary
            buffers.

    Raises:
        ArgumentTypeError: `blob` is not bytes.
        QuantizeError: it is not a TFLite file, or cannot be run.

    Cost: that of TFLite's allocation of the arena; about 20 us for each tensor.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.quantize import arena_bytes
        >>> @tf.function(input_signature=[tf.TensorSpec([1, 64], tf.float32)])
        ... def net(x):
        ...     return tf.exp(x)
        >>> convert = tf.lite.TFLiteConverter.from_concrete_functions
        >>> arena_bytes(convert([net.get_concrete_function()], net).convert())
        512
    """
    interpreter_of(blob)
    return measure_arena(tflite.open(bytes(blob)), reference=reference).size


@dataclass(frozen=True)
class _Draft:
    """An order of a subgraph, and the one that it is compared with."""

    index: int
    graph: LiteGraph
    arenas: Mapping[Runtime, RuntimeArena]
    order: Sequence[int]
    bound: int
    is_least: bool
    reason: str | None

    @property
    def is_moved(self) -> bool:
        return self.reason is None

    def unmoved(self, reason: str) -> _Draft:
        """Return the draft that leaves the ops where they are."""
        own = range(len(self.order))
        return replace(self, order=own, is_least=False, reason=reason)


def _checked(blob: bytes, runtime: str | None, iterations: Any) -> LiteFile:
    """Refuse a file that cannot be run; else return it."""
    interpreter_of(blob)
    if runtime is not None and runtime not in RUNTIMES:
        raise QuantizeError(
            f"there is no runtime {runtime!r}; take one of {', '.join(RUNTIMES)}"
        )
    if not isinstance(iterations, int) or isinstance(iterations, bool):
        raise ArgumentTypeError(
            f"iterations is a number of states, not {type_name(iterations)}"
        )
    return tflite.open(bytes(blob))


def _draft(
    file: LiteFile,
    graph: LiteGraph,
    runtime: Runtime | None,
    iterations: int,
    fixed: str | None,
) -> _Draft:
    """Find an order of a subgraph, and tell why there is no better one if so."""
    index = file.graphs.index(graph)
    try:
        arenas = runtime_arenas(file, graph)
    except (ValueError, RuntimeError) as error:
        raise QuantizeError(
            f"TFLite cannot plan subgraph {index} of the file: {error}. Convert "
            "it with sizes that are all known, a batch of 1 for example"
        ) from error
    own = list(range(len(graph.ops)))
    arena = arenas[runtime or _USUAL]
    if fixed is None and arena.unplaced:
        name = arena.unplaced[0].name
        fixed = f"how large '{name}' is is known only when the file runs"
    if fixed is not None:
        return _Draft(index, graph, arenas, own, 0, False, fixed)
    aligned = arena.aligned()
    found = least_peak(aligned, iterations=iterations)

    cost = _Cost(arenas, runtime)
    candidates = [own, found.order]
    for other in arenas.values():
        if other is not arena:
            other_order = least_peak(other.aligned(), iterations=iterations // 4).order
            candidates.append(other_order)
    tries = iterations // _STATES_A_TRY
    least = least_arena(aligned, cost, candidates, enough=found.bound, tries=tries)
    order, reason = least.order, None
    # An order that gains nothing is no reason to change the file.
    if cost(order) >= cost(own):
        order, reason = own, "no order that was found has a smaller arena"
    return _Draft(index, graph, arenas, order, found.bound, least.is_least, reason)


class _Cost:
    """The cost of an order: the arena under a runtime, and then under the others."""

    def __init__(
        self, arenas: Mapping[Runtime, RuntimeArena], runtime: Runtime | None
    ) -> None:
        first = arenas[runtime or _USUAL]
        self._arenas = [first, *(a for a in arenas.values() if a is not first)]
        own = range(first.program.count)
        self._limits = [a.bytes_of(own) for a in self._arenas if runtime is None]

    def __call__(self, order: Sequence[int]) -> tuple[int, ...]:
        sizes = [arena.bytes_of(order) for arena in self._arenas]
        pairs = zip(sizes, self._limits, strict=False)
        grown = sum(max(size - limit, 0) for size, limit in pairs)
        if grown:
            sizes[0] = max(sizes[0], self._limits[0]) + grown
        return tuple(sizes)


def _measured(draft: _Draft, changed: LiteFile, runtime: Runtime) -> ReorderedSubgraph:
    """Return the outcome of a subgraph, as the interpreter reports it."""
    arenas, graph = draft.arenas, changed.graphs[draft.index]
    after = {r: arenas[r].size for r in RUNTIMES}
    if draft.is_moved:
        after["micro"] = arenas["micro"].bytes_of(draft.order)
        after["litert"] = measure_arena(changed, graph).size
        after["reference"] = measure_arena(changed, graph, reference=True).size
    arena = arenas[runtime]
    own = range(arena.program.count)
    return ReorderedSubgraph(
        index=draft.index,
        ops=arena.program.count,
        order=tuple(draft.order),
        arenas_before={r: arenas[r].size for r in RUNTIMES},
        arenas_after=after,
        lower_bound=(
            after[runtime]
            if draft.is_least
            else max(draft.bound - arena.alignment + 1, 0)
        ),
        proven=draft.is_least,
        peak_before=arena.program.peak(own),
        peak_after=arena.program.peak(draft.order),
        peak_tensors_before=_peak_tensors(draft.graph, arena, own),
        peak_tensors_after=_peak_tensors(draft.graph, arena, draft.order),
        reason=draft.reason,
    )


def _peak_tensors(
    graph: LiteGraph, arena: RuntimeArena, order: Sequence[int]
) -> tuple[PeakTensor, ...]:
    """Return the tensors that are alive in the step in which most bytes are."""
    program: ArenaProgram = arena.program
    if not order:
        return ()
    alive = program.alive(order)
    step = max(range(len(order)), key=alive.__getitem__)
    found = []
    for value, tensor, buffer in zip(
        program.values, arena.tensors, program.buffers(order), strict=False
    ):
        if buffer.first <= step <= buffer.last and value.size:
            op = "input" if value.maker < 0 else graph.ops[value.maker].kind
            found.append(PeakTensor(tensor.name, value.size, op))
    at = graph.ops[order[step]]
    for size in program.temporaries[order[step]] if program.temporaries else ():
        found.append(PeakTensor(at.result, size, f"buffer of {at.kind}"))
    return tuple(sorted(found, key=lambda t: -t.size))


def _lines_of(graph: ReorderedSubgraph, runtime: Runtime, *, alone: bool) -> list[str]:
    """Return the lines of a subgraph in a report."""
    lines = []
    if not alone:
        change = _change(graph.arenas_before[runtime], graph.arenas_after[runtime])
        lines.append(f"subgraph {graph.index}: {change}")
    moved = sum(place != i for place, i in enumerate(graph.order))
    lines.append(
        f"{moved} of {graph.ops} op(s) moved"
        + (f": {graph.reason}" if graph.reason else "")
    )
    lines.append(f"alive at the peak, {graph.peak_before:,} bytes before:")
    lines += map(_line, graph.peak_tensors_before)
    if moved:
        lines.append(f"alive at the peak, {graph.peak_after:,} bytes after:")
        lines += map(_line, graph.peak_tensors_after)
    return lines


def _line(tensor: PeakTensor) -> str:
    return f"  {tensor.size:>12,}  {tensor.op}  {tensor.name}"


def _change(before: int, after: int) -> str:
    share = f" ({100 * (after / before - 1):+.1f} %)" if before else ""
    return f"{before:,} -> {after:,} bytes{share}"
