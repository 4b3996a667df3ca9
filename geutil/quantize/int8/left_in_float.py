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
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph import creation
from geutil.graph.types import Graph, MutableIdentityMap, Operation, Tensor
from geutil.quantize.int8.converter_workarounds import read_instead
from geutil.quantize.partial_copy import values_of
from geutil.quantize.planning.network import is_left_in_float
from geutil.select.networks.provenance import Origins
from geutil.tflite import old_edits as tflite_edits
from geutil.tflite.run import packed, unpacked

Array = np.ndarray[Any, Any]

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
        """Make values complex and real again around marked ops.

        Args:
            graph: the copy, whose variables and ranges are constants; it is changed,
                and the caller is in it.
            results: its results.

        Returns:
            The results as they are now, and inputs in the place of weights, by name.

        Cost: linear in the ops and edges; one run of what such weights depend on.
        """
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
        """Return the file without these edges, and with weights in it.

        Cost: linear in the file.
        """
        if not self._has_edges:
            return blob
        model = unpacked(blob)
        self.join(model)
        tflite_edits.drop_unread(model)
        return packed(model)

    def join(self, model: Any) -> set[str]:
        """Leave edges out of a file, put weights in; return what stood for them."""
        if not self._has_edges:
            return set()
        for signature in model.signatureDefs:
            graph = model.subgraphs[signature.subgraphIndex]
            for end in list(signature.inputs):
                value = self._weights.get(end.name.decode())
                if value is not None:
                    _store(model, graph, int(end.tensorIndex), value)
                    signature.inputs.remove(end)
        return {name for graph in model.subgraphs for name in _joined(model, graph)}


def _store(model: Any, graph: Any, place: int, value: Array) -> None:
    """Let weights that are an input be a constant, and what transposes them, too."""
    graph.inputs = graph.inputs[graph.inputs != place]
    tflite_edits.set_constant(model, graph.tensors[place], value, "FLOAT32")
    for op in list(graph.operators):
        if place in op.inputs and tflite_edits.kind_of(model, op) == "TRANSPOSE":
            order = tflite_edits.constant(model, graph.tensors[op.inputs[1]])
            moved = value.transpose(order)
            made = graph.tensors[op.outputs[0]]
            tflite_edits.set_constant(model, made, moved, "FLOAT32")
            graph.operators.remove(op)


def _joined(model: Any, graph: Any) -> list[str]:
    """Let ops read what was made complex and real again; return its names."""
    casts: dict[int, int] = {}
    source_of: dict[int, int] = {}
    operators = []
    for op in graph.operators:
        inputs = [source_of.get(i, i) for i in map(int, op.inputs)]
        op.inputs = np.array(inputs, np.int32)
        kind, results = tflite_edits.kind_of(model, op), list(map(int, op.outputs))
        if kind == "CAST" and _is_complex(graph, results[0]):
            casts[results[0]] = inputs[0]
        if kind == "REAL" and inputs[0] in casts:
            source_of[results[0]] = casts[inputs[0]]
        else:
            operators.append(op)
    graph.operators = operators
    for made, source in source_of.items():
        tflite_edits.set_end(model, graph, made, source)
    return [graph.tensors[made].name.decode() for made in source_of]


def _is_complex(graph: Any, index: int) -> bool:
    return tflite_edits.type_of(graph.tensors[index]) == "COMPLEX64"
