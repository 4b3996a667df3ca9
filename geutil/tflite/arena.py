"""The arena of a TFLite file: where the interpreter puts each tensor.

The interpreter tells no size of its arena, but the address of each tensor. Tensors that
it plans lie in one piece of memory, without gaps but for alignment; the arena is that
piece. Weights lie in the file, variables and what is computed once elsewhere. Scalars
are read without an address: they count with their bytes, but not in the size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from geutil.tflite.order import FileSubgraph, file_subgraphs
from geutil.tflite.run import new_interpreter, packed, schema, unpacked

ALIGNMENT = 64
"""The interpreter starts tensors at multiples of so many bytes."""
_UNKNOWN = -1
"""The address of a scalar."""


@dataclass(frozen=True)
class MeasuredArena:
    """Where the interpreter put the tensors of a subgraph.

    Attributes:
        size: the bytes of the arena.
        offsets: of the file's tensors that are in it, from its start, in bytes.
        sizes: of these tensors, in bytes.
        unplaced: tensors that got no place yet, since a size is known only when the
            file runs.
        temporaries: the bytes of kernels' own buffers that are in it, such as the
            patches of an image that a convolution multiplies as a matrix.
    """

    size: int
    offsets: Mapping[int, int]
    sizes: Mapping[int, int]
    unplaced: tuple[int, ...]
    temporaries: tuple[int, ...]


def measure_arena(
    blob: bytes, subgraph: int = 0, *, reference: bool = False
) -> MeasuredArena:
    """Return the arena that the interpreter plans for a file, without delegates.

    Args:
        blob: the file. Sizes that it leaves open count as 1.
        subgraph: which of its subgraphs; others than the first are measured in a file
            in which they are the first.
        reference: whether it is measured with TFLite's reference kernels, which hold
            few temporary buffers.

    Raises:
        ValueError, RuntimeError: it is no TFLite file, or cannot be run.

    Cost: TFLite's own, which allocates the arena, and linear in the tensors; some
        20 us for each. The weights are copied for subgraphs other than the first.
    """
    graph = file_subgraphs(blob)[subgraph]
    if subgraph:
        blob = _with_first(blob, subgraph)
    interpreter = new_interpreter(blob, reference=reference)
    interpreter.allocate_tensors()
    return _arena(graph, _addresses(graph, interpreter))


def measure_op_temporaries(
    blob: bytes, subgraph: int = 0, *, reference: bool = False
) -> list[tuple[int, ...]]:
    """Return for each op the bytes of its kernel's own buffers, each op measured alone.

    They are those of the arena and such that are kept from run to run: the interpreter
    does not tell them apart. Ops that call subgraphs, or share a state, have none.

    Args:
        blob: the file.
        subgraph: which of its subgraphs.
        reference: as of `measure_arena`.

    Cost: an interpreter for each op; some 1 ms, and a copy of its weights.
    """
    model = unpacked(blob)
    graph = file_subgraphs(blob)[subgraph]
    unmeasured = {*graph.stateful, *graph.calls}
    return [
        () if i in unmeasured else _temporaries(model, graph, i, reference)
        for i in range(len(graph.kinds))
    ]


def _temporaries(
    model: Any, graph: FileSubgraph, place: int, reference: bool
) -> tuple[int, ...]:
    blob = _alone(model, graph, place)
    try:
        interpreter = new_interpreter(blob, reference=reference)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError):
        # It cannot run by itself: it needs a resource, say.
        return ()
    (alone,) = file_subgraphs(blob)
    found = _addresses(alone, interpreter)
    return tuple(size for t, (_, size) in found.items() if t >= len(alone.names))


def _alone(model: Any, graph: FileSubgraph, place: int) -> bytes:
    """Return a file of one op, whose constants are constants still."""
    types = schema()
    whole = model.subgraphs[graph.index]
    op = whole.operators[place]
    used = dict.fromkeys([*graph.reads[place], *graph.writes[place]])
    new_index = {t: i for i, t in enumerate(used)}
    alone, buffer = types.ModelT(), types.BufferT()
    alone.version, alone.description = model.version, "one op"
    alone.operatorCodes = [model.operatorCodes[op.opcodeIndex]]
    alone.buffers = [buffer]
    part = types.SubGraphT()
    part.tensors = []
    for t in used:
        tensor = _copy(whole.tensors[t])
        tensor.buffer = 0
        if t in graph.constants:
            tensor.buffer = len(alone.buffers)
            alone.buffers.append(model.buffers[whole.tensors[t].buffer])
        part.tensors.append(tensor)
    only = _copy(op)
    only.opcodeIndex = 0
    only.inputs = [new_index.get(int(t), -1) for t in op.inputs]
    only.outputs = [new_index[int(t)] for t in op.outputs]
    part.operators = [only]
    fed = (t for t in graph.reads[place] if t not in graph.constants)
    part.inputs = [new_index[t] for t in dict.fromkeys(fed)]
    part.outputs = only.outputs
    alone.subgraphs = [part]
    return packed(alone)


def _with_first(blob: bytes, index: int) -> bytes:
    """Return a file whose first subgraph is another one, for measuring only.

    The first stays behind it, so that calls find all subgraphs that they may call.
    """
    model = unpacked(blob)
    body = model.subgraphs[index]
    model.subgraphs = [body, *model.subgraphs]
    model.signatureDefs = []
    # What calls a subgraph by its place finds it one place on.
    for graph in model.subgraphs[1:]:
        for op in graph.operators:
            _shift_calls(op.builtinOptions)
            _shift_calls(op.builtinOptions2)
    return packed(model)


def _shift_calls(options: Any) -> None:
    for name, value in vars(options).items() if options is not None else ():
        if name.lower().endswith(("subgraphindex", "subgraph")):
            setattr(options, name, value + 1)
        elif name == "branchSubgraphIndices" and value is not None:
            setattr(options, name, [index + 1 for index in value])


def _copy(item: Any) -> Any:
    new = type(item)()
    vars(new).update(vars(item))
    return new


def _addresses(graph: FileSubgraph, interpreter: Any) -> dict[int, tuple[int, int]]:
    """Return the address and size of the tensors that may be in the arena."""
    elsewhere = graph.constants | graph.variables | graph.outside
    found: dict[int, tuple[int, int]] = {}
    # Those without a shape have no details, and end the process if they are read.
    for detail in interpreter.get_tensor_details():
        index = detail["index"]
        if index in elsewhere:
            continue
        try:
            array = interpreter.tensor(index)()
        except ValueError:
            # It has no memory yet.
            continue
        if array.nbytes:
            address = array.ctypes.data if isinstance(array, np.ndarray) else _UNKNOWN
            found[index] = (address, array.nbytes)
    return found


def _arena(graph: FileSubgraph, found: Mapping[int, tuple[int, int]]) -> MeasuredArena:
    """Return the largest piece of memory without gaps, and what lies in it."""
    made = {*graph.inputs, *(t for writes in graph.writes for t in writes)}
    elsewhere = graph.constants | graph.variables | graph.outside | found.keys()
    unplaced = tuple(sorted(made - elsewhere))
    scalars = {t: size for t, (at, size) in found.items() if at == _UNKNOWN}
    found = {t: place for t, place in found.items() if t not in scalars}
    pieces: list[list[int]] = []
    end = -1
    for index in sorted(found, key=lambda t: found[t]):
        address, size = found[index]
        if not pieces or address > end + ALIGNMENT:
            pieces.append([])
            end = address
        pieces[-1].append(index)
        end = max(end, address + size)
    piece = max(pieces, key=len, default=[])
    start = min((found[t][0] for t in piece), default=0)
    tensors = sorted(t for t in piece if t < len(graph.names))
    return MeasuredArena(
        size=max((sum(found[t]) for t in piece), default=start) - start,
        offsets={t: found[t][0] - start for t in tensors},
        sizes={t: found[t][1] for t in tensors}
        | {t: size for t, size in scalars.items() if t in made},
        unplaced=unplaced,
        temporaries=tuple(found[t][1] for t in sorted(piece) if t >= len(graph.names)),
    )
