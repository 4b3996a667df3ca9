"""Conversion: from quantized models to TFLite files, which keep their promises.

A mask adds -1e9, say, to the logits that shall have no share in a softmax, and the sum
ends at the low end of its range. TFLite (TensorFlow 2.21) aborts in ADD, and in SUB,
where the steps of an input are 2^19 times those of the result, and overflows in MUL
where the product of two steps is about as far from that of the result. So such ranges
are cut off where no result tells; files that would still end the process are not run.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import QuantizeError, Words
from geutil.graph import adjacency, creation, functions, op_types, protos
from geutil.graph.types import Graph, IdentityMap, Operation, Tensor
from geutil.graph.walks import walk
from geutil.quantize.calibration.ranges import (
    RangeSite,
    frozen,
    range_values,
    variable_values,
)
from geutil.quantize.partial_copy import Amend, PartialCopy
from geutil.quantize.planning import network
from geutil.quantize.planning.int8_kernels import FAKE_QUANT
from geutil.quantize.planning.plan import quantized_ops
from geutil.quantize.spec import SYMMETRIC_START, block_of, step, with_zero
from geutil.quantize.tflite import converter_workarounds, stored_weights
from geutil.quantize.tflite.converter_workarounds import Apart, Dilated, part_weights
from geutil.select.networks.layers import Origins
from geutil.tflite import LiteFile, LiteOp
from geutil.tflite.kinds import CONVERSIONS, has_floats
from geutil.tflite.op_names import called, file_names, sources_of
from geutil.tflite.parts import Array
from geutil.tflite.schema import words

_SUMS = op_types.ADDITIONS | {"Sub"}
_FAR = 2.0**16
"""Steps of an input that are so many times those of the result are cut off."""
_MOVES = words(
    "BroadcastTo ExpandDims Identity Reshape Slice Squeeze StridedSlice Tile Transpose"
)
"""Ops that move the values of their first input, or repeat them."""


@dataclass(eq=False)
class _Site:
    """A FakeQuant op with one range for all channels."""

    op: Operation
    low: float
    high: float
    step: float

    @classmethod
    def of(cls, op: Operation, constants: Mapping[Operation, Array]) -> _Site | None:
        """Return the site of an op; None if it is no FakeQuant of known range."""
        ends = _ends(op)
        if len(ends) != 2 or any(end not in constants for end in ends):
            return None
        low, high = (constants[end] for end in ends)
        if np.ndim(low):
            return None
        low, high = with_zero(low, high)
        bits, narrow = op.get_attr("num_bits"), op.get_attr("narrow_range")
        width = float(step(low, high, int(bits), bool(narrow)))
        return cls(op, float(low), float(high), width) if width > 0 else None


def cut_off(
    graph: Graph, constants: Mapping[Operation, Array]
) -> dict[Operation, Array]:
    """Return other ends for ranges of addends that reach too far."""
    changed_ends: dict[Operation, Array] = {}
    value_by_end = dict(constants)
    ops = adjacency.topological_sort(graph.get_operations())
    # Several FakeQuant ops may share a range; it changes for all of them.
    ops_by_ends: dict[tuple[Operation, ...], list[Operation]] = {}
    for op in ops:
        if _Site.of(op, value_by_end) is not None:
            ops_by_ends.setdefault(_ends(op), []).append(op)
    # The reader of a sum is cut off before the sum's own addends.
    for op in reversed(ops):
        sharing_ops = ops_by_ends.get(_ends(op), ())
        if sharing_ops and sharing_ops[0] is op:
            ends = _shortened(sharing_ops, value_by_end)
            changed_ends |= ends
            value_by_end |= ends
    return changed_ends


def _ends(op: Operation) -> tuple[Operation, ...]:
    """Return the ops that a FakeQuant op reads its range from."""
    return tuple(t.op for t in op.inputs[1:]) if op.type in FAKE_QUANT else ()


def _shortened(
    together: Sequence[Operation], value_by_end: Mapping[Operation, Array]
) -> dict[Operation, Array]:
    """Return the ends of a range that all of its readers allow to be cut off."""
    site = _Site.of(together[0], value_by_end)
    if site is None:
        return {}
    same, reaches = frozenset(together), []
    for reader, index in _readers_behind_moves(together):
        if reader in same:
            continue
        tell = _reach_of_factor if reader.type == "Mul" else _reach_of_addend
        reach = tell(site, reader, index, value_by_end)
        # One reader that needs the whole range decides for all.
        if reach is None:
            return {}
        reaches.append(reach)
    if not reaches:
        return {}
    low = max(site.low, min(low for low, _ in reaches))
    high = min(site.high, max(high for _, high in reaches))
    # A narrow range is symmetric, and has to stay so.
    if site.op.get_attr("narrow_range"):
        high = max(high, -low)
        low = -high
    if (low, high) == (site.low, site.high):
        return {}
    values = (np.float32(low), np.float32(high))
    return dict(zip(_ends(site.op), map(np.asarray, values), strict=True))


def _reach_of_addend(
    site: _Site, op: Operation, index: int, value_by_end: Mapping[Operation, Array]
) -> tuple[float, float] | None:
    """Return between which values an addend makes a difference."""
    if op.type not in _SUMS or len(op.inputs) != 2:
        return None
    other = _Site.of(_source(op.inputs[1 - index]), value_by_end)
    results = list(_sites(_readers_behind_moves([op]), value_by_end))
    if other is None or not results or None in results:
        return None
    sums = [site for site in results if site is not None]
    # Steps that are near those of the result need no cut.
    if site.step < _FAR * min(each.step for each in sums):
        return None
    low, high = min(s.low for s in sums), max(s.high for s in sums)
    if op.type != "Sub":
        return low - other.high, high - other.low
    if index == 0:
        return low + other.low, high + other.high
    return other.low - high, other.high - low


def _reach_of_factor(
    site: _Site, op: Operation, index: int, value_by_end: Mapping[Operation, Array]
) -> tuple[float, float] | None:
    """Return between which values a factor of what was cut off makes a difference.

    The other factor begins at 0; its first step already reaches the end of the product.
    """
    other = _Site.of(_source(op.inputs[1 - index]), value_by_end)
    results = list(_sites(_readers_behind_moves([op]), value_by_end))
    if other is None or other.low < 0 or len(results) != 1 or results[0] is None:
        return None
    product = results[0]
    if site.step * other.step < _FAR * product.step:
        return None
    return product.low / other.step, product.high / other.step


def _sites(
    readers: Iterable[tuple[Operation, int]], value_by_end: Mapping[Operation, Array]
) -> Iterator[_Site | None]:
    return (_Site.of(reader, value_by_end) for reader, _ in readers)


def _readers_behind_moves(ops: Sequence[Operation]) -> list[tuple[Operation, int]]:
    """Return the ops that read the results of some, seen through moves."""

    def moves(reader: Operation, tensor: Tensor) -> bool:
        is_move = reader.type in _MOVES and reader.inputs[0] is tensor
        return is_move and bool(reader.outputs[0].consumers())

    def moving(op: Operation) -> list[Operation]:
        return [r for t in op.outputs for r in t.consumers() if moves(r, t)]

    return [
        (reader, place)
        for op in walk(ops, moving)
        for tensor in op.outputs
        for reader in dict.fromkeys(tensor.consumers())
        if not moves(reader, tensor) and reader.type not in op_types.VALUE_BLIND
        for place, t in enumerate(reader.inputs)
        if t is tensor
    ]


def _source(tensor: Tensor) -> Operation:
    """Return the op that makes the values of a tensor, seen through moves."""
    while tensor.op.type in _MOVES:
        tensor = tensor.op.inputs[0]
    return tensor.op


def deployed(model: Any, *, fuse: bool = False, apart: Apart | None = None) -> Any:
    """Return a function of a quantized model as it will be deployed.

    Ranges and other variables are constants, with the values that they have now. Of a
    model for training, what learns ranges and what delays quantization is left out.

    Its inputs and outputs have the names that they have in a file; see `file_names`.
    """
    graph = model.graph
    variables = variable_values(graph)
    ranges = range_values(graph)
    values = ranges | variables
    dilated = converter_workarounds.find_dilated(graph) if fuse else []
    blocks: dict[Operation, Array] = {}
    if fuse:
        values |= converter_workarounds.nudged_ranges(graph, values)
        values |= cut_off(graph, values)
        blocks = stored_weights.levels_of_blocks(graph)
        values |= blocks
    stand_in_of = frozen(values)
    # Ops that dilated convolutions take in.
    around = (op for each in dilated for op in (each.spread, each.gathered))
    moves = {op: op.inputs[0] for op in around}

    read: list[Operation] = []

    def replace(op: Operation) -> Tensor | Array | None:
        # Training writes ranges, and a file is made with those that it has now.
        if op in variables and op not in ranges:
            read.append(op)
        # The converter has no word for it.
        if op.type == "PlaceholderWithDefault":
            return op.inputs[0]
        unchanged = network.neutral_input(op)
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
    inputs, outputs = (file_names(list(model.inputs)), file_names(list(model.outputs)))
    by_handle = {id(v.handle): v for v in model.variables.values()}
    # Those that tables are looked up in, which only the converter can freeze.
    looked_up = [by_handle[id(e)] for e in copy.externals if id(e) in by_handle]
    input_tensors = {inputs[name]: t for name, t in copy.inputs.items()}
    with creation.neutral(copy.graph):
        if apart is not None:
            skipped = [
                n for n, t in model.inputs.items() if network.is_left_in_float(t.op)
            ]
            network.leave_in_float([copy.inputs[name].op for name in skipped], ())
            output_tensors, given = apart.set_apart(copy.graph, output_tensors)
            input_tensors |= given
        if fuse:
            part_weights(copy.graph)
        stored_weights.mark_blocks(copies[len(model.outputs) :])
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
    simulations = network.live_simulations(graph)
    range_ends = {t.op for op in simulations for t in list(op.inputs)[1:]}
    of_weights = {op for op in simulations if origins.is_parameter(op.inputs[0])}
    # Channels of several axes are brought together, and taken apart again.
    readers = {o for op in of_weights for t in op.outputs for o in t.consumers()}
    around = readers | {op.inputs[0].op for op in of_weights}
    of_weights |= {op for op in around if op.type == "Reshape"}
    # A name without its digits must be no op's, either.
    prefix = next(letters for i in count(1) if (letters := "r" * i) not in op_names)
    short_names = (name for i in count() if (name := f"{prefix}{i}") not in op_names)

    def amend(node: Any, op: Operation) -> None:
        if op.type == "FakeQuantWithMinMaxArgs":
            ends = converter_workarounds.nudge(op, *map(op.get_attr, ("min", "max")))
            node.attr["min"].f, node.attr["max"].f = map(float, ends)
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


def missed(model: Any, float_ops: Sequence[LiteOp]) -> list[LiteOp]:
    """Return float ops of a file whose values are quantized in the model."""
    computing = [op for op in float_ops if op.kind not in CONVERSIONS]
    if not computing:
        return []
    promised = {op.name for op in quantized_ops(model.graph, model.outputs.values())}
    by_name = {op.name: op for op in model.graph.get_operations()}
    return [op for op in computing if _is_promised(op, by_name, promised)]


def _is_promised(op: LiteOp, by_name: dict[str, Operation], promised: set[str]) -> bool:
    """Return whether all ops that an op of the file is named after are quantized."""
    matches = (called(source, by_name) for source in sources_of(op.result))
    # Ranges are read from variables.
    named = [o for o in matches if o is not None and o.type != "ReadVariableOp"]
    behind = [o.inputs[0].op if o.type in FAKE_QUANT else o for o in named]
    return bool(behind) and all(graph_op.name in promised for graph_op in behind)


# Ranges before calibration, as tf.contrib.quantize starts with.
_STARTS = ((-6.0, 6.0), (0.0, 6.0))
_SYMMETRIC_STARTS = ((-SYMMETRIC_START, SYMMETRIC_START),)
# The bits of the scheme.
_BITS = 8
# Names that a message lists; the rest is counted.
_SHOWN = 5
_SAID = re.compile(r"(?:error: |^(?=[A-Z][A-Za-z ]* ops: ))(.*)", re.M)
# Characters of the converter's own message that are passed on.
_LONGEST = 1500


def float_ops(file: LiteFile) -> list[LiteOp]:
    """Return the ops of a TFLite file that read or make floats."""
    return [*filter(has_floats, file.ops)]


def check_bits(graph: Graph) -> None:
    """Raise if a graph simulates bits that the int8 kernels of TFLite lack."""
    origins = Origins(graph)
    for op in network.live_simulations(graph):
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
        text = str(error)
        found = dict.fromkeys(match[1].strip() for match in _SAID.finditer(text))
        # Without its traces, that is.
        said = "; ".join(found)[:_LONGEST] or text[:_LONGEST]
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
