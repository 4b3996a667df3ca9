"""Ops that a caller left in float, kept so by TFLite's converter.

The converter quantizes what lies between two ranges (TensorFlow 2.21). So ops that
`quantize` was told to skip carry a mark, and in what the converter is given values are
made complex and real again on each edge between these ops and others: that is the same,
the converter does not see it, and TFLite does so with floats only. In the file they go
on as they are.

Weights of transposed convolutions it stores in 8 bits all the same. They are inputs of
what it is given, and constants of the file.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from geutil import tflite
from geutil.graph import creation
from geutil.graph.types import Graph, MutableIdentityMap, Operation, Tensor
from geutil.quantize.partial_copy import values_of
from geutil.quantize.planning.network import is_left_in_float
from geutil.quantize.tflite.converter_workarounds import read_instead
from geutil.select.networks.provenance import Origins
from geutil.tflite import LiteFile, LiteGraph, LiteTensor
from geutil.tflite.ends import set_end
from geutil.tflite.parts import Array

_TRANSPOSED, _WEIGHTS = "Conv2DBackpropInput", 1


class Apart:
    """The marked ops of a copy of a graph, on their way through the converter."""

    def __init__(self) -> None:
        """Begin with no copy."""
        # By the names of the inputs that take their place.
        self._weights: dict[str, Array] = {}
        self._has_edges = False

    def set_apart(
        self, graph: Graph, results: Sequence[Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Make values complex and real again around marked ops."""
        ops = [op for op in graph.get_operations() if is_left_in_float(op)]
        if not ops:
            return list(results), {}
        self._has_edges = True
        marked, origins = frozenset(ops), Origins(graph)
        again: MutableIdentityMap[Tensor] = MutableIdentityMap()

        def real(tensor: Tensor) -> Tensor:
            if tensor not in again:
                again[tensor] = tf.math.real(tf.cast(tensor, tf.complex64))
            return again[tensor]

        def is_data(tensor: Tensor) -> bool:
            return tensor.dtype == tf.float32 and not origins.is_parameter(tensor)

        for op in ops:
            for slot, tensor in enumerate(op.inputs):
                if tensor.op not in marked and is_data(tensor):
                    creation.set_new_input(op, slot, real(tensor))
        for tensor in (t for op in ops for t in op.outputs if is_data(t)):
            readers = [op for op in tensor.consumers() if op not in marked]
            if readers:
                read_instead(readers, tensor, real(tensor))
        ends = [real(t) if t.op in marked and is_data(t) else t for t in results]
        return ends, self._given(ops)

    def _given(self, ops: Sequence[Operation]) -> dict[str, Tensor]:
        """Let transposed convolutions read weights from inputs; return these."""
        layers = [op for op in ops if op.type == _TRANSPOSED]
        with tf.init_scope():
            values = values_of([op.inputs[_WEIGHTS] for op in layers])
        given = {}
        for index, (op, value) in enumerate(zip(layers, values, strict=True)):
            name = f"float_weights_{index}"
            self._weights[name] = value
            given[name] = tf.compat.v1.placeholder(value.dtype, value.shape, name)
            creation.set_new_input(op, _WEIGHTS, given[name])
        return given

    def joined(self, blob: bytes) -> bytes:
        """Return the file without these edges, and with weights in it."""
        if not self._has_edges:
            return blob
        file = tflite.open(blob)
        self.join(file)
        file.strip()
        return file.to_bytes()

    def join(self, file: LiteFile) -> set[str]:
        """Leave edges out of a file, put weights in; return their placeholders."""
        if not self._has_edges:
            return set()
        for signature in file.signatures.values():
            for name in self._weights.keys() & signature.inputs.keys():
                tensor = signature.inputs.pop(name)
                _store(signature.graph, tensor, self._weights[name])
        return {name for graph in file.graphs for name in _joined(file, graph)}


def _store(graph: LiteGraph, weights: LiteTensor, value: Array) -> None:
    """Replace weights that are an input by a constant, and their transposition, too."""
    graph.inputs = tuple(t for t in graph.inputs if t is not weights)
    weights.store(value, "float32")
    moving = [op for op in weights.consumers if op.kind == "TRANSPOSE"]
    for op in moving:
        op.outputs[0].store(value.transpose(op.reads[1].value), "float32")
    graph.set_ops(op for op in graph.ops if op not in moving)


def _joined(file: LiteFile, graph: LiteGraph) -> list[str]:
    """Let ops read values that were made complex and real again; return their names."""
    source_of: dict[LiteTensor, LiteTensor] = {}
    kept = []
    for op in graph.ops:
        op.inputs = tuple(source_of.get(t, t) if t else None for t in op.inputs)
        cast = op.reads[0].producer if op.kind == "REAL" else None
        if cast is not None and cast.kind == "CAST":
            source_of[op.outputs[0]] = cast.reads[0]
        else:
            kept.append(op)
    graph.set_ops(kept)
    for made, source in source_of.items():
        set_end(file, graph, made, source)
    return [made.name for made in source_of]
