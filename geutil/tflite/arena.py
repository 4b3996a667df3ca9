"""The arena of a TFLite file: where the interpreter puts each tensor.

The interpreter tells no size of its arena, but the address of each tensor. Tensors that
it plans lie in one piece of memory, without gaps but for alignment; the arena is that
piece. Weights lie in the file, variables and what is computed once elsewhere. Scalars
are read without an address: they count with their bytes, but not in the size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from geutil.tflite.file import LiteFile
from geutil.tflite.order import calls_others
from geutil.tflite.parts import LiteGraph, LiteOp, LiteTensor
from geutil.tflite.run import new_interpreter
from geutil.tflite.state import keeps_order

ALIGNMENT = 64
"""The interpreter starts tensors at multiples of so many bytes."""
_UNKNOWN = -1
"""The address of a scalar."""
_OUTSIDE = frozenset(("resource", "string", "variant"))
"""Types of tensors that are never in the arena."""


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
    alone = _alone(op)
    try:
        interpreter = new_interpreter(alone.to_bytes(), reference=reference)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError):
        # It cannot run by itself: it needs a resource, say.
        return ()
    _, temporaries = _addresses(alone.graphs[0], interpreter)
    return tuple(size for _, size in temporaries)


def _alone(op: LiteOp) -> LiteFile:
    """Return a file of one op, whose constants are constants still."""
    copies = {t: t.copied() for t in (*op.reads, *op.outputs)}
    file, graph = LiteFile(), LiteGraph()
    only = graph.add_op(op.copied(copies))
    for tensor in copies:
        if tensor.quantization is not None and tensor.quantization.block_scales:
            graph.add_tensor(tensor.quantization.block_scales)
    fed = dict.fromkeys(t for t in op.reads if not t.stored_bytes)
    graph.inputs = tuple(copies[t] for t in fed)
    graph.outputs = only.outputs
    file.graphs.append(graph)
    return file


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
    is_outside = tensor.is_variable or tensor.dtype in _OUTSIDE
    return is_outside or tensor.stored_bytes > 0


def _arena(
    graph: LiteGraph, found: Mapping[LiteTensor, Place], temporaries: list[Place]
) -> MeasuredArena:
    """Return the largest piece of memory without gaps, and what lies in it."""
    made = {*graph.inputs, *(t for op in graph.ops for t in op.outputs)}
    pieces: list[list[Place]] = []
    end = -1
    for address, size in sorted((*found.values(), *temporaries)):
        if address == _UNKNOWN:
            continue
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
