"""Conversion.

From quantized models to TFLite files of int8 kernels, which keep their promises.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import QuantizeError, Words
from geutil.graph import creation, functions, op_types, protos
from geutil.graph.types import Graph, IdentityMap, Operation, Tensor
from geutil.quantize.blocks import block_of
from geutil.quantize.calibration.ranges import (
    RangeSite,
    frozen,
    live_simulations,
    range_values,
    variable_values,
)
from geutil.quantize.int8 import (
    block_weights,
    converter_workarounds,
    far_addends,
)
from geutil.quantize.int8.converter_workarounds import Dilated
from geutil.quantize.int8.left_in_float import Apart
from geutil.quantize.int8.parted_weights import part_weights
from geutil.quantize.partial_copy import Amend, PartialCopy
from geutil.quantize.planning.int8_kernels import (
    DECISIONS,
    FAKE_QUANT,
    KERNELS,
)
from geutil.quantize.planning.network import (
    is_left_in_float,
    leave_in_float,
    neutral_input,
)
from geutil.quantize.planning.plan import quantized_ops
from geutil.quantize.spec import SYMMETRIC_START
from geutil.select.networks.layers import LAYERS
from geutil.select.networks.provenance import Origins
from geutil.tflite import LiteFile, LiteOp
from geutil.tflite.names import called, file_names, sources_of
from geutil.tflite.precision import has_floats

Array = np.ndarray[Any, Any]
_ROUNDING = 2.0**-20
_COMPUTING = frozenset((*KERNELS, *LAYERS)) - FAKE_QUANT - op_types.VALUE_BLIND
_IN_INT8 = frozenset((*DECISIONS, *FAKE_QUANT, *op_types.VALUE_BLIND))


def deployed(model: Any, *, fuse: bool = False, apart: Apart | None = None) -> Any:
    """Return a function of a quantized model as it will be deployed.

    Ranges and other variables are constants, with the values that they have now. Of a
    model for training, what learns ranges and what delays quantization is left out.

    Its inputs and outputs have the names that they have in a file; see `file_names`.

    Cost: one copy of the graph.
    """
    graph = model.graph
    variables = variable_values(graph)
    ranges = range_values(graph)
    values = ranges | variables
    dilated = converter_workarounds.find_dilated(graph) if fuse else []
    blocks: dict[Operation, Array] = {}
    if fuse:
        values |= converter_workarounds.nudged_ranges(graph, values)
        values |= far_addends.cut_off(graph, values)
        blocks = block_weights.levels_of_blocks(graph)
        values |= blocks
    stand_in_of, moves = frozen(values), converter_workarounds.left_out(dilated)

    read: list[Operation] = []

    def replace(op: Operation) -> Tensor | Array | None:
        # Training writes ranges, and a file is made with those that it has now.
        if op in variables and op not in ranges:
            read.append(op)
        # The converter has no word for it.
        if op.type == "PlaceholderWithDefault":
            return op.inputs[0]
        unchanged = neutral_input(op)
        if unchanged is not None:
            return op.inputs[unchanged]
        return moves[op] if op in moves else stand_in_of(op)

    amend = _amendments(graph, dilated) if fuse else None
    copy = PartialCopy(graph, model.inputs, replace, amend)
    wanted = [*model.outputs.values(), *(op.outputs[0] for op in blocks)]
    copies = copy.of(wanted)
    if fuse:
        _check_state(graph, read)
    output_tensors = copies[: len(model.outputs)]
    inputs, outputs = (
        file_names(list(model.inputs)),
        file_names(list(model.outputs)),
    )
    by_handle = {id(v.handle): v for v in model.variables.values()}
    # Those that tables are looked up in, which only the converter can freeze.
    looked_up = [by_handle[id(e)] for e in copy.externals if id(e) in by_handle]
    input_tensors = {inputs[name]: t for name, t in copy.inputs.items()}
    with creation.neutral(copy.graph):
        if apart is not None:
            skipped = [n for n, t in model.inputs.items() if is_left_in_float(t.op)]
            leave_in_float([copy.inputs[name].op for name in skipped], ())
            output_tensors, given = apart.set_apart(copy.graph, output_tensors)
            input_tensors |= given
        if fuse:
            part_weights(copy.graph)
        block_weights.mark_blocks(copies[len(model.outputs) :])
        if fuse:
            converter_workarounds.with_fitting_comparisons(copy.graph)
            output_tensors = converter_workarounds.without_divisions(
                copy.graph, output_tensors
            )
            converter_workarounds.with_factors_apart(copy.graph)
            output_tensors = converter_workarounds.with_bias_vectors(
                copy.graph, output_tensors
            )
        results = {
            name: tf.identity(t)
            for name, t in zip(outputs.values(), output_tensors, strict=True)
        }
    return functions.build_function(copy.graph, input_tensors, results, [], looked_up)


def _check_state(graph: Graph, read: Iterable[Operation]) -> None:
    """Raise if a model keeps a state from run to run, which its file would not."""
    ops = graph.get_operations()
    writing = (op for op in ops if op.type in op_types.ASSIGNMENTS)
    writers = IdentityMap((op.inputs[0], op) for op in writing)
    for op in read:
        writer = writers.get(op.inputs[0])
        if writer is not None:
            raise QuantizeError(
                f"'{writer.name}' ({writer.type}) writes a variable that '{op.name}' "
                "reads for an output, each time the model runs, and a file would hold "
                "its present value for good; make the state an input and an output"
            )


def _amendments(graph: Graph, dilated: Sequence[Dilated]) -> Amend:
    by_op = {each.convolution: each for each in dilated}
    op_names = {op.name for op in graph.get_operations()}
    origins = Origins(graph)
    simulations = live_simulations(graph)
    range_ends = {t.op for op in simulations for t in list(op.inputs)[1:]}
    of_weights = {op for op in simulations if origins.is_parameter(op.inputs[0])}
    # Channels of several axes are brought together, and taken apart again.
    around = {o for op in of_weights for o in (op.inputs[0].op, *_readers(op))}
    of_weights |= {op for op in around if op.type == "Reshape"}
    # What is left of a name without its digits must be no op's, either.
    prefix = next(letters for i in count(1) if (letters := "r" * i) not in op_names)
    short_names = (name for i in count() if (name := f"{prefix}{i}") not in op_names)

    def amend(node: Any, op: Operation) -> None:
        converter_workarounds.nudge(node, op)
        # The file has its name, and holds it for each tensor.
        scope, _, own = op.name.rpartition("/")
        if own == op.type and op.type in FAKE_QUANT and scope not in op_names:
            node.name = scope or op.name
        # So it has those of both ends of a range, for the tensor in that range, and of
        # the FakeQuant op of weights, next to the name of the layer.
        if (op in range_ends and node.op == "Const") or op in of_weights:
            node.name = next(short_names)
        if op in by_op:
            by_op[op].amend(node)

    return amend


def _readers(op: Operation) -> list[Operation]:
    return [reader for t in op.outputs for reader in t.consumers()]


_CASTS = frozenset(("DEQUANTIZE", "QUANTIZE"))


def missed(model: Any, float_ops: Sequence[LiteOp]) -> list[LiteOp]:
    """Return float ops of a file whose values are quantized in the model.

    They are told by the names of the tensors that they make. What TFLite has no int8
    kernel for, or was not quantized, is not among them.

    Cost: that of planning the quantization of the model again, if there are any.
    """
    computing = [op for op in float_ops if op.kind not in _CASTS]
    if not computing:
        return []
    promised = {op.name for op in quantized_ops(model.graph, model.outputs.values())}
    by_name = {op.name: op for op in model.graph.get_operations()}
    return [op for op in computing if _is_promised(op, by_name, promised)]


def _is_promised(op: LiteOp, by_name: dict[str, Operation], promised: set[str]) -> bool:
    """Tell whether all ops that an op of the file is named after are quantized."""
    matches = (called(source, by_name) for source in sources_of(op.result))
    named = [
        graph_op
        for graph_op in matches
        if graph_op is not None and not _is_range(graph_op)
    ]
    behind = [o.inputs[0].op if o.type in FAKE_QUANT else o for o in named]
    return bool(behind) and all(graph_op.name in promised for graph_op in behind)


def _is_range(op: Operation) -> bool:
    return op.type == "ReadVariableOp"


_logger = logging.getLogger("geutil")

_STARTS = ((-6.0, 6.0), (0.0, 6.0))
_SYMMETRIC_STARTS = ((-SYMMETRIC_START, SYMMETRIC_START),)
_BITS = 8
_SHOWN = 5
_SAID = re.compile(r"(?:error: |^(?=[A-Z][A-Za-z ]* ops: ))(.*)", re.M)
_LONGEST = 1500


def float_ops(file: LiteFile) -> list[LiteOp]:
    """Return the ops of a TFLite file that read or make floats."""
    return [*filter(has_floats, file.ops)]


def check_bits(graph: Graph) -> None:
    """Raise if a graph simulates bits that the int8 kernels of TFLite lack."""
    origins = Origins(graph)
    for op in live_simulations(graph):
        bits = int(op.get_attr("num_bits"))
        is_weights = origins.is_parameter(op.inputs[0])
        if block_of(op) is not None:
            raise QuantizeError(
                f"'{op.name}' rounds weights by blocks, which TFLite's int8 kernels "
                "cannot read; convert by to_tflite(model, scheme='dynamic_range_int4')"
            )
        if bits == _BITS or (is_weights and bits < _BITS):
            continue
        raise QuantizeError(
            f"'{op.name}' has {bits} bits: TFLite's int8 kernels store activations in "
            "8 bits, and weights in 8 or less",
            remedy=f"quantize with {Words('activation_bits=8', 8)} and "
            f"{Words('weight_bits')} up to 8 to convert, or keep the model for "
            "simulation",
        )


def converted(
    function: Any, ask: Callable[[Any], None] = lambda converter: None
) -> bytes:
    """Return the TFLite file of a function."""
    # The converter wants to know an owner of variables; without one the file has no
    # names.
    owner = protos.new_trackable()
    owner.variables = list(function.variables)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function], owner)
    ask(converter)
    try:
        with warnings.catch_warnings():
            # It misses the ranges of inputs, which FakeQuant ops tell.
            warnings.filterwarnings("ignore", "Statistics for quantized inputs")
            return bytes(converter.convert())
    # The converter raises classes of its own for what MLIR refuses.
    except Exception as error:
        said = _said(error)
        if "TensorList" in said and "element_shape" in said:
            raise QuantizeError(
                "TFLite's converter takes no loop whose lists have elements of an open "
                f"size ({said.partition(';')[0]})",
                remedy=f"convert a model without loops, by {Words('Model.unroll()')}, "
                f"or of a fixed batch, by {Words('Model.set_batch_size(1)')}",
            ) from error
        raise QuantizeError(
            f"TFLite's converter fails: {said}. Replace ops that it names, or "
            f"cut the model before them ({Words('model.cut')}); what the report of "
            "quantize skips stays float"
        ) from error


def check_learnt(sites: list[RangeSite]) -> None:
    """Raise QuantizeError if ranges of activations are as they were initialized."""
    activations = [site for site in sites if not site.is_weights]
    untouched = [site.name for site in activations if _is_at(site, _STARTS)]
    if len(untouched) < len(activations):
        # Data behind a Relu6 that fills its range looks untouched, too.
        untouched = [site.name for site in activations if _is_at(site, _STARTS[:1])]
    if not untouched:
        return
    names = ", ".join(f"'{name}'" for name in untouched[:_SHOWN])
    more = len(untouched) - _SHOWN
    raise QuantizeError(
        f"{len(untouched)} range(s) are as they were initialized: {names}"
        f"{f' and {more} more' if more > 0 else ''}",
        remedy=f"call {Words('geutil.quantize.calibrate')} with data, train the model, "
        "or restore a checkpoint",
    )


def _is_at(site: RangeSite, ranges: Sequence[tuple[float, float]]) -> bool:
    low, high = site.read()
    ranges = _SYMMETRIC_STARTS if site.form.symmetric else ranges
    return any(
        np.all(low == np.float32(a)) and np.all(high == np.float32(b))
        for a, b in ranges
    )


def _said(error: Exception) -> str:
    """Return what the converter says of the ops, without its traces."""
    text = str(error)
    said = dict.fromkeys(match[1].strip() for match in _SAID.finditer(text))
    return "; ".join(said)[:_LONGEST] or text[:_LONGEST]
