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

from geutil.tflite import LiteFile, LiteGraph, LiteTensor
from geutil.tflite.arena import (
    MeasuredArena,
    measure_arena,
    measure_op_temporaries,
)
from geutil.tflite.arena_buffers import ArenaProgram, Fit, Value, arena_bytes
from geutil.tflite.order import dependencies

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


def runtime_arenas(file: LiteFile, graph: LiteGraph) -> dict[Runtime, RuntimeArena]:
    """Return the arena of a subgraph under each runtime."""
    edges = dependencies(graph)
    arenas: dict[Runtime, RuntimeArena] = {}
    for runtime in ("litert", "reference"):
        is_reference = runtime == "reference"
        measured = measure_arena(file, graph, reference=is_reference)
        temporaries: Sequence[Sequence[int]] = ()
        if measured.temporaries:
            alone = measure_op_temporaries(graph, reference=is_reference)
            temporaries = _in_arena(alone, measured.temporaries)
        values, tensors = _values(graph, measured.sizes, _roots(graph, measured))
        program = ArenaProgram(len(graph.ops), values, temporaries, edges)
        arenas[runtime] = RuntimeArena(
            runtime, program, tensors, measured.size, measured.unplaced
        )
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
            sizes[t],
            makers[t],
            tuple(u for u in users[t] if u != makers[t]),
            t in kept,
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
