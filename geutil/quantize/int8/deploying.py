"""A quantized model as it is deployed: nothing is learnt, and all is constant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph.function_graphs import build_function
from geutil.graph.identity import MutableIdentityMap
from geutil.graph.importing import neutral, set_new_input
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.quantize.copying import Amend, PartialCopy
from geutil.quantize.finding.kernels import DECISIONS, FAKE_QUANT, KERNELS, SHAPES
from geutil.quantize.freezing import frozen, range_values, variable_values
from geutil.quantize.int8.dilating import Dilated, find_dilated, left_out
from geutil.quantize.int8.dividing import without_divisions
from geutil.quantize.int8.mending import mended, nudge
from geutil.quantize.int8.running import file_names
from geutil.select.networks.layers import LAYERS

Array = np.ndarray[Any, Any]
_ROUNDING = 2.0**-20
_IN_INT8 = frozenset((*DECISIONS, *FAKE_QUANT, *KERNELS, *LAYERS, *SHAPES))


def deployed(model: Any, *, mend: bool = False) -> Any:
    """Return a function of a quantized model as it will be deployed.

    Ranges and other variables are constants, with the values that they have now. Of a
    model for training, what learns ranges and what delays quantization is left out.

    Its inputs and outputs have the names that they have in a file; see `file_names`.

    Args:
        model: a `geutil.model.Model`.
        mend: make of it what TFLite's converter understands: change values that it
            would store wrong, by less than it rounds them, and write dilated
            convolutions as one op.

    Cost: one copy of the graph; with `mend`, one run of what biases depend on.
    """
    graph = model.graph
    values = range_values(graph) | variable_values(graph)
    dilated = find_dilated(graph) if mend else []
    if mend:
        values |= mended(graph, values)
    known, moves = frozen(values), left_out(dilated)

    def replace(op: Operation) -> Tensor | Array | None:
        # The converter has no word for it.
        if op.type == "PlaceholderWithDefault":
            return op.inputs[0]
        return moves[op] if op in moves else known(op)

    amend = _amendments(graph, dilated) if mend else None
    copy = PartialCopy(graph, model.inputs, replace, amend)
    made = copy.of(list(model.outputs.values()))
    inputs, outputs = file_names(list(model.inputs)), file_names(list(model.outputs))
    by_handle = {id(v.handle): v for v in model.variables.values()}
    # Those that tables are looked up in, which only the converter can freeze.
    variables = [by_handle[id(e)] for e in copy.externals if id(e) in by_handle]
    with neutral(copy.graph):
        if mend:
            made = _parted(without_divisions(copy.graph, made))
        results = {
            name: tf.identity(t) for name, t in zip(outputs.values(), made, strict=True)
        }
    given = {inputs[name]: t for name, t in copy.inputs.items()}
    return build_function(copy.graph, given, results, [], variables)


def _parted(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return outputs that no op shares which reads them in float.

    The converter gives both the same tensor, in float, and takes that away where the
    output becomes int8 (TensorFlow 2.21: "Tensor at index 0 was optional"). Those of
    two ranges are not the same, if only by a float32 rounding error.
    """
    found: MutableIdentityMap[Tensor] = MutableIdentityMap()
    for output in outputs:
        if output in found:
            continue
        found[output] = output
        if output.op.type not in FAKE_QUANT:
            continue
        deciding = [op for op in output.consumers() if op.type in DECISIONS]
        in_float = any(op.type not in _IN_INT8 for op in output.consumers())
        if deciding:
            # In int8, but only by itself.
            _read_instead(deciding, output, _twin(output, 1.0 + _ROUNDING))
        if in_float:
            found[output] = _twin(output, 1.0 + 2.0 * _ROUNDING)
    return [found[output] for output in outputs]


def _read_instead(ops: Sequence[Operation], tensor: Tensor, other: Tensor) -> None:
    for op in ops:
        for index, t in enumerate(op.inputs):
            if t is tensor:
                set_new_input(op, index, other)


def _twin(simulated: Tensor, wider: float) -> Tensor:
    """Return a tensor that is quantized once more, in a range that is hardly wider."""
    op = simulated.op
    _, *range_ = op.inputs
    known = [tf.get_static_value(t) for t in range_]
    low, high = known or (op.get_attr("min"), op.get_attr("max"))
    bits, narrow = (op.get_attr(a) for a in ("num_bits", "narrow_range"))
    return tf.quantization.fake_quant_with_min_max_vars(
        simulated, low * wider, high * wider, bits, narrow
    )


def _amendments(graph: Graph, dilated: Sequence[Dilated]) -> Amend:
    by_op = {each.convolution: each for each in dilated}
    taken = {op.name for op in graph.get_operations()}

    def amend(node: Any, op: Operation) -> None:
        nudge(node, op)
        # The file has its name, and holds it for each tensor.
        scope, _, own = op.name.rpartition("/")
        if own == op.type and op.type in FAKE_QUANT and scope not in taken:
            node.name = scope or op.name
        if op in by_op:
            by_op[op].amend(node)

    return amend
