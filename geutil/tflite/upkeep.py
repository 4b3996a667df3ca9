"""Upkeep of TFLite files that are edited: their ends, and parts that nothing needs."""

from __future__ import annotations

from geutil.tflite.parts import Buffer, Contents, LiteGraph, LiteTensor


def set_end(
    file: Contents, graph: LiteGraph, tensor: LiteTensor, new: LiteTensor
) -> None:
    """Let a tensor be an input or an output of a subgraph in the place of another one.

    Cost: linear in inputs and outputs.
    """
    graph.inputs = tuple(new if t is tensor else t for t in graph.inputs)
    graph.outputs = tuple(new if t is tensor else t for t in graph.outputs)
    for signature in file.signatures.values():
        for ends in (signature.inputs, signature.outputs):
            for name, end in ends.items() if signature.graph is graph else ():
                if end is tensor:
                    ends[name] = new


def drop_unread(file: Contents) -> None:
    """Leave out ops whose results nothing reads, and tensors and buffers of no op.

    Ops with a state stay, as those of a kind that reads or makes nothing do. Buffers of
    the same bytes become one.

    Cost: linear in ops, tensors and bytes.
    """
    for graph in file.graphs:
        _drop_ops(graph)
        ends = [s for s in file.signatures.values() if s.graph is graph]
        named = (t for s in ends for t in (*s.inputs.values(), *s.outputs.values()))
        _drop_tensors(graph, {*named})
    _share_buffers(file)
    file.kept = {0}
    used = {id(op.code) for op in file.ops}
    file.codes = [code for code in file.codes if id(code) in used]


def _drop_ops(graph: LiteGraph) -> None:
    read = {*graph.outputs}
    kept = []
    for op in reversed(graph.ops):
        stateful = not op.outputs or any(t.is_variable for t in op.reads)
        mutates = op.record.mutatingVariableInputs is not None
        if stateful or mutates or not read.isdisjoint(op.outputs):
            kept.append(op)
            read.update(op.reads)
    graph.set_ops(kept[::-1])


def _drop_tensors(graph: LiteGraph, used: set[LiteTensor]) -> None:
    used |= {*graph.inputs, *graph.outputs}
    for op in graph.ops:
        used.update(op.reads, op.outputs, (t for t in op.intermediates if t))
    # No op reads the steps of blocks, but the tensors that they are for do.
    for steps in [t.quantization for t in used if t.quantization is not None]:
        used.update(t for t in (steps.block_scales, steps.block_zeros) if t)
    graph.drop_tensors([t for t in graph.tensors if t not in used])


def _share_buffers(file: Contents) -> None:
    """Let constants of the same bytes be in one buffer."""
    first: dict[bytes, Buffer] = {}
    for tensor in file.tensors:
        data = tensor.buffer.data
        if data is not None and data.size and not tensor.is_variable:
            tensor.buffer = first.setdefault(data.tobytes(), tensor.buffer)
