"""TFLite files as objects: constants, kinds of ops, what is not needed any more.

What is edited is the `ModelT` of `geutil.tflite.run.unpacked`: subgraphs that
hold tensors and ops by number, and buffers of constants.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from geutil.tflite.run import kind_names, schema, type_names

Array = np.ndarray[Any, Any]

_LAST_OF_ONE_BYTE = 127
"""Kinds up to this one are written in a field for old readers, too."""
_DTYPES = {
    "FLOAT32": np.float32,
    "FLOAT16": np.float16,
    "INT8": np.int8,
    "UINT8": np.uint8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
}


def kind_of(model: Any, op: Any) -> str:
    """Return the type of an op, such as "CONV_2D"."""
    code = model.operatorCodes[op.opcodeIndex]
    builtin = max(code.builtinCode, code.deprecatedBuiltinCode)
    return kind_names().get(builtin, str(builtin))


def type_of(tensor: Any) -> str:
    """Return the type of a tensor, such as "INT8"."""
    return type_names()[tensor.type]


def set_type(tensor: Any, name: str) -> None:
    """Set the type of a tensor."""
    tensor.type = getattr(schema().TensorType, name)


def constant(model: Any, tensor: Any) -> Array | None:
    """Return the value of a tensor that the file holds; None for others.

    Values of 4 bits are returned as int8.
    """
    data = model.buffers[tensor.buffer].data if tensor.buffer else None
    if data is None or not len(data):
        return None
    raw = np.asarray(data, np.uint8)
    shape = () if tensor.shape is None else tuple(map(int, tensor.shape))
    if type_of(tensor) == "INT4":
        return unpacked_int4(raw, int(np.prod(shape))).reshape(shape)
    dtype = _DTYPES.get(type_of(tensor))
    return None if dtype is None else raw.view(dtype).reshape(shape)


def packed_int4(values: Array) -> Array:
    """Return integers from -8 to 7 as bytes, two in each, the first one low.

    Example:
        >>> import numpy as np
        >>> from geutil.tflite.old_edits import packed_int4
        >>> packed_int4(np.array([1, -1, 7])).tolist()
        [241, 7]
    """
    flat = values.reshape(-1).astype(np.int8).view(np.uint8) & 15
    flat = np.append(flat, np.zeros(flat.size % 2, np.uint8))
    return (flat[::2] | flat[1::2] << 4).astype(np.uint8)


def unpacked_int4(data: Array, count: int) -> Array:
    """Return the integers that bytes hold two by two."""
    pairs = np.stack([data & 15, data >> 4], axis=1).reshape(-1)[:count]
    return np.where(pairs > 7, pairs.astype(np.int8) - 16, pairs).astype(np.int8)


def set_constant(model: Any, tensor: Any, value: Array, kind: str) -> None:
    """Let a tensor hold a value, in a buffer of its own.

    Args:
        model: the file.
        tensor: the tensor.
        value: the value; integers from -8 to 7 for "INT4".
        kind: the type to store it in.
    """
    buffer = schema().BufferT()
    if kind == "INT4":
        buffer.data = packed_int4(value)
    else:
        raw: Array = np.ascontiguousarray(value, _DTYPES[kind])
        buffer.data = np.frombuffer(raw.tobytes(), np.uint8)
    tensor.buffer = len(model.buffers)
    tensor.shape = np.asarray(value.shape, np.int32)
    set_type(tensor, kind)
    model.buffers.append(buffer)


def new_tensor(graph: Any, like: Any, name: str = "") -> int:
    """Add a tensor of the shape and type of another one; return its number."""
    tensor = schema().TensorT()
    tensor.shape, tensor.shapeSignature = like.shape, like.shapeSignature
    tensor.type, tensor.hasRank = like.type, like.hasRank
    tensor.name = name.encode() if name else like.name
    tensor.buffer = 0
    graph.tensors.append(tensor)
    return len(graph.tensors) - 1


def set_end(model: Any, graph: Any, index: int, new: int) -> None:
    """Let a tensor be an input or an output in the place of another one."""
    for ends in (graph.inputs, graph.outputs):
        ends[ends == index] = new
    this = next(i for i, g in enumerate(model.subgraphs) if g is graph)
    for signature in model.signatureDefs or ():
        named = (*(signature.inputs or ()), *(signature.outputs or ()))
        for end in named if signature.subgraphIndex == this else ():
            if end.tensorIndex == index:
                end.tensorIndex = new


def set_steps(tensor: Any, steps: Array | float, axis: int = 0, zero: int = 0) -> None:
    """Let a tensor be stored in steps.

    Args:
        tensor: the tensor.
        steps: the size of a step, one for all or one for each channel.
        axis: the axis of the channels.
        zero: the integer that stands for 0.
    """
    parameters = schema().QuantizationParametersT()
    parameters.scale = np.asarray(steps, np.float32).reshape(-1)
    parameters.zeroPoint = np.full(parameters.scale.size, zero, np.int64)
    parameters.quantizedDimension = axis if parameters.scale.size > 1 else 0
    tensor.quantization = parameters


def knows_blocks() -> bool:
    """Tell whether the schema that is installed has steps for blocks."""
    return hasattr(schema(), "BlockwiseQuantizationT")


def set_blocks(tensor: Any, steps: int, block: int) -> None:
    """Let a matrix [outputs, inputs] be stored in steps, one for each block of a row.

    Args:
        tensor: the matrix.
        steps: the number of the tensor that holds their sizes: [outputs, blocks].
        block: how many values have one step.
    """
    details = schema().BlockwiseQuantizationT()
    details.scales, details.zeroPoints, details.blockSize = steps, -1, block
    parameters = schema().QuantizationParametersT()
    parameters.detailsType = schema().QuantizationDetails.BlockwiseQuantization
    parameters.details, parameters.quantizedDimension = details, 0
    tensor.quantization = parameters


def _blocks_of(tensor: Any) -> Any:
    """Return how a tensor is stored in blocks; None if it is not."""
    parameters = tensor.quantization
    if parameters is None or not knows_blocks():
        return None
    blockwise = schema().QuantizationDetails.BlockwiseQuantization
    return parameters.details if parameters.detailsType == blockwise else None


def steps_of(tensor: Any) -> Array | None:
    """Return the sizes of a tensor's steps; None if it is not quantized."""
    parameters = tensor.quantization
    if parameters is None or parameters.scale is None or not len(parameters.scale):
        return None
    return np.asarray(parameters.scale, np.float32)


