"""A quantized model as it is deployed: nothing is learnt, and all is constant."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph.function_graphs import bindings, build_function
from geutil.graph.identity import MutableIdentityMap
from geutil.graph.importing import neutral
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.quantize.calibration.sites import variable_behind
from geutil.quantize.copying import PartialCopy
from geutil.quantize.finding.delays import delayed_input
from geutil.quantize.finding.kernels import FAKE_QUANT
from geutil.quantize.int8.mending import mended, nudge
from geutil.quantize.int8.running import file_names

Array = np.ndarray[Any, Any]


def deployed(model: Any, *, mend: bool = False) -> Any:
    """Return a function of a quantized model as it will be deployed.

    Ranges and other variables are constants, with the values that they have now. Of a
    model for training, what learns ranges and what delays quantization is left out.

    Its inputs and outputs have the names that they have in a file; see `file_names`.

    Args:
        model: a `geutil.model.Model`.
        mend: change values that TFLite's converter would store wrong, by less than
            it rounds them.

    Cost: one copy of the graph; with `mend`, one run of what biases depend on.
    """
    graph = model.graph
    stand_ins = _constants(graph)
    if mend:
        stand_ins |= mended(graph, stand_ins)

    def replace(op: Operation) -> Tensor | Array | None:
        found = stand_ins.get(op)
        if found is not None:
            return found
        return None if delayed_input(op) is None else op.inputs[1]

    copy = PartialCopy(graph, model.inputs, replace, nudge if mend else None)
    made = copy.of(list(model.outputs.values()))
    inputs, outputs = file_names(list(model.inputs)), file_names(list(model.outputs))
    by_handle = {id(v.handle): v for v in model.variables.values()}
    # Those that tables are looked up in, which only the converter can freeze.
    variables = [by_handle[id(e)] for e in copy.externals if id(e) in by_handle]
    with neutral(copy.graph):
        results = {
            name: tf.identity(t) for name, t in zip(outputs.values(), made, strict=True)
        }
    given = {inputs[name]: t for name, t in copy.inputs.items()}
    return build_function(copy.graph, given, results, [], variables)


def _constants(graph: Graph) -> dict[Operation, Array]:
    """Return the values of ranges, and of all that is read from variables."""
    outside = MutableIdentityMap((inside, ext) for ext, inside in bindings(graph))
    found: dict[Operation, Array] = {}
    for op in graph.get_operations():
        if op.type == "ReadVariableOp":
            ends = [op.outputs[0]]
        elif op.type in FAKE_QUANT:
            ends = list(op.inputs)[1:]
        else:
            continue
        for end in ends:
            inside = variable_behind(end)
            handle = None if inside is None else outside.get(inside)
            if handle is not None and end.op not in found:
                found[end.op] = _value(handle, end.dtype)
    return found


def _value(handle: Any, dtype: tf.DType) -> Array:
    read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
    return np.asarray(read.numpy())
