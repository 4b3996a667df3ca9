"""The arena of a TFLite file as numbers, for each runtime that plans one.

What is alive depends on who runs the file:

- "litert": LiteRT's interpreter, or TensorFlow Lite's, with its own kernels and without
  delegates. Inputs are alive to the end. Some ops write their result into the buffer of
  an input. Convolutions need temporary buffers, which can be larger than all tensors.
- "reference": the same with its reference kernels, which need few temporary buffers.
- "micro": TensorFlow Lite for Microcontrollers. Inputs are alive until they are read
  for the last time, and no op writes into the buffer of an input. Buffers that its
  kernels ask for are not known here, and it keeps structs and biases beside the tensors
  that are as large in any order.

Which ops share buffers, and which need temporary ones, is read off the interpreter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from geutil.quantize.int8.arena_buffers import ArenaProgram, Fit, Value, arena_bytes
from geutil.tflite.arena import (
    MeasuredArena,
    measure_arena,
    measure_op_temporaries,
)
from geutil.tflite.order import FileSubgraph, file_subgraphs

Runtime = Literal["litert", "reference", "micro"]
RUNTIMES: tuple[Runtime, ...] = ("litert", "reference", "micro")
_RULES: Mapping[Runtime, tuple[int, Fit]] = {
    "litert": (64, "tightest"),
    "reference": (64, "tightest"),
    "micro": (16, "first"),
}


@dataclass(frozen=True)
class RuntimeArena:
    """The arena of a subgraph under a runtime.

    Attributes:
        runtime: which one.
        program: the ops, and the buffers that they need.
        tensors: for each value of the program, the file's tensor that it is, the first
            of those that share its buffer.
        size: the bytes of the arena in the file's order: measured, and computed for
            "micro".
        unplaced: tensors whose sizes are known only when the file runs.
    """

    runtime: Runtime
    program: ArenaProgram
    tensors: tuple[int, ...]
    size: int
    unplaced: tuple[int, ...] = ()

    @property
    def alignment(self) -> int:
        """The multiple of bytes at which tensors start."""
        return _RULES[self.runtime][0]

    def bytes_of(self, order: Sequence[int]) -> int:
        """Return the bytes of the arena in an order, as the runtime will plan it."""
        return _planned(self.program, self.runtime, order)

    def aligned(self) -> ArenaProgram:
        """Return the program with sizes rounded up to the alignment."""
        step = self.alignment
        program = self.program
        return ArenaProgram(
            program.count,
            [
                Value(-(-v.size // step) * step, v.maker, v.users, v.is_kept)
                for v in program.values
            ],
            [[-(-n // step) * step for n in sizes] for sizes in program.temporaries],
            program.after,
        )


def runtime_arenas(blob: bytes, subgraph: int = 0) -> dict[Runtime, RuntimeArena]:
    """Return the arena of a subgraph under each runtime.

    Args:
        blob: the file.
        subgraph: which of its subgraphs.

    Raises:
        ValueError, RuntimeError: it is no TFLite file, or cannot be run.

    Cost: two interpreters of the file, and one for each op where kernels need temporary
        buffers: some 1 ms for each op.
    """
    graph = file_subgraphs(blob)[subgraph]
    arenas: dict[Runtime, RuntimeArena] = {}
    for runtime in ("litert", "reference"):
        is_reference = runtime == "reference"
        measured = measure_arena(blob, subgraph, reference=is_reference)
        temporaries: Sequence[Sequence[int]] = ()
        if measured.temporaries:
            alone = measure_op_temporaries(blob, subgraph, reference=is_reference)
            temporaries = _in_arena(alone, measured.temporaries)
        program, tensors = _program(graph, measured.sizes, _roots(graph, measured))
        program = ArenaProgram(program.count, program.values, temporaries, graph.edges)
        arenas[runtime] = RuntimeArena(
            runtime, program, tensors, measured.size, measured.unplaced
        )
    sizes = measured.sizes
    program, tensors = _program(graph, sizes, {}, stay=False)
    order = range(program.count)
    micro = RuntimeArena("micro", program, tensors, _planned(program, "micro", order))
    return {**arenas, "micro": micro}


def _planned(program: ArenaProgram, runtime: Runtime, order: Sequence[int]) -> int:
    alignment, fit = _RULES[runtime]
    return arena_bytes(program.buffers(order), alignment=alignment, fit=fit)


def _roots(graph: FileSubgraph, measured: MeasuredArena) -> dict[int, int]:
    """Return for tensors that share a buffer the first of those that do.

    An op's inputs and outputs are alive at once: if they start at the same place, they
    share it.
    """
    roots: dict[int, int] = {}
    for reads, writes in zip(graph.reads, graph.writes, strict=True):
        at = {measured.offsets[t]: t for t in reads if t in measured.offsets}
        for tensor in writes:
            shared = at.get(measured.offsets.get(tensor, -1))
            if shared is not None:
                roots[tensor] = roots.get(shared, shared)
    return roots


def _program(
    graph: FileSubgraph,
    sizes: Mapping[int, int],
    roots: Mapping[int, int],
    *,
    stay: bool = True,
) -> tuple[ArenaProgram, tuple[int, ...]]:
    """Return the ops and their buffers, and the tensors that these are.

    Args:
        graph: the ops.
        sizes: the bytes of tensors that are in the arena.
        roots: for tensors that share a buffer with others, the first of them.
        stay: whether inputs are alive to the end.
    """
    makers = {t: -1 for t in graph.inputs if t in sizes}
    users: dict[int, dict[int, None]] = {t: {} for t in makers}
    for i, (reads, writes) in enumerate(zip(graph.reads, graph.writes, strict=True)):
        for tensor in (*reads, *writes):
            root = roots.get(tensor, tensor)
            if tensor in writes and tensor in sizes and root not in makers:
                makers[root], users[root] = i, {}
            elif root in users:
                users[root][i] = None
    kept = {roots.get(t, t) for t in graph.outputs}
    # An input that nothing reads is written all the same.
    kept.update(t for t in graph.inputs if stay or not users.get(t))
    tensors = tuple(sorted(makers))
    values = [
        Value(
            sizes[t],
            makers[t],
            tuple(u for u in users[t] if u != makers[t]),
            t in kept,
        )
        for t in tensors
    ]
    return ArenaProgram(len(graph.kinds), values, (), graph.edges), tensors


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