def known_steps(tensor: Any) -> Array:
    """Return the sizes of a tensor's steps.

    Raises:
        ValueError: it is not quantized.
    """
    steps = steps_of(tensor)
    if steps is None:
        raise ValueError(f"tensor {tensor.name!r} of the file has no steps")
    return steps


def zeros_of(tensor: Any) -> Array:
    """Return the integers that stand for 0, one for all or one for each channel."""
    zeros = tensor.quantization.zeroPoint
    return np.zeros(1, np.int64) if zeros is None else np.asarray(zeros, np.int64)


def new_op(
    model: Any, kind: str, inputs: Iterable[int], outputs: Iterable[int], version: int
) -> Any:
    """Return an op without options, which is in no subgraph yet."""
    op = schema().OperatorT()
    op.opcodeIndex = code_index(model, kind, version)
    op.inputs = np.asarray([*inputs], np.int32)
    op.outputs = np.asarray([*outputs], np.int32)
    return op


def code_index(model: Any, kind: str, version: int) -> int:
    """Return the number of a kind of op, of this version of its kernel at least."""
    wanted = getattr(schema().BuiltinOperator, kind)
    for index, code in enumerate(model.operatorCodes):
        if max(code.builtinCode, code.deprecatedBuiltinCode) == wanted:
            # Newer versions of a kernel compute what older ones do.
            code.version = max(code.version, version)
            return index
    code = schema().OperatorCodeT()
    code.builtinCode, code.version = wanted, version
    code.deprecatedBuiltinCode = min(wanted, _LAST_OF_ONE_BYTE)
    model.operatorCodes.append(code)
    return len(model.operatorCodes) - 1


def drop_unread(model: Any) -> None:
    """Leave out ops whose results nothing reads, and tensors and buffers of no op.

    Ops with a state stay, as those of a kind that reads or makes nothing do. Buffers of
    the same bytes become one.

    Cost: linear in ops, tensors and bytes.
    """
    for graph in model.subgraphs:
        _drop_ops(graph)
        _drop_tensors(model, graph)
    _share_buffers(model)
    used = {0, *(t.buffer for g in model.subgraphs for t in g.tensors)}
    used |= {entry.buffer for entry in model.metadata or ()}
    kept = sorted(used)
    place = {old: new for new, old in enumerate(kept)}
    model.buffers = [model.buffers[index] for index in kept]
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            tensor.buffer = place[tensor.buffer]
    for entry in model.metadata or ():
        entry.buffer = place[entry.buffer]


def _share_buffers(model: Any) -> None:
    """Let constants of the same bytes be in one buffer."""
    first: dict[bytes, int] = {}
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            data = model.buffers[tensor.buffer].data if tensor.buffer else None
            if data is not None and len(data) and not tensor.isVariable:
                content = np.asarray(data, np.uint8).tobytes()
                tensor.buffer = first.setdefault(content, tensor.buffer)


def _drop_ops(graph: Any) -> None:
    is_variable = [bool(t.isVariable) for t in graph.tensors]
    read = {int(i) for i in graph.outputs}
    kept = []
    for op in reversed(graph.operators):
        outputs = [int(i) for i in op.outputs if i >= 0]
        inputs = [int(i) for i in op.inputs if i >= 0]
        stateful = not outputs or any(is_variable[i] for i in inputs)
        if stateful or any(i in read for i in outputs) or op.mutatingVariableInputs:
            kept.append(op)
            read.update(inputs)
    graph.operators = kept[::-1]


def _drop_tensors(model: Any, graph: Any) -> None:
    used = {int(i) for i in (*graph.inputs, *graph.outputs)}
    for op in graph.operators:
        for indices in (op.inputs, op.outputs, op.intermediates):
            used.update(int(i) for i in (() if indices is None else indices) if i >= 0)
    # No op reads the steps of blocks, but the tensors that they are for do.
    blocks = [b for i in used if (b := _blocks_of(graph.tensors[i])) is not None]
    used.update(i for b in blocks for i in (b.scales, b.zeroPoints) if i >= 0)
    kept = sorted(used)
    place = {old: new for new, old in enumerate(kept)} | {-1: -1}
    graph.tensors = [graph.tensors[index] for index in kept]
    for details in blocks:
        details.scales = place[details.scales]
        details.zeroPoints = place[details.zeroPoints]
    graph.inputs, graph.outputs = (
        np.asarray([place[int(i)] for i in ends], np.int32)
        for ends in (graph.inputs, graph.outputs)
    )
    for op in graph.operators:
        for field in ("inputs", "outputs", "intermediates"):
            indices = getattr(op, field)
            if indices is not None:
                new = np.asarray([place[int(i)] for i in indices], np.int32)
                setattr(op, field, new)
    this = next(i for i, g in enumerate(model.subgraphs) if g is graph)
    for signature in model.signatureDefs or ():
        if signature.subgraphIndex == this:
            for end in (*(signature.inputs or ()), *(signature.outputs or ())):
                end.tensorIndex = place[end.tensorIndex]
